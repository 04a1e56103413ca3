"""When a token ends its request: the same one by one as for a batch."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transfer.stops import finish_of, finish_of_rows
from transfer.wire import LENGTH, MAX_STOP_IDS, RUNNING, STOP, SamplingParams

PARAMS = SamplingParams(max_new_tokens=3, stop_token_ids=(7, 9))


@pytest.mark.parametrize(
    ("token_id", "token_idx", "expected"),
    [
        (5, 0, RUNNING),
        (7, 0, STOP),
        (9, 1, STOP),
        (5, 1, RUNNING),
        (5, 2, LENGTH),
        (9, 2, STOP),  # the client is told of the stop id, not the length
        (5, 3, LENGTH),
    ],
)
def test_a_stop_id_stops_and_the_last_place_ends_by_length(
    token_id: int, token_idx: int, expected: int
) -> None:
    assert finish_of(token_id, token_idx, PARAMS) == expected


def test_an_unused_place_for_a_stop_id_stops_nothing() -> None:
    assert finish_of(0, 0, SamplingParams(max_new_tokens=5)) == RUNNING
    unused = np.full((1, MAX_STOP_IDS), -1, np.int32)
    one = np.zeros((1, 1), np.int32)
    assert finish_of_rows(one, one, unused, one[0] + 5).tolist() == [[RUNNING]]


WIDTH = 3
ROW = st.tuples(
    st.lists(st.integers(0, 9), min_size=WIDTH, max_size=WIDTH),
    st.integers(0, 6),
    st.integers(1, 6),
    st.lists(st.integers(0, 9), max_size=MAX_STOP_IDS),
)


@given(st.lists(ROW, max_size=8))
def test_batch_and_single_form_agree(rows: list[tuple[list[int], int, int, list[int]]]) -> None:
    stop_ids = np.full((len(rows), MAX_STOP_IDS), -1, np.int32)
    for at, (_, _, _, stops) in enumerate(rows):
        stop_ids[at, : len(stops)] = stops
    token_ids = np.array([row[0] for row in rows], np.int32).reshape(len(rows), WIDTH)
    first_idx, most = np.array([row[1:3] for row in rows], np.int32).reshape(len(rows), 2).T
    token_idx = first_idx[:, None] + np.arange(WIDTH, dtype=np.int32)
    got = finish_of_rows(token_ids, token_idx, stop_ids, most)
    assert got.dtype == np.uint8
    assert got.tolist() == [
        [
            finish_of(token_id, idx, SamplingParams(max_new, stop_token_ids=tuple(stops)))
            for idx, token_id in enumerate(ids, start=first)
        ]
        for ids, first, max_new, stops in rows
    ]
