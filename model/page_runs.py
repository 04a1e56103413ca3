"""Runs of pages between the pool and the host: gathered on one side, put in place on the other.

Each shard crosses between its device and the host of its process. Where a mesh spans processes, all
of them run the same programs, each with its own shards.
"""

import logging
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh

from model.buckets import bucket_for
from model.config import KVSpec
from model.kv import abstract_pages, gather_pages, write_pages
from model.programs import Program
from model.sharding import (
    POOL_SPEC,
    RANKS,
    abstract_i32,
    num_ranks,
    on_ranks,
    own_devices,
    rank_devices,
)

log = logging.getLogger(__name__)

_ON_THE_HOST = ("cpu",)  # platforms whose memory is the host's
RUNS_PLACED_AHEAD = 4  # of the device: memory is planned for so many, and further runs wait


class GatheredRuns:
    """The programs that pack pages for the wire."""

    def __init__(self, kv: KVSpec, mesh: Mesh, run_pages: tuple[int, ...]) -> None:
        self._kv, self._mesh, self._run_pages = kv, mesh, run_pages
        self._gather: dict[int, Program] = {}

    def programs(self, pool: jax.ShapeDtypeStruct) -> list[Program]:
        """All programs, to be compiled. pool: its shape."""
        gather = on_ranks(self._mesh, gather_pages, (POOL_SPEC, RANKS), POOL_SPEC)
        for count in self._run_pages:
            ids = abstract_i32((num_ranks(self._mesh) * count,), self._mesh, RANKS)
            self._gather[count] = Program(f"gather[pages={count}]", gather, (pool, ids))
        return list(self._gather.values())

    def gather(self, pool: Array, page_ids: Sequence[Sequence[int]]) -> Array:
        """Dispatch the gathering of a run of each rank, which may be empty."""
        bucket = bucket_for(max(map(len, page_ids)), self._run_pages)
        ids = np.zeros((len(page_ids), bucket), np.int32)
        for rank, run in enumerate(page_ids):
            ids[rank, : len(run)] = run
        gathered: Array = self._gather[bucket](pool, ids.ravel())
        return gathered

    def shards(self, gathered: Array, page_ids: Sequence[Sequence[int]]) -> list[list[Any]]:
        """By rank, this process's shards, for `numpy.asarray`; begins to copy them to the host.

        A shard is [layers, planes, bucket, page_size, kv, dim], of which the first
        len(page_ids[rank]) pages count.
        """
        found = {shard.device: shard.data for shard in gathered.addressable_shards}
        runs = []
        for rank, run in enumerate(page_ids):
            devices = rank_devices(self._mesh, rank)
            arrays = [found[device] for device in devices if device in found]
            runs.append([to_host(array) for array in arrays] if run else arrays)
        return runs


class PlacedRuns:
    """The programs that put received pages into the pool."""

    def __init__(self, kv: KVSpec, mesh: Mesh, run_pages: tuple[int, ...]) -> None:
        self._kv, self._mesh, self._run_pages = kv, mesh, run_pages
        # The array has a part on each device, whichever rank's pages came.
        self._needs_nothing = num_ranks(mesh) > 1
        self._nowhere = 0  # a page past the pool of a rank
        self._place: dict[int, Program] = {}
        self._nothing: dict[int, dict[jax.Device, Array]] = {}
        # Pages that arrived and are on the device, but not in the pool yet.
        self._placing_pages = 0
        self.most_placing = RUNS_PLACED_AHEAD * run_pages[-1]

    @property
    def spare_pages(self) -> int:
        """Memory for pages on their way, besides the pool, in pages of each rank."""
        nothing = sum(self._run_pages) if self._needs_nothing else 0
        return self.most_placing + nothing

    def programs(self, pool: jax.ShapeDtypeStruct) -> list[Program]:
        """All programs, to be compiled. pool: its shape."""
        self._nowhere = pool.shape[2] // num_ranks(self._mesh)
        on_cpu = self._mesh.devices.flat[0].platform in _ON_THE_HOST
        write = partial(write_pages, on_cpu=on_cpu)
        place = on_ranks(self._mesh, write, (POOL_SPEC, POOL_SPEC, RANKS), POOL_SPEC)
        for count in self._run_pages:
            ids = abstract_i32((num_ranks(self._mesh) * count,), self._mesh, RANKS)
            args = (pool, abstract_pages(self._kv, count, self._mesh), ids)
            self._place[count] = Program(f"place[pages={count}]", place, args, (0,))
        return list(self._place.values())

    def settle(self) -> None:
        """Make the filler for devices that nothing came for; its values are never read."""
        for bucket in self._run_pages if self._needs_nothing else ():
            staged = abstract_pages(self._kv, bucket, self._mesh)
            zeros = np.zeros(staged.sharding.shard_shape(staged.shape), staged.dtype)
            self._nothing[bucket] = {
                device: jax.device_put(zeros, device) for device in own_devices(self._mesh)
            }

    def place(
        self, pool: Array, rank: int, page_ids: Sequence[int], shards: Sequence[np.ndarray]
    ) -> Array:
        """Dispatch the write of pages that came for a rank. The pool is donated.

        Waits while too many are on devices but not in the pool. shards: one per device of the rank
        that this process has, [layers, planes, n, page_size, kv heads, head_dim] with
        n = len(page_ids).
        """
        longest = self._run_pages[-1]
        for at in range(0, len(page_ids), longest):
            ids = page_ids[at : at + longest]
            pool = self._place_run(pool, rank, ids, [s[:, :, at : at + len(ids)] for s in shards])
        return pool

    def _place_run(
        self, pool: Array, rank: int, page_ids: Sequence[int], shards: Sequence[np.ndarray]
    ) -> Array:
        """One run that a program takes."""
        bucket = bucket_for(len(page_ids), self._run_pages)
        ids = np.full((num_ranks(self._mesh), bucket), self._nowhere, np.int32)
        ids[rank, : len(page_ids)] = page_ids
        self._placing_pages += bucket
        if self._placing_pages > self.most_placing:
            jax.block_until_ready(pool)
            self._placing_pages = bucket
        own = own_devices(self._mesh)
        devices = [device for device in rank_devices(self._mesh, rank) if device in own]
        came = {
            device: jax.device_put(_padded(shard, bucket), device)
            for device, shard in zip(devices, shards, strict=True)
        }
        local = [
            came[device] if device in came else self._nothing[bucket][device] for device in own
        ]
        staged = abstract_pages(self._kv, bucket, self._mesh)
        arrays = jax.make_array_from_single_device_arrays(staged.shape, staged.sharding, local)
        placed: Array = self._place[bucket](pool, arrays, ids.ravel())
        return placed


def to_host(array: Array) -> Array:
    """Begin to copy one device's array to the host; `numpy.asarray` of the result waits for it.

    A GPU copies at the speed of its bus to memory that the driver has pinned, which numpy reads in
    place: 47 GB/s on an H200, against 1.2 into memory of numpy's own.
    """
    if next(iter(array.devices())).platform in _ON_THE_HOST:
        array.copy_to_host_async()
        return array
    pinned: Array = jax.device_put(array, array.sharding.with_memory_kind("pinned_host"))
    return pinned


def memory_pinner(mesh: Mesh) -> Callable[[np.ndarray], None] | None:
    """A function that pins host memory until it is freed, so that devices copy out of it directly.

    The driver first copies unpinned memory on the host: that way 96 MiB came to an H200 at 5 GB/s,
    out of pinned memory at 43. None where devices read the host's memory. If pinning fails, the log
    says so once, and no more is pinned.
    """
    device = own_devices(mesh)[0]
    if device.platform in _ON_THE_HOST:
        return None
    refused = False

    def pin(memory: np.ndarray) -> None:
        nonlocal refused
        if refused:
            return
        client, address = device.client, memory.ctypes.data
        try:
            client.dma_map(address, memory.nbytes)
        except (AttributeError, RuntimeError) as error:
            refused = True
            log.warning("host memory stays unpinned, pages come more slowly: %s", error)
            return
        weakref.finalize(memory, client.dma_unmap, address).atexit = False

    return pin


def _padded(shard: np.ndarray, num_pages: int) -> np.ndarray:
    if shard.shape[2] == num_pages:
        return shard
    padded = np.zeros((*shard.shape[:2], num_pages, *shard.shape[3:]), shard.dtype)
    padded[:, :, : shard.shape[2]] = shard
    return padded
