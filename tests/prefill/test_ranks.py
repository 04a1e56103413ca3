"""The queue before prefill's ranks: bound late, oldest first, and none passes a dictated prompt."""

import numpy as np
import pytest

from prefill.balancer import Method
from prefill.ranks import Rank, Ranks
from prefill.scheduler import PrefillScheduler, Prompt
from transfer.pages import PagePool
from transfer.prefix_cache import PrefixCache

PAGE, CHUNK, SEQS = 4, 16, 2


class Bench:
    """Ranks, and the prompts given to them."""

    def __init__(
        self, dp_size: int = 2, method: Method = "shortest_queue", num_pages: int = 32
    ) -> None:
        self.ranks = Ranks([_rank(num_pages) for _ in range(dp_size)], method)
        self.prompts: dict[int, Prompt] = {}

    def add(
        self, room: int, num_tokens: int = 3, rank: int = -1, first: int | None = None
    ) -> Prompt:
        """A granted prompt; its tokens are first, first + 1, ..."""
        first = 1000 * room if first is None else first
        ids = np.arange(first, first + num_tokens, dtype=np.int32)
        prompt = self.prompts[room] = Prompt(room, ids, float(room), rank=rank)
        self.ranks.add(prompt)
        self.ranks.grant(prompt)
        return prompt

    def plan(self) -> list[list[int]]:
        """By rank, the rooms of the next chunk's pieces."""
        return [[piece.prompt.room for piece in pieces] for pieces in self.ranks.plan()]

    def release(self, *rooms: int) -> None:
        for room in rooms:
            self.ranks.release(self.prompts.pop(room))


def _rank(num_pages: int) -> Rank:
    pool = PagePool(num_pages)
    cache = PrefixCache(pool, PAGE)
    return Rank(pool, cache, PrefillScheduler(pool, cache, CHUNK, SEQS, 64))


def test_one_rank_takes_everything_at_once() -> None:
    bench = Bench(dp_size=1)
    for room in range(1, 6):
        assert bench.add(room).rank == 0
    assert bench.plan() == [[1, 2]]
    assert bench.plan() == [[3, 4]]


def test_prompts_are_shared_out_oldest_first_and_the_rest_stay_unbound() -> None:
    bench = Bench()
    for room in (5, 3, 1, 2, 4):
        bench.add(room)
    assert bench.plan() == [[1, 3], [2, 4]]
    assert bench.prompts[5].rank == -1
    assert bench.ranks.queued() == (1, 3)
    assert bench.plan() == [[5], []]


def test_a_long_prompt_keeps_its_rank_busy_and_the_others_go_past_it() -> None:
    bench = Bench()
    bench.add(1, num_tokens=40)
    for room in (2, 3, 4):
        bench.add(room, num_tokens=16)
    assert bench.plan() == [[1], [2]]
    assert bench.plan() == [[1], [3]]
    assert bench.plan() == [[1], [4]]  # although the first prompt has only eight tokens left


def test_a_short_prompt_goes_beside_a_long_one_when_every_rank_has_one() -> None:
    bench = Bench()
    for room in (1, 2, 3):
        bench.add(room, num_tokens=60)
    bench.add(4, num_tokens=5)  # more than a quarter of a chunk
    bench.add(5, num_tokens=3)
    bench.add(6, num_tokens=4)
    bench.add(7, num_tokens=2)
    assert bench.plan() == [[1, 5], [2, 6]]
    assert [bench.prompts[room].rank for room in (3, 4, 7)] == [-1, -1, -1]
    assert bench.plan() == [[1, 7], [2]]
    assert [bench.plan() for _ in range(2)] == [[[1], [2]]] * 2
    assert bench.plan() == [[1, 4], [3]]  # there is room again, and the oldest goes first


def test_what_a_long_prompt_leaves_is_for_one_that_was_told_to_go_there_as_well() -> None:
    bench = Bench()
    for room in (1, 2):
        bench.add(room, num_tokens=60)
    bench.plan()
    bench.add(3, num_tokens=40, rank=0)
    bench.add(4, num_tokens=4, rank=0)
    bench.add(5, num_tokens=4)
    assert bench.plan() == [[1, 4], [2, 5]]
    assert bench.prompts[3].granted is False


def test_without_pages_nobody_goes_beside_a_long_prompt() -> None:
    bench = Bench(num_pages=16)
    for room in (1, 2):
        bench.add(room, num_tokens=60)
    bench.add(3, num_tokens=4)
    assert bench.plan() == [[1, 3], [2]]
    bench.add(4, num_tokens=4)
    bench.add(5, num_tokens=8)
    bench.add(6, num_tokens=3)
    assert bench.plan() == [[1], [2, 4]]
    bench.release(3)
    assert bench.plan() == [[1, 6], [2]]


def test_a_prompt_that_was_not_granted_is_bound_to_none() -> None:
    bench = Bench()
    prompt = Prompt(1, np.arange(3, dtype=np.int32), 1.0)
    bench.ranks.add(prompt)
    assert bench.plan() == [[], []]
    assert len(bench.ranks) == 1
    bench.ranks.grant(prompt)
    bench.ranks.grant(prompt)  # a second grant changes nothing
    assert bench.plan() == [[1], []]


def test_a_dictated_rank_is_waited_for_and_others_go_elsewhere() -> None:
    bench = Bench()
    bench.add(1, num_tokens=40, rank=1)
    bench.add(2, rank=1)
    bench.add(3)
    assert bench.plan() == [[3], [1]]
    bench.add(4, num_tokens=12)
    assert bench.plan() == [[4], [1]]
    assert bench.plan() == [[], [1, 2]]
    assert [bench.prompts[room].rank for room in (1, 2, 3, 4)] == [1, 1, 0, 0]


@pytest.mark.parametrize("method", ["round_robin", "shortest_queue", "total_tokens"])
def test_nobody_who_came_later_is_bound_to_a_rank_that_is_waited_for(method: Method) -> None:
    bench = Bench(method=method)
    bench.add(1, num_tokens=40, rank=0)
    bench.add(2, rank=0)
    for room in (3, 4, 5):
        bench.add(room)
    while bench.prompts[2].rank not in (-1, 0) or bench.ranks.queued()[0]:
        bench.plan()
    assert [bench.prompts[room].rank for room in (3, 4, 5)] == [1, 1, 1]


def test_a_rank_that_follows_from_the_room_is_taken_in_order() -> None:
    bench = Bench(method="follow_bootstrap_room")
    bench.add(2, num_tokens=40)
    bench.add(4, rank=0)
    bench.add(6)
    assert [bench.plan()[0] for _ in range(4)] == [[2], [2], [2, 4], [6]]


def test_without_pages_anywhere_a_prompt_stays_unbound_and_keeps_its_turn() -> None:
    bench = Bench(num_pages=4)
    for room in (1, 2):
        bench.add(room, num_tokens=13)  # takes all pages of a rank
    assert bench.plan() == [[1], [2]]
    for room in (3, 4, 5):
        bench.add(room, num_tokens=5)
    assert bench.plan() == [[], []]
    assert [bench.prompts[room].rank for room in (3, 4, 5)] == [-1, -1, -1]
    bench.release(2)
    assert bench.plan() == [[], [3, 4]]
    bench.release(1)
    assert bench.plan() == [[5], []]


@pytest.mark.parametrize("method", ["round_robin", "total_tokens", "prefix_aware"])
def test_a_prompt_goes_to_the_rank_that_has_pages_for_it(method: Method) -> None:
    bench = Bench(num_pages=4, method=method)
    bench.add(1, num_tokens=13, rank=0)
    assert bench.plan() == [[1], []]
    bench.add(2, num_tokens=5)
    bench.add(3, num_tokens=5)
    assert bench.plan() == [[], [2, 3]]


def test_pages_that_others_of_the_same_turn_wait_for_are_taken() -> None:
    bench = Bench(num_pages=4)
    for room in (1, 2, 3):
        bench.add(room, num_tokens=9)  # takes three of a rank's four pages
    assert bench.plan() == [[1], [2]]
    assert bench.prompts[3].rank == -1
    assert bench.plan() == [[], []]


def test_cached_pages_make_room_unless_they_are_held_or_its_own_prefix() -> None:
    bench = Bench(num_pages=4)
    bench.add(1, num_tokens=12, rank=0, first=0)
    bench.add(2, num_tokens=16, rank=1)
    bench.plan()
    bench.release(1)  # three of rank 0's pages are cached, one is free
    bench.add(3, num_tokens=16, first=0)  # the two cached pages it can share, and the others
    assert bench.plan() == [[3], []]
    bench.add(4, num_tokens=5)
    assert bench.plan() == [[], []]
    bench.release(2)  # its pages stay cached, and nobody holds them
    assert bench.plan() == [[], [4]]


def test_a_prompt_s_own_prefix_is_no_room_for_the_rest_of_it() -> None:
    bench = Bench(num_pages=6)
    bench.add(1, num_tokens=12, rank=0, first=0)
    bench.add(2, num_tokens=8, rank=0)
    bench.plan()
    bench.plan()
    bench.release(1)  # three of rank 0's pages are cached, two are held, one is free
    bench.add(3, num_tokens=20, first=0)  # three cached pages, and two more
    assert bench.plan() == [[], [3]]


def test_who_waits_for_pages_takes_none_for_what_is_cached() -> None:
    bench = Bench(num_pages=9)
    bench.add(1, num_tokens=12, rank=0, first=0)
    bench.add(2, num_tokens=33, rank=1)  # takes all pages of rank 1
    bench.plan()
    bench.add(3, num_tokens=20, first=0)  # two pages besides those cached from the first
    bench.add(4, num_tokens=16)
    assert bench.plan() == [[3, 4], [2]]


def test_small_prompts_do_not_pass_a_large_one_for_ever() -> None:
    bench = Bench(num_pages=4)
    for room in (1, 2, 3, 4):
        bench.add(room, num_tokens=5)
    assert bench.plan() == [[1, 3], [2, 4]]
    bench.add(5, num_tokens=16)
    for room in range(6, 12):
        bench.add(room, num_tokens=5, rank=room % 2 if room > 9 else -1)
    for ended in (2, 3):
        bench.release(ended)
        assert bench.plan() == [[], []]  # there are pages enough for any of the others
    bench.release(4)
    assert bench.plan() == [[6], [5]]


def test_a_cached_prefix_draws_a_prompt_to_its_rank() -> None:
    bench = Bench(method="prefix_aware")
    bench.add(1, num_tokens=12, rank=1, first=0)
    bench.plan()
    bench.release(1)
    assert bench.add(2, num_tokens=13, first=0) is bench.prompts[2]
    bench.plan()
    assert bench.prompts[2].rank == 1
    assert bench.prompts[2].num_cached == 12
    bench.add(3, num_tokens=13, first=500)
    bench.plan()
    assert bench.prompts[3].rank == 0


def test_a_rank_that_follows_from_the_room_is_taken_though_it_is_busy() -> None:
    bench = Bench(method="follow_bootstrap_room")
    for room in (1, 3, 5):
        bench.add(room, num_tokens=16)
    assert bench.plan() == [[], [1]]
    assert bench.plan() == [[], [3]]


@pytest.mark.parametrize("turns", [0, 1])
def test_a_release_before_and_after_the_binding_leaves_nothing(turns: int) -> None:
    bench = Bench()
    for room in (1, 2, 3):
        bench.add(room, num_tokens=20)
    for _ in range(turns):
        bench.plan()
    bench.release(1, 2, 3)
    assert (len(bench.ranks), bench.ranks.queued()) == (0, (0, 0))
    assert bench.plan() == [[], []]
    for rank in bench.ranks.ranks:
        rank.pool.check()
        assert rank.pool.num_held == len(rank.cache) == rank.cache.num_evictable


def test_a_cached_prefix_is_no_work_so_chunks_are_filled_past_it() -> None:
    """Three prompts of a full chunk's length; rank 0 has three quarters of two of them cached."""
    bench = Bench(dp_size=1 + 1, method="prefix_aware", num_pages=64)
    bench.add(1, num_tokens=13, rank=0, first=0)
    bench.plan()
    bench.release(1)
    for room in (2, 3):
        bench.add(room, num_tokens=16, first=0)
    bench.add(4, num_tokens=16, first=900)
    # These two compute four tokens each; counted in full, each would have filled a chunk.
    assert bench.plan() == [[2, 3], [4]]
    assert [bench.prompts[room].num_cached for room in (2, 3, 4)] == [12, 12, 0]
