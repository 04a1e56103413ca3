"""One generation: what it asks, its tokens in order over all attempts, and whom it tells."""

from dataclasses import dataclass
from typing import Literal, Protocol

import msgspec

from serving.router import Key, Pair
from serving.timers import Timer
from transfer import wire
from transfer.errors import BadMessage, RequestError

FinishReason = Literal["stop", "length", "abort"]
Top = list[tuple[int, float]]


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
    doubles or gaps, whatever attempts it took. The last call is exactly one of on_end and
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
        """The generation is complete; "abort" when somebody else aborted it."""
        ...

    def on_error(self, error: RequestError) -> None:
        """It cannot be completed, now or by trying again."""
        ...


@dataclass(frozen=True)
class GenerationSpec:
    """What a client asks. Times are unix seconds; sampling is resolved and in range."""

    prompt_ids: list[int]
    sampling: wire.SamplingParams
    request_id: str
    arrival_s: float
    deadline_s: float
    cache_salt: str = ""


@dataclass(slots=True)
class StepRows:
    """The packed arrays of one StepBatch as lists, one entry a row."""

    rooms: list[int]
    token_ids: list[int]
    token_idx: list[int]
    finish: list[int]
    logprobs: list[float] | None
    top: dict[int, Top]  # by row

    def __len__(self) -> int:
        return len(self.rooms)


def unpack_rows(batch: wire.StepBatch) -> StepRows:
    """The rows of a batch. Raises BadMessage when its arrays disagree in length."""
    rows = StepRows(
        wire.unpack_i64(batch.rooms).tolist(),
        wire.unpack_i32(batch.token_ids).tolist(),
        wire.unpack_i32(batch.token_idx).tolist(),
        wire.unpack_u8(batch.finish).tolist(),
        wire.unpack_f32(batch.logprobs).tolist() if batch.logprobs else None,
        {},
    )
    n = len(rows)
    lengths = [len(rows.token_ids), len(rows.token_idx), len(rows.finish)]
    if rows.logprobs is not None:
        lengths.append(len(rows.logprobs))
    if any(length != n for length in lengths):
        raise BadMessage(f"step {batch.step} of {batch.worker_id}: {n} rooms but rows {lengths}")
    if batch.top_rows:
        _unpack_top(batch, n, rows.top)
    return rows


def _unpack_top(batch: wire.StepBatch, num_rows: int, top: dict[int, Top]) -> None:
    top_rows = wire.unpack_i32(batch.top_rows).tolist()
    ids = wire.unpack_i32(batch.top_ids)
    logprobs = wire.unpack_f32(batch.top_logprobs)
    expected = len(top_rows) * wire.NUM_TOP_LOGPROBS
    if len(ids) != expected or len(logprobs) != expected or max(top_rows) >= num_rows:
        raise BadMessage(
            f"step {batch.step} of {batch.worker_id}: top logprobs for {len(top_rows)} of "
            f"{num_rows} rows need {expected} entries, got {len(ids)} ids, {len(logprobs)} values"
        )
    shape = (len(top_rows), wire.NUM_TOP_LOGPROBS)
    for row, row_ids, row_logprobs in zip(
        top_rows, ids.reshape(shape).tolist(), logprobs.reshape(shape).tolist(), strict=True
    ):
        top[row] = list(zip(row_ids, row_logprobs, strict=True))


class Generation:
    """A request in the workers' hands, from submit to its end. Made by `Dispatcher.submit`.

    An *attempt* is one room: both legs of the request at one pair of workers. Attempts follow
    each other, each starting from the prompt and the tokens so far; `token_ids` has every token
    told to the sink. A token's index counts over all attempts, which makes doubles and early
    ones plain: the first token of an attempt comes from prefill, the next ones from decode, over
    connections that know nothing of each other.
    """

    __slots__ = (
        "_early",
        "_num_top",
        "attempt_start",
        "avoid",
        "deadline_timer",
        "ended",
        "finish",
        "last_token_s",
        "pair",
        "prefilled",
        "refusals",
        "refused_since_s",
        "retries",
        "retry_timer",
        "room",
        "sink",
        "spec",
        "token_ids",
    )

    def __init__(self, spec: GenerationSpec, sink: Sink) -> None:
        self.spec = spec
        self.sink = sink
        self.room = 0  # 0 while between attempts
        self.pair: Pair | None = None
        self.token_ids: list[int] = []
        self.attempt_start = 0  # tokens there were when the current attempt began
        self.prefilled = False  # the sink knows
        self.finish = wire.RUNNING
        self.ended = False
        self.last_token_s = 0.0  # monotonic
        self.avoid: frozenset[str] = frozenset()  # workers that failed it lately
        self.retries = 0
        self.refusals = 0  # in a row
        self.refused_since_s: float | None = None
        self.retry_timer: Timer | None = None
        self.deadline_timer: Timer | None = None
        self._num_top = spec.sampling.num_top_logprobs
        # Tokens past a gap, by index: (id, logprob, top, finish). Fewer than max_new_tokens.
        self._early: dict[int, tuple[int, float | None, Top | None, int]] = {}

    @property
    def started(self) -> bool:
        """Whether a token was told to the sink."""
        return bool(self.token_ids)

    @property
    def decoding(self) -> bool:
        """Whether decode's first token was told in the current attempt: prefill's leg is over."""
        return len(self.token_ids) > self.attempt_start + 1

    def involves(self, key: Key) -> bool:
        """Whether the current attempt is at that worker."""
        pair = self.pair
        return pair is not None and (pair.decode_key == key or pair.prefill_key == key)

    def begin_attempt(self, room: int, pair: Pair) -> None:
        assert not self.ended, f"room {self.room} ended, it cannot begin another attempt"
        self.room = room
        self.pair = pair
        self.attempt_start = len(self.token_ids)
        self._early.clear()

    def leave_attempt(self) -> None:
        """Forget the room and what came early in it: the next attempt makes it again."""
        self.room = 0
        self.pair = None
        self._early.clear()

    def submit_message(self, api_id: str) -> wire.Submit:
        """One leg of the current attempt, for a worker that knows this process as api_id."""
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
            token_ids=wire.pack_i32(spec.prompt_ids + self.token_ids),
            num_prompt_tokens=len(spec.prompt_ids),
            sampling=sampling,
            arrival_s=spec.arrival_s,
            deadline_s=spec.deadline_s,
            prefill=_ref(self.pair.prefill),
            decode=_ref(self.pair.decode),
            cache_salt=spec.cache_salt,
        )

    def accept(
        self, token_idx: int, token_id: int, finish: int, logprob: float | None, top: Top | None
    ) -> Tokens | None:
        """Take one row; the tokens that are now next in order, or None.

        Sets `finish` once the last token is among them. logprob, top: None when the step had
        none; cut to what the request asked.
        """
        if token_idx != len(self.token_ids) or self.finish:
            if len(self.token_ids) < token_idx < self.spec.sampling.max_new_tokens:
                self._early.setdefault(token_idx, (token_id, logprob, top, finish))
            return None
        self.token_ids.append(token_id)
        self.finish = finish
        num_top = self._num_top
        if num_top < 0:
            tokens = Tokens([token_id])
        elif num_top == 0:
            tokens = Tokens([token_id], _floats(logprob))
        else:
            tokens = Tokens([token_id], _floats(logprob), [top[:num_top] if top else None])
        if self._early:
            self._follow_on(tokens)
        return tokens

    def _follow_on(self, tokens: Tokens) -> None:
        """Append the early tokens that the latest one made next."""
        num_top = self._num_top
        while not self.finish:
            row = self._early.pop(len(self.token_ids), None)
            if row is None:
                return
            token_id, logprob, top, self.finish = row
            self.token_ids.append(token_id)
            tokens.ids.append(token_id)
            if tokens.logprobs is not None:
                tokens.logprobs += _floats(logprob)
            if tokens.top is not None:
                tokens.top.append(top[:num_top] if top else None)


def _floats(logprob: float | None) -> list[float]:
    # A worker that was asked for logprobs and sends none is caught here, not in a client's JSON.
    if logprob is None:
        raise BadMessage("a row without a logprob, though its request asked for one")
    return [logprob]


def _ref(member: wire.Member) -> wire.WorkerRef:
    return wire.WorkerRef(member.info.worker_id, member.epoch, member.info.address)
