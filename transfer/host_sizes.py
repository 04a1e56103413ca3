"""How many pages of prefixes the host's memory keeps, and whether they fit in it."""

import logging
from collections.abc import Sequence
from typing import Final, NamedTuple

import psutil

from model.config import KVSpec
from model.errors import MemoryShortage, ModelError
from model.host_memory import available_bytes, total_bytes
from model.opening import OpenedModel
from model.page_runs import RUNS_PLACED_AHEAD, memory_pinner
from model.programs import mib
from model.promises import PROMISES
from transfer.gathered import RunEngine
from transfer.host_pages import HostMemory, HostPages
from transfer.worker_config import WorkerConfig

log = logging.getLogger(__name__)

# Of pages that come back from the host, in buffers of up to twice their size: those on their way
# to the device, and the next one.
_RUNS_RETURNING: Final = 2 * (RUNS_PLACED_AHEAD + 1)


class Hosts(NamedTuple):
    """By rank: which of its pages the hosts of its nodes have, and what this one has of them."""

    pages: Sequence[HostPages]
    memories: Sequence[HostMemory | None]

    @property
    def num_pages(self) -> int:
        """Pages of each group that all of them can have."""
        return sum(host.num_pages for host in set(self.pages))


def check_host(config: WorkerConfig, opened: OpenedModel) -> None:
    """Promise what this node will take. Raises ModelError if its host has too little memory.

    Called before weights are loaded, as far as the flags tell how much.
    """
    if config.hicache_size or config.max_total_tokens:
        num_pages = config.max_total_tokens // opened.kv.page_size
        with PROMISES.turn():
            _promise(config, opened.kv, _most_kept(config, opened.kv, num_pages))


def take_hosts(config: WorkerConfig, opened: OpenedModel, engine: RunEngine) -> Hosts:
    """Take this node's memory for pages that the caches evict, to keep account of all nodes'.

    Raises ModelError as `check_host`.
    """
    memories = take_memories(config, opened, engine)
    most = _most_kept(config, opened.kv, engine.num_pages)
    # A page can come back to the ranks that have their shards on the same nodes.
    hosts = {nodes: HostPages(most, opened.kv.groups) for nodes in set(config.nodes)}
    return Hosts([hosts[nodes] for nodes in config.nodes], memories)


def take_memories(
    config: WorkerConfig, opened: OpenedModel, engine: RunEngine
) -> list[HostMemory | None]:
    """Take this node's memory, by rank. Raises ModelError as `check_host`."""
    kv = opened.kv
    most = _most_kept(config, kv, engine.num_pages)
    idle_bytes = returning_bytes(kv, engine.max_run_pages)
    with PROMISES.turn():
        taken = _promise(config, kv, most, idle_bytes)
    log.info("host memory: %d pages of prefixes %s", most, mib(taken))
    shape = kv.num_layers, kv.planes, kv.page_size, kv.num_kv_heads // config.tp_size, kv.head_dim
    pin = memory_pinner(opened.model.mesh)
    memories: dict[tuple[int, ...], HostMemory | None] = {}
    for nodes in config.nodes:
        num_shards = nodes.count(config.node_rank)
        if nodes not in memories:
            idle = idle_bytes * num_shards // config.tp_size
            sizes = most, num_shards, shape, kv.stored_dtype, kv.groups, idle, pin
            memories[nodes] = HostMemory(*sizes) if num_shards else None
    return [memories[nodes] for nodes in config.nodes]


def pages_kept(kv: KVSpec, pool_pages: int, size: int, ratio: float, apart: int = 1) -> int:
    """Pages of each group that the host keeps. size, ratio: of --hicache-size and --hicache-ratio.

    pool_pages: of each group, in the pools of all ranks. apart: sets of nodes that have ranks, each
    of which keeps its own. Raises ModelError if they keep none.
    """
    most = (size * 10**9 // kv.all_layers_bytes if size else int(ratio * pool_pages)) // apart
    if not most:
        raise ModelError(
            f"--enable-hierarchical-cache keeps not one page of {mib(kv.all_layers_bytes)} in the "
            "host's memory; choose a larger --hicache-size or --hicache-ratio"
        )
    return most


def returning_bytes(kv: KVSpec, run_pages: int) -> int:
    """Bytes of the host's memory for pages on their way back. run_pages: of the longest run."""
    return _RUNS_RETURNING * run_pages * kv.page_bytes


def _most_kept(config: WorkerConfig, kv: KVSpec, num_pages: int) -> int:
    """See pages_kept. num_pages: of each group in a rank's pool."""
    pool_pages, apart = num_pages * config.dp_size, len(set(config.nodes))
    return pages_kept(kv, pool_pages, config.hicache_size, config.hicache_ratio, apart)


def _promise(config: WorkerConfig, kv: KVSpec, most: int, idle_bytes: int = 0) -> int:
    """Promise this node's part of so many pages, in bytes. Call in a turn.

    idle_bytes: of other memory for them, if a node has all shards. Raises ModelError if the host
    has no room for it, and MemoryShortage if something else has that room now.
    """
    num_shards = sum(nodes.count(config.node_rank) for nodes in set(config.nodes))
    pages_bytes = most * kv.all_layers_bytes * num_shards // config.tp_size
    needed = pages_bytes + idle_bytes * num_shards // config.tp_size
    own = PROMISES.outstanding_own_bytes()
    left = available_bytes() - PROMISES.outstanding_bytes() - own
    if needed > left:
        alone = psutil.Process().memory_info().rss + own + needed
        kind = MemoryShortage if alone <= total_bytes() else ModelError
        raise kind(
            f"--enable-hierarchical-cache: {most} pages take {mib(needed)} of the host's memory, "
            f"of which {mib(max(left, 0))} are left; choose a --hicache-size or --hicache-ratio "
            "that fits"
        )
    PROMISES.reserve(needed)
    return pages_bytes
