"""Placement of experts: what must hold for any loads, and how much it evens out the loads."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from model import eplb


@st.composite
def layers(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, int]:
    """(loads, a placement, parts) of one layer, with any number of copies that is allowed."""
    parts = draw(st.integers(1, 6))
    size = draw(st.integers(1, 6))
    physical = parts * size
    # No expert can have more copies than there are parts.
    experts = draw(st.integers(-(-physical // parts), physical))
    loads = draw(st.lists(st.integers(0, 1000), min_size=experts, max_size=experts))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    placed = rng.permutation(eplb.trivial(experts, physical))
    return np.array(loads), placed, parts


@settings(max_examples=200)
@given(layers())
def test_every_expert_is_placed_and_no_part_has_one_twice(
    layer: tuple[np.ndarray, np.ndarray, int],
) -> None:
    loads, placed, parts = layer
    new = eplb.balanced(loads, placed, parts)
    assert new.shape == placed.shape
    assert set(new.tolist()) == set(range(len(loads)))
    assert all(len(set(row.tolist())) == len(row) for row in new.reshape(parts, -1))


@settings(max_examples=200)
@given(layers())
def test_a_second_look_at_the_same_loads_moves_nothing(
    layer: tuple[np.ndarray, np.ndarray, int],
) -> None:
    loads, placed, parts = layer
    once = eplb.balanced(loads, placed, parts)
    assert eplb.balanced(loads, once, parts).tolist() == once.tolist()


@settings(max_examples=200)
@given(layers())
def test_weights_come_from_a_place_that_had_that_expert(
    layer: tuple[np.ndarray, np.ndarray, int],
) -> None:
    loads, placed, parts = layer
    new = eplb.balanced(loads, placed, parts)
    taken = eplb.sources(placed, new, parts)
    assert placed[taken].tolist() == new.tolist()
    stays = placed == new
    assert taken[stays].tolist() == np.flatnonzero(stays).tolist()
    size = len(placed) // parts
    for place, source in enumerate(taken.tolist()):
        part = placed.reshape(parts, -1)[place // size]
        assert source // size == place // size or new[place] not in part


@settings(max_examples=200)
@given(layers())
def test_the_map_names_every_place_of_every_expert_and_no_other(
    layer: tuple[np.ndarray, np.ndarray, int],
) -> None:
    loads, placed, parts = layer
    new = eplb.balanced(loads, placed, parts)
    ((places,), (counts,)) = eplb.copies_of(new[None], len(loads), parts)
    for expert, (row, count) in enumerate(zip(places.tolist(), counts.tolist(), strict=True)):
        assert sorted(row[:count]) == np.flatnonzero(new == expert).tolist()
        assert row == [row[i % count] for i in range(parts)]


def test_balancedness_by_hand() -> None:
    loads = np.array([6, 2, 2, 2])
    # 6 + 2 against 2 + 2; with a copy of the first on both sides 3 + 2 + 0 against 3 + 2 + 2.
    assert eplb.balancedness(loads, np.array([0, 1, 2, 3]), 2) == 6 / 8
    assert eplb.balancedness(loads, np.array([0, 1, 0, 2, 3, 1]), 2) == 6 / 7
    assert eplb.balancedness(np.zeros(4), np.array([0, 1, 2, 3]), 2) == 1.0


def test_the_most_loaded_expert_is_the_one_with_copies() -> None:
    loads = np.array([1, 1, 90, 1, 1, 1, 1, 4])
    new = eplb.balanced(loads, eplb.trivial(8, 10), 2)
    assert np.bincount(new).tolist() == [1, 1, 2, 1, 1, 1, 1, 2]
    assert eplb.balancedness(loads, new, 2) == 1.0
    # In four parts it may have a copy in each; more of them go to the next.
    new = eplb.balanced(loads, eplb.trivial(8, 12), 4)
    assert np.bincount(new).tolist() == [1, 1, 4, 1, 1, 1, 1, 2]


def test_skewed_loads_of_a_wide_layer_become_even() -> None:
    rng = np.random.default_rng(0)
    loads = rng.permutation((1e6 / np.arange(1, 257) ** 0.5).astype(np.int64))
    start = eplb.trivial(256, 288)
    assert eplb.balancedness(loads, start, 32) < 0.7
    assert eplb.balancedness(loads, eplb.balanced(loads, start, 32), 32) > 0.98


def test_without_copies_the_fullest_part_has_the_heaviest_expert_beside_the_lightest() -> None:
    rng = np.random.default_rng(0)
    loads = rng.permutation((1e6 / np.arange(1, 257) ** 0.5).astype(np.int64))
    start = eplb.trivial(256, 256)
    best = loads.sum() / 32 / (loads.max() + np.sort(loads)[:7].sum())
    assert eplb.balancedness(loads, start, 32) < 0.9 * best
    assert eplb.balancedness(loads, eplb.balanced(loads, start, 32), 32) > 0.99 * best


def test_few_experts_move_when_loads_change_a_little() -> None:
    rng = np.random.default_rng(1)
    loads = rng.permutation((1e6 / np.arange(1, 129) ** 0.5).astype(np.int64))
    placed = eplb.balanced(loads, eplb.trivial(128, 144), 8)
    again = eplb.balanced(loads + rng.integers(0, 2, 128), placed, 8)
    assert np.count_nonzero(again != placed) < 144 // 4
