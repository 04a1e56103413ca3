"""Builds an engine from the flags: what every process of a prefill group does at start-up."""

from model.buckets import PrefillBuckets, pages_for, prefill_buckets
from model.opening import BeforeWeights, OpenedModel, at_once, on_cpu
from prefill.config import PrefillConfig
from prefill.engine import PrefillEngine
from transfer.host_sizes import check_host
from transfer.keeping import most_saving
from transfer.opened import open_configured


def build_engine(
    config: PrefillConfig, before_weights: BeforeWeights = at_once
) -> tuple[PrefillEngine, OpenedModel, PrefillBuckets]:
    """Load the model, compile it, and take memory. Raises ModelError if something does not fit."""
    chunk = config.chunked_prefill_size or (512 if on_cpu() else 8192)

    def check(opened: OpenedModel) -> None:
        if config.enable_hierarchical_cache:
            check_host(config, opened)
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
    engine = PrefillEngine(
        opened,
        buckets,
        config.mem_fraction_static,
        config.max_total_tokens,
        natural,
        most_saving=most_saving(buckets.run_pages) if config.enable_hierarchical_cache else 0,
    )
    return engine, opened, buckets
