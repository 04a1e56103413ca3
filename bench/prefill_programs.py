"""All programs of a prefill worker, for a device that need not be here."""

from dataclasses import replace
from typing import Final

from bench.absent import POOL_PAGES
from model.buckets import prefill_buckets
from model.opening import OpenedModel
from model.programs import Program
from prefill.engine import PrefillEngine
from transfer.keeping import most_saving

_MAX_SEQS: Final = 16


def prefill_programs(opened: OpenedModel, chunk: int) -> list[Program]:
    """Not compiled; of chunks only the largest, of so many tokens. The host keeps prefixes."""
    sizes = opened.context_length, opened.kv.page_size, opened.kv.groups, opened.run_pages
    buckets = prefill_buckets(chunk, _MAX_SEQS, *sizes)
    buckets = replace(buckets, tokens=buckets.tokens[-1:])
    return PrefillEngine.programs_of(opened, buckets, POOL_PAGES, most_saving(buckets.run_pages))
