"""When a prompt is bound to a rank, and to which: never where it would wait for a row or a page."""

import numpy as np

from prefill.balancer import Method
from prefill.ranks import Rank, Ranks
from prefill.scheduler import PrefillScheduler, Prompt
from tests.prefill import test_scheduler
from tests.prefill.test_ranks import CHUNK, PAGE, Bench
from transfer.pages import PagePool
from transfer.prefix_cache import PrefixCache


class Rows(Bench):
    """Ranks whose chunks have a chosen number of rows."""

    def __init__(
        self, seqs: int = 2, method: Method = "shortest_queue", num_pages: int = 32
    ) -> None:
        super().__init__(method=method, num_pages=num_pages)
        self.ranks = Ranks([_rank(num_pages, seqs) for _ in range(2)], method)

    def add_salted(self, room: int, num_tokens: int, salt: str, rank: int = -1) -> Prompt:
        """A granted prompt; the prompts added here all start with the same tokens."""
        ids = np.arange(num_tokens, dtype=np.int32)
        prompt = self.prompts[room] = Prompt(room, ids, float(room), salt, rank=rank)
        self.ranks.add(prompt)
        self.ranks.grant(prompt)
        return prompt

    def rank_of(self, room: int) -> int:
        return self.prompts[room].rank


def _rank(num_pages: int, seqs: int) -> Rank:
    pool = PagePool(num_pages)
    cache = PrefixCache(pool, PAGE)
    return Rank(pool, cache, PrefillScheduler(pool, cache, CHUNK, seqs, 64))


def test_a_chunk_that_is_full_to_the_token_takes_nobody_more() -> None:
    bench = Rows()
    for room in (1, 2):
        bench.add(room, num_tokens=CHUNK)
    bench.add(3)
    assert bench.plan() == [[1], [2]]
    assert bench.rank_of(3) == -1


def test_beside_a_long_prompt_nobody_is_bound_who_finds_no_row() -> None:
    bench = Rows(seqs=2)
    for rank, (short, long) in enumerate(((1, 2), (3, 4))):
        bench.add(short, num_tokens=2, rank=rank)
        bench.add(long, num_tokens=60, rank=rank)
    bench.add(5, num_tokens=2)  # two tokens of the quarter are left, but no row
    assert bench.plan() == [[1, 2], [3, 4]]
    assert bench.rank_of(5) == -1


def test_beside_a_long_prompt_nobody_is_bound_who_finds_the_quarter_used_up() -> None:
    bench = Rows(seqs=4)
    for room in (1, 2):
        bench.add(room, num_tokens=60)
    for room in (3, 4, 5):
        bench.add(room, num_tokens=3)  # of the quarter's four tokens
    assert bench.plan() == [[1, 3], [2, 4]]
    assert bench.rank_of(5) == -1


def test_beside_a_long_prompt_means_there_whatever_the_balancer_prefers() -> None:
    bench = Rows(seqs=2, method="total_tokens")
    for room in (1, 2):
        bench.add(room, num_tokens=8, rank=0)
    bench.add(3, num_tokens=60, rank=1)
    bench.add(4, num_tokens=4)  # rank 0 has fewer tokens, but no room
    assert bench.plan() == [[1, 2], [3, 4]]


def test_a_rank_that_waits_for_pages_keeps_nobody_from_the_place_beside_a_long_prompt() -> None:
    bench = Rows(num_pages=16)
    bench.add(1, num_tokens=60, rank=0)
    for _ in range(4):
        bench.plan()
    bench.add(2, num_tokens=8, rank=0)  # needs two pages, one is free
    bench.add(3, num_tokens=60, rank=1)
    assert bench.plan() == [[], [3]]
    bench.add(4, num_tokens=4)
    assert bench.plan() == [[], [3, 4]]


def test_pages_of_its_own_prefix_do_not_make_room_for_the_rest_of_it() -> None:
    bench = Rows(num_pages=4)
    bench.add(1, num_tokens=8, rank=0, first=0)
    bench.add(2, num_tokens=16, rank=1)
    bench.plan()
    bench.release(1)  # two pages are cached, two are free
    bench.add(3, num_tokens=3, rank=0)
    bench.plan()
    bench.add(4, num_tokens=16, first=0)  # two cached pages and two more, but only one is free
    assert bench.plan() == [[], []]
    assert bench.rank_of(4) == -1
    bench.release(2)
    assert bench.plan() == [[], [4]]


def test_the_page_of_its_last_token_is_none_that_the_cache_has() -> None:
    bench = Rows(num_pages=4)
    bench.add(1, num_tokens=16, rank=0, first=0)
    bench.add(2, num_tokens=16, rank=1)
    bench.plan()
    bench.add(3, num_tokens=16, first=0)  # the last page is computed again, but none is free
    assert bench.plan() == [[], []]
    assert bench.rank_of(3) == -1
    bench.release(2)
    assert bench.plan() == [[], [3]]


def test_two_prompts_of_one_cached_prefix_need_pages_for_what_is_new_of_them() -> None:
    bench = Rows(num_pages=6)
    bench.add(1, num_tokens=13, rank=0, first=0)
    bench.add(2, num_tokens=24, rank=1)
    for _ in range(2):
        bench.plan()
    bench.release(1)  # three pages are cached, three are free
    for room in (3, 4):
        bench.add(room, num_tokens=13, first=0)
    assert bench.plan() == [[3, 4], []]


def test_the_rank_that_has_a_prefix_under_another_salt_draws_nobody() -> None:
    bench = Rows(method="prefix_aware")
    bench.add_salted(1, 13, "", rank=1)
    bench.add_salted(2, 13, "tenant", rank=0)
    bench.plan()
    bench.release(1, 2)
    salted = bench.add_salted(3, 13, "tenant")
    bench.plan()
    assert (salted.rank, salted.num_cached) == (0, 12)
    plain = bench.add_salted(4, 13, "")
    bench.plan()
    assert (plain.rank, plain.num_cached) == (1, 12)


def test_a_prompt_shares_no_page_with_another_salt() -> None:
    bench = Rows()
    bench.add_salted(1, 13, "", rank=0)
    bench.plan()
    bench.release(1)
    for room, salt, cached in ((2, "tenant", 0), (3, "tenant", 12), (4, "", 12)):
        prompt = bench.add_salted(room, 13, salt, rank=0)
        bench.plan()
        assert prompt.num_cached == cached
        bench.release(room)


def test_a_page_is_shared_once_all_of_it_is_computed() -> None:
    bench = test_scheduler.Bench(chunk_tokens=6)
    bench.add(1, list(range(16)))
    assert bench.plan() == [(1, 0, 6)]
    second = bench.add(2, list(range(16)), arrival_s=0.0)
    assert bench.plan() == [(2, 4, 10)]
    assert second.num_cached == 4


def test_of_prompts_that_came_together_the_one_granted_first_goes_first() -> None:
    bench = Rows()
    for rank, room in enumerate((1, 2)):
        bench.add(room, num_tokens=CHUNK, rank=rank)
    together = [Prompt(room, np.arange(3, dtype=np.int32), 9.0) for room in (5, 4, 3)]
    for prompt in together:
        bench.ranks.add(prompt)
        bench.ranks.grant(prompt)
    assert bench.plan() == [[1], [2]]
    assert [prompt.rank for prompt in together] == [-1] * 3
    assert bench.plan() == [[5, 3], [4]]


def test_a_rank_whose_pages_are_cached_and_free_is_as_good_as_an_empty_one() -> None:
    bench = Rows(num_pages=4)
    bench.add(1, num_tokens=16, rank=0, first=0)
    bench.plan()
    bench.add(2, num_tokens=3, rank=1)
    bench.plan()
    bench.release(1)
    first, second = (rank.load() for rank in bench.ranks.ranks)
    assert (first.pages_free, second.pages_free) == (4, 3)
