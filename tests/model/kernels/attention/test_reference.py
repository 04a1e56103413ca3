"""Paged attention against one softmax at a time, in plain numpy."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model import kernels
from model.attention import ChunkBatch
from tests.model.harness import i32

PAGES, PAGE_SIZE, HEADS, GROUP, HEAD_DIM = 50, 16, 2, 3, 8
SHAPE = kernels.AttentionShape("cpu", "float32", PAGE_SIZE, HEADS, GROUP, HEAD_DIM)
LAYER = 1


def _built(backends: Sequence[kernels.Backend]) -> list[Any]:
    """Every backend that serves the shape here."""
    found: list[Any] = []
    for backend in backends:
        try:
            found.append(pytest.param(backend.build(SHAPE), id=backend.name))
        except NotImplementedError:
            continue
    return found


def _pool_and_queries(rows: int) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(4)
    pool = draw.standard_normal((2, 2, PAGES, PAGE_SIZE, HEADS, HEAD_DIM)).astype(np.float32)
    return pool, draw.standard_normal((rows, HEADS, GROUP, HEAD_DIM)).astype(np.float32)


def _one(pool: np.ndarray, q: np.ndarray, pages: list[int], position: int) -> np.ndarray:
    flat = pool[LAYER][:, pages].reshape(2, -1, HEADS, HEAD_DIM)[:, : position + 1]
    scores = np.einsum("kgh,skh->kgs", q, flat[0]) / np.sqrt(HEAD_DIM)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("kgs,skh->kgh", weights / weights.sum(-1, keepdims=True), flat[1])


@pytest.mark.parametrize("prefill", _built(kernels.PREFILL_ATTENTION))
def test_packed_tokens_see_their_own_sequence_up_to_themselves(
    prefill: Callable[..., jax.Array],
) -> None:
    pages = [[31, 2, 17], [8], list(range(40, 22, -1))]
    rows = [(0, 33), (0, 34), (0, 35), (1, 0), (1, 1), (2, 287), (2, 255)]
    pool, q = _pool_and_queries(len(rows) + 1)
    listed = [(page, seq, i * PAGE_SIZE) for seq, p in enumerate(pages) for i, page in enumerate(p)]
    used = len(listed)
    listed += [(0, 3, 0)] * 9
    out_of_range = PAGES * PAGE_SIZE
    positions = [position for _, position in rows] + [0]
    seq_idx = [seq for seq, _ in rows] + [3]
    per_token = [[0] * 8, positions, seq_idx, [out_of_range] * 8]
    batch = ChunkBatch._make(map(i32, [*per_token, *zip(*listed, strict=True), used]))
    out = np.asarray(jax.jit(prefill)(jnp.asarray(q), jnp.asarray(pool), i32(LAYER), batch))
    assert np.isfinite(out).all()
    for row, (seq, position) in enumerate(rows):
        expected = _one(pool, q[row], pages[seq], position)
        np.testing.assert_allclose(out[row], expected, atol=2e-6)


@pytest.mark.parametrize("decode", _built(kernels.DECODE_ATTENTION))
def test_each_row_sees_its_own_pages_and_padding_rows_see_nothing(
    decode: Callable[..., jax.Array],
) -> None:
    pages = [[31, 2, 17], [8], list(range(40, 22, -1))]
    positions = [40, 0, 287, -1]
    pool, q = _pool_and_queries(4)
    table = np.zeros((4, 19), np.int32)
    for row, listed in enumerate(pages):
        table[row, : len(listed)] = listed
    arrays = jnp.asarray(q), jnp.asarray(pool), i32(LAYER), i32(positions), i32(table)
    out = np.asarray(jax.jit(decode)(*arrays))
    for row, listed in enumerate(pages):
        expected = _one(pool, q[row], listed, positions[row])
        np.testing.assert_allclose(out[row], expected, atol=2e-6)
    assert (out[3] == 0).all()
