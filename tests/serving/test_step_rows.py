"""Rows of a step: unpacked, refused when they disagree, and gathered into runs of one room."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.step_rows import Run, Runs, StepRows, runs_of, unpack_rows, unpack_runs
from transfer import wire
from transfer.errors import BadMessage
from transfer.replies import merge


def batch(**arrays: bytes) -> wire.StepBatch:
    rows: dict[str, Any] = {
        "rooms": wire.pack_i64([5, 6]),
        "token_ids": wire.pack_i32([50, 60]),
        "token_idx": wire.pack_i32([0, 4]),
        "finish": wire.pack_u8([0, 2]),
    }
    return wire.StepBatch("d", 1, 1, 0.0, **{**rows, **arrays})


def test_rows_are_unpacked_with_top_logprobs_at_the_rows_that_have_them():
    top_ids, top_logprobs = list(range(20)), [-float(i) for i in range(20)]
    rows = unpack_rows(
        batch(
            logprobs=wire.pack_f32([-1.0, -2.0]),
            top_rows=wire.pack_i32([1]),
            top_ids=wire.pack_i32(top_ids),
            top_logprobs=wire.pack_f32(top_logprobs),
        )
    )
    columns = (rows.rooms, rows.token_ids, rows.token_idx, rows.finish)
    assert [column.tolist() for column in columns] == [[5, 6], [50, 60], [0, 4], [0, 2]]
    assert rows.logprobs == [-1.0, -2.0]
    assert rows.top == {1: list(zip(top_ids, top_logprobs, strict=True))}


@pytest.mark.parametrize(
    "arrays",
    [
        {"token_ids": wire.pack_i32([1])},
        {"finish": b"\0\0\0"},
        {"logprobs": wire.pack_f32([0.5])},
        {"rooms": b"12345"},
        {"top_rows": wire.pack_i32([0]), "top_ids": wire.pack_i32([1])},
        {
            "top_rows": wire.pack_i32([2]),
            "top_ids": wire.pack_i32([0] * 20),
            "top_logprobs": wire.pack_f32([0] * 20),
        },
    ],
)
def test_rows_whose_arrays_disagree_are_refused(arrays):
    with pytest.raises(BadMessage):
        unpack_rows(batch(**arrays))


def rows_of(rows: list[tuple[int, int, int, int]], logprobs: bool = False) -> StepRows:
    rooms, idx, ids, finish = (np.array(column) for column in zip(*rows, strict=True))
    values = [-float(row) for row in range(len(rows))] if logprobs else None
    top = {row: [(row, -1.0)] for row in range(0, len(rows), 2)} if logprobs else {}
    return StepRows(rooms, ids, idx, finish, values, top)


def columns_of(runs: Runs) -> tuple[list[int], list[int], list[list[int]], list[int]]:
    """Rooms, first indices, ids and finishes."""
    ids = runs.ids_of(np.arange(len(runs)))
    return runs.rooms.tolist(), runs.first_idx.tolist(), ids, runs.finish.tolist()


def test_each_row_of_one_step_is_a_run_in_its_order():
    runs = runs_of(rows_of([(7, 3, 30, 0), (5, 1, 10, 2)], logprobs=True))
    assert columns_of(runs) == ([7, 5], [3, 1], [[30], [10]], [0, 2])
    assert runs.detail == [Run([-0.0], [[(0, -1.0)]]), Run([-1.0], [None])]


def test_rows_of_one_room_are_one_run_unless_they_do_not_follow_each_other():
    rows = [
        (7, 3, 30, 0),
        (5, 1, 10, 0),
        (7, 4, 40, 0),
        (5, 2, 20, 2),
        (7, 6, 60, 0),
        (7, 7, 70, 1),
    ]
    runs = runs_of(rows_of(rows, logprobs=True))
    ids = [[10, 20], [30, 40], [60, 70]]
    assert columns_of(runs) == ([5, 7, 7], [1, 3, 6], ids, [2, 0, 1])
    assert columns_of(runs.part(1, 3)) == ([7, 7], [3, 6], ids[1:], [0, 1])
    assert runs.part(1, 3).token_ids.tolist() == [30, 40, 60, 70]
    assert runs.detail is not None
    assert runs.detail[0] == Run([-1.0, -3.0], [None, None])
    assert runs.detail[2] == Run([-4.0, -5.0], [[(4, -1.0)], None])


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 5), st.integers(0, 2)), min_size=1))
def test_runs_have_every_row_once_and_end_where_a_row_says_so(plan: list[tuple[int, int, int]]):
    rows = [(room, idx, place, finish) for place, (room, idx, finish) in enumerate(plan)]
    runs = runs_of(rows_of(rows))
    found = [
        (room, first + place, token_id, finish if place == len(ids) - 1 else 0)
        for room, first, ids, finish in zip(*columns_of(runs), strict=True)
        for place, token_id in enumerate(ids)
    ]
    assert sorted(found) == sorted(rows)
    for room in range(1, 5):
        assert [row for row in found if row[0] == room] == [row for row in rows if row[0] == room]


@given(
    st.lists(
        st.lists(st.tuples(st.integers(1, 5), st.integers(0, 2)), unique_by=lambda row: row[0]),
        min_size=2,
        max_size=6,
    )
)
def test_runs_that_a_worker_gathered_are_those_of_its_rows(plan: list[list[tuple[int, int]]]):
    """plan: (room, finish) of each row of each step; a room's tokens follow each other or not."""
    steps, rows = [], []
    for idx, one in enumerate(plan):
        some = [(room, idx, 10 * idx + room, finish) for room, finish in one]
        rooms, token_idx, ids, finish = zip(*some, strict=True) if some else ((),) * 4
        arrays = {
            "rooms": wire.pack_i64(rooms),
            "token_ids": wire.pack_i32(ids),
            "token_idx": wire.pack_i32(token_idx),
            "finish": wire.pack_u8(finish),
        }
        steps.append(batch(**arrays))
        rows += some
    merged = merge(steps)
    assert merged.num_rows == len(rows)
    if rows:
        got = sorted(zip(*columns_of(unpack_runs(merged)), strict=True))
        assert got == sorted(zip(*columns_of(runs_of(rows_of(rows))), strict=True))


@pytest.mark.parametrize(
    "arrays",
    [
        {"counts": wire.pack_i32([1, 2])},
        {"counts": wire.pack_i32([2])},
        {"counts": wire.pack_i32([0, 2])},
        {"counts": wire.pack_i32([3, -1])},
        {"counts": wire.pack_i32([1, 1]), "rooms": wire.pack_i64([6, 5])},
        {"counts": wire.pack_i32([1, 1]), "finish": b""},
        {"counts": wire.pack_i32([1, 1]), "logprobs": wire.pack_f32([0.0, 0.0])},
        {"counts": b"123"},
    ],
)
def test_runs_whose_arrays_disagree_are_refused(arrays):
    with pytest.raises(BadMessage):
        unpack_runs(batch(**arrays))
