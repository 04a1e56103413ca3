"""Payload buffers are reused once their last view is gone, and not before."""

import mmap
import threading
import weakref

import numpy as np
import pytest

from transfer.buffers import BufferPool


def test_a_buffer_is_used_again_once_no_view_of_it_lives() -> None:
    pool = BufferPool(1 << 20)
    first = pool.take(5000)
    first[:] = 7
    view = first.view(np.uint16)[3:9].reshape(2, 3)
    del first
    assert pool.idle_bytes == 0
    pool.take(5000)[:] = 9
    assert (view == 0x0707).all()
    del view
    assert pool.idle_bytes == 2 * 8192
    again = pool.take(6000)
    assert again.shape == (6000,)
    assert pool.idle_bytes == 8192


def test_two_who_hold_buffers_never_share_memory() -> None:
    pool = BufferPool(1 << 20)
    held = [pool.take(4096) for _ in range(8)]
    for value, buffer in enumerate(held):
        buffer[:] = value
    assert [int(buffer[0]) for buffer in held] == list(range(8))


def test_idle_memory_is_bounded() -> None:
    pool = BufferPool(max_idle_bytes=10_000)
    held = [pool.take(4096) for _ in range(5)]
    held.clear()
    assert pool.idle_bytes == 8192


@pytest.mark.parametrize("num_bytes", [0, 1, 4095, 4096, 4097, 1 << 16])
def test_a_buffer_has_the_length_asked_for(num_bytes: int) -> None:
    assert BufferPool(1 << 20).take(num_bytes).nbytes == num_bytes


class Pins:
    """Stands in for what pins memory: sizes pinned, in order, and sizes no longer pinned."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.ended: list[int] = []

    def __call__(self, memory: np.ndarray) -> None:
        assert memory.ctypes.data % mmap.PAGESIZE == 0
        assert not memory.any()
        self.sizes.append(memory.nbytes)
        weakref.finalize(memory, self.ended.append, memory.nbytes)


def test_a_large_buffer_is_pinned_once_and_for_as_long_as_it_is_used() -> None:
    pins = Pins()
    pool = BufferPool(3 << 20, pins)
    small, large = pool.take(4096), pool.take((1 << 20) + 1)
    assert pins.sizes == [2 << 20]
    del small, large
    large = pool.take(2 << 20)
    assert pins.sizes == [2 << 20]
    view = large.view(np.uint16)[7:]
    larger = pool.take(4 << 20)
    del larger  # it exceeds what may stay idle
    assert pins.ended == [4 << 20]
    pool.max_idle_bytes = 0
    del large
    assert pins.ended == [4 << 20]
    del view
    assert pins.ended == [4 << 20, 2 << 20]


def test_threads_may_take_and_give_back_at_once() -> None:
    pool = BufferPool(1 << 20)
    wrong: list[int] = []

    def churn(value: int) -> None:
        for _ in range(300):
            buffer = pool.take(4096)
            buffer[:] = value
            if (buffer != value).any():
                wrong.append(value)

    threads = [threading.Thread(target=churn, args=(value,)) for value in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert pool.idle_bytes <= 4 * 2 * 4096  # each thread may briefly hold two
