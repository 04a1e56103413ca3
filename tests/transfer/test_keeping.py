"""Prefixes that leave the pool for the host's memory: found again, and never another's."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from model.calls import Calls
from prefill.config import PrefillConfig
from prefill.scheduler import Prompt
from prefill.worker import Granted
from tests.prefill.test_ranks import PAGE, Bench
from tests.sim.alone import Alone
from tests.sim.workers import SimPrefill
from tests.transfer.test_prefix_cache import PAGE as SHORT_PAGE
from tests.transfer.test_prefix_cache import SALTS, TOKENS, ids
from transfer.backend import SenderEvent
from transfer.errors import ConfigError
from transfer.gathered import GatheredPages
from transfer.host_pages import HostMemory, HostPages
from transfer.keeping import Keeping, KeptPages
from transfer.pages import PagePool
from transfer.prefix_cache import PrefixCache, Sharing, flush_caches
from transfer.wire import SamplingParams
from transfer.worker import Aborted


def prefill(**sizes: int) -> tuple[Alone, SimPrefill]:
    alone = Alone("prefill", **{"num_pages": 16, "host_pages": 64, **sizes})
    return alone, cast(SimPrefill, alone.worker)


def run(alone: Alone, room: int, first: int, num_tokens: int = 61, **fields: Any) -> None:
    """A prompt of first, first + 1, ... comes, is computed and leaves."""
    ids = np.arange(first, first + num_tokens, dtype=np.int32).tobytes()
    alone.submit(room, num_tokens=num_tokens, token_ids=ids, **fields)
    alone.worker.handle(Granted((alone.grant(room),)))
    while alone.turn():
        pass
    alone.worker.handle(SenderEvent("acked", room))


def cached_tokens(alone: Alone) -> list[int]:
    """What each prompt so far found in a cache."""
    return [leg.cached_tokens for leg in alone.legs()]


@pytest.mark.parametrize("window", [0, 5])
def test_a_prefix_that_the_pool_had_no_room_for_is_found_on_the_host(window: int) -> None:
    alone, worker = prefill(window=window)
    for room, first in enumerate((0, 100, 0, 100), start=1):
        run(alone, room, first)
    alone.turn()
    assert cached_tokens(alone) == [0, 0, 60, 60]
    assert worker.counters["host_pages_saved"] == 2 * 15  # a window's pages beside the others
    assert worker.counters["host_pages_restored"] == 2 * 15
    assert worker.state().counters["host_pages"] == 2 * 15


def test_without_memory_on_the_host_it_is_computed_again() -> None:
    alone, worker = prefill(host_pages=0)
    for room, first in enumerate((0, 100, 0), start=1):
        run(alone, room, first)
    alone.turn()
    assert cached_tokens(alone) == [0, 0, 0]
    assert "host_pages" not in worker.state().counters


def test_a_host_with_room_for_part_of_a_prefix_keeps_its_beginning() -> None:
    alone, _ = prefill(host_pages=6)
    for room, first in enumerate((0, 100, 0), start=1):
        run(alone, room, first)
    alone.turn()
    assert cached_tokens(alone) == [0, 0, 6 * PAGE]


def test_part_of_a_prefix_comes_from_the_pool_and_the_rest_from_the_host() -> None:
    alone, worker = prefill()
    run(alone, 1, 0)
    run(alone, 2, 100, num_tokens=25)  # takes seven pages: six of the first prompt's tail go
    run(alone, 3, 0)
    alone.turn()
    assert cached_tokens(alone) == [0, 0, 60]
    assert 0 < worker.counters["host_pages_restored"] < 15


def test_the_last_token_of_a_prompt_is_computed_though_its_page_is_on_the_host() -> None:
    alone, _ = prefill()
    for room, first in enumerate((0, 100, 0), start=1):
        run(alone, room, first, num_tokens=60)
    alone.turn()
    assert cached_tokens(alone) == [0, 0, 56]


def test_positions_whose_logprobs_are_asked_for_are_computed() -> None:
    alone, _ = prefill()
    run(alone, 1, 0)
    run(alone, 2, 100)
    run(alone, 3, 0, sampling=SamplingParams(4, prompt_logprobs_start=20))
    alone.turn()
    assert cached_tokens(alone) == [0, 0, 16]


def test_one_salt_finds_nothing_that_another_left() -> None:
    alone, _ = prefill()
    run(alone, 1, 0, cache_salt="one")
    run(alone, 2, 100)
    run(alone, 3, 0, cache_salt="another")
    run(alone, 4, 0, cache_salt="one")
    alone.turn()
    assert cached_tokens(alone) == [0, 0, 0, 60]


def test_what_one_rank_evicted_another_finds() -> None:
    alone, _ = prefill(dp_size=2)
    run(alone, 1, 0, disagg_prefill_dp_rank=0)
    run(alone, 2, 100, disagg_prefill_dp_rank=0)
    run(alone, 3, 0, disagg_prefill_dp_rank=1)
    alone.turn()
    assert cached_tokens(alone) == [0, 0, 60]


def test_a_flush_forgets_what_the_host_has() -> None:
    alone, worker = prefill()
    run(alone, 1, 0)
    run(alone, 2, 100)
    reply = worker.flush()
    assert reply.flushed
    assert reply.message == "30 pages flushed"
    run(alone, 3, 0)
    alone.turn()
    assert cached_tokens(alone) == [0, 0, 0]
    assert worker.counters["host_pages_restored"] == 0


def test_a_prompt_that_is_aborted_while_its_prefix_comes_back_leaves_all_in_order() -> None:
    alone, worker = prefill()
    run(alone, 1, 0)
    run(alone, 2, 100)
    ids = np.arange(61, dtype=np.int32).tobytes()
    alone.submit(3, num_tokens=61, token_ids=ids)
    worker.handle(Granted((alone.grant(3),)))
    alone.turn()
    worker.handle(Aborted((3,)))
    while alone.turn():
        pass
    assert worker.state().pages_held == 0
    run(alone, 4, 0)
    alone.turn()
    assert cached_tokens(alone)[-1] == 60


def test_a_rank_expects_no_work_of_what_the_host_has_but_takes_pages_for_it() -> None:
    host = HostPages(64)
    bench = Bench(dp_size=2, num_pages=16)
    for rank in bench.ranks.ranks:
        rank.cache.host = host
    ids = np.arange(60, dtype=np.int32)
    for digest in bench.ranks.ranks[0].cache.chain(ids, ""):
        assert host.put(digest, 0)
    prompt = bench.add(1, num_tokens=61, rank=0, first=0)
    assert bench.plan() == [[1], []]
    assert prompt.num_foreseen == prompt.num_cached == 60
    assert prompt.pages_foreseen == 0
    assert bench.ranks.ranks[0].pool.num_free == 0
    waiting = Prompt(2, ids, 2.0)
    assert not bench.ranks.ranks[0].scheduler.can_start(waiting, ())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hicache_ratio": 0.0}, "--hicache-ratio must be above 0, got 0.0"),
        ({"hicache_ratio": 1e308}, r"--hicache-ratio must be at most 1000000, got 1e\+308"),
        ({"hicache_size": -1}, "--hicache-size must be at least 0, got -1"),
        (
            {"enable_hierarchical_cache": True, "disable_radix_cache": True},
            "--enable-hierarchical-cache keeps what the prefix cache evicts",
        ),
    ],
)
def test_flags_that_make_no_sense_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PrefillConfig(Path("model"), "127.0.0.1:1", **fields)


class Pools:
    """The pools of two ranks; a page holds one number."""

    num_pages = 8
    max_run_pages = 3

    def __init__(self, groups: int) -> None:
        self.calls = Calls()
        self.kv = np.zeros((2, groups * self.num_pages), np.int64)

    def gather_runs(self, page_ids: Sequence[Sequence[int]]) -> list[list[Any]]:
        assert 0 < max(map(len, page_ids)) <= self.max_run_pages
        gathered = np.zeros((2, self.max_run_pages), np.int64)
        for rank, run in enumerate(page_ids):
            gathered[rank, : len(run)] = self.kv[rank, list(run)]
        return [[of_rank.reshape(1, 1, -1, 1, 1, 1)] for of_rank in gathered]

    def place_run(self, rank: int, page_ids: Sequence[int], shards: Sequence[np.ndarray]) -> None:
        assert 0 < len(page_ids) <= self.max_run_pages
        self.kv[rank, list(page_ids)] = shards[0].ravel()


Prompted = tuple[int, str, list[int], int]  # rank, salt, tokens, how many may not be reused


class KeepingBesideModel(RuleBasedStateMachine):
    """Turns of a worker with random prompts; a page's contents follow from its prefix."""

    @initialize(capacity=st.integers(1, 12), groups=st.integers(1, 2))
    def begin(self, capacity: int, groups: int) -> None:
        self.groups = groups
        self.host = HostPages(capacity, groups)
        self.memory = HostMemory(capacity, 1, (1, 1, 1, 1, 1), "int64", groups)
        self.pools = [PagePool(Pools.num_pages) for _ in range(2)]
        self.caches = [PrefixCache(pool, SHORT_PAGE, host=self.host) for pool in self.pools]
        self.engine = Pools(groups)
        self.counters: Counter[str] = Counter()
        gathered = GatheredPages(self.engine)
        kept = KeptPages([self.memory] * 2, self.engine, gathered)
        self.keeping = Keeping(kept, self.caches, self.engine, gathered, self.counters)
        self.live: list[tuple[int, list[int]]] = []  # rank and pages of prompts that are computed
        self.prefixes: dict[bytes, int] = {}  # all that were ever computed, and their contents
        self.left: set[bytes] = set()  # pages that left a pool since the last flush

    @rule(
        prompts=st.lists(
            st.tuples(st.integers(0, 1), SALTS, TOKENS, st.integers(0, 3)), min_size=1, max_size=4
        )
    )
    def turn(self, prompts: list[Prompted]) -> None:
        begun = [each for prompt in prompts if (each := self._start(prompt)) is not None]
        self.keeping.dispatch()
        for rank, sharing, pages, num_found in begun:
            cache, full = self.caches[rank], len(sharing.token_ids) // SHORT_PAGE
            chain = sharing.first(cache, full)
            self.prefixes |= {digest: int.from_bytes(digest[:4]) for digest in chain}
            self._check_pages(rank, dict(zip(chain[:num_found], pages, strict=False)))
            for place, page in enumerate(pages[num_found:], num_found):
                for group in range(self.groups):
                    contents = self._contents(chain[place], group) if place < full else -1
                    self.engine.kv[rank, group * Pools.num_pages + page] = contents
            cache.insert(chain, pages[:full])
            self.live.append((rank, pages))
        self.keeping.settle()

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        rank, pages = self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))
        self.pools[rank].release(pages)

    @rule()
    def flush(self) -> None:
        flush_caches(self.caches)
        self.left.clear()

    @invariant()
    def all_that_is_found_holds_what_was_computed(self) -> None:
        for rank, cache in enumerate(self.caches):
            assert not cache.evicted
            assert not cache.restored
            self._check_pages(rank, cache._pages)
        found = [digest for digest in self.prefixes if digest in self.host]
        for digest in found:
            for group in range(self.groups):
                (page,) = self.memory.fetch([self.host.place_of(digest, group)])
                assert page.item() == self._contents(digest, group)
        assert len(found) == len(self.host) == min(len(self.left), self.host.num_pages)

    def _start(self, prompt: Prompted) -> tuple[int, Sharing, list[int], int] | None:
        """As PrefillScheduler does; None if there are too few pages."""
        rank, salt, tokens, cut = prompt
        cache, pool = self.caches[rank], self.pools[rank]
        sharing = Sharing(ids(tokens), salt, len(tokens) - cut)
        found, num_cached = sharing.found(cache)
        shared = cache.share(found[:num_cached])
        need = -(-len(tokens) // SHORT_PAGE) - len(shared)
        cache.evict(max(need - pool.num_free, 0))
        self.left |= {digest for digest, _ in cache.evicted}
        fresh = pool.reserve(need)
        if fresh is None:
            pool.release(shared)
            return None
        pages = [*shared, *fresh]
        cache.restore(found, pages[: len(found)], num_cached)
        return rank, sharing, pages, len(found)

    def _check_pages(self, rank: int, pages: dict[bytes, int]) -> None:
        for digest, page in pages.items():
            for group in range(self.groups):
                held = self.engine.kv[rank, group * Pools.num_pages + page]
                assert held == self._contents(digest, group)

    def _contents(self, digest: bytes, group: int) -> int:
        return 2 * self.prefixes[digest] + group


KeepingBesideModel.TestCase.settings = settings(max_examples=100, stateful_step_count=20)
TestKeepingBesideModel = KeepingBesideModel.TestCase


class Turns(KeepingBesideModel):
    """A worker of one rank and one prompt at a time."""

    def __init__(self, capacity: int, groups: int = 1) -> None:
        super().__init__()
        self.begin(capacity, groups)

    def compute(self, tokens: list[int]) -> None:
        self.turn([(0, "", tokens, 0)])
        self.pools[0].release(self.live.pop()[1])

    def evict(self, num_pages: int) -> None:
        self.caches[0].evict(num_pages)
        self.keeping.dispatch()
        self.keeping.settle()

    def num_kept(self, tokens: list[int]) -> int:
        """Pages of a prompt that the host has."""
        return self.host.num_found(self.caches[0].chain(ids(tokens), ""))


def test_of_a_prefix_that_went_on_the_end_makes_room_first() -> None:
    worker = Turns(capacity=6)
    for tokens in ([0] * 8, [0] * 12, [1] * 2):
        worker.compute(tokens)
        worker.evict(Pools.num_pages)
    assert worker.num_kept([0] * 12) == 5


def test_a_page_that_leaves_again_is_not_as_old_as_its_copy() -> None:
    worker = Turns(capacity=2)
    for number in (0, 1):
        worker.compute([number] * 2)
        worker.evict(1)
    for number in (0, 1, 2):
        worker.compute([number] * 2)
    held = worker.caches[0].share([*worker.caches[0].chain(ids([1] * 2), "")])
    worker.evict(2)
    worker.pools[0].release(held)
    assert [worker.num_kept([number] * 2) for number in range(3)] == [1, 0, 1]


def test_pages_on_their_way_back_make_no_room_for_those_that_leave() -> None:
    """Of eight pages of two groups, some reach the host before the others come back."""
    worker = Turns(capacity=5, groups=2)
    worker.compute([0] * 10)
    worker.evict(Pools.num_pages)
    worker.compute([1] * 16)
    worker.compute([0] * 10 + [2] * 6)
    assert worker.counters["host_pages_restored"] == 5
