"""Paged attention against one softmax at a time, in plain numpy."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model import kernels
from model.attention import ChunkBatch
from model.kernels.attention import reference
from tests.model.harness import i32

PAGES, PAGE_SIZE, HEADS, GROUP, HEAD_DIM = 50, 16, 2, 3, 8
PLAIN = kernels.AttentionShape("cpu", "float32", PAGE_SIZE, HEADS, GROUP, HEAD_DIM)
SHAPES = {
    "plain": PLAIN,
    "sinks": replace(PLAIN, sinks=True),
    "gpt_oss": replace(PLAIN, sinks=True, windows=True),
    "cuda": replace(PLAIN, sinks=True, windows=True, platform="cuda"),
    "gpu": replace(PLAIN, platform="gpu", head_dim=48, interpreted=True),
    "gpu_gpt_oss": replace(
        PLAIN, platform="gpu", head_dim=16, sinks=True, windows=True, interpreted=True
    ),
    "gpu_latent": replace(
        PLAIN,
        platform="gpu",
        head_dim=80,
        planes=1,
        kv_heads=1,
        group=20,
        scale=0.1,
        windows=True,
        interpreted=True,
    ),
    "latent": replace(PLAIN, planes=1, kv_heads=1, group=4, scale=0.3, windows=True),
}
LAYER = 1
LAST = np.iinfo(np.int32).max  # the window of a layer without one
# One position, within a page, a page, a page and one, across pages, a decode block of 128, that and
# one, across blocks, longer than every context.
WINDOWS = (1, 5, 16, 17, 40, 128, 129, 200, 1000, LAST)
LISTED = [[31, 2, 17], [8], list(range(40, 22, -1))]


def _built(backends: Sequence[kernels.Backend]) -> list[Any]:
    """Every backend with every shape that it serves on this machine."""
    found: list[Any] = []
    for backend in backends:
        for name, shape in SHAPES.items():
            try:
                kernel = backend.build(shape)
            except NotImplementedError:
                continue
            found.append(pytest.param(kernel, shape, id=f"{backend.name}-{name}"))
    return found


PREFILL, DECODE = map(_built, (kernels.PREFILL_ATTENTION, kernels.DECODE_ATTENTION))


def _pool_and_queries(shape: kernels.AttentionShape, rows: int) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(4)
    pool = draw.standard_normal((2, shape.planes, PAGES, PAGE_SIZE, shape.kv_heads, shape.head_dim))
    queries = draw.standard_normal((rows, shape.kv_heads, shape.group, shape.head_dim))
    return pool.astype(np.float32), queries.astype(np.float32)


def _sinks(shape: kernels.AttentionShape) -> np.ndarray | None:
    """Sinks of usual size, and some that take nearly all, nearly nothing, all, nothing."""
    if not shape.sinks:
        return None
    return np.array([[0.5, 4.0, -3.0], [1e4, -1e4, -3e38]], np.float32)


def _windows(shape: kernels.AttentionShape) -> tuple[int | None, ...]:
    return WINDOWS if shape.windows else (None,)


def _one(
    shape: kernels.AttentionShape,
    pool: np.ndarray,
    q: np.ndarray,
    pages: list[int],
    position: int,
    window: int | None,
) -> np.ndarray:
    """Attention of one query. The sink is one more score, whose value is zero."""
    first = 0 if window is None else max(0, position - window + 1)
    flat = pool[LAYER][:, pages].reshape(shape.planes, -1, shape.kv_heads, shape.head_dim)
    keys, values = flat[0, first : position + 1], flat[-1, first : position + 1]
    scale = shape.head_dim**-0.5 if shape.scale is None else shape.scale
    scores = np.einsum("kgh,skh->kgs", q, keys).astype(np.float64) * scale
    sinks = _sinks(shape)
    if sinks is not None:
        scores = np.concatenate([scores, sinks[..., None]], axis=-1)
        values = np.concatenate([values, np.zeros_like(values[:1])])
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    found: np.ndarray = np.einsum("kgs,skh->kgh", weights / weights.sum(-1, keepdims=True), values)
    return found


def _extras(shape: kernels.AttentionShape, window: int | None) -> tuple[jax.Array | None, ...]:
    sinks = _sinks(shape)
    return None if sinks is None else jnp.asarray(sinks), None if window is None else i32(window)


@pytest.mark.parametrize("tile", [256, 3])  # one tile of all tokens; tiles of three, with padding
@pytest.mark.parametrize(("prefill", "shape"), PREFILL)
def test_packed_tokens_see_their_own_sequence_up_to_themselves(
    monkeypatch: pytest.MonkeyPatch,
    prefill: Callable[..., jax.Array],
    shape: kernels.AttentionShape,
    tile: int,
) -> None:
    monkeypatch.setattr(reference, "_PREFILL_TILES", (tile, tile))
    run = jax.jit(prefill)
    rows = [(0, 33), (0, 34), (0, 35), (1, 0), (1, 1), (2, 287), (2, 255)]
    pool, q = _pool_and_queries(shape, len(rows) + 1)
    listed = [
        (page, seq, i * PAGE_SIZE)
        for seq, pages in enumerate(LISTED)
        for i, page in enumerate(pages)
    ]
    used = len(listed)
    listed += [(0, 3, 0)] * 9
    out_of_range = PAGES * PAGE_SIZE
    positions = [position for _, position in rows] + [0]
    seq_idx = [seq for seq, _ in rows] + [3]
    per_token = [[0] * 8, positions, seq_idx, [out_of_range] * 8]
    batch = ChunkBatch(*map(i32, [*per_token, *zip(*listed, strict=True), used]))
    for window in _windows(shape):
        arrays = jnp.asarray(q), jnp.asarray(pool), i32(LAYER), batch
        out = np.asarray(run(*arrays, *_extras(shape, window)))
        assert np.isfinite(out).all()
        for row, (seq, position) in enumerate(rows):
            expected = _one(shape, pool, q[row], LISTED[seq], position, window)
            np.testing.assert_allclose(out[row], expected, atol=2e-6, err_msg=f"{window} {row}")


@pytest.mark.parametrize(("decode", "shape"), DECODE)
def test_each_row_sees_its_own_pages_and_padding_rows_see_nothing(
    decode: Callable[..., jax.Array], shape: kernels.AttentionShape
) -> None:
    run = jax.jit(decode)
    pool, q = _pool_and_queries(shape, 4)
    for window in _windows(shape):
        # From the second case on, short windows hide the first block of 128 from every row.
        for far in ([40, 0, 287, -1], [-1, -1, 270, -1], [-1, -1, 128, -1], [-1] * 4):
            table = np.zeros((4, 19), np.int32)
            for row, pages in enumerate(LISTED):
                table[row, : len(pages)] = pages
            arrays = jnp.asarray(q), jnp.asarray(pool), i32(LAYER), i32(far), i32(table)
            out = np.asarray(run(*arrays, *_extras(shape, window)))
            for row, position in enumerate(far):
                if position < 0:
                    assert (out[row] == 0).all()
                    continue
                expected = _one(shape, pool, q[row], LISTED[row], position, window)
                np.testing.assert_allclose(out[row], expected, atol=2e-6, err_msg=f"{window} {far}")


def test_blocks_of_an_accelerator_add_up_to_what_one_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = SHAPES["cuda"]
    pool, q = _pool_and_queries(shape, 4)
    table = np.zeros((4, 19), np.int32)
    for row, pages in enumerate(LISTED):
        table[row, : len(pages)] = pages
    arrays = jnp.asarray(q), jnp.asarray(pool), i32(LAYER), i32([40, 0, 287, -1]), i32(table)
    kernel = kernels.choose("decode_attention", kernels.DECODE_ATTENTION, shape)
    for window in _windows(shape):
        one = np.asarray(jax.jit(kernel)(*arrays, *_extras(shape, window)))
        with monkeypatch.context() as patch:
            patch.setattr(reference, "_SHORT_CONTEXT", 0)
            patch.setattr(reference, "_LARGE_BLOCK", 64)
            several = np.asarray(jax.jit(kernel)(*arrays, *_extras(shape, window)))
        np.testing.assert_allclose(several, one, atol=2e-6, err_msg=str(window))


@pytest.mark.parametrize(("decode", "shape"), DECODE)
def test_rows_far_apart_each_keep_their_own_window(
    decode: Callable[..., jax.Array], shape: kernels.AttentionShape
) -> None:
    """All rows read one sequence up to different positions; the earliest decides where to begin."""
    run = jax.jit(decode)
    pool, q = _pool_and_queries(shape, 4)
    pages = LISTED[2]
    table = i32(np.tile(np.array([*pages, 0]), (4, 1)))
    for window in _windows(shape):
        for positions in ([287, 131, 260, -1], [287, 286, -1, 257], [127, 128, 129, 255]):
            arrays = jnp.asarray(q), jnp.asarray(pool), i32(LAYER), i32(positions), table
            out = np.asarray(run(*arrays, *_extras(shape, window)))
            for row, position in enumerate(positions):
                if position >= 0:
                    expected = _one(shape, pool, q[row], pages, position, window)
                    np.testing.assert_allclose(
                        out[row], expected, atol=2e-6, err_msg=f"{window} {positions}"
                    )


@pytest.mark.parametrize(
    ("window", "positions", "unread"),
    [
        (5, [287, 200, -1], 1),  # the earliest position seen is 196
        (5, [287, 131, -1], 0),  # ... 127
        (4, [287, 131, -1], 1),  # ... 128
        (1, [-1, 256, 287], 2),
        (288, [287, -1, -1], 0),
        (LAST, [287, -1, -1], 0),
    ],
)
def test_decoding_reads_no_block_before_every_rows_window(
    window: int, positions: list[int], unread: int
) -> None:
    """Pages of skipped blocks hold NaN, so reading one would show."""
    pool, q = _pool_and_queries(PLAIN, 4)
    pages = LISTED[2]
    pool[:, :, pages[: unread * 8]] = np.nan
    table = i32(np.tile(np.array([*pages, 0]), (4, 1)))
    run = jax.jit(reference.decode)
    arrays = jnp.asarray(q), jnp.asarray(pool), i32(LAYER), i32([*positions, -1]), table
    assert np.isfinite(np.asarray(run(*arrays, None, i32(window)))).all()
    pool[:, :, pages[unread * 8]] = np.nan  # the first block that must be read
    arrays = jnp.asarray(q), jnp.asarray(pool), *arrays[2:]
    assert not np.isfinite(np.asarray(run(*arrays, None, i32(window)))).all()


@pytest.mark.parametrize(("decode", "shape"), DECODE)
def test_on_a_processor_each_row_reads_its_own_blocks_and_finds_what_it_finds_alone(
    decode: Callable[..., jax.Array], shape: kernels.AttentionShape
) -> None:
    if shape.platform != "cpu":
        return
    pool, q = _pool_and_queries(shape, 4)
    positions, table = [287, 20, -1, 140], np.tile([*LISTED[2], 0], (4, 1)).astype(np.int32)
    pool[:, :, 1] = np.nan  # the second block of the short row
    table[1, 8:] = 1
    run = jax.jit(decode)

    def rows(of: slice) -> np.ndarray:
        arrays = jnp.asarray(q[of]), jnp.asarray(pool), i32(LAYER), i32(positions[of])
        return np.asarray(run(*arrays, i32(table[of]), *_extras(shape, None)))

    together = rows(slice(None))
    assert np.isfinite(together).all()
    for row in range(4):
        assert (together[row] == rows(slice(row, row + 1))[0]).all()


def test_a_row_that_sees_nothing_finds_nothing_whatever_the_sinks() -> None:
    """In prefill, a token whose sequence has no page in use."""
    shape = SHAPES["sinks"]
    pool, q = _pool_and_queries(shape, 2)
    columns = [[0, 0], [5, 5], [0, 1], [0, 0], [31, 2], [0, 1], [0, 0]]
    for used in (1, 0):
        batch = ChunkBatch(*map(i32, [*columns, used]))
        arrays = jnp.asarray(q), jnp.asarray(pool), i32(LAYER), batch
        out = np.asarray(jax.jit(reference.prefill)(*arrays, *_extras(shape, None)))
        assert (out[1] == 0).all()
        assert (out[0] == 0).all() == (used == 0)


def test_a_tile_of_tokens_reads_the_pages_that_they_see_and_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Pages of other tiles, before the windows and after the tokens hold NaN."""
    monkeypatch.setattr(reference, "_PREFILL_TILES", (2, 2))
    monkeypatch.setattr(reference, "_PREFILL_BLOCKS", (PAGE_SIZE, PAGE_SIZE))
    pool, q = _pool_and_queries(PLAIN, 4)
    ids = np.array([*range(18), *range(20, 38)], np.int32)
    # The first tile has tokens of both sequences.
    columns = [[0] * 4, [95, 17, 60, 271], [0, 1, 1, 1], [0] * 4]
    pages = [ids, np.repeat([0, 1], 18), np.tile(np.arange(18) * PAGE_SIZE, 2), len(ids)]
    batch = ChunkBatch(*map(i32, [*columns, *pages]))
    run = jax.jit(reference.prefill)

    def is_finite(unread: set[int]) -> bool:
        filled = pool.copy()
        filled[:, :, sorted(unread)] = np.nan
        arrays = jnp.asarray(q), jnp.asarray(filled), i32(LAYER), batch
        return bool(np.isfinite(np.asarray(run(*arrays, None, i32(30)))).all())

    read = {4, 5, 20, 21, 22, 23, 35, 36}
    assert is_finite(set(range(PAGES)) - read)
    for page in read:
        assert not is_finite(set(range(PAGES)) - read | {page})
