"""The pools between which the transfer benchmark copies: pages in host memory, or on CPU devices.

A sender gathers runs of scattered pages, and a receiver puts them in place.
"""

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import ml_dtypes
import numpy as np
import xxhash

from bench.host_limits import PageWork
from transfer.buffers import BufferPool

RUN_BYTES = 4 << 20  # gathered, sent and put in place at once; one page, if that is larger
_IDLE_BYTES = 256 << 20
_GATHERS_AHEAD = 2  # gathers that are dispatched before the first of them is sent
_PLACED_AHEAD = 4  # writes that are dispatched before waiting for them, as decode/engine.py does


class Pool(Protocol):
    """Pages of bfloat16: [layers, 2, pages, page_size, kv_heads, head_dim]."""

    def gather(self, runs: Sequence[np.ndarray]) -> Iterator[np.ndarray]:
        """The pages of each run, packed: [layers, 2, n, page_size, kv_heads, head_dim]."""
        ...

    def place(self, ids: np.ndarray, pages: np.ndarray) -> None:
        """Begin to write packed pages to the places `ids` (any thread)."""
        ...

    def settle(self) -> None:
        """Wait until all pages are written."""
        ...

    def digest(self, ids: np.ndarray) -> str:
        """Digest of the pages' bytes, in the order of ids."""
        ...


def new_pool(work: PageWork, fill: int) -> np.ndarray:
    """u16[layers, 2, pages, page_size, kv_heads, head_dim], written in full."""
    shape = (work.layers, 2, work.pool_pages, work.page_size, work.kv_heads, work.head_dim)
    return np.full(shape, fill, np.uint16)


def digest(pool: np.ndarray, ids: np.ndarray) -> str:
    """Digest of the pages' bytes, in the order of ids."""
    return xxhash.xxh3_64_hexdigest(np.ascontiguousarray(np.take(pool, ids, axis=2)).data)


class HostPool:
    """Pages in numpy arrays; numpy stands in for compiled programs."""

    def __init__(self, pages: np.ndarray) -> None:
        """pages: u16, see `new_pool`; not copied."""
        self._pages = pages
        self._buffers = BufferPool(_IDLE_BYTES)

    def gather(self, runs: Sequence[np.ndarray]) -> Iterator[np.ndarray]:
        layers, both, _, *page = self._pages.shape
        for ids in runs:
            shape = (layers, both, len(ids), *page)
            packed = self._buffers.take(2 * int(np.prod(shape))).view(np.uint16).reshape(shape)
            np.take(self._pages, ids, axis=2, out=packed, mode="clip")
            yield packed.view(ml_dtypes.bfloat16)

    def place(self, ids: np.ndarray, pages: np.ndarray) -> None:
        self._pages[:, :, ids] = pages.view(np.uint16)

    def settle(self) -> None:
        pass

    def digest(self, ids: np.ndarray) -> str:
        return digest(self._pages, ids)


class DevicePool:
    """Pages on a CPU device, gathered and placed by the programs that the workers compile."""

    def __init__(self, pages: np.ndarray) -> None:
        """pages: u16, see `new_pool`; copied."""
        import jax

        from model.kv import gather_pages, write_pages

        jax.config.update("jax_platforms", "cpu")
        self._lock = threading.Lock()
        self._pool: Any = jax.device_put(pages.view(ml_dtypes.bfloat16)).copy()
        self._gather = jax.jit(gather_pages)
        self._write = jax.jit(write_pages, donate_argnums=0)
        self._put, self._wait = jax.device_put, jax.block_until_ready
        self._num_placing = 0

    def gather(self, runs: Sequence[np.ndarray]) -> Iterator[np.ndarray]:
        ahead: deque[Any] = deque()
        for ids in runs:
            ahead.append(self._gather(self._pool, ids.astype(np.int32)))
            if len(ahead) > _GATHERS_AHEAD:
                yield np.asarray(ahead.popleft())
        while ahead:
            yield np.asarray(ahead.popleft())

    def place(self, ids: np.ndarray, pages: np.ndarray) -> None:
        with self._lock:
            self._num_placing += 1
            if self._num_placing > _PLACED_AHEAD:
                self._wait(self._pool)
                self._num_placing = 1
            self._pool = self._write(self._pool, self._put(pages), ids.astype(np.int32))

    def settle(self) -> None:
        with self._lock:
            self._wait(self._pool)

    def digest(self, ids: np.ndarray) -> str:
        with self._lock:
            return digest(np.asarray(self._pool).view(np.uint16), ids)


def pool_of(work: PageWork, fill: int, on_device: bool) -> Pool:
    """A pool in which every page is filled with its number plus fill."""
    pages = new_pool(work, fill)
    pages += np.arange(work.pool_pages, dtype=np.uint16)[:, None, None, None]
    return DevicePool(pages) if on_device else HostPool(pages)


def runs_of(ids: np.ndarray, page_bytes: int) -> list[np.ndarray]:
    """The pages of a request, cut into runs."""
    per_run = max(1, RUN_BYTES // page_bytes)
    return [ids[at : at + per_run] for at in range(0, len(ids), per_run)]
