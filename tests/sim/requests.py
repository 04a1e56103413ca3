"""What a client of the simulation asked for, and what it may be told."""

import asyncio
import functools
from collections.abc import Callable
from dataclasses import dataclass, field

from serving.generation import FinishReason, Generation, Tokens
from serving.router import Ranks
from tests.sim.engines import prompt_logprob
from tests.sim.grammars import WRONG
from tests.sim.network import expected_tokens
from tests.sim.streams import text_of
from transfer import wire
from transfer.errors import Code, RequestError
from transfer.stops import finish_of


def _checked[**P](told: Callable[P, None]) -> Callable[P, None]:
    """Keep what the check raises: the product takes care that no sink's error reaches others."""

    @functools.wraps(told)
    def checking(*args: P.args, **kwargs: P.kwargs) -> None:
        request = args[0]
        assert isinstance(request, Request)
        if request.end in ("aborted", "api_died"):
            return  # nobody listens
        try:
            assert request.may_be_told, "told amid its submit"
            assert not request.end, f"request {request.number} ended, and is told more"
            told(*args, **kwargs)
        except Exception as error:
            request.errors.append(error)

    return checking


@dataclass(eq=False)
class Request:
    """A request and, as the sink of its generation, all that its client was told."""

    number: int
    prompt_ids: list[int]
    sampling: wire.SamplingParams
    salt: str
    adapter: str
    patience_s: float
    ranks: Ranks  # that it dictates
    is_streamed: bool
    max_retries: int
    queue_timeout_s: float
    arrival_s: float = 0.0  # by the clock of its API process
    generation: Generation | None = None  # once it was admitted
    tokens: list[int] = field(default_factory=list)
    rooms: list[int] = field(default_factory=list)  # of all attempts
    prefilled: bool = False
    end: str = ""
    may_be_told: bool = True  # not while it is submitted
    errors: list[BaseException] = field(default_factory=list)
    now_s: Callable[[], float] = lambda: 0.0
    over: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.expected = expected_tokens(self.prompt_ids, self.sampling, self.adapter)
        last = len(self.expected) - 1
        # Its logits are no numbers behind these tokens.
        self.breaks = not self.expected or not finish_of(self.expected[-1], last, self.sampling)

    @property
    def deadline_s(self) -> float:
        return self.arrival_s + self.patience_s

    def finish(self, how: str) -> None:
        assert not self.end, f"request {self.number} ended {self.end}, and again {how}"
        self.end = how
        self.over.set()

    # --- what workers draw ------------------------------------------------------------------------

    def check(self, token_idx: int, token_id: int, finish: int) -> None:
        """Check that a token some worker drew is the one an undisturbed worker draws."""
        what = f"request {self.number}, token {token_idx}"
        assert token_idx < len(self.expected), f"{what} comes after the end"
        assert token_id == self.expected[token_idx], f"{what} is {token_id}"
        assert finish == finish_of(token_id, token_idx, self.sampling), what

    # --- the sink ---------------------------------------------------------------------------------

    @_checked
    def on_prefilled(self, cached_tokens: int, told: wire.PromptLogprobs | None) -> None:
        assert not self.prefilled
        assert not self.tokens
        assert cached_tokens <= len(self.prompt_ids)
        self.prefilled = True
        start = self.sampling.prompt_logprobs_start
        assert (told is not None) == (start >= 0)
        if told is not None:
            spots = range(max(start, 1), len(self.prompt_ids))
            assert told.start == spots.start
            assert wire.unpack_i32(told.token_ids).tolist() == self.prompt_ids[spots.start :]
            assert wire.unpack_f32(told.logprobs).tolist() == [prompt_logprob(p) for p in spots]

    @_checked
    def on_tokens(self, tokens: Tokens) -> None:
        assert tokens.ids
        self.tokens += tokens.ids
        assert self.tokens == self.expected[: len(self.tokens)], f"request {self.number}"
        num_top = self.sampling.num_top_logprobs
        if num_top < 0:
            return
        assert tokens.logprobs == [-token_id / 8 for token_id in tokens.ids]
        if num_top:
            assert tokens.top is not None
            for token_id, top in zip(tokens.ids, tokens.top, strict=True):
                assert top is None or top[0][0] == token_id

    @_checked
    def on_end(self, finish_reason: FinishReason) -> None:
        assert self.tokens == self.expected, f"request {self.number}"
        self._ended_well(finish_reason)

    @_checked
    def on_error(self, error: RequestError) -> None:
        self._failed(error.code, is_begun=bool(self.tokens))

    @_checked
    def read(self, text: str, reason: str | None, code: Code | None) -> None:
        """Its client has read all of a streamed answer. code: why it failed, None if it did not."""
        whole = text_of(self.expected, self.sampling)
        if code is None:
            assert text == whole, f"request {self.number}"
            self._ended_well(reason)
        else:
            assert whole.startswith(text), f"request {self.number}"
            self._failed(code, is_begun=bool(text))

    def _ended_well(self, reason: str | None) -> None:
        assert not self.breaks
        last = len(self.expected) - 1
        is_stop = finish_of(self.expected[-1], last, self.sampling) == wire.STOP
        assert reason == ("stop" if is_stop else "length")
        self.finish("finished")

    def _failed(self, code: Code, is_begun: bool) -> None:
        now_s, generation = self.now_s() + 1e-6, self.generation
        waited = not is_begun and now_s >= self.arrival_s + self.queue_timeout_s
        if code is Code.DEADLINE:
            assert now_s >= self.deadline_s
        elif code is Code.QUEUE_FULL:
            assert waited
        elif code is Code.PEER_LOST:
            assert generation is not None
            assert waited or generation.retries > self.max_retries
        elif code is Code.INTERNAL:
            assert self.breaks
        else:
            assert code is Code.BAD_REQUEST
            assert self.sampling.grammar == WRONG
        self.finish(code.value)
