"""Pages of windowed layers: which layers have them, what a step reads, and memory plans."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode.engine import DecodeEngine
from decode.rings import Rings
from model import opening
from model.buckets import prefill_buckets, touched_pages
from model.config import ModelConfig
from model.page_groups import FULL, WINDOWED, decode_groups, group_of_layer, of_groups, place_of
from prefill.engine import PrefillEngine
from tests.model.harness import (
    GOLDENS,
    NUM_PAGES,
    PAGE_SIZE,
    Harness,
    chunks,
    full_steps,
    i32,
    open_plainly,
)
from transfer.opened import PoolFacts

PATH = GOLDENS / "gpt_oss" / "model"
CFG = ModelConfig.from_dir(PATH)


def test_each_layer_has_its_own_place_in_pages_of_its_kind() -> None:
    assert CFG.window_layers == (True, False, True, False)
    for traced in (False, True):
        found = []
        for layer in range(4):
            group = group_of_layer(CFG, layer)
            place = place_of(CFG, jnp.int32(layer), None if traced else group)
            assert int(place.group) == group
            found.append((group, int(place.layer)))
        assert found == [(WINDOWED, 0), (FULL, 0), (WINDOWED, 1), (FULL, 1)]


@pytest.mark.parametrize("windows", [(True, False), (True, True, False, False)])
def test_half_of_the_layers_with_a_window_are_a_group(windows: tuple[bool, ...]) -> None:
    cfg = replace(CFG, num_layers=len(windows), window_layers=windows)
    assert cfg.page_groups == 2


@pytest.mark.parametrize("windows", [(), (False, False), (True, True), (True, False, False)])
def test_others_keep_one_kind_of_page(windows: tuple[bool, ...]) -> None:
    cfg = replace(CFG, num_layers=len(windows) or 2, window_layers=windows)
    assert cfg.page_groups == 1
    assert place_of(cfg, jnp.int32(1), None).group == FULL


def test_nowhere_is_nowhere_in_every_group() -> None:
    assert of_groups(CFG, i32([-1, 0, 5]), 6, 4).tolist() == [[-1, 0, 5], [-1, 24, 29]]
    rows = decode_groups(CFG, 4, 6, i32([-1, 3]), i32([[0, 0], [2, 0]]), i32([-1, 11]), None)
    assert rows.kv_idx.tolist() == [[-1, 11], [-1, 35]]


@given(
    position=st.integers(0, 95),
    window=st.integers(1, 40),
    page_size=st.sampled_from((2, 4, 8)),
    ringed=st.booleans(),
)
def test_a_step_looks_at_the_pages_of_the_window_and_at_no_others(
    position: int, window: int, page_size: int, ringed: bool
) -> None:
    cfg, most = replace(CFG, sliding_window=window), 96 // page_size
    table = np.arange(100, 100 + most)
    size = touched_pages(window, page_size)
    ring = i32([range(500, 500 + size)]) if ringed else None
    at, idx = position // page_size, position % page_size
    kv_idx = i32([table[at] * page_size + idx])
    rows = decode_groups(cfg, page_size, 1000, i32([position]), i32([table]), kv_idx, ring)
    own = [500 + j % size if ringed else 1000 + int(table[j]) for j in range(most)]
    positions, seen = rows.of(WINDOWED)
    first = max(position + 1 - window, 0) // page_size
    assert int(positions[0]) == position - first * page_size
    assert seen.shape[1] == min(size, most)
    assert seen[0, : at - first + 1].tolist() == own[first : at + 1]
    assert int(rows.kv_idx[WINDOWED, 0]) == own[at] * page_size + idx
    # Where one loop runs layers of both groups, their tables have one width.
    _, wide = rows.of(jnp.int32(WINDOWED))
    assert wide[0, : seen.shape[1]].tolist() == seen[0].tolist()
    assert rows.of(FULL)[1].tolist() == [table.tolist()]


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_chunks_and_steps_write_to_the_pages_of_their_tokens_and_to_no_others(
    platform: str,
) -> None:
    harness = Harness(PATH, platform=platform)
    num_tokens, pages = 37, [5, 3, NUM_PAGES - 2]
    pool = harness.new_pool()
    for batch in chunks([list(range(2, 2 + num_tokens))], [pages]):  # the last one has padding
        _, pool = harness._prefill(harness.model, harness.params, pool, batch)
    for step in range(3):
        _, pool = harness.decode_step(pool, [7], [num_tokens + step], [pages])
    written = np.asarray(pool).any(axis=(0, 1, 4, 5)).reshape(2, NUM_PAGES, PAGE_SIZE)
    expected = np.zeros((NUM_PAGES, PAGE_SIZE), bool)
    for at in range(num_tokens + 3):
        expected[pages[at // PAGE_SIZE], at % PAGE_SIZE] = True
    assert (written[0] == expected).all()
    assert (written[1] == expected).all()


def test_a_pool_has_what_slots_can_use_of_both_groups() -> None:
    context, slots = 512, 3
    opened = open_plainly(PATH, 16, context)
    facts, each = PoolFacts.of(opened), context // 16
    whole = DecodeEngine(opened, full_steps(slots, context, 16), 0.0, 0)
    assert whole.num_pages == slots * each
    assert Rings(facts, whole.num_pages).pool_pages == slots * each
    buckets = full_steps(slots, context, 16, facts.window)
    ringed = DecodeEngine(opened, buckets, 0.0, 0)
    assert buckets.ring_pages == 2
    assert ringed.num_pages == slots * (each + 2) // 2
    assert Rings(facts, ringed.num_pages, 2).pool_pages == slots * (each + 2)
    told = f"{ringed.num_pages} pages of each of 2 groups of layers"
    assert told in str(ringed.plan)
    assert ringed.plan.page_bytes == 2 * opened.kv.page_bytes


def test_pages_under_way_are_of_both_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "memory_budget_bytes", lambda *_: 1 << 31)
    one, both = (prefill_buckets(64, 2, 512, 16, groups) for groups in (1, 2))
    assert both.staged_pages == 2 * one.staged_pages
    opened = open_plainly(PATH, 16, 512)
    plans = [PrefillEngine(opened, buckets, 0.0, 512, 1).plan for buckets in (one, both)]
    more = (both.staged_pages - one.staged_pages) * opened.kv.page_bytes
    assert plans[1].scratch_bytes - plans[0].scratch_bytes == more
