"""Where each slot of a plan is among the rows of a step."""

import numpy as np
import pytest

from decode.engine import _places


@pytest.mark.parametrize(
    ("ranks", "dp_size", "within", "most"),
    [
        ([0, 0, 0], 1, [0, 1, 2], 3),
        ([1, 0, 1, 1, 0], 2, [0, 0, 1, 2, 1], 3),
        ([2, 2], 4, [0, 1], 2),
    ],
)
def test_rows_of_a_rank_follow_each_other_in_the_order_of_the_plan(
    ranks: list[int], dp_size: int, within: list[int], most: int
) -> None:
    found, fullest = _places(np.array(ranks, np.int32), dp_size)
    assert (found.tolist(), fullest) == (within, most)
