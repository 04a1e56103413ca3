"""Unpacks a StepBatch's arrays, as rows and as runs: each room's consecutive tokens together."""

from dataclasses import dataclass

import numpy as np

from transfer import wire
from transfer.errors import BadMessage
from transfer.runs import gathered

Top = list[tuple[int, float]]  # (token id, logprob), best first


@dataclass(slots=True)
class StepRows:
    """The arrays of a batch, one entry a row."""

    rooms: np.ndarray  # i64
    token_ids: np.ndarray  # i32
    token_idx: np.ndarray  # i32
    finish: np.ndarray  # u8
    logprobs: list[float] | None
    top: dict[int, Top]  # by row

    def __len__(self) -> int:
        return len(self.rooms)


def unpack_rows(batch: wire.StepBatch) -> StepRows:
    """The rows of a batch. Raises BadMessage when its arrays disagree in length."""
    rows = StepRows(
        wire.unpack_i64(batch.rooms),
        wire.unpack_i32(batch.token_ids),
        wire.unpack_i32(batch.token_idx),
        wire.unpack_u8(batch.finish),
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


@dataclass(slots=True)
class Run:
    """What a batch with logprobs has of one room's tokens beside their ids."""

    logprobs: list[float]
    top: list[Top | None]


@dataclass(slots=True)
class Runs:
    """Consecutive tokens of one room each. Arrays have one entry a run."""

    rooms: np.ndarray  # i64
    first_idx: np.ndarray  # i32
    finish: np.ndarray  # u8, of the last token; RUNNING for those before
    counts: np.ndarray  # i64, tokens
    starts: np.ndarray  # i64, of its tokens in token_ids
    token_ids: np.ndarray  # i32, one entry a token, run after run
    detail: list[Run] | None  # None: no row has logprobs

    def __len__(self) -> int:
        return len(self.rooms)

    def ids_of(self, which: np.ndarray) -> list[list[int]]:
        """The tokens of some runs. which: their indices, i64[n], ascending."""
        if not len(which):
            return []
        first, last = which[0], which[-1]
        begin = self.starts[first]
        ids = self.token_ids[begin : self.starts[last] + self.counts[last]].tolist()
        starts = self.starts[which] - begin
        ends = starts + self.counts[which]
        return [ids[start:end] for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]

    def detail_of(self, which: np.ndarray) -> list[Run] | list[None]:
        """The logprobs of some runs; None for each if no row has logprobs."""
        if self.detail is None:
            return [None] * len(which)
        return [self.detail[run] for run in which.tolist()]

    def part(self, start: int, end: int) -> "Runs":
        """Runs start .. end - 1; at least one."""
        if start == 0 and end >= len(self):
            return self
        part = slice(start, end)
        starts, counts = self.starts[part], self.counts[part]
        return Runs(
            self.rooms[part],
            self.first_idx[part],
            self.finish[part],
            counts,
            starts - starts[0],
            self.token_ids[starts[0] : starts[-1] + counts[-1]],
            None if self.detail is None else self.detail[part],
        )


def unpack_runs(batch: wire.StepBatch) -> Runs:
    """All tokens of a batch. Raises BadMessage when its arrays disagree."""
    if not batch.counts:
        return runs_of(unpack_rows(batch))
    counts = wire.unpack_i32(batch.counts).astype(np.int64)
    runs = Runs(
        wire.unpack_i64(batch.rooms),
        wire.unpack_i32(batch.token_idx),
        wire.unpack_u8(batch.finish),
        counts,
        counts.cumsum() - counts,
        wire.unpack_i32(batch.token_ids),
        None,
    )
    n = len(counts)
    lengths = [len(runs.rooms), len(runs.first_idx), len(runs.finish)]
    if any(length != n for length in lengths):
        raise BadMessage(f"step {batch.step} of {batch.worker_id}: {n} runs but arrays {lengths}")
    if counts.min() < 1 or counts.sum() != len(runs.token_ids):
        raise BadMessage(
            f"step {batch.step} of {batch.worker_id}: runs of {counts.min()} tokens and more, "
            f"{counts.sum()} in all, but {len(runs.token_ids)} ids"
        )
    if (runs.rooms[1:] < runs.rooms[:-1]).any() or batch.logprobs or batch.top_rows:
        raise BadMessage(f"step {batch.step} of {batch.worker_id}: runs unsorted, or with logprobs")
    return runs


def runs_of(rows: StepRows) -> Runs:
    """All rows, as one run a room. A room has several rows when several steps were merged."""
    rooms = np.sort(rows.rooms)  # takes a tenth of the time of np.unique
    if (rooms[1:] != rooms[:-1]).all():
        return _single_runs(rows)
    order, starts, ends = gathered(rows.rooms, rows.token_idx, rows.finish)
    firsts = order[starts]
    detail = None
    if rows.logprobs is not None:
        old = order.tolist()
        bounds = zip(starts.tolist(), ends.tolist(), strict=True)
        detail = [_detail(rows, old[start:end]) for start, end in bounds]
    return Runs(
        rows.rooms[firsts],
        rows.token_idx[firsts],
        rows.finish[order[ends - 1]],
        ends - starts,
        starts,
        rows.token_ids[order],
        detail,
    )


def _single_runs(rows: StepRows) -> Runs:
    n = len(rows)
    return Runs(
        rows.rooms,
        rows.token_idx,
        rows.finish,
        np.ones(n, np.int64),
        np.arange(n),
        rows.token_ids,
        None if rows.logprobs is None else [_detail(rows, [row]) for row in range(n)],
    )


def _detail(rows: StepRows, of: list[int]) -> Run:
    assert rows.logprobs is not None, "rows without logprobs have no detail"
    return Run([rows.logprobs[row] for row in of], [rows.top.get(row) for row in of])
