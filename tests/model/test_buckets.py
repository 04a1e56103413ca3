"""Padded shapes come from lists that cover every size; sizes that do not tile are refused."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.buckets import (
    ADMIT_ROWS,
    MAX_RUN_PAGES,
    bucket_for,
    check_page_size,
    chunk_sizes,
    decode_buckets,
    geometric,
    list_sizes,
    pages_for,
    prefill_buckets,
    run_pages_on_cpu,
)
from model.errors import ModelError


def test_geometric_sizes_end_at_the_largest() -> None:
    assert geometric(16, 512, 4) == (32, 128, 512)
    assert geometric(16, 16, 4) == (16,)
    assert geometric(16, 8, 4) == (8,)


def test_long_chunks_double_and_short_ones_are_four_times_as_long_as_the_last() -> None:
    assert chunk_sizes(8192) == (32, 128, 512, 1024, 2048, 4096, 8192)
    assert chunk_sizes(1536) == (48, 192, 768, 1536)
    assert chunk_sizes(512) == (32, 128, 512)
    assert chunk_sizes(16) == (16,)


@given(st.integers(1, 64), st.integers(1, 10_000), st.integers(2, 8))
def test_geometric_sizes_ascend_and_keep_their_bounds(
    smallest: int, largest: int, factor: int
) -> None:
    sizes = geometric(smallest, largest, factor)
    assert list(sizes) == sorted(set(sizes))
    assert sizes[-1] == largest
    assert all(size >= min(smallest, largest) for size in sizes)


@given(st.integers(0, 512))
def test_the_smallest_bucket_that_fits_is_chosen(size: int) -> None:
    sizes = (32, 128, 512)
    assert bucket_for(size, sizes) == min(bucket for bucket in sizes if bucket >= size)


def test_a_size_above_the_largest_bucket_is_our_bug() -> None:
    with pytest.raises(AssertionError, match="513 is above the largest bucket 512"):
        bucket_for(513, (128, 512))


def test_pages_are_rounded_up() -> None:
    assert [pages_for(tokens, 16) for tokens in (0, 1, 16, 17)] == [0, 1, 1, 2]


@pytest.mark.parametrize(
    ("page_size", "chunk", "context", "says"),
    [
        (12, 48, 96, "power of two, got 12"),
        (0, 48, 96, "power of two, got 0"),
        (16, 32, 100, "16 does not divide the context length 100"),
        (16, 24, 96, "16 does not divide --chunked-prefill-size 24"),
    ],
)
def test_numbers_that_do_not_tile_are_refused_by_name(
    page_size: int, chunk: int, context: int, says: str
) -> None:
    with pytest.raises(ModelError, match=says):
        check_page_size(page_size, chunk, context)


@given(st.integers(1, 8), st.integers(0, 5), st.integers(1, 64), st.integers(1, 64))
def test_prefill_shapes_hold_every_chunk(
    max_seqs: int, log_page: int, chunk_pages: int, context_pages: int
) -> None:
    page_size = 2**log_page
    context = context_pages * page_size
    buckets = prefill_buckets(chunk_pages * page_size, max_seqs, context, page_size)
    assert buckets.tokens[-1] == chunk_pages * page_size
    assert buckets.seqs == max_seqs
    # The first prompt of a chunk always fits, whatever its length.
    assert buckets.pages >= pages_for(context, page_size)
    assert 1 <= buckets.run_pages[-1] <= MAX_RUN_PAGES
    assert bucket_for(1, buckets.run_pages) >= 1
    # Where there are several lists, prompts that begin in a chunk fit the first one.
    for tokens in buckets.tokens:
        lists = list_sizes(buckets, tokens, page_size)
        assert lists[-1] == buckets.pages
        assert all(2 * one <= other for one, other in pairwise(lists))
        whole, rest = divmod(tokens - max_seqs + 1, page_size)
        if tokens >= max_seqs and len(lists) > 1:
            # The case with most pages: all prompts but one have one token each.
            assert max_seqs - 1 + whole + (rest > 0) <= lists[0]


@pytest.mark.parametrize(
    ("page_bytes", "most"), [(4 << 10, 32), (512 << 10, 32), (3 << 20, 2), (20 << 20, 1)]
)
def test_on_a_cpu_large_pages_travel_a_few_at_a_time(page_bytes: int, most: int) -> None:
    run_pages = run_pages_on_cpu(page_bytes)
    assert run_pages == most
    sizes = prefill_buckets(512, 1, 512, 16, run_pages=run_pages).run_pages
    assert sizes == decode_buckets(1, 512, 16, run_pages=run_pages).run_pages
    assert sizes[-1] == most


@given(st.integers(1, 300), st.integers(1, 100))
def test_decode_shapes_hold_every_batch(max_running: int, context_pages: int) -> None:
    buckets = decode_buckets(max_running, 16 * context_pages, 16)
    assert buckets.slots[0] == 1
    assert buckets.slots[-1] == max_running
    assert list(buckets.slots) == sorted(set(buckets.slots))
    assert all(after <= 2 * before for before, after in pairwise(buckets.slots))
    assert buckets.pages_per_slot == context_pages
    assert 1 <= buckets.admit_rows <= min(ADMIT_ROWS, max_running)
