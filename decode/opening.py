"""Builds an engine from the flags: what every process of a decode group does at start-up."""

from typing import NamedTuple

from decode.config import ANY_PROMPT, DecodeConfig
from decode.engine import DecodeEngine
from decode.local import local_buckets
from decode.rings import ringed_window
from model.buckets import PrefillBuckets, decode_buckets
from model.opening import BeforeWeights, OpenedModel, at_once, on_cpu
from transfer.role import PoolFacts, open_configured


class Built(NamedTuple):
    """An engine, and what its worker has to know of it."""

    engine: DecodeEngine
    opened: OpenedModel
    rank_slots: int
    local: PrefillBuckets | None  # shapes of chunks of prompts that are computed here
    ring_pages: int


def build_engine(config: DecodeConfig, before_weights: BeforeWeights = at_once) -> Built:
    """Load the model, compile it, and take memory. Raises ModelError if something does not fit."""
    chunk = config.chunked_prefill_size or (512 if on_cpu() else 2048)
    opened = open_configured(config, chunk if config.local_prefill_tokens else 0, before_weights)
    rank_slots = config.max_running_requests // config.dp_size or (16 if on_cpu() else 256)
    page_size = opened.kv.page_size
    local, local_tokens = None, most_local(config, opened.context_length)
    window = ringed_window(PoolFacts.of(opened), local_tokens)
    buckets = decode_buckets(
        rank_slots,
        opened.context_length,
        page_size,
        config.drafting,
        window,
        opened.run_pages,
    )
    if local_tokens:
        local = local_buckets(local_tokens, chunk, page_size)
    engine = DecodeEngine(
        opened, buckets, config.mem_fraction_static, config.max_total_tokens, local
    )
    return Built(engine, opened, rank_slots, local, buckets.ring_pages)


def most_local(config: DecodeConfig, context_length: int) -> int:
    """Tokens of the longest prompt that decode computes itself."""
    limit = config.local_prefill_tokens
    return context_length if limit == ANY_PROMPT else min(limit, context_length)
