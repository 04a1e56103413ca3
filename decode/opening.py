"""Builds an engine from the flags: what every process of a decode group does at start-up."""

import logging
from typing import NamedTuple

from decode.config import ANY_PROMPT, DecodeConfig
from decode.engine import DecodeEngine
from decode.local import local_buckets
from decode.rings import ringed_window
from model.buckets import DecodeBuckets, PrefillBuckets, decode_buckets
from model.opening import BeforeWeights, OpenedModel, at_once, on_cpu
from model.page_runs import memory_pinner
from model.promises import PROMISES
from transfer.backend import OnReceiverEvent
from transfer.choice import arriving_bytes, check_staging, open_receiver
from transfer.host_sizes import check_host
from transfer.keeping import most_saving
from transfer.opened import PoolFacts, open_configured
from transfer.ports import bind
from transfer.receiver import Receiver
from transfer.rpc import Security
from transfer.tcp import DATA_FLAGS

log = logging.getLogger(__name__)


class Built(NamedTuple):
    """An engine, and what its worker has to know of it."""

    engine: DecodeEngine
    opened: OpenedModel
    rank_slots: int
    local: PrefillBuckets | None  # shapes of chunks of prompts that are computed here
    ring_pages: int


def build_engine(config: DecodeConfig, before_weights: BeforeWeights = at_once) -> Built:
    """Load the model, compile it, and take memory.

    Raises ModelError or ConfigError if something does not fit, before it loads weights where that
    can be known.
    """
    chunk = config.chunked_prefill_size or (512 if on_cpu() else 2048)
    slots, most = config.dp_size * _rank_slots(config), config.max_queued_requests
    if slots > most:
        log.warning("of %d slots %d can be used: raise --max-queued-requests", slots, most)

    def check(opened: OpenedModel) -> None:
        _buckets(config, opened)
        if keeps_prefixes(config):
            check_host(config, opened)
        check_staging(config, opened.kv, config.transfer_staging_bytes)
        if on_cpu() and config.local_prefill_tokens != ANY_PROMPT:
            PROMISES.lent_bytes = arriving_bytes(config, opened.kv, config.transfer_staging_bytes)
        before_weights(opened)

    checked = chunk if config.local_prefill_tokens else config.chunked_prefill_size
    opened = open_configured(config, checked, check)
    local, local_tokens = None, most_local(config, opened.context_length)
    buckets = _buckets(config, opened)
    if local_tokens:
        local = local_buckets(local_tokens, chunk, opened.kv.page_size, opened.padding_costs)
    engine = DecodeEngine(
        opened,
        buckets,
        config.mem_fraction_static,
        config.max_total_tokens,
        local,
        most_saving=most_saving(buckets.run_pages) if keeps_prefixes(config) else 0,
    )
    return Built(engine, opened, _rank_slots(config), local, buckets.ring_pages)


def check_data_port(config: DecodeConfig) -> None:
    """Raises ConfigError for a port that is taken: `open_data` listens only when all is built."""
    bind(_data_host(config), config.data_port, DATA_FLAGS).close()


def open_data(
    config: DecodeConfig, security: Security, opened: OpenedModel, on_event: OnReceiverEvent
) -> Receiver:
    """Where this process takes pages, not started. Raises ConfigError as `open_receiver`."""
    return open_receiver(
        config,
        security,
        host=_data_host(config),
        port=config.data_port,
        staging_bytes=config.transfer_staging_bytes,
        pin=memory_pinner(opened.model.mesh),
        kv=opened.kv,
        on_event=on_event,
    )


def _data_host(config: DecodeConfig) -> str:
    return config.data_host or config.host


def keeps_prefixes(config: DecodeConfig) -> bool:
    """Whether the host keeps what the prefix caches evict: what was sent can be sent again."""
    return config.enable_hierarchical_cache and config.local_prefill_tokens != 0


def _rank_slots(config: DecodeConfig) -> int:
    return config.max_running_requests // config.dp_size or (16 if on_cpu() else 256)


def _buckets(config: DecodeConfig, opened: OpenedModel) -> DecodeBuckets:
    """Shapes of steps. Raises ModelError for flags that do not fit each other."""
    local_tokens = most_local(config, opened.context_length)
    return decode_buckets(
        _rank_slots(config),
        opened.context_length,
        opened.kv.page_size,
        config.drafting,
        ringed_window(PoolFacts.of(opened), local_tokens),
        opened.run_pages,
    )


def most_local(config: DecodeConfig, context_length: int) -> int:
    """Tokens of the longest prompt that decode computes itself."""
    limit = config.local_prefill_tokens
    return context_length if limit == ANY_PROMPT else min(limit, context_length)
