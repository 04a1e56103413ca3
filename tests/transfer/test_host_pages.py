"""Pages in the host's memory: found whole, in order of use, and copied bit for bit."""

import hashlib

import ml_dtypes
import numpy as np
import pytest

from transfer.host_pages import HostMemory, HostPages

SHAPE = (3, 2, 4, 2, 8)  # layers, planes, page_size, kv heads, head_dim


def digest(number: int) -> bytes:
    return hashlib.sha256(bytes([number])).digest()


def page(number: int, shards: int = 1, dtype: str = "float32") -> list[np.ndarray]:
    """What one page holds, by shard: random bits of its own."""
    rng = np.random.default_rng(number)
    size = np.dtype(dtype).itemsize * int(np.prod(SHAPE))
    return [rng.integers(0, 256, size, np.uint8).view(dtype).reshape(SHAPE) for _ in range(shards)]


def filled(num_pages: int, *numbers: int) -> HostPages:
    host = HostPages(num_pages)
    for number in numbers:
        assert host.put(digest(number), 0)
    return host


def found(host: HostPages) -> list[int]:
    return [number for number in range(10) if digest(number) in host]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "uint8"])
def test_pages_come_back_bit_for_bit_shard_by_shard_and_group_by_group(dtype: str) -> None:
    stored = np.dtype(getattr(ml_dtypes, dtype, dtype)).name
    host, memory = HostPages(3, groups=2), HostMemory(3, 2, SHAPE, stored, groups=2)
    pages = {(n, group): page(10 * n + group, 2, stored) for n in range(3) for group in range(2)}
    for (number, group), shards in pages.items():
        place = host.put(digest(number), group)
        assert place is not None
        memory.store(place, shards)
    for group in range(2):
        came = memory.fetch([host.place_of(digest(number), group) for number in (2, 0)])
        for shard, array in enumerate(came):
            assert array.dtype == stored
            assert array.shape == (3, 2, 2, 4, 2, 8)
            for at, number in enumerate((2, 0)):
                assert array[:, :, at].tobytes() == pages[number, group][shard].tobytes()


def test_a_page_is_found_once_every_group_of_it_is_here() -> None:
    host = HostPages(2, groups=2)
    host.put(digest(1), 0)
    assert digest(1) not in host
    host.put(digest(1), 1)
    assert digest(1) in host
    assert len(host) == 1


def test_what_was_used_longest_ago_makes_room() -> None:
    host = filled(3, 1, 2, 3)
    host.touch([digest(1)])
    host.put(digest(4), 0)
    assert found(host) == [1, 3, 4]


def test_of_a_chain_that_was_used_the_tail_goes_first() -> None:
    host = filled(3, 1, 2, 3)
    host.touch([digest(1), digest(2), digest(3)])
    host.put(digest(4), 0)
    assert found(host) == [1, 2, 4]


def test_pages_that_are_wanted_make_no_room() -> None:
    host = filled(2, 1, 2)
    kept = host.place_of(digest(1), 0)
    assert host.put(digest(3), 0, besides={digest(1)}) not in (None, kept)
    assert found(host) == [1, 3]
    assert host.put(digest(4), 0, besides={digest(1), digest(3)}) is None
    assert found(host) == [1, 3]
    assert host.place_of(digest(1), 0) == kept


def test_a_chain_is_found_up_to_its_first_gap() -> None:
    host = filled(4, 1, 2, 4)
    assert host.num_found(map(digest, (1, 2, 3, 4))) == 2
    assert host.num_found(map(digest, (3, 4))) == 0


def test_a_page_that_comes_twice_takes_one_place() -> None:
    host = filled(2, 1, 1, 1, 2)
    assert found(host) == [1, 2]


def test_pages_that_were_fetched_stay_as_they_are() -> None:
    memory = HostMemory(1, 1, SHAPE, "float32")
    memory.store((0, 0), page(1))
    (came,) = memory.fetch([(0, 0)])
    memory.store((0, 0), page(2))
    assert came[:, :, 0].tobytes() == page(1)[0].tobytes()


def test_after_it_is_cleared_nothing_is_found_and_all_places_are_free() -> None:
    host = filled(3, 1, 2, 3)
    assert host.clear() == 3
    assert found(host) == []
    assert len(host) == 0
    for number in (4, 5, 6):
        host.put(digest(number), 0)
    assert found(host) == [4, 5, 6]
