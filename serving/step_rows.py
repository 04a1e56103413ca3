"""The packed arrays of a StepBatch, row by row, and as runs: each room's next tokens together."""

from dataclasses import dataclass

import numpy as np

from transfer import wire
from transfer.errors import BadMessage

Top = list[tuple[int, float]]  # (token id, logprob), best first


@dataclass(slots=True)
class StepRows:
    """The arrays as lists, one entry a row."""

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


@dataclass(slots=True)
class Run:
    """What a batch says of one room's tokens beside their ids, when it has logprobs."""

    logprobs: list[float]
    top: list[Top | None]


@dataclass(slots=True)
class Runs:
    """Consecutive tokens of one room each. Lists have one entry a run."""

    rooms: list[int]
    first_idx: list[int]
    ids: list[list[int]]
    finish: list[int]  # of the last token; RUNNING for those before
    detail: list[Run] | None  # None: no row has logprobs

    def __len__(self) -> int:
        return len(self.rooms)


def runs_of(rows: StepRows) -> Runs:
    """All rows, each in one run: a step has one row a room, and several steps may have merged."""
    if len(set(rows.rooms)) == len(rows):
        return _single_runs(rows, range(len(rows)))
    rooms, token_idx, finish = map(np.asarray, (rows.rooms, rows.token_idx, rows.finish))
    order = np.argsort(rooms, kind="stable")
    rooms, token_idx, finish = rooms[order], token_idx[order], finish[order]
    follows = (rooms[1:] == rooms[:-1]) & (token_idx[1:] == token_idx[:-1] + 1) & (finish[:-1] == 0)
    starts = np.concatenate(([0], np.flatnonzero(~follows) + 1))
    ends = np.append(starts[1:], len(rooms))
    ids = np.asarray(rows.token_ids)[order].tolist()
    bounds = list(zip(starts.tolist(), ends.tolist(), strict=True))
    detail = None
    if rows.logprobs is not None:
        old = order.tolist()
        detail = [_detail(rows, old[start:end]) for start, end in bounds]
    return Runs(
        rooms[starts].tolist(),
        token_idx[starts].tolist(),
        [ids[start:end] for start, end in bounds],
        finish[ends - 1].tolist(),
        detail,
    )


def _single_runs(rows: StepRows, every_row: range) -> Runs:
    return Runs(
        rows.rooms,
        rows.token_idx,
        [[token_id] for token_id in rows.token_ids],
        rows.finish,
        None if rows.logprobs is None else [_detail(rows, [row]) for row in every_row],
    )


def _detail(rows: StepRows, of: list[int]) -> Run:
    assert rows.logprobs is not None, "rows without logprobs have no detail"
    return Run([rows.logprobs[row] for row in of], [rows.top.get(row) for row in of])
