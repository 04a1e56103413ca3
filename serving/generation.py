"""One generation: what was asked, its tokens in order over all attempts, and the sink it tells."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import msgspec

from serving.prompt import Prompt
from serving.router import ANY_RANKS, Key, Pair, Ranks
from serving.step_rows import Run, Top
from serving.timeline import ChoiceTimeline
from serving.timers import Timer
from transfer import wire
from transfer.errors import BadMessage, RequestError

FinishReason = Literal["stop", "length", "abort"]


@dataclass(slots=True)
class Tokens:
    """Consecutive tokens of one generation, usually one. Lists have the length of ids.

    logprobs: of the chosen tokens; None unless the request asked (num_top_logprobs >= 0).
    top: (token id, logprob), best first, num_top_logprobs a token; None unless that is above 0.
    """

    ids: list[int]
    logprobs: list[float] | None = None
    top: list[Top | None] | None = None


class Sink(Protocol):
    """What a generation tells its stream, on the event loop, inside the wake-up of a step.

    Never called from within `submit` or `abort`. Tokens come in order of their index without
    duplicates or gaps, however many attempts it took. The last call is exactly one of on_end and
    on_error, unless the stream itself aborted, after which nothing is called. on_tokens may call
    `Dispatcher.abort` of its own generation.
    """

    def on_prefilled(self, cached_tokens: int, prompt_logprobs: wire.PromptLogprobs | None) -> None:
        """At most once, before the first token. cached_tokens <= prompt tokens."""
        ...

    def on_tokens(self, tokens: Tokens) -> None:
        """The next tokens; a stop token is among them."""
        ...

    def on_end(self, finish_reason: FinishReason) -> None:
        """The generation is complete; "abort" when another than the stream aborted it."""
        ...

    def on_error(self, error: RequestError) -> None:
        """The generation cannot be completed, now or by trying again."""
        ...


class Borrower(Protocol):
    """Takes a generation's tokens in its place and tells them with what its stream has lent."""

    def give_back(self, generation: "Generation") -> None:
        """From now on the generation takes and tells its own tokens; none was missed."""
        ...


@dataclass(frozen=True)
class GenerationSpec:
    """What a client asks. Times are monotonic; sampling is resolved and in range."""

    prompt: Prompt
    sampling: wire.SamplingParams
    request_id: str
    arrival_s: float
    deadline_s: float
    cache_salt: str = ""
    ranks: Ranks = ANY_RANKS
    adapter: str = ""
    is_probe: bool = False  # not a client's request: metrics of requests leave it out


@dataclass(slots=True, eq=False, repr=False)
class Generation:
    """A request in the workers' hands, from submit to its end. Made by `Dispatcher.submit`.

    An *attempt* is one room: both legs of the request at one pair of workers. Attempts follow
    each other, each starting from the prompt and the tokens so far; `token_ids` has every token
    told to the sink. A token's index counts over all attempts, which exposes duplicates and early
    tokens: the first token of an attempt comes from prefill, the next ones from decode, over
    connections that know nothing of each other.
    """

    spec: GenerationSpec
    sink: Sink
    timeline: ChoiceTimeline | None = None  # None: not recorded
    room: int = 0  # 0 while between attempts
    pair: Pair | None = None
    # The pair's, which each row is checked against; once decode began, only its tokens count.
    decode_key: Key | None = None
    _prefill_key: Key | None = None
    # An array takes a quarter of a list's memory, and has nothing to collect.
    token_ids: array[int] = field(default_factory=lambda: array("i"))
    attempt_start: int = 0  # tokens there were when the current attempt began
    model_digest: str = ""  # of the workers of the latest attempt; set as it is placed
    prefilled: bool = False  # whether the sink was told
    finish: int = wire.RUNNING
    ended: bool = False
    last_token_s: float = 0.0  # monotonic
    lent_to: Borrower | None = None  # tells its tokens in its place
    slot: int = -1  # its slot at that borrower
    avoid: frozenset[str] = frozenset()  # workers that failed it lately
    retries: int = 0
    refusals: int = 0  # in a row
    refused_since_s: float | None = None
    # Monotonic: since when it has been without a pair, its wait for admission included.
    unplaced_since_s: float | None = field(init=False)
    retry_timer: Timer | None = None
    deadline_timer: Timer | None = None
    _num_top: int = field(init=False)
    # Tokens past a gap, by index: (id, finish, its logprobs). Fewer than max_new_tokens.
    _early: dict[int, tuple[int, int, Run | None]] | None = None

    def __post_init__(self) -> None:
        self.unplaced_since_s = self.spec.arrival_s
        self._num_top = self.spec.sampling.num_top_logprobs

    @property
    def started(self) -> bool:
        """Whether a token was told to the sink."""
        return bool(self.token_ids)

    @property
    def decoding(self) -> bool:
        """Whether decode's first token was told in the current attempt: prefill's leg is over."""
        return len(self.token_ids) > self.attempt_start + 1

    @property
    def computed(self) -> bool:
        """Whether prefill's token was told in the current attempt. Its pages may still travel."""
        return len(self.token_ids) > self.attempt_start

    @property
    def may_be_local(self) -> bool:
        """Whether decode may compute the prompt: not where prefill's rank is dictated."""
        return self.spec.ranks.prefill < 0

    def involves(self, key: Key) -> bool:
        """Whether the current attempt is at that worker."""
        return self.decode_key == key or self._prefill_key == key

    def begin_attempt(self, room: int, pair: Pair) -> None:
        assert not self.ended, f"room {self.room} ended, it cannot begin another attempt"
        self.room = room
        self.pair = pair
        self.decode_key = pair.decode_key
        self._prefill_key = pair.prefill_key
        self.attempt_start = len(self.token_ids)
        self.unplaced_since_s = None
        self._early = None

    @property
    def finish_reason(self) -> FinishReason:
        """The reason, of a generation that came to its end."""
        return "stop" if self.finish == wire.STOP else "length"

    @property
    def in_order(self) -> bool:
        """Whether every token that came was told, and none of them was the last."""
        return self._early is None and not self.finish

    def reclaim(self) -> None:
        """Take back what was lent, if anything."""
        if self.lent_to is not None:
            self.lent_to.give_back(self)

    def leave_attempt(self) -> None:
        """Forget the room and what came early in it: the next attempt makes it again."""
        self.reclaim()
        self.room = 0
        self.pair = self.decode_key = self._prefill_key = None
        self._early = None

    def submit_message(self, api_id: str) -> wire.Submit:
        """One leg of the current attempt, for a worker that knows this process as api_id.

        Its times are filled in as it leaves (serving/worker_link.py).
        """
        assert self.pair is not None, "a leg belongs to an attempt"
        spec = self.spec
        sampling = spec.sampling
        if self.prefilled and sampling.prompt_logprobs_start >= 0:
            # The sink has them already, and computing them again would bypass the prefix cache.
            sampling = msgspec.structs.replace(sampling, prompt_logprobs_start=-1)
        return wire.Submit(
            room=self.room,
            request_id=spec.request_id,
            api_id=api_id,
            token_ids=spec.prompt.packed + wire.pack_i32(self.token_ids),
            num_prompt_tokens=len(spec.prompt.ids),
            sampling=sampling,
            age_s=0.0,
            left_s=0.0,
            prefill=_ref(self.pair.prefill),
            decode=_ref(self.pair.decode),
            cache_salt=spec.cache_salt,
            adapter=spec.adapter,
            routed_dp_rank=self.pair.decode_rank,
            disagg_prefill_dp_rank=self.pair.prefill_rank,
        )

    def accept(
        self, first_idx: int, ids: list[int], finish: int, detail: Run | None
    ) -> Tokens | None:
        """Take a run of tokens; return those that are now next in order, or None.

        finish: of the last of them. Sets `finish` once the last token of all is among those
        returned. detail: None when the step had no logprobs; cut to what the request asked.
        """
        if first_idx != len(self.token_ids) or self._early is not None or self.finish:
            return self._accept_each(first_idx, ids, finish, detail)
        self.token_ids.extend(ids)
        self.finish = finish
        return Tokens(ids) if self._num_top < 0 else self._with_logprobs(ids, detail)

    def _accept_each(
        self, first_idx: int, ids: list[int], finish: int, detail: Run | None
    ) -> Tokens | None:
        """As `accept`, where some tokens may be known already, or come before earlier ones."""
        early = self._early or {}
        last_idx = first_idx + len(ids) - 1
        for idx, token_id in enumerate(ids, first_idx):
            if len(self.token_ids) <= idx < self.spec.sampling.max_new_tokens:
                place = idx - first_idx
                one = None if detail is None else Run([detail.logprobs[place]], [detail.top[place]])
                early.setdefault(idx, (token_id, finish if idx == last_idx else wire.RUNNING, one))
        next_ids: list[int] = []
        parts: list[Run | None] = []
        while not self.finish:
            known = early.pop(len(self.token_ids), None)
            if known is None:
                break
            token_id, self.finish, part = known
            self.token_ids.append(token_id)
            next_ids.append(token_id)
            parts.append(part)
        self._early = early or None
        if not next_ids:
            return None
        if self._num_top < 0:
            return Tokens(next_ids)
        return self._with_logprobs(next_ids, _join(parts))

    def _with_logprobs(self, ids: list[int], detail: Run | None) -> Tokens:
        # A worker that was asked for them and sends none is caught here, not in a client's JSON.
        if detail is None:
            raise BadMessage("a row without a logprob, though its request asked for one")
        num_top = self._num_top
        if num_top == 0:
            return Tokens(ids, detail.logprobs)
        top = [best[:num_top] if best else None for best in detail.top]
        return Tokens(ids, detail.logprobs, top)


def _join(parts: Sequence[Run | None]) -> Run | None:
    joined = Run([], [])
    for part in parts:
        if part is None:
            return None
        joined.logprobs += part.logprobs
        joined.top += part.top
    return joined


def _ref(member: wire.Member) -> wire.WorkerRef:
    return wire.WorkerRef(member.info.worker_id, member.epoch, member.info.address)
