"""Attention kernels over pages, however the work is cut, against the plain form."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model import kernels
from model.attention import ChunkBatch
from model.kernels import tiles
from model.kernels.attention import paged_decode as decoding
from model.kernels.attention import paged_prefill as prefilling
from model.kernels.attention import reference
from tests.model.harness import i32

PAGES, HEADS, GROUP, HEAD_DIM = 24, 2, 3, 32
# Blocks within a page and across pages; one program per row, and several, some without work.
DECODE_CUTS = [
    decoding.Cut(positions=16, least=16, programs=1),
    decoding.Cut(positions=16, least=16, programs=60),
    decoding.Cut(positions=16, least=16, programs=400),  # more parts than are joined at once
    decoding.Cut(positions=64, least=64, programs=60),
    decoding.Cut(positions=64, least=256, programs=1000, most_queries=2),
    decoding.Cut(positions=16, least=16, most=32, programs=6),  # programs take several turns
]
PREFILL_CUTS = [
    prefilling.Cut(rows=16, positions=16),
    prefilling.Cut(rows=64, positions=64),
    prefilling.Cut(rows=2, positions=32),
]


def _pool(page_size: int, dtype: Any) -> jax.Array:
    """A pool of random numbers, or of the bytes of fp8."""
    drawn = np.random.default_rng(page_size).standard_normal(
        (2, 2, PAGES, page_size, HEADS, HEAD_DIM), np.float32
    )
    if dtype == jnp.uint8:
        return jax.lax.bitcast_convert_type(jnp.asarray(drawn, jnp.float8_e4m3fn), jnp.uint8)
    return jnp.asarray(drawn, dtype)


def _queries(rows: int, dtype: Any) -> jax.Array:
    drawn = np.random.default_rng(rows).standard_normal((rows, HEADS, GROUP, HEAD_DIM), np.float32)
    return jnp.asarray(drawn, dtype)


# Each compiled as one program, as in use, but not optimized, since it is called once or twice.
soon = {"xla_backend_optimization_level": 0}
plain_decode, plain_prefill = (
    jax.jit(partial(plain, accelerator=True), static_argnames="value_dim", compiler_options=soon)
    for plain in (reference.decode, reference.prefill)
)
paged_decode, paged_prefill = (
    jax.jit(
        partial(kernel, interpret=True),
        static_argnames=("value_dim", "cut"),
        compiler_options=soon,
    )
    for kernel in (decoding.paged_decode, prefilling.paged_prefill)
)
SINKS = jnp.asarray([[0.5, 4.0, -3.0], [0.0, -1.0, 2.0]], jnp.float32)


@pytest.mark.parametrize("cut", DECODE_CUTS)
@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("window", [None, 20, 100])
def test_decoding_finds_the_same_however_positions_are_split(
    cut: decoding.Cut, page_size: int, window: int | None
) -> None:
    pool, q = _pool(page_size, jnp.float32), _queries(5, jnp.float32)
    most = 6 * page_size
    far = i32([-1, 0, most - 1, page_size, 37 if page_size == 16 else 200])
    draw = np.random.default_rng(1)
    table = i32(np.array([draw.permutation(PAGES)[:6] for _ in range(5)]))
    args = q, pool, i32(1), far, table, SINKS, None if window is None else i32(window)
    found = paged_decode(*args, cut=cut)
    np.testing.assert_allclose(found, plain_decode(*args), atol=2e-6)


def test_pages_past_the_pool_are_some_page_and_count_for_nothing() -> None:
    pool, q = _pool(16, jnp.float32), _queries(2, jnp.float32)
    cut = decoding.Cut(positions=64, least=64)
    far, window = i32([70, 70]), i32(20)
    tables = i32([[4, 5, 6, 7, 8]] * 2), i32([[4, 5, 6, 7, 8], [-1, 10**9, -5, 7, 8]])
    found = [paged_decode(q, pool, i32(0), far, table, None, window, cut=cut) for table in tables]
    np.testing.assert_array_equal(found[0], found[1])


def test_a_row_is_computed_the_same_whatever_the_others_are() -> None:
    pool, q = _pool(16, jnp.float32), _queries(5, jnp.float32)
    table = i32(np.random.default_rng(3).permutation(PAGES)[:6][None].repeat(5, 0))
    cut = decoding.Cut(positions=16, least=16, most=32, programs=12)
    found = [
        decoding.paged_decode(q, pool, i32(1), i32(far), table, SINKS, cut=cut, interpret=True)
        for far in ([90, 90, 90, 90, 90], [-1, 5, 90, 40, 0], [95, 95, 90, -1, 95])
    ]
    for others in found[1:]:
        np.testing.assert_array_equal(others[2], found[0][2])


@pytest.mark.parametrize(
    ("rows", "heads", "splits"),
    [(1, 4, 17), (16, 4, 8), (64, 4, 2), (256, 4, 1), (1, 1, 17), (48, 1, 11), (528, 1, 1)],
)
def test_rows_have_as_many_parts_as_programs_run_at_once(
    rows: int, heads: int, splits: int
) -> None:
    assert decoding.splits_of(rows, heads, 1088, decoding.Cut()) == splits


def _chunk(page_size: int) -> ChunkBatch:
    """A long prompt, one that continues after cached positions, one of a single token; padding."""
    starts, lengths = [0, 3 * page_size + 5, 0], [90, 21, 1]
    rows: list[tuple[int, int]] = []
    listed: list[tuple[int, int, int]] = []
    free = iter(np.random.default_rng(2).permutation(PAGES))
    for seq, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        rows += [(position, seq) for position in range(start, start + length)]
        ends = range(0, start + length, page_size)
        listed += [(int(next(free)), seq, at) for at in ends]
    used = len(listed)
    rows += [(0, 3)] * 7
    listed += [(0, 3, 0)] * 4
    positions, seqs = zip(*rows, strict=True)
    nothing = [0] * len(rows)
    per_token = [nothing, positions, seqs, nothing]
    return ChunkBatch(*map(i32, [*per_token, *zip(*listed, strict=True), used]))


@pytest.mark.parametrize("cut", PREFILL_CUTS)
@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("window", [None, 20])
def test_chunks_find_the_same_however_tokens_and_positions_are_cut(
    cut: prefilling.Cut, page_size: int, window: int | None
) -> None:
    batch = _chunk(page_size)
    live = np.asarray(batch.seq_idx) < 3
    pool, q = _pool(page_size, jnp.float32), _queries(len(live), jnp.float32)
    args = q, pool, i32(1), batch, SINKS, None if window is None else i32(window)
    found = np.asarray(paged_prefill(*args, cut=cut))
    expected = np.asarray(plain_prefill(*args))
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found[live], expected[live], atol=2e-6)


def test_most_pages_of_a_long_prompt_are_seen_entirely() -> None:
    spans = prefilling.spans_of(_chunk(16), 16, 16, None)
    # The sixth tile has tokens of two sequences, so none of its pages is seen by all its tokens.
    assert np.asarray(spans.full_lasts - spans.full_firsts)[:5].tolist() == [0, 1, 2, 3, 4]
    assert np.asarray(spans.lasts - spans.firsts)[:5].tolist() == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.uint8])
def test_pages_of_narrow_numbers_are_read_as_what_they_are(dtype: Any) -> None:
    pool, q = _pool(16, dtype), _queries(4, jnp.bfloat16)
    table = i32(np.arange(24).reshape(4, 6))
    args = q, pool, i32(0), i32([95, 3, 40, 16]), table
    near: Callable[..., None] = np.testing.assert_allclose
    found = paged_decode(*args).astype(jnp.float32)
    near(found, plain_decode(*args).astype(jnp.float32), atol=0.02)
    batch = _chunk(16)
    q = _queries(len(batch.positions), jnp.bfloat16)
    live = np.asarray(batch.seq_idx) < 3
    chunk = q, pool, i32(0), batch
    seen = paged_prefill(*chunk).astype(jnp.float32)
    expected = plain_prefill(*chunk).astype(jnp.float32)
    near(np.asarray(seen)[live], np.asarray(expected)[live], atol=0.02)


@pytest.mark.parametrize(
    ("head_dim", "value_dim", "part", "dtype"),
    [
        (96, 64, 32, jnp.float32),
        (96, 64, 512, jnp.uint8),
        (64, 48, 512, jnp.float32),
        (64, 40, 512, jnp.uint8),
    ],
)
def test_of_values_that_begin_a_key_no_more_than_they_have_is_found(
    head_dim: int, value_dim: int, part: int, dtype: Any
) -> None:
    draw = np.random.default_rng(head_dim)
    drawn = draw.standard_normal((2, 1, PAGES, 16, 1, head_dim), np.float32)
    pool = jnp.asarray(drawn)
    if dtype == jnp.uint8:
        pool = jax.lax.bitcast_convert_type(pool.astype(jnp.float8_e4m3fn), jnp.uint8)
    of = jnp.float32 if dtype == jnp.float32 else jnp.bfloat16
    near: Callable[..., None] = partial(
        np.testing.assert_allclose, atol=2e-6 if dtype == jnp.float32 else 0.02
    )

    def queries(rows: int) -> jax.Array:
        return jnp.asarray(draw.standard_normal((rows, 1, 4, head_dim), np.float32), of)

    table = i32(np.arange(24).reshape(4, 6))
    args = queries(4), pool, i32(0), i32([95, 3, 40, 16]), table
    expected = plain_decode(*args, value_dim=value_dim).astype(jnp.float32)
    assert expected.shape == (4, 1, 4, value_dim)
    for programs in (1, 60):
        cut = decoding.Cut(positions=16, least=16, programs=programs, part=part)
        found = paged_decode(*args, value_dim=value_dim, cut=cut)
        near(found.astype(jnp.float32), expected)
    batch = _chunk(16)
    live = np.asarray(batch.seq_idx) < 3
    chunk = queries(len(live)), pool, i32(0), batch
    expected = plain_prefill(*chunk, value_dim=value_dim)
    seen = paged_prefill(*chunk, value_dim=value_dim)
    near(np.asarray(seen, np.float32)[live], np.asarray(expected, np.float32)[live])


def test_arrays_of_which_offsets_would_be_wrong_are_not_for_kernels() -> None:
    for size, dtype, indexed in (
        (2**31 - 1, jnp.uint8, True),
        (2**31, jnp.uint8, False),
        (2**32, jnp.uint8, False),
        (2**32 + 1, jnp.uint8, True),
        (2**31, jnp.bfloat16, False),
        (2**31 + 1, jnp.bfloat16, True),
    ):
        assert tiles.is_indexed(jax.ShapeDtypeStruct((size,), dtype)) is indexed


# Shared memory of an L40 and an A100, in bytes.
@pytest.mark.parametrize(
    ("shared", "queries", "rows", "wide"), [(101376, 32, 32, 32), (166912, 64, 64, 128)]
)
def test_a_program_has_as_many_queries_as_its_memory_takes(
    shared: int, queries: int, rows: int, wide: int
) -> None:
    assert decoding.cut_of(576, 128, 2, shared).most_queries == queries
    assert prefilling.cut_of(576, 2, shared).rows == rows
    assert prefilling.cut_of(256, 2, shared).rows == wide
    for most in (0, 232448):  # enough, and an H200's
        assert decoding.cut_of(576, 128, 2, most) == decoding.cut_of(576, 128, 2)
        assert prefilling.cut_of(256, 2, most) == prefilling.cut_of(256, 2)
    assert tiles.queries_within(64, 32, 576, 2, 1) == tiles.LEAST


def test_heads_of_other_sizes_and_processors_are_refused() -> None:
    shape = kernels.AttentionShape("gpu", "bfloat16", 64, 4, 8, 128)
    for backends in (kernels.DECODE_ATTENTION, kernels.PREFILL_ATTENTION):
        build = next(backend.build for backend in backends if backend.name == "paged")
        build(replace(shape, head_dim=576))
        with pytest.raises(NotImplementedError, match="for GPUs, this is cpu"):
            build(replace(shape, platform="cpu"))
        with pytest.raises(NotImplementedError, match="multiples of 16, heads have 72"):
            build(replace(shape, head_dim=72))
