"""Every shape that gets compiled, listed before traffic; padding is chosen here alone."""

from bisect import bisect_left
from dataclasses import dataclass
from typing import NamedTuple

from model.errors import ModelError

LIST_FACTOR = 4  # ratio of successive lengths of a chunk's list of pages, where there are several
MAX_SEQS_PER_CHUNK = 1024  # each has a row of logits
_LONG_CHUNK = 512
_SHORTEST_CHUNK = 16


def geometric(smallest: int, largest: int, factor: int) -> tuple[int, ...]:
    """Ascending sizes up to `largest`, each `factor` times the last, none below `smallest`."""
    assert smallest > 0
    assert factor > 1
    sizes = [largest]
    while sizes[-1] // factor >= smallest:
        sizes.append(sizes[-1] // factor)
    return tuple(reversed(sizes))


def chunk_sizes(largest: int) -> tuple[int, ...]:
    """Ascending lengths of chunks up to the largest.

    Long chunks double, since padding is computed all the same: on an H200 a prompt of 1,024 tokens
    took 37 ms in a chunk of 2,048. Short ones grow by a factor of four.
    """
    sizes = [largest]
    while True:
        smaller = sizes[-1] // (2 if sizes[-1] >= 2 * _LONG_CHUNK else 4)
        if smaller < _SHORTEST_CHUNK:
            return tuple(reversed(sizes))
        sizes.append(smaller)


def bucket_for(size: int, buckets: tuple[int, ...]) -> int:
    """The smallest bucket that holds `size`. Asking for more than the largest is our bug."""
    idx = bisect_left(buckets, size)
    assert idx < len(buckets), f"{size} is above the largest bucket {buckets[-1]}"
    return buckets[idx]


def pages_for(num_tokens: int, page_size: int) -> int:
    """Pages that hold num_tokens token positions."""
    return -(-num_tokens // page_size)


def touched_pages(num_positions: int, page_size: int) -> int:
    """The most pages that so many consecutive positions can touch, wherever they begin."""
    return 1 if num_positions < 2 else (num_positions - 2) // page_size + 2


def mask_words(vocab_size: int) -> int:
    """Words of a mask: bit t % 32 of word t // 32 stands for token t."""
    return -(-vocab_size // 32)


@dataclass(frozen=True)
class PrefillBuckets:
    """Shapes of the prefill programs.

    tokens: padded lengths of a packed chunk. seqs: prompts in one chunk. pages: capacity of
    the chunk's list of context pages (its cost follows the pages in use, not the capacity; where it
    does not, there are shorter lists: `list_sizes`).
    run_pages: lengths of a gathered run of pages on its way out. staged_pages: pages of each rank
    that may be gathered but not yet on the host, padding included. padding_costs: as much time as
    tokens do, as on a CPU unless the network is small; elsewhere a short chunk takes hardly less
    time than one a few times as long.
    """

    tokens: tuple[int, ...]
    seqs: int
    pages: int
    run_pages: tuple[int, ...]
    staged_pages: int
    padding_costs: bool = False

    @property
    def dear_tokens(self) -> tuple[int, ...]:
        """`tokens` where padding costs, as of model.pieces.ChunkLimits; () where it does not."""
        return self.tokens if self.padding_costs else ()


def list_sizes(buckets: PrefillBuckets, tokens: int, page_size: int) -> tuple[int, ...]:
    """Ascending lengths of the list of pages, for a chunk whose cost follows the list's length.

    The first is enough for prompts that begin in the chunk, the last for any prompts.
    """
    size, sizes = pages_for(tokens, page_size) + buckets.seqs, []
    while 2 * size <= buckets.pages:
        sizes.append(size)
        size *= LIST_FACTOR
    return (*sizes, buckets.pages)


class Drafting(NamedTuple):
    """How a decode step drafts the tokens that may follow a slot's last one."""

    num_tokens: int
    min_match: int  # tokens that must have occurred before
    max_match: int  # most tokens that are compared: the longer match wins, then the later one


@dataclass(frozen=True)
class DecodeBuckets:
    """Shapes of the decode programs.

    slots: padded batch sizes of a step. pages_per_slot: width of the page table.
    run_pages: lengths of a run of pages that is put in place. admit_rows: slots set in one call.
    drafting: for steps that have rows to spare; None: no step drafts. ring_pages: pages that each
    slot has for layers with a window; 0: as many as for the other layers.
    """

    slots: tuple[int, ...]
    pages_per_slot: int
    run_pages: tuple[int, ...]
    admit_rows: int
    drafting: Drafting | None = None
    ring_pages: int = 0

    def drafting_of(self, slots: int) -> Drafting | None:
        """How a step of this bucket drafts tokens, if it does.

        Drafted tokens take rows of their own, which idle slots leave free: no step has more rows
        than the largest bucket, except a step of a single slot.
        """
        if self.drafting is None:
            return None
        num_rows = slots * (1 + self.drafting.num_tokens)
        return self.drafting if slots == 1 or num_rows <= self.slots[-1] else None


RUN_LENGTHS = geometric(1, 32, 4)  # of pages that are gathered, sent or put in place at once
MAX_RUN_PAGES = RUN_LENGTHS[-1]
# On a CPU. Larger arrays are new memory each time (glibc: DEFAULT_MMAP_THRESHOLD_MAX, 32 MiB, less
# where several are in use at once), and touching that costs four times as much as the copy.
_MAX_RUN_BYTES = 16 << 20
ADMIT_ROWS = 4


def run_pages_on_cpu(page_bytes: int) -> int:
    """The most pages of a run on a CPU. page_bytes: of a page on one device."""
    return max((n for n in RUN_LENGTHS if n * page_bytes <= _MAX_RUN_BYTES), default=1)


def check_page_size(page_size: int, chunk_size: int, context_length: int) -> None:
    """Raises ModelError when pages would not tile a chunk or the context."""
    if page_size < 1 or page_size & (page_size - 1):
        raise ModelError(f"--page-size must be a power of two, got {page_size}")
    if context_length % page_size:
        raise ModelError(
            f"--page-size {page_size} does not divide the context length {context_length}; "
            "give a --page-size or --context-length that fits"
        )
    if chunk_size % page_size:
        raise ModelError(
            f"--page-size {page_size} does not divide --chunked-prefill-size {chunk_size}; "
            "give values that fit"
        )


def prefill_buckets(
    chunk_size: int,
    max_seqs: int,
    context_length: int,
    page_size: int,
    groups: int = 1,
    run_pages: int = MAX_RUN_PAGES,
    padding_costs: bool = False,
) -> PrefillBuckets:
    """Every program serves every context length.

    groups: see model.config.KVSpec. run_pages: the most to gather at once. padding_costs: see
    PrefillBuckets.
    """
    check_page_size(page_size, chunk_size, context_length)
    run = min(run_pages, pages_for(chunk_size, page_size))
    return PrefillBuckets(
        tokens=chunk_sizes(chunk_size),
        seqs=max_seqs,
        pages=2 * pages_for(context_length, page_size) + max_seqs,
        run_pages=geometric(1, run, 4),
        # Pages that two chunks compute. A prompt with a cached prefix has up to its context more.
        staged_pages=2 * groups * (pages_for(chunk_size, page_size) + run),
        padding_costs=padding_costs,
    )


def decode_buckets(
    max_running: int,
    context_length: int,
    page_size: int,
    drafting: Drafting | None = None,
    window: int = 0,
    run_pages: int = MAX_RUN_PAGES,
) -> DecodeBuckets:
    """Slot buckets double; the largest is --max-running-requests.

    window: positions for which windowed layers keep pages, where they have pages of their own; 0:
    for all. run_pages: the most to put in place at once. Raises ModelError when pages do not tile
    the context, or drafts would reach past one page.
    """
    check_page_size(page_size, page_size, context_length)
    if drafting is not None and drafting.num_tokens >= page_size:
        raise ModelError(
            f"--speculative-num-draft-tokens {drafting.num_tokens} must be below --page-size "
            f"{page_size}: a step enters one page for each slot"
        )
    per_slot = pages_for(context_length, page_size)
    # A step must not overwrite what the first of its tokens still sees: beyond the window a ring
    # has room for at least page_size - 1 positions, and a step drafts fewer than page_size tokens.
    ring = touched_pages(window, page_size) if window else 0
    slots = [1]
    while slots[-1] < max_running:
        slots.append(min(slots[-1] * 2, max_running))
    return DecodeBuckets(
        slots=tuple(slots),
        pages_per_slot=per_slot,
        run_pages=geometric(1, min(run_pages, per_slot), 4),
        admit_rows=min(ADMIT_ROWS, max_running),
        drafting=drafting,
        ring_pages=ring if ring < per_slot else 0,
    )
