"""Runs of pages between the pool and the host: gathered on one side, put in place on the other.

Where one process has all devices, each shard crosses between its device and the host. Where a mesh
spans processes, everything travels through its leader: within the programs, shards pass between the
leader's first device and their own, so that nothing outside the mesh knows of its processes.
"""

import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from model.buckets import bucket_for
from model.config import KVSpec
from model.kv import abstract_pages, gather_pages, write_pages
from model.programs import Program
from model.sharding import (
    DEVICES,
    POOL_SPEC,
    RANKS,
    abstract_i32,
    from_first_device,
    gather_devices,
    num_ranks,
    on_ranks,
    own_devices,
    rank_devices,
    shard_idx,
    spans_processes,
)

log = logging.getLogger(__name__)

_ON_THE_HOST = ("cpu",)  # platforms whose memory is the host's
RUNS_PLACED_AHEAD = 4  # of the device: memory is planned for so many, and further runs wait


class GatheredRuns:
    """The programs that pack pages for the wire."""

    def __init__(self, kv: KVSpec, mesh: Mesh, run_pages: tuple[int, ...]) -> None:
        self._kv, self._mesh, self._run_pages = kv, mesh, run_pages
        self._spans = spans_processes(mesh)
        self._gather: dict[int, Program] = {}

    @property
    def copies(self) -> int:
        """How many times a gathered page is in memory, over all devices."""
        return self._mesh.size if self._spans else 1

    def programs(self, pool: jax.ShapeDtypeStruct) -> list[Program]:
        """All programs, to be compiled. pool: its shape."""
        function, out = (_gather_all, P()) if self._spans else (gather_pages, POOL_SPEC)
        gather = on_ranks(self._mesh, function, (POOL_SPEC, RANKS), out)
        for count in self._run_pages:
            ids = abstract_i32((num_ranks(self._mesh) * count,), self._mesh, RANKS)
            self._gather[count] = Program(f"gather[pages={count}]", gather, (pool, ids))
        return list(self._gather.values())

    def ids_of(self, page_ids: Sequence[Sequence[int]]) -> tuple[int, np.ndarray]:
        """The bucket for a run of each rank, and the page ids that its program takes."""
        bucket = bucket_for(max(map(len, page_ids)), self._run_pages)
        ids = np.zeros((len(page_ids), bucket), np.int32)
        for rank, run in enumerate(page_ids):
            ids[rank, : len(run)] = run
        return bucket, ids.ravel()

    def gather(self, pool: Array, bucket: int, ids: np.ndarray) -> Array:
        """Dispatch the program of a bucket. ids: see `ids_of`."""
        gathered: Array = self._gather[bucket](pool, ids)
        return gathered

    def shards(self, gathered: Array, page_ids: Sequence[Sequence[int]]) -> list[list[Any]]:
        """Each rank's shards, for `numpy.asarray`; begins to copy runs with pages to the host.

        A shard is [layers, planes, bucket, page_size, kv, dim], of which the first
        len(page_ids[rank]) pages count.
        """
        if self._spans:
            whole = to_host(gathered.addressable_data(0))
            size = self._mesh.size // len(page_ids)
            return [
                [_Part(whole, rank * size + shard) for shard in range(size)]
                for rank in range(len(page_ids))
            ]
        found = {shard.device: shard.data for shard in gathered.addressable_shards}
        runs = []
        for rank, run in enumerate(page_ids):
            arrays = [found[device] for device in rank_devices(self._mesh, rank)]
            runs.append([to_host(array) for array in arrays] if run else arrays)
        return runs


@dataclass(frozen=True)
class _Part:
    """One shard of an array that has the shards of all devices."""

    whole: Array
    idx: int

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        part: np.ndarray = np.asarray(self.whole)[self.idx]
        return part

    def block_until_ready(self) -> "_Part":
        self.whole.block_until_ready()
        return self


class PlacedRuns:
    """The programs that put received pages into the pool."""

    def __init__(self, kv: KVSpec, mesh: Mesh, run_pages: tuple[int, ...]) -> None:
        self._kv, self._mesh, self._run_pages = kv, mesh, run_pages
        self._spans = spans_processes(mesh)
        # The array has a part on each device, whichever rank's pages came.
        self._needs_nothing = self._spans or num_ranks(mesh) > 1
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
        # Where the mesh spans processes, each device receives the shards of its whole rank.
        copies = self._mesh.size // num_ranks(self._mesh) if self._spans else 1
        return (self.most_placing + nothing) * copies

    def programs(self, pool: jax.ShapeDtypeStruct) -> list[Program]:
        """All programs, to be compiled. pool: its shape."""
        self._nowhere = pool.shape[2] // num_ranks(self._mesh)
        function, spec = (_place_sent, DEVICES) if self._spans else (write_pages, POOL_SPEC)
        on_cpu = self._mesh.devices.flat[0].platform in _ON_THE_HOST
        write = partial(function, on_cpu=on_cpu)
        place = on_ranks(self._mesh, write, (POOL_SPEC, spec, RANKS), POOL_SPEC)
        for count in self._run_pages:
            ids = abstract_i32((num_ranks(self._mesh) * count,), self._mesh, RANKS)
            args = (pool, self._staged(count), ids)
            self._place[count] = Program(f"place[pages={count}]", place, args, (0,))
        return list(self._place.values())

    def settle(self) -> None:
        """Make the filler for devices that nothing came for; its values are never read."""
        for bucket in self._run_pages if self._needs_nothing else ():
            staged = self._staged(bucket)
            zeros = np.zeros(staged.sharding.shard_shape(staged.shape), staged.dtype)
            self._nothing[bucket] = {
                device: jax.device_put(zeros, device) for device in own_devices(self._mesh)
            }

    def cut(
        self, page_ids: Sequence[int], shards: Sequence[np.ndarray]
    ) -> Iterator[tuple[Sequence[int], list[np.ndarray]]]:
        """Pages and their shards, see `place`, in runs that a program takes."""
        longest = self._run_pages[-1]
        for at in range(0, len(page_ids), longest):
            ids = page_ids[at : at + longest]
            yield ids, [shard[:, :, at : at + len(ids)] for shard in shards]

    def ids_of(self, rank: int, page_ids: Sequence[int]) -> tuple[int, np.ndarray]:
        """The bucket for a run of one rank, and the ids of the pages that its program writes."""
        bucket = bucket_for(len(page_ids), self._run_pages)
        ids = np.full((num_ranks(self._mesh), bucket), self._nowhere, np.int32)
        ids[rank, : len(page_ids)] = page_ids
        return bucket, ids.ravel()

    def place(
        self, pool: Array, bucket: int, ids: np.ndarray, rank: int, shards: Sequence[np.ndarray]
    ) -> Array:
        """Dispatch the write of pages that came for a rank. The pool is donated.

        Waits while too many are on devices but not in the pool. shards: one per device of the rank,
        [layers, planes, n, page_size, kv heads, head_dim], n <= bucket; () in a member that does
        not lead.
        """
        self._placing_pages += bucket
        if self._placing_pages > self.most_placing:
            jax.block_until_ready(pool)
            self._placing_pages = bucket
        padded = [_padded(shard, bucket) for shard in shards]
        came: dict[jax.Device, Array] = {}
        if padded and self._spans:
            first = self._mesh.devices.flat[0]
            came[first] = jax.device_put(np.stack(padded)[None], first)
        elif padded:
            devices = rank_devices(self._mesh, rank)
            came = {d: jax.device_put(s, d) for s, d in zip(padded, devices, strict=True)}
        local = [
            came[device] if device in came else self._nothing[bucket][device]
            for device in own_devices(self._mesh)
        ]
        staged = self._staged(bucket)
        arrays = jax.make_array_from_single_device_arrays(staged.shape, staged.sharding, local)
        placed: Array = self._place[bucket](pool, arrays, ids)
        return placed

    def _staged(self, count: int) -> jax.ShapeDtypeStruct:
        """What a program takes besides the pool: runs of `count` pages."""
        pages = abstract_pages(self._kv, count, self._mesh)
        if not self._spans:
            return pages
        size = self._mesh.size // num_ranks(self._mesh)
        shape = (self._mesh.size, size, *pages.sharding.shard_shape(pages.shape))
        sharding = NamedSharding(self._mesh, DEVICES)
        return jax.ShapeDtypeStruct(shape, pages.dtype, sharding=sharding)


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
    out of pinned memory at 43. None where devices read the host's memory, or where received pages
    are copied on the host anyway. If pinning fails, the log says so once, and no more is pinned.
    """
    device = own_devices(mesh)[0]
    # What goes to the processes of a mesh is first copied into one array.
    if device.platform in _ON_THE_HOST or spans_processes(mesh):
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


def _gather_all(pool: Array, page_ids: Array) -> Array:
    """[devices, layers, planes, n, page_size, kv heads of one, head_dim], the same everywhere."""
    return gather_devices(gather_pages(pool, page_ids))


def _place_sent(pool: Array, sent: Array, page_ids: Array, on_cpu: bool) -> Array:
    """sent: [1, shards, layers, planes, n, page_size, kv heads of one, head_dim]."""
    shards = from_first_device(sent[0])
    mine = lax.dynamic_index_in_dim(shards, shard_idx(), keepdims=False)
    return write_pages(pool, mine, page_ids, on_cpu)


def _padded(shard: np.ndarray, num_pages: int) -> np.ndarray:
    if shard.shape[2] == num_pages:
        return shard
    padded = np.zeros((*shard.shape[:2], num_pages, *shard.shape[3:]), shard.dtype)
    padded[:, :, : shard.shape[2]] = shard
    return padded
