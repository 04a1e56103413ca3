"""Builds an engine from the flags: what every process of a prefill group does at start-up."""

import logging

from model.buckets import PrefillBuckets, pages_for, prefill_buckets
from model.config import KVSpec
from model.errors import ModelError
from model.host_memory import available_bytes
from model.opening import BeforeWeights, OpenedModel, at_once, on_cpu
from model.page_runs import RUNS_PLACED_AHEAD, memory_pinner
from model.programs import mib
from model.promises import PROMISES
from prefill.config import PrefillConfig
from prefill.engine import PrefillEngine
from prefill.keeping import RUNS_SAVED_AHEAD
from transfer.host_pages import HostPages
from transfer.opened import open_configured

log = logging.getLogger(__name__)

# Of pages that come back from the host, in buffers of up to twice their size: those on their way
# to the device, and the next one.
_RUNS_RETURNING = 2 * (RUNS_PLACED_AHEAD + 1)


def build_engine(
    config: PrefillConfig, before_weights: BeforeWeights = at_once
) -> tuple[PrefillEngine, OpenedModel, PrefillBuckets]:
    """Load the model, compile it, and take memory. Raises ModelError if something does not fit."""
    chunk = config.chunked_prefill_size or (512 if on_cpu() else 8192)

    def check(opened: OpenedModel) -> None:
        kv = opened.kv
        most = _most_kept(config, kv, config.max_total_tokens // kv.page_size)
        if config.enable_hierarchical_cache and (config.hicache_size or most):
            with PROMISES.turn():
                _check_room(most, kv)
        before_weights(opened)

    opened = open_configured(config, chunk, check)
    page_size, context = opened.kv.page_size, opened.context_length
    chunk = min(chunk, pages_for(context, page_size) * page_size)
    buckets = prefill_buckets(
        chunk,
        config.max_seqs_per_chunk,
        context,
        page_size,
        opened.kv.groups,
        opened.run_pages,
        opened.padding_costs,
    )
    # On an accelerator, all memory that is left caches prefixes; on a CPU, the host keeps it.
    contexts = config.max_seqs_per_chunk if on_cpu() else 1 << 20
    natural = contexts * pages_for(context, page_size)
    saving = RUNS_SAVED_AHEAD * buckets.run_pages[-1] if config.enable_hierarchical_cache else 0
    engine = PrefillEngine(
        opened,
        buckets,
        config.mem_fraction_static,
        config.max_total_tokens,
        natural,
        most_saving=saving,
    )
    return engine, opened, buckets


def host_pages(
    config: PrefillConfig, opened: OpenedModel, engine: PrefillEngine
) -> HostPages | None:
    """Take the host's memory for pages that the caches evict; None if none are kept.

    Raises ModelError if the host has too little memory.
    """
    if not config.enable_hierarchical_cache:
        return None
    kv = opened.kv
    most = _most_kept(config, kv, engine.num_pages)
    idle_bytes = _RUNS_RETURNING * engine.max_run_pages * kv.page_bytes
    with PROMISES.turn():
        _check_room(most, kv, idle_bytes)
        PROMISES.add(most * kv.all_layers_bytes + idle_bytes)
    log.info("host memory: %d pages of prefixes %s", most, mib(most * kv.all_layers_bytes))
    shape = kv.num_layers, kv.planes, kv.page_size, kv.num_kv_heads // config.tp_size, kv.head_dim
    pin = memory_pinner(opened.model.mesh)
    return HostPages(most, config.tp_size, shape, kv.stored_dtype, kv.groups, idle_bytes, pin)


def _most_kept(config: PrefillConfig, kv: KVSpec, num_pages: int) -> int:
    """Pages of each group that the host is to keep. num_pages: see `host_pages`."""
    if config.hicache_size:
        return config.hicache_size * 10**9 // kv.all_layers_bytes
    return int(config.hicache_ratio * num_pages * config.dp_size)


def _check_room(most: int, kv: KVSpec, beside: int = 0) -> None:
    """Raises ModelError if the host has no room for so many pages. Call in a turn.

    beside: bytes of other memory that it needs.
    """
    left = available_bytes() - PROMISES.outstanding_bytes() - PROMISES.own_bytes()
    if not 0 < most * kv.all_layers_bytes <= left - beside:
        raise ModelError(
            f"--enable-hierarchical-cache: {most} pages of {mib(kv.all_layers_bytes)} do not fit "
            f"in the host's memory, {mib(max(left, 0))} of which are left; it takes one page at "
            "least, see --hicache-size and --hicache-ratio"
        )
