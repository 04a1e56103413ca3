"""Chunks within their budgets, in order of arrival; all pages come back however a prompt ends."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefill.scheduler import PrefillScheduler, Prompt
from transfer.pages import PagePool
from transfer.prefix_cache import PrefixCache

PAGE = 4


class Bench:
    """A scheduler with its pool and cache."""

    def __init__(
        self,
        num_pages: int = 64,
        chunk_tokens: int = 16,
        chunk_seqs: int = 3,
        chunk_pages: int = 64,
        cached: bool = True,
        sizes: tuple[int, ...] = (),
    ) -> None:
        self.pool = PagePool(num_pages)
        self.cache = PrefixCache(self.pool, PAGE, cached)
        self.scheduler = PrefillScheduler(
            self.pool, self.cache, chunk_tokens, chunk_seqs, chunk_pages, sizes
        )

    def add(
        self,
        room: int,
        tokens: int | Sequence[int],
        arrival_s: float | None = None,
        logprobs_start: int = -1,
        granted: bool = True,
    ) -> Prompt:
        """A prompt; an int `tokens` stands for that many tokens that no other room has."""
        if isinstance(tokens, int):
            tokens = [1000 * room + at for at in range(tokens)]
        prompt = Prompt(
            room,
            np.array(tokens, np.int32),
            float(room) if arrival_s is None else arrival_s,
            logprobs_start=logprobs_start,
        )
        self.scheduler.add(prompt)
        if granted:
            self.scheduler.grant(room)
        return prompt

    def plan(self) -> list[tuple[int, int, int]]:
        """(room, start, end) of the next chunk's pieces."""
        return [(piece.prompt.room, piece.start, piece.end) for piece in self.scheduler.plan()]

    def all_back(self) -> bool:
        """Whether only the cache holds pages."""
        self.pool.check()
        return self.pool.num_held == len(self.cache) == self.cache.num_evictable


def test_where_padding_costs_a_prompt_that_is_alone_has_shorter_chunks() -> None:
    bench = Bench(256, 512, chunk_pages=256, sizes=(32, 128, 512))
    bench.add(1, 150)
    assert bench.plan() == [(1, 0, 128)]
    assert bench.plan() == [(1, 128, 150)]
    bench.add(2, 40)
    bench.add(3, 100)
    assert bench.plan() == [(2, 0, 40), (3, 0, 88)]
    bench.add(4, 60)
    assert bench.plan() == [(3, 88, 100), (4, 0, 60)]


def test_nothing_runs_before_its_grant() -> None:
    bench = Bench()
    bench.add(1, 5, granted=False)
    assert bench.plan() == []
    assert bench.scheduler.queued() == (1, 5)
    bench.scheduler.grant(1)
    bench.scheduler.grant(1)  # a second grant changes nothing
    assert bench.plan() == [(1, 0, 5)]
    assert bench.plan() == []
    assert bench.scheduler.queued() == (0, 0)


def test_prompts_are_packed_until_the_token_budget_is_used_up() -> None:
    bench = Bench(chunk_tokens=16)
    bench.add(1, 13)
    bench.add(2, 19)
    assert bench.plan() == [(1, 0, 13), (2, 0, 3)]
    assert bench.plan() == [(2, 3, 19)]


def test_no_more_prompts_than_the_chunk_has_rows() -> None:
    bench = Bench(chunk_tokens=64, chunk_seqs=2)
    for room in (1, 2, 3):
        bench.add(room, 3)
    assert bench.plan() == [(1, 0, 3), (2, 0, 3)]
    assert bench.plan() == [(3, 0, 3)]


def test_context_pages_of_a_chunk_stay_within_their_budget() -> None:
    bench = Bench(chunk_tokens=32, chunk_pages=4)
    bench.add(1, 9)  # three pages
    bench.add(2, 8)  # two pages: they do not fit beside the three
    bench.add(3, 1)  # fits, but does not overtake
    assert bench.plan() == [(1, 0, 9)]
    assert bench.plan() == [(2, 0, 8), (3, 0, 1)]


def test_a_long_prompt_goes_chunk_by_chunk() -> None:
    bench = Bench(chunk_tokens=16)
    bench.add(1, 40)
    assert [bench.plan() for _ in range(4)] == [[(1, 0, 16)], [(1, 16, 32)], [(1, 32, 40)], []]


def test_a_long_prompt_leaves_a_quarter_of_each_chunk_to_shorter_ones_behind_it() -> None:
    bench = Bench(num_pages=64, chunk_tokens=16)
    bench.add(1, 40)
    bench.add(2, 3)  # the chunk leaves it no more than that
    assert bench.plan() == [(1, 0, 13), (2, 0, 3)]
    bench.add(3, 20)  # is long itself, so it waits
    bench.add(4, 10)
    assert bench.plan() == [(1, 13, 25), (4, 0, 4)]
    assert bench.plan() == [(1, 25, 40), (4, 4, 5)]  # this chunk completes prompt 1
    assert bench.plan() == [(3, 0, 12), (4, 5, 9)]
    assert bench.plan() == [(3, 12, 20), (4, 9, 10)]


def test_a_short_prompt_that_is_older_takes_what_it_needs_of_a_long_ones_chunk() -> None:
    bench = Bench(num_pages=64, chunk_tokens=16)
    bench.add(1, 14)
    bench.add(2, 40)
    bench.add(3, 16)
    assert bench.plan() == [(1, 0, 14), (3, 0, 2)]  # too little is left to the long one
    assert bench.plan() == [(2, 0, 12), (3, 2, 6)]


def test_nothing_is_left_to_those_who_wait_for_pages() -> None:
    bench = Bench(num_pages=12, chunk_tokens=16)
    bench.add(1, 40)  # ten pages
    bench.add(2, 12)  # three pages, two are free
    assert bench.plan() == [(1, 0, 16)]
    assert bench.plan() == [(1, 16, 32)]
    assert bench.plan() == [(1, 32, 40)]
    bench.scheduler.release(1)
    assert bench.plan() == [(2, 0, 12)]


def test_what_short_prompts_do_not_take_of_their_quarter_goes_to_the_long_one() -> None:
    crowd = Bench(num_pages=64, chunk_tokens=16, chunk_seqs=3)
    crowd.add(1, 100)
    for room in range(2, 9):
        crowd.add(room, 1)
    # Four tokens are reserved for seven prompts; only two fit beside the long one.
    assert crowd.plan() == [(1, 0, 14), (2, 0, 1), (3, 0, 1)]
    alone = Bench(num_pages=64, chunk_tokens=16, chunk_seqs=1)
    alone.add(1, 40)
    alone.add(2, 3)
    assert alone.plan() == [(1, 0, 16)]
    cached = Bench(num_pages=64, chunk_tokens=16)
    cached.add(1, list(range(12)))
    cached.plan()
    cached.add(2, 40)
    cached.add(3, [*range(12), 99])  # thirteen tokens, of which twelve are cached
    assert cached.plan() == [(2, 0, 15), (3, 12, 13)]
    assert cached.plan() == [(2, 15, 31)]


@pytest.mark.parametrize(("chunk_pages", "end"), [(10, 28), (11, 31)])
def test_a_piece_that_gets_the_rest_keeps_to_the_pages_of_a_chunk(
    chunk_pages: int, end: int
) -> None:
    bench = Bench(num_pages=64, chunk_tokens=16, chunk_pages=chunk_pages)
    bench.add(1, list(range(8)))
    bench.plan()
    bench.add(2, 40)
    assert bench.plan() == [(2, 0, 16)]
    bench.add(3, [*range(8), 99])  # three pages beside the other's seven; one token of the quarter
    assert bench.plan() == [(2, 16, end), (3, 8, 9)]


def test_order_is_by_arrival_whatever_the_order_of_grants() -> None:
    bench = Bench(chunk_seqs=1)
    bench.add(1, 3, arrival_s=5.0)
    bench.add(2, 3, arrival_s=1.0)
    bench.add(3, 3, arrival_s=5.0)
    assert [bench.plan()[0][0] for _ in range(3)] == [2, 1, 3]


def test_nobody_overtakes_into_the_free_pages() -> None:
    bench = Bench(num_pages=6, chunk_tokens=64)
    bench.add(1, 16)
    assert bench.plan() == [(1, 0, 16)]
    bench.add(2, 12)  # three pages, two are free
    bench.add(3, 4)
    assert bench.plan() == []
    bench.scheduler.release(1)
    assert bench.plan() == [(2, 0, 12), (3, 0, 4)]


def test_a_started_prompt_goes_on_behind_an_older_one_that_waits_for_pages() -> None:
    """Otherwise both would wait for ever: the older for pages, the younger for its turn."""
    bench = Bench(num_pages=8, chunk_tokens=16)
    bench.add(2, 24, arrival_s=2.0)
    assert bench.plan() == [(2, 0, 16)]
    bench.add(1, 20, arrival_s=1.0)  # five pages, two are free
    bench.add(3, 4, arrival_s=3.0)
    assert bench.plan() == [(2, 16, 24)]
    assert bench.plan() == []
    bench.scheduler.release(2)
    assert bench.plan() == [(1, 0, 16)]


def test_a_cached_prefix_is_not_computed_again() -> None:
    bench = Bench()
    tokens = list(range(10))
    bench.add(1, tokens)
    bench.plan()
    bench.scheduler.release(1)
    second = bench.add(2, [*tokens, 99])
    assert bench.plan() == [(2, 8, 11)]
    assert second.num_cached == 8


def test_a_prefix_is_shared_while_its_first_owner_is_still_at_work() -> None:
    bench = Bench(chunk_tokens=8)
    first = bench.add(1, list(range(16)))
    bench.plan()
    second = bench.add(2, list(range(16)), arrival_s=0.0)
    assert bench.plan() == [(2, 8, 16)]
    assert second.pages[:2] == first.pages[:2]
    assert second.pages[2:] != first.pages[2:]


@pytest.mark.parametrize("num_tokens", [1, 4, 5, 8])
def test_the_last_token_is_always_computed(num_tokens: int) -> None:
    bench = Bench()
    tokens = list(range(num_tokens))
    for room in (1, 2):
        bench.add(room, tokens)
        ((_, start, end),) = bench.plan()
        assert end == num_tokens
        bench.scheduler.release(room)
    assert start == (num_tokens - 1) // PAGE * PAGE


@pytest.mark.parametrize(
    ("logprobs_start", "cached"),
    [(-1, 12), (0, 0), (1, 0), (4, 0), (5, 4), (9, 8), (13, 12), (16, 12), (99, 12)],
)
def test_positions_whose_logprobs_are_asked_are_computed(logprobs_start: int, cached: int) -> None:
    """The row before position p gives p's logprob, so reuse ends one token earlier."""
    bench = Bench()
    tokens = list(range(16))
    bench.add(1, tokens)
    bench.plan()
    bench.scheduler.release(1)
    bench.add(2, tokens, logprobs_start=logprobs_start)
    assert bench.plan() == [(2, cached, 16)]


def test_cached_pages_give_way_to_a_prompt_that_needs_them() -> None:
    bench = Bench(num_pages=6)
    bench.add(1, 16)
    bench.plan()
    bench.scheduler.release(1)
    assert len(bench.cache) == 4
    bench.add(2, 12)
    assert bench.plan() == [(2, 0, 12)]
    assert len(bench.cache) == 6  # three of the new prompt, and all but one of the old


@pytest.mark.parametrize("chunks", [None, 0, 1, 2, 3])
def test_abort_in_every_state_frees_every_page(chunks: int | None) -> None:
    """chunks: None: before the grant; else after that many chunks."""
    bench = Bench(chunk_tokens=8, cached=False)
    bench.add(1, 20, granted=chunks is not None)
    for _ in range(chunks or 0):
        assert bench.plan()
    bench.scheduler.release(1)
    bench.scheduler.release(1)  # releasing an unknown room does nothing
    assert bench.all_back()
    assert bench.plan() == []
    assert len(bench.scheduler) == 0


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 40), st.integers(0, 3), st.booleans()),
        st.tuples(st.just("plan"), st.none(), st.none(), st.none()),
        st.tuples(st.just("release"), st.integers(0, 5), st.none(), st.none()),
        st.tuples(st.just("grant"), st.integers(0, 5), st.none(), st.none()),
    ),
    max_size=60,
)


@settings(max_examples=200)
@given(EVENTS, st.booleans())
def test_random_events_keep_budgets_order_and_pages(events: list, cached: bool) -> None:
    bench = Bench(num_pages=12, chunk_tokens=12, chunk_seqs=2, chunk_pages=11, cached=cached)
    live: dict[int, Prompt] = {}
    computed: dict[int, int] = {}
    room = 0
    for kind, number, arrival, granted in events:
        if kind == "add":
            room += 1
            shared = list(range(number))  # prompts share beginnings
            live[room] = bench.add(room, shared, arrival_s=arrival, granted=granted)
        elif kind == "plan":
            _run_chunk(bench, computed)
        elif live:
            chosen = list(live)[number % len(live)]
            if kind == "grant":
                bench.scheduler.grant(chosen)
            else:
                del live[chosen]
                bench.scheduler.release(chosen)
        held = {page for prompt in live.values() for page in prompt.pages}
        assert bench.pool.num_held - bench.cache.num_evictable == len(held)
        bench.pool.check()
    _drain(bench, live, computed)
    assert bench.all_back()


def _run_chunk(bench: Bench, computed: dict[int, int]) -> bool:
    pieces = bench.scheduler.plan()
    assert sum(piece.num_tokens for piece in pieces) <= 12
    assert len(pieces) <= 2
    assert sum(-(-piece.end // PAGE) for piece in pieces) <= 11
    for piece in pieces:
        prompt = piece.prompt
        assert prompt.granted
        assert piece.num_tokens > 0
        assert piece.start == computed.get(prompt.room, prompt.num_cached)
        assert len(prompt.pages) == len(set(prompt.pages)) == -(-prompt.num_tokens // PAGE)
        computed[prompt.room] = piece.end
    return bool(pieces)


def _drain(bench: Bench, live: dict[int, Prompt], computed: dict[int, int]) -> None:
    """Grant all that are left and run them to their end: none may get stuck."""
    for room in live:
        bench.scheduler.grant(room)
    while live:
        if _run_chunk(bench, computed):
            continue
        done = [room for room, prompt in live.items() if computed.get(room) == prompt.num_tokens]
        assert done, "nothing can run and nothing is done"
        for room in done:
            del live[room]
            bench.scheduler.release(room)


# --- prompts that have not begun ------------------------------------------------------------------


def test_a_long_prompt_without_a_turn_leaves_the_pages_to_shorter_ones() -> None:
    bench = Bench(num_pages=40)
    for room in (1, 2, 3):
        bench.add(room, 64)  # 16 pages each
    bench.add(4, 4)
    assert bench.plan() == [(1, 0, 12), (4, 0, 4)]
    assert bench.pool.num_held == 17
    bench.add(5, 4)
    assert bench.plan() == [(1, 12, 24), (5, 0, 4)]


def test_a_prompt_that_waits_for_its_turn_shares_all_that_was_computed_meanwhile() -> None:
    bench = Bench()
    for room in (1, 2):
        bench.add(room, range(64))
    bench.add(3, 4)
    computed = 0
    while pieces := bench.scheduler.plan():
        computed += sum(piece.num_tokens for piece in pieces)
    assert computed == 64 + 4 + 4  # of the second prompt only the last page
    assert bench.pool.num_held == 16 + 1 + 1


def test_a_long_prompt_of_which_little_is_left_to_compute_has_its_turn_as_a_short_one() -> None:
    bench = Bench()
    bench.add(1, [*range(64)])
    while bench.plan():
        pass
    bench.scheduler.release(1)
    bench.add(2, 64)
    bench.add(3, [*range(64), 7])
    bench.add(4, 3)
    assert bench.plan() == [(2, 0, 13), (3, 64, 65), (4, 0, 2)]


def test_pages_may_be_had_again_once_the_one_that_found_none_has_left() -> None:
    for leave in (PrefillScheduler.release, PrefillScheduler.keep_back):
        bench = Bench(num_pages=4)
        bench.add(1, 12)
        bench.add(2, 12)
        bench.add(3, 3)
        assert bench.plan() == [(1, 0, 12)]
        had_room = bench.scheduler.has_room
        leave(bench.scheduler, 2)
        assert (had_room, bench.scheduler.has_room) == (False, True)
        assert bench.plan() == [(3, 0, 3)]


def test_there_is_room_up_to_a_chunk_and_for_a_quarter_of_it_beside_a_long_prompt() -> None:
    bench = Bench(chunk_tokens=16, chunk_seqs=3)
    has_room = []
    for room, num_tokens in ((1, 15), (2, 1)):
        bench.add(room, num_tokens)
        has_room.append(bench.scheduler.has_room)
    assert has_room == [True, False]
    bench.plan()
    beside = []
    for room, num_tokens in ((3, 40), (4, 2), (5, 1)):
        bench.add(room, num_tokens)
        beside.append(bench.scheduler.room_beside)
    assert beside == [4, 2, 0]  # a third piece would be a chunk's last


def test_while_one_finds_no_pages_there_is_no_room_and_as_much_as_ever_once_it_has_them() -> None:
    bench = Bench(num_pages=16, chunk_tokens=16)
    bench.add(1, 60)
    bench.add(2, 8)
    bench.plan()
    rooms = [(bench.scheduler.has_room, bench.scheduler.room_beside)]
    bench.scheduler.release(1)
    assert rooms == [(False, 0)]
    assert bench.plan() == [(2, 0, 8)]
    assert bench.scheduler.has_room


@pytest.mark.parametrize("cached", [True, False])
def test_a_prompt_that_is_kept_back_gives_its_pages_to_one_that_finds_too_few(cached: bool) -> None:
    bench = Bench(num_pages=16, chunk_tokens=16, cached=cached)
    slow = bench.add(1, 60)
    assert bench.plan() == [(1, 0, 16)]
    bench.scheduler.keep_back(1)
    bench.add(2, 4)
    assert bench.plan() == [(2, 0, 4)]
    assert len(slow.pages) == 15, "there were enough pages"
    bench.add(3, 8)
    assert bench.scheduler.can_start(bench.add(4, 8, granted=False), ())
    assert bench.plan() == [(3, 0, 8)]
    assert not slow.pages
    bench.scheduler.grant(1)
    for room in (2, 3, 4):
        bench.scheduler.release(room)
    begun = 16 if cached else 0
    assert bench.plan() == [(1, begun, begun + 16)]
    assert slow.num_cached == 0, "when it first started"
    while bench.plan():
        pass
    bench.scheduler.release(1)
    assert bench.all_back()


def test_a_prompt_that_is_kept_back_keeps_its_pages_if_its_logprobs_are_collected() -> None:
    bench = Bench(num_pages=4, chunk_tokens=8)
    bench.add(1, 16, logprobs_start=0)
    bench.add(2, 4)
    assert bench.plan() == [(1, 0, 8)]
    bench.scheduler.keep_back(1)
    assert bench.plan() == []
    bench.scheduler.grant(1)
    assert bench.plan() == [(1, 8, 16)]
