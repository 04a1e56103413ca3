"""Where each slot of a plan is among the rows of a step; memory for pages that come."""

import jax
import numpy as np
import pytest

from decode.engine import DecodeEngine, _places
from model.buckets import decode_buckets
from model.opening import open_model
from serving.demo import demo_model_path


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


def test_pages_that_come_wait_once_as_many_as_were_planned_for_are_on_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    page_size, context = 16, 128
    opened = open_model(demo_model_path(), "float32", "auto", 1, 1, page_size, context)
    buckets = decode_buckets(1, context, page_size)
    engine = DecodeEngine(opened, buckets, 0.0, 4 * context)
    longest = buckets.run_pages[-1]
    assert engine.plan.scratch_bytes > engine._most_placing * engine.plan.page_bytes

    placed: list[int] = []
    waits: list[int] = []  # how many were placed before
    wait = jax.block_until_ready

    def counted(value: object) -> object:
        waits.append(len(placed))
        return wait(value)

    monkeypatch.setattr(jax, "block_until_ready", counted)
    kv = opened.kv
    shape = (kv.num_layers, kv.planes, longest, page_size, kv.num_kv_heads, kv.head_dim)
    run = np.ones(shape, np.float32)
    for number in range(20):
        engine.place_run(0, range(longest), [run])
        placed.append(number)
    assert waits == [4, 8, 12, 16]
