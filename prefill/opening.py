"""Builds an engine from the flags: what every process of a prefill group does at start-up."""

from model.buckets import PrefillBuckets, pages_for, prefill_buckets
from model.opening import BeforeWeights, OpenedModel, at_once, on_cpu
from prefill.config import PrefillConfig
from prefill.engine import PrefillEngine
from transfer.opened import open_configured


def build_engine(
    config: PrefillConfig, before_weights: BeforeWeights = at_once
) -> tuple[PrefillEngine, OpenedModel, PrefillBuckets]:
    """Load the model, compile it, and take memory. Raises ModelError if something does not fit."""
    chunk = config.chunked_prefill_size or (512 if on_cpu() else 8192)
    opened = open_configured(config, chunk, before_weights)
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
        opened, buckets, config.mem_fraction_static, config.max_total_tokens, natural
    )
    return engine, opened, buckets
