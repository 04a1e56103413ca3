"""PagePool against a naive model, under random events."""

import random
from collections import Counter

import pytest

from transfer.pages import PagePool


class NaivePool:
    """A plain dictionary of counts."""

    def __init__(self, num_pages: int) -> None:
        self.counts = dict.fromkeys(range(num_pages), 0)

    @property
    def free(self) -> set[int]:
        return {page for page, count in self.counts.items() if count == 0}


@pytest.mark.parametrize("seed", range(20))
def test_answers_like_the_naive_model_on_random_events(seed: int) -> None:
    rng = random.Random(seed)
    num_pages = rng.randint(1, 12)
    pool, naive = PagePool(num_pages), NaivePool(num_pages)
    held: list[tuple[int, ...]] = []
    kept: set[int] = set()
    for _ in range(400):
        match rng.choice(["reserve", "share", "release", "keep", "let go"]):
            case "reserve":
                wanted = rng.randint(0, num_pages + 1)
                taken = pool.reserve(wanted)
                assert (taken is None) == (wanted > len(naive.free))
                if taken is not None:
                    assert len(set(taken)) == wanted
                    assert set(taken) <= naive.free
                    naive.counts.update(dict.fromkeys(taken, 1))
                    held.append(taken)
            case "share" if held:
                pages = rng.choice(held)
                pool.share(pages)
                for page in pages:
                    naive.counts[page] += 1
                held.append(pages)
            case "release" if held:
                pages = held.pop(rng.randrange(len(held)))
                pool.release(pages)
                for page in pages:
                    naive.counts[page] -= 1
            case "keep" if held:
                for page in set(rng.choice(held)[:1]) - kept:
                    pool.keep([page])
                    naive.counts[page] += 1
                    kept.add(page)
            case "let go" if kept:
                page = rng.choice(sorted(kept))
                pool.let_go([page])
                naive.counts[page] -= 1
                kept.remove(page)
        pool.check()
        assert pool.num_kept_alone == sum(naive.counts[page] == 1 for page in kept)
        assert pool.num_references == sum(naive.counts.values())
        assert pool.num_free == len(naive.free)
        assert pool.num_free + pool.num_held == num_pages
        assert {page: pool.refcount(page) for page in range(num_pages)} == naive.counts
    expected = Counter(page for pages in held for page in pages)
    expected.update(kept)
    assert all(pool.refcount(page) == expected[page] for page in range(num_pages))


def test_takes_nothing_when_too_few_are_free() -> None:
    pool = PagePool(3)
    assert pool.reserve(2) is not None
    assert pool.reserve(2) is None
    assert pool.num_free == 1
    pool.check()


def test_two_pools_told_the_same_hand_out_the_same_pages() -> None:
    first, second = PagePool(8), PagePool(8)
    for pool in (first, second):
        pages = pool.reserve(5)
        assert pages is not None
        pool.release(pages[1:4])
    assert first.reserve(4) == second.reserve(4)


def test_releasing_a_free_page_is_caught() -> None:
    pool = PagePool(2)
    pages = pool.reserve(1)
    assert pages is not None
    pool.release(pages)
    with pytest.raises(AssertionError, match="free already"):
        pool.release(pages)


def test_sharing_a_free_page_is_caught() -> None:
    with pytest.raises(AssertionError, match="is free"):
        PagePool(2).share([1])


def test_a_shared_page_stays_held_until_its_last_reference() -> None:
    pool = PagePool(1)
    pages = pool.reserve(1)
    assert pages is not None
    pool.share(pages)
    pool.release(pages)
    assert pool.num_free == 0
    pool.release(pages)
    assert pool.num_free == 1
