"""A worker's reply stream to one API process: steps that have to wait leave as one message."""

import asyncio
from collections.abc import Sequence

import msgspec

from transfer import wire
from transfer.runs import gathered

# A reader that falls further behind loses its stream: its rooms are dropped, and it sees the end.
MAX_ROWS = 1 << 20
MAX_EVENTS = 1 << 18
MAX_EVENT_BYTES = 1 << 29
# Bytes of rows in one message, bounded so that the reader's loop handles it in one go: 131,072 rows
# without logprobs, which is 64 for each of 2,048 streams. Rows with logprobs cost the reader more,
# and have more bytes.
_ROW_BYTES_PER_MESSAGE = 1 << 20
# Bytes of prompt logprobs in one message, unless one prompt has more: gRPC takes 256 MiB.
_EVENT_BYTES_PER_MESSAGE = 16 << 20
_ROW_BYTES_IN_RUNS = 8  # 4 a token and 17 a run: less for runs of five tokens or more


class Replies:
    """The reply stream of one API process. Used on the event loop.

    While the reader keeps up, each step is one message. When gRPC's flow control holds a message
    back, the steps behind it leave together, so a reader that fell behind gets many tokens of a
    stream at once, which cost it little more than one.
    """

    def __init__(self) -> None:
        self._waiting: list[wire.StepBatch] = []
        self._num_rows = 0
        self._num_events = 0
        self._event_bytes = 0
        self._ended = False
        self._finishing = False
        self._changed = asyncio.Event()

    def offer(self, batch: wire.StepBatch) -> bool:
        """Add a step; False when too much waits already."""
        num_rows = self._num_rows + batch.num_rows
        num_events = self._num_events + _num_events(batch)
        event_bytes = self._event_bytes + _event_bytes(batch)
        if num_rows > MAX_ROWS or num_events > MAX_EVENTS or event_bytes > MAX_EVENT_BYTES:
            return False
        self._waiting += _parts(batch)
        self._num_rows = num_rows
        self._num_events = num_events
        self._event_bytes = event_bytes
        self._changed.set()
        return True

    def end(self) -> None:
        """End the stream; drop the steps that wait."""
        self._ended = True
        self._changed.set()

    def finish(self) -> None:
        """End the stream once the steps that wait have left."""
        self._finishing = True
        self._changed.set()

    async def take(self, timeout_s: float) -> wire.StepBatch | None:
        """The waiting steps as one message; None once ended. Raises TimeoutError if none comes."""
        if not (self._waiting or self._ended or self._finishing):
            self._changed.clear()
            await asyncio.wait_for(self._changed.wait(), timeout_s)
        if self._ended or not self._waiting:
            return None
        taken: list[wire.StepBatch] = []
        row_bytes = event_bytes = 0
        for batch in self._waiting:
            row_bytes += _row_bytes(batch)
            event_bytes += _event_bytes(batch)
            too_much = row_bytes > _ROW_BYTES_PER_MESSAGE or event_bytes > _EVENT_BYTES_PER_MESSAGE
            if taken and too_much:
                break
            taken.append(batch)
        del self._waiting[: len(taken)]
        merged = merge(taken)
        self._num_rows -= merged.num_rows
        self._num_events -= _num_events(merged)
        self._event_bytes -= _event_bytes(merged)
        return merged


def merge(batches: Sequence[wire.StepBatch]) -> wire.StepBatch:
    """Merge consecutive steps of one worker for one API process; the result has the first's time.

    A room's rows stay in order; without logprobs they become runs. If some steps have logprobs, the
    rows of the others get zeros, which nobody reads. Events apply after all rows, except
    "prefilled", as in each step alone.
    """
    first = batches[0]
    if len(batches) == 1:
        return first
    rows = _rows(batches) if any(batch.logprobs for batch in batches) else _runs(batches)
    return msgspec.structs.replace(
        first,
        step=batches[-1].step,
        **rows,
        events=tuple([event for batch in batches for event in batch.events]),
        legs=tuple([leg for batch in batches for leg in batch.legs]),
    )


def _runs(batches: Sequence[wire.StepBatch]) -> dict[str, bytes]:
    """The rows of steps without logprobs, as runs."""
    rooms = wire.unpack_i64(b"".join([batch.rooms for batch in batches]))
    if not len(rooms):
        return {}  # events alone
    token_idx = wire.unpack_i32(b"".join([batch.token_idx for batch in batches]))
    finish = wire.unpack_u8(b"".join([batch.finish for batch in batches]))
    token_ids = wire.unpack_i32(b"".join([batch.token_ids for batch in batches]))
    order, starts, ends = gathered(rooms, token_idx, finish)
    firsts = order[starts]
    return {
        "rooms": wire.pack_i64(rooms[firsts]),
        "token_ids": wire.pack_i32(token_ids[order]),
        "token_idx": wire.pack_i32(token_idx[firsts]),
        "finish": wire.pack_u8(finish[order[ends - 1]]),
        "counts": wire.pack_i32(ends - starts),
    }


def _rows(batches: Sequence[wire.StepBatch]) -> dict[str, bytes]:
    """The rows of all steps, one after the other, with logprobs."""
    top_rows: list[bytes] = []
    start = 0
    for batch in batches:
        if batch.top_rows:
            top_rows.append(wire.pack_i32(wire.unpack_i32(batch.top_rows) + start))
        start += batch.num_rows
    logprobs = [batch.logprobs or bytes(4 * batch.num_rows) for batch in batches]
    as_they_are = ("rooms", "token_ids", "token_idx", "finish", "top_ids", "top_logprobs")
    return {
        **{name: b"".join([getattr(batch, name) for batch in batches]) for name in as_they_are},
        "logprobs": b"".join(logprobs),
        "top_rows": b"".join(top_rows),
    }


def _row_bytes(batch: wire.StepBatch) -> int:
    """Bytes of all row arrays, once the step is merged with others."""
    if not batch.logprobs:
        return _ROW_BYTES_IN_RUNS * batch.num_rows
    always = len(batch.rooms) + len(batch.token_ids) + len(batch.token_idx) + len(batch.finish)
    top = len(batch.top_rows) + len(batch.top_ids) + len(batch.top_logprobs)
    return always + len(batch.logprobs) + top


def _parts(batch: wire.StepBatch) -> list[wire.StepBatch]:
    """A step, or if its events are too long for one message: a message for each long one, then it.

    Only "prefilled" is long, and it applies before the rows in any case.
    """
    if _event_bytes(batch) <= _EVENT_BYTES_PER_MESSAGE:
        return [batch]
    nothing = wire.StepBatch(batch.worker_id, batch.epoch, batch.step, batch.emitted_s)
    long = [event for event in batch.events if event.prompt_logprobs is not None]
    rest = tuple(event for event in batch.events if event.prompt_logprobs is None)
    ahead = [msgspec.structs.replace(nothing, events=(event,)) for event in long]
    return [*ahead, msgspec.structs.replace(batch, events=rest)]


def _event_bytes(batch: wire.StepBatch) -> int:
    """Bytes of prompt logprobs; other events have next to none."""
    return sum([_logprob_bytes(event.prompt_logprobs) for event in batch.events])


def _logprob_bytes(told: wire.PromptLogprobs | None) -> int:
    if told is None:
        return 0
    return len(told.token_ids) + len(told.logprobs) + len(told.top_ids) + len(told.top_logprobs)


def _num_events(batch: wire.StepBatch) -> int:
    return len(batch.events) + len(batch.legs)
