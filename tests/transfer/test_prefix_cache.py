"""The prefix cache against a naive one: sharing, salt, limit, and an eviction order that helps."""

from collections.abc import Iterator

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from transfer.pages import PagePool
from transfer.prefix_cache import PrefixCache, Sharing

PAGE = 2
TOKENS = st.lists(st.integers(0, 1), min_size=0, max_size=11)
SALTS = st.sampled_from(["", "tenant"])

Key = tuple[str, tuple[int, ...]]


def ids(tokens: list[int]) -> np.ndarray:
    return np.array(tokens, np.int32)


def filled(num_pages: int = 8) -> tuple[PagePool, PrefixCache]:
    pool = PagePool(num_pages)
    return pool, PrefixCache(pool, PAGE)


def match(cache: PrefixCache, tokens: list[int], salt: str, limit: int) -> tuple[int, ...]:
    """Share what is cached of at most `limit` tokens."""
    return cache.share(Sharing(ids(tokens), salt, limit).cached(cache))


def cached_prompt(pool: PagePool, cache: PrefixCache, tokens: list[int], salt: str = "") -> None:
    """One prompt arrives, is computed and leaves."""
    shared = match(cache, tokens, salt, len(tokens))
    fresh = pool.reserve(-(-len(tokens) // PAGE) - len(shared))
    assert fresh is not None
    pages = (*shared, *fresh)
    cache.insert([*cache.chain(ids(tokens), salt)], pages[: len(tokens) // PAGE])
    pool.release(pages)


def test_a_prefix_is_found_page_by_page_and_shared() -> None:
    pool, cache = filled()
    cached_prompt(pool, cache, [1, 2, 3, 4, 5])
    assert len(cache) == 2  # the half-filled last page is not cached
    found = match(cache, [1, 2, 3, 4, 9, 9], "", 6)
    assert len(found) == 2
    assert [pool.refcount(page) for page in found] == [2, 2]
    assert len(match(cache, [1, 2, 9, 9], "", 4)) == 1
    assert match(cache, [9, 2, 3, 4], "", 4) == ()


def test_a_salt_made_of_the_bytes_of_tokens_is_no_prefix() -> None:
    pool, cache = filled()
    cached_prompt(pool, cache, [3, 4], salt=ids([1, 2]).tobytes().decode())
    assert match(cache, [1, 2, 3, 4], "", 4) == ()
    cached_prompt(pool, cache, [1, 2, 3, 4])
    assert len(cache) == 3


def test_looking_what_is_cached_shares_nothing_and_makes_nothing_younger() -> None:
    pool, cache = filled()
    cached_prompt(pool, cache, [1, 2, 3, 4])
    cached_prompt(pool, cache, [5, 6])
    found = [
        len(Sharing(ids(tokens), salt, limit).cached(cache))
        for tokens, salt, limit in (
            ([1, 2, 3, 4, 9], "", 4),
            ([1, 2, 3, 4], "", 3),
            ([1, 2, 3, 4], "tenant", 4),
            ([9, 2, 3, 4], "", 4),
        )
    ]
    assert found == [2, 1, 0, 0]
    assert cache.num_evictable == 3
    cache.evict(2)  # evicts the oldest chain, although it was looked at last
    assert cache.cached_pages(cache.chain(ids([5, 6]), "")) == 1


def test_a_page_is_not_found_behind_another_beginning() -> None:
    pool, cache = filled()
    cached_prompt(pool, cache, [1, 2, 3, 4])
    assert match(cache, [3, 4], "", 2) == ()


def test_another_salt_sees_nothing() -> None:
    pool, cache = filled()
    cached_prompt(pool, cache, [1, 2, 3, 4], "a")
    assert match(cache, [1, 2, 3, 4], "b", 4) == ()
    assert match(cache, [1, 2, 3, 4], "", 4) == ()
    assert len(match(cache, [1, 2, 3, 4], "a", 4)) == 2


def test_a_limit_cuts_to_whole_pages_and_may_be_negative() -> None:
    pool, cache = filled()
    cached_prompt(pool, cache, [1, 2, 3, 4])
    lengths = [len(match(cache, [1, 2, 3, 4], "", limit)) for limit in (-1, 0, 1, 2, 3, 4)]
    assert lengths == [0, 0, 0, 1, 1, 2]


def test_a_page_is_digested_once_and_not_before_somebody_looks_for_it() -> None:
    class Counting(PrefixCache):
        num_digested = 0

        def chain(self, token_ids: np.ndarray, salt: str) -> Iterator[bytes]:
            for digest in super().chain(token_ids, salt):
                self.num_digested += 1
                yield digest

    cache = Counting(PagePool(8), PAGE)
    known, other = (Sharing(ids(tokens), "", 8) for tokens in ([1] * 8, [2] * 8))
    pages = cache._pool.reserve(4)
    assert pages is not None
    cache.insert(known.first(cache, 2), pages[:2])
    cache.insert(known.first(cache, 3), pages[:3])
    assert cache.num_digested == 3
    assert known.cached(cache) == known.first(cache, 3)
    assert cache.num_digested == 4  # the fourth was digested, but not found
    for _ in range(3):
        assert other.cached(cache) == []
    assert cache.num_digested == 5
    assert len(known.first(cache, 9)) == 4
    assert cache.num_digested == 5


def test_a_disabled_cache_keeps_and_finds_nothing() -> None:
    pool = PagePool(4)
    cache = PrefixCache(pool, PAGE, enabled=False)
    cached_prompt(pool, cache, [1, 2, 3, 4])
    assert len(cache) == 0
    assert pool.num_held == 0
    assert match(cache, [1, 2, 3, 4], "", 4) == ()


def test_a_known_prefix_keeps_its_page_and_the_copy_stays_the_newcomers() -> None:
    pool, cache = filled()
    cached_prompt(pool, cache, [1, 2])
    copy = pool.reserve(1)
    assert copy is not None
    cache.insert([*cache.chain(ids([1, 2]), "")], copy)
    assert pool.refcount(copy[0]) == 1
    pool.release(copy)
    assert pool.num_held == 1


def test_the_oldest_goes_first_and_use_makes_young() -> None:
    pool, cache = filled()
    cached_prompt(pool, cache, [1, 1])
    cached_prompt(pool, cache, [2, 2])
    pool.release(match(cache, [1, 1], "", 2))
    assert cache.evict(1) == 1
    assert match(cache, [2, 2], "", 2) == ()
    assert len(match(cache, [1, 1], "", 2)) == 1


def test_a_page_that_somebody_holds_is_never_evicted() -> None:
    pool, cache = filled()
    cached_prompt(pool, cache, [1, 2, 3, 4])
    held = match(cache, [1, 2], "", 2)
    assert cache.num_evictable == 1
    assert cache.flush() == 1
    assert len(cache) == 1
    pool.release(held)
    assert cache.flush() == 1
    assert pool.num_held == 0


@settings(max_examples=100)
@given(st.lists(st.one_of(TOKENS, st.integers(1, 4)), max_size=12))
def test_eviction_takes_tails_before_heads_so_all_that_stays_can_be_found(
    events: list[list[int] | int],
) -> None:
    """Prompts arrive one after the other; an integer evicts that many pages."""
    pool, cache = filled(64)
    seen: list[list[int]] = []
    for event in events:
        if isinstance(event, int):
            cache.evict(event)
        else:
            seen.append(event)
            cached_prompt(pool, cache, event)
        found = {page for tokens in seen for page in _peek(pool, cache, tokens)}
        assert len(found) == len(cache), "a cached page that no prompt can find"


def _peek(pool: PagePool, cache: PrefixCache, tokens: list[int]) -> tuple[int, ...]:
    """Match without keeping a reference. It makes its chain young, so the order stays valid."""
    pages = match(cache, tokens, "", len(tokens))
    pool.release(pages)
    return pages


class CacheBesideModel(RuleBasedStateMachine):
    """Prompts overlap at random; a dict of prefixes and a list of ages model the cache."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(12)
        self.cache = PrefixCache(self.pool, PAGE)
        self.known: dict[Key, int] = {}
        self.ages: list[Key] = []  # oldest first
        self.live: list[tuple[str, list[int], list[int]]] = []  # salt, tokens, pages

    @rule(tokens=TOKENS, salt=SALTS, cut=st.integers(0, 3))
    def start(self, tokens: list[int], salt: str, cut: int) -> None:
        limit = len(tokens) - cut
        expected = []
        for key in self._chain(salt, tokens[: max(limit, 0)]):
            if key not in self.known:
                break
            expected.append(key)
        shared = match(self.cache, tokens, salt, limit)
        assert list(shared) == [self.known[key] for key in expected]
        self._touch(expected)
        fresh = self.pool.reserve(-(-len(tokens) // PAGE) - len(shared))
        if fresh is None:
            self.pool.release(shared)
        else:
            self.live.append((salt, tokens, [*shared, *fresh]))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def insert(self, data: st.DataObject) -> None:
        salt, tokens, pages = data.draw(st.sampled_from(self.live))
        full = data.draw(st.integers(0, len(tokens) // PAGE))
        self.cache.insert(Sharing(ids(tokens), salt, 0).first(self.cache, full), pages[:full])
        chain = self._chain(salt, tokens[: full * PAGE])
        for key, page in zip(chain, pages, strict=False):
            self.known.setdefault(key, page)
        self._touch(chain)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        at = data.draw(st.integers(0, len(self.live) - 1))
        self.pool.release(self.live.pop(at)[2])

    @rule(num_pages=st.integers(0, 6))
    def evict(self, num_pages: int) -> None:
        idle = [key for key in self.ages if not self._holders(self.known[key])]
        victims = idle[:num_pages]
        assert self.cache.evict(num_pages) == len(victims)
        for key in victims:
            self.ages.remove(key)
            del self.known[key]

    @invariant()
    def references_add_up(self) -> None:
        self.pool.check()
        assert len(self.cache) == len(self.known)
        cached = set(self.known.values())
        for page in range(self.pool.num_pages):
            assert self.pool.refcount(page) == self._holders(page) + (page in cached)
        assert self.cache.num_evictable == sum(not self._holders(page) for page in cached)

    def _chain(self, salt: str, tokens: list[int]) -> list[Key]:
        return [(salt, tuple(tokens[:end])) for end in range(PAGE, len(tokens) + 1, PAGE)]

    def _touch(self, chain: list[Key]) -> None:
        for key in reversed(chain):
            if key in self.ages:
                self.ages.remove(key)
            self.ages.append(key)

    def _holders(self, page: int) -> int:
        return sum(page in pages for _, _, pages in self.live)


CacheBesideModel.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestCacheBesideModel = CacheBesideModel.TestCase


def test_pages_that_are_wanted_do_not_count_as_room() -> None:
    pool, cache = filled(num_pages=4)
    tokens = [1, 2, 3, 4]
    cached_prompt(pool, cache, tokens)
    chain = frozenset(cache.chain(ids(tokens), ""))
    assert len(chain) == 2
    assert cache.can_evict(2)
    assert not cache.can_evict(1, chain)
