"""Which pages are shipped after a chunk, and with which numbers."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode.admission import Seat
from decode.rings import Rings, first_seen
from model.buckets import pages_for, touched_pages
from model.pieces import Piece
from prefill.scheduler import Prompt
from prefill.shipping import Shipping, pages_to_ship
from transfer.opened import PoolFacts

PAGE = 4


@pytest.mark.parametrize(
    ("start", "num_tokens", "already", "expected"),
    [
        (0, 8, 0, [0, 1]),  # two full pages
        (0, 6, 0, [0]),  # the unfinished page stays
        (6, 4, 1, [1]),  # ... and leaves once it is full
        (4, 2, 1, []),
        (8, 3, 2, [2]),  # the last piece takes its half-filled page along
        (10, 1, 0, [0, 1, 2]),  # cached pages are shipped too
    ],
)
def test_pages_are_shipped_once_when_complete(
    start: int, num_tokens: int, already: int, expected: list[int]
) -> None:
    piece = Piece(Prompt(1, np.zeros(11, np.int32), 0.0), start, num_tokens)
    assert list(pages_to_ship(piece, PAGE, already)) == expected


def a_prompt(num_tokens: int, pages: list[int] | None = None) -> Prompt:
    prompt = Prompt(1, np.zeros(num_tokens, np.int32), 0.0)
    prompt.pages = pages or list(range(pages_for(num_tokens, PAGE)))
    return prompt


def test_pages_of_one_group_keep_their_place_in_the_prompt() -> None:
    shipping = Shipping(PAGE, num_pages=100, most=2)
    prompt = a_prompt(17, [9, 8, 7, 6, 5])
    assert shipping.first_windowed(17, 5) == 5
    runs = shipping.runs_of(Piece(prompt, 0, 17), range(1, 5), 5)
    assert runs == [(1, 1, [8, 7]), (1, 3, [6, 5])]


def test_pages_that_decode_has_are_not_sent_and_the_others_count_from_there() -> None:
    shipping = Shipping(PAGE, num_pages=100, most=2)
    prompt = a_prompt(17, [9, 8, 7, 6, 5])
    assert shipping.first_windowed(17, 3, first_page=2) == 5
    piece = Piece(prompt, 0, 17)
    pages = pages_to_ship(piece, PAGE, 2)
    assert shipping.runs_of(piece, pages, 5, first_page=2) == [(1, 0, [7, 6]), (1, 2, [5])]


@pytest.mark.parametrize(
    ("groups", "num_granted", "first_page"), [(1, 0, 5), (1, 5, 2), (1, 2, 2), (2, 3, 2), (1, 1, 6)]
)
def test_from_that_page_on_so_many_cannot_be_granted_for_five(
    groups: int, num_granted: int, first_page: int
) -> None:
    assert Shipping(PAGE, 100, 8, groups).first_windowed(17, num_granted, first_page) is None


def test_pages_of_windows_come_from_behind_the_others_and_leave_before_them() -> None:
    shipping = Shipping(PAGE, num_pages=100, most=2, groups=2)
    prompt = a_prompt(17, [9, 8, 7, 6, 5])
    first = shipping.first_windowed(17, 8)
    assert first == 2
    runs = shipping.runs_of(Piece(prompt, 0, 16), range(4), first)
    assert runs == [(1, 5, [107, 106]), (1, 0, [9, 8]), (1, 2, [7, 6])]
    assert shipping.runs_of(Piece(prompt, 16, 1), range(4, 5), first) == [
        (1, 7, [105]),
        (1, 4, [5]),
    ]


@pytest.mark.parametrize(
    ("groups", "num_granted"), [(1, 0), (1, 4), (1, 6), (1, 10), (2, 4), (2, 11)]
)
def test_so_many_pages_cannot_be_granted_for_five(groups: int, num_granted: int) -> None:
    assert Shipping(PAGE, 100, 8, groups).first_windowed(17, num_granted) is None


@given(
    num_tokens=st.integers(1, 80),
    window=st.integers(1, 40),
    page_size=st.sampled_from((2, 4, 8)),
    cuts=st.lists(st.integers(1, 79), max_size=4),
    whole=st.booleans(),
)
def test_every_page_that_decode_granted_is_filled_once_and_from_its_own_positions(
    num_tokens: int, window: int, page_size: int, cuts: list[int], whole: bool
) -> None:
    """Decode says how many pages it wants, prefill which: both must mean the same pages."""
    ring_pages = 0 if whole else touched_pages(window, page_size)
    num_places = num_tokens // page_size + 1
    pages, ring = list(range(1000, 1000 + num_places)), list(range(2000, 2000 + ring_pages))
    seat = Seat(1, num_tokens, 0.0, pages=pages, ring=ring[:num_places])
    rings = Rings(PoolFacts(page_size, 96, 1, 1, window), 5000, ring_pages)
    granted = rings.to_fill(seat)
    assert len(set(granted)) == len(granted)

    prompt = Prompt(1, np.zeros(num_tokens, np.int32), 0.0)
    prompt.pages = list(range(pages_for(num_tokens, page_size)))
    shipping = Shipping(page_size, num_pages=100, most=3, groups=2)
    first = shipping.first_windowed(num_tokens, len(granted))
    assert first is not None
    filled: dict[int, int] = {}  # decode's page -> prefill's
    shipped = 0
    ends = sorted({*(cut for cut in cuts if cut < num_tokens), num_tokens})
    for start, end in zip([0, *ends], ends, strict=False):
        piece = Piece(prompt, start, end - start)
        leaving = pages_to_ship(piece, page_size, shipped)
        shipped += len(leaving)
        for run in shipping.runs_of(piece, leaving, first):
            assert len(run.page_ids) <= 3
            for number, page in enumerate(run.page_ids, start=run.first_page):
                assert granted[number] not in filled
                filled[granted[number]] = page
    assert set(filled) == set(granted)
    for place in range(len(prompt.pages)):
        assert filled[pages[place]] == place
    for place in range(first_seen(num_tokens, window, page_size), len(prompt.pages)):
        held = ring[place % ring_pages] if ring_pages else 5000 + pages[place]
        assert filled[held] == 100 + place


@given(
    start=st.integers(0, 200),
    window=st.integers(1, 40),
    drafts=st.integers(0, 7),
    page_size=st.sampled_from((2, 4, 8)),
)
def test_what_a_step_writes_is_not_where_its_first_token_still_looks(
    start: int, window: int, drafts: int, page_size: int
) -> None:
    drafts = min(drafts, page_size - 1)  # as checked for the flags
    size = touched_pages(window, page_size) * page_size
    seen = range(max(start + 1 - window, 0), start + drafts + 1)
    assert len({at % size for at in seen}) == len(seen)
    places = {at // page_size for at in seen}
    assert first_seen(start, window, page_size) == min(places)
