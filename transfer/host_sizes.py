"""How many pages of prefixes the host's memory keeps, and whether they fit in it."""

import logging
from typing import Final

from model.config import KVSpec
from model.errors import ModelError
from model.host_memory import available_bytes
from model.opening import OpenedModel
from model.page_runs import RUNS_PLACED_AHEAD, memory_pinner
from model.programs import mib
from model.promises import PROMISES
from transfer.host_pages import HostPages
from transfer.keeping import RunEngine
from transfer.worker_config import WorkerConfig

log = logging.getLogger(__name__)

# Of pages that come back from the host, in buffers of up to twice their size: those on their way
# to the device, and the next one.
_RUNS_RETURNING: Final = 2 * (RUNS_PLACED_AHEAD + 1)


def check_host(config: WorkerConfig, opened: OpenedModel) -> None:
    """Promise what will be taken. Raises ModelError if the host has too little memory.

    Called before weights are loaded, as far as the flags tell how much, in all processes of a
    group, of which the first takes it.
    """
    if config.node_rank == 0 and (config.hicache_size or config.max_total_tokens):
        num_pages = config.max_total_tokens // opened.kv.page_size
        with PROMISES.turn():
            _promise(_most_kept(config, opened.kv, num_pages), opened.kv)


def take_host(config: WorkerConfig, opened: OpenedModel, engine: RunEngine) -> HostPages:
    """Take the host's memory for pages that the caches evict. Raises ModelError as `check_host`."""
    kv = opened.kv
    most = _most_kept(config, kv, engine.num_pages)
    idle_bytes = _RUNS_RETURNING * engine.max_run_pages * kv.page_bytes
    with PROMISES.turn():
        _promise(most, kv, idle_bytes)
    log.info("host memory: %d pages of prefixes %s", most, mib(most * kv.all_layers_bytes))
    shape = kv.num_layers, kv.planes, kv.page_size, kv.num_kv_heads // config.tp_size, kv.head_dim
    pin = memory_pinner(opened.model.mesh)
    return HostPages(most, config.tp_size, shape, kv.stored_dtype, kv.groups, idle_bytes, pin)


def _most_kept(config: WorkerConfig, kv: KVSpec, num_pages: int) -> int:
    """Pages of each group. num_pages: of each group in a rank's pool."""
    if config.hicache_size:
        return config.hicache_size * 10**9 // kv.all_layers_bytes
    return int(config.hicache_ratio * num_pages * config.dp_size)


def _promise(most: int, kv: KVSpec, beside: int = 0) -> None:
    """Raises ModelError if the host has no room for so many pages. Call in a turn.

    beside: bytes of other memory for them.
    """
    needed = most * kv.all_layers_bytes + beside
    left = available_bytes() - PROMISES.outstanding_bytes() - PROMISES.outstanding_own_bytes()
    if not most or needed > left:
        raise ModelError(
            f"--enable-hierarchical-cache: {most} pages take {mib(needed)} of the host's memory, "
            f"of which {mib(max(left, 0))} are left; choose a --hicache-size or --hicache-ratio "
            "that keeps one page at least and fits"
        )
    PROMISES.reserve(needed)
