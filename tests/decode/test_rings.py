"""Windowed layers keep their pages in rings, which changes no token."""

import json
import shutil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode.admission import Admission
from decode.rings import ringed_window
from model.buckets import Drafting
from tests.model.checkpoints import write_config
from tests.model.harness import GOLDENS
from tests.one_process import OneProcess
from transfer.opened import PoolFacts
from transfer.pages import PagePool
from transfer.wire import SamplingParams

PAGE, RING = 4, 3


# Window, pages of its ring, drafts of a step. The last, tightest kind has as many drafts as a page
# allows: overwriting of each page begins while its last position is still visible.
KINDS = {
    "a window of one page": (16, 2, 0),
    "of a page and a bit": (18, 3, 3),
    "with as many drafts as can be": (17, 2, 15),
}


@pytest.fixture(scope="module", params=KINDS)
def both(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[OneProcess, OneProcess]:
    """Decode that keeps all pages, and decode with rings and perhaps drafts."""
    window, ring_pages, drafts = KINDS[request.param]
    golden, path = GOLDENS / "gpt_oss" / "model", tmp_path_factory.mktemp("windows")
    shutil.copytree(golden, path, dirs_exist_ok=True)
    config = json.loads((golden / "config.json").read_text())
    write_config(path, config | {"sliding_window": window})
    ringed = OneProcess(path, has_rings=True, drafting=Drafting(drafts, 1, 3) if drafts else None)
    whole = OneProcess(path)
    assert (whole.rings.ring_pages, ringed.rings.ring_pages) == (0, ring_pages)
    return whole, ringed


@pytest.mark.parametrize(
    ("num_tokens", "temperature"),
    [(1, 0.8), (15, 0.0), (16, 0.8), (17, 0.8), (31, 0.0), (33, 0.8), (100, 0.8)],
)
def test_the_same_tokens_are_drawn_from_a_ring(
    both: tuple[OneProcess, OneProcess], num_tokens: int, temperature: float
) -> None:
    whole, ringed = both
    ids = np.random.default_rng(num_tokens).integers(0, 500, num_tokens).tolist()
    params = SamplingParams(70, temperature=temperature, seed=num_tokens)
    drawn = whole.run(ids, params)
    assert len(set(drawn)) > 5 or not temperature
    assert ringed.run(ids, params) == drawn


def test_a_worker_that_computes_prompts_has_no_rings() -> None:
    facts = PoolFacts(16, 512, 1, 1, window=32)
    assert ringed_window(facts, local_tokens=0) == 32
    assert ringed_window(facts, local_tokens=1) == 0


def a_desk(num_pages: int, ring_pages: int = RING) -> Admission:
    return Admission([PagePool(num_pages)], 4, PAGE, 0, ring_pages=ring_pages)


def test_a_seat_has_a_ring_as_long_as_its_prompt_or_the_window() -> None:
    desk = a_desk(40)
    for room, num_tokens in enumerate((1, 4, 11, 12)):
        desk.add(room, num_tokens, float(room))
    seats = desk.admit()
    assert [len(seat.pages) for seat in seats] == [1, 2, 3, 4]
    assert [len(seat.ring) for seat in seats] == [1, 2, 3, 3]
    desk.check()


def test_a_seat_that_grows_takes_a_page_for_its_ring_until_that_is_whole() -> None:
    desk = a_desk(8)
    desk.add(1, 1, 0.0)
    (seat,) = desk.admit()
    assert [desk.grow(seat) is not None for _ in range(5)] == [True, True, True, True, False]
    assert (len(seat.pages), len(seat.ring)) == (5, 3)
    desk.check()
    desk.release(1)
    desk.check()


def test_headroom_is_left_for_the_two_pages_of_who_grows() -> None:
    desk = Admission([PagePool(10)], 4, PAGE, 1, ring_pages=RING)
    desk.add(1, 3, 0.0)  # a page, and a page of its ring
    desk.add(2, 12, 1.0)  # four and three pages: with one left, the first could not grow
    assert [seat.room for seat in desk.admit()] == [1]


def test_who_cannot_have_both_pages_takes_none() -> None:
    desk = a_desk(3)
    desk.add(1, 1, 0.0)
    (seat,) = desk.admit()
    assert desk.grow(seat) is None
    assert (len(seat.pages), len(seat.ring)) == (1, 1)
    desk.check()


def test_a_prompt_waits_until_its_ring_fits_too() -> None:
    desk = a_desk(9)
    desk.add(1, 12, 0.0)  # four pages, and a ring of three
    desk.add(2, 4, 1.0)  # two pages, and two of its ring
    assert [seat.room for seat in desk.admit()] == [1]
    desk.release(1)
    assert [seat.room for seat in desk.admit()] == [2]


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 6)), min_size=1, max_size=6))
def test_pages_of_rings_add_up(requests: list[tuple[int, int]]) -> None:
    desk = a_desk(30)
    for room, (num_tokens, _) in enumerate(requests):
        desk.add(room, num_tokens, float(room))
    seats = desk.admit()
    for seat in seats:
        for _ in range(requests[seat.room][1]):
            desk.grow(seat)
        assert len(seat.ring) == min(len(seat.pages), RING)
        desk.check()
    for seat in seats:
        desk.release(seat.room)
        desk.check()
    assert desk._pools[0].num_held == sum(
        len(seat.pages) + len(seat.ring) for seat in desk._seats.values()
    )
