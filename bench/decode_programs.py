"""All programs of a decode worker, for a device that need not be here."""

from dataclasses import replace

from bench.absent import POOL_PAGES
from decode.engine import DecodeEngine
from decode.rings import ringed_window
from model.buckets import Drafting, decode_buckets
from model.opening import OpenedModel
from model.programs import Program
from transfer.keeping import most_saving
from transfer.opened import PoolFacts


def decode_programs(opened: OpenedModel, slots: int, drafts: int = 0) -> list[Program]:
    """Not compiled; of steps only the largest, with so many slots. The host keeps prefixes.

    drafts: tokens that a step drafts for each slot; 0: none. The largest step that does so is there
    too: drafts take rows that idle slots leave free.
    """
    drafting = Drafting(drafts, 2, 4) if drafts else None
    window = ringed_window(PoolFacts.of(opened), 0)
    sizes = opened.context_length, opened.kv.page_size
    buckets = decode_buckets(slots, *sizes, drafting, window, opened.run_pages)
    drafting_slots = [each for each in buckets.slots if buckets.drafting_of(each) is not None]
    buckets = replace(buckets, slots=tuple(sorted({*drafting_slots[-1:], slots})))
    saving = 0 if buckets.ring_pages else most_saving(buckets.run_pages)  # rings are never kept
    return DecodeEngine.programs_of(opened, buckets, POOL_PAGES, most_saving=saving)
