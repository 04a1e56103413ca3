"""What layers do to rows between products on GPUs, one kernel each where XLA launches several.

A launch costs a decode step two to four microseconds, whatever it does, and in a chunk each launch
reads again what the one before wrote.
"""

from functools import partial
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Float, Int32

from model import heads as reference
from model.heads import Heads, Queries
from model.kernels.tiles import is_indexed
from model.kv import PagePool, stored

_POOL: Final = 5  # the pool's place among `_heads_kernel`'s arguments
_MOST_INTERPRETED: Final = 16  # programs that write to a pool: interpreted, each copies all of it
_WIDE: Final = 4096  # numbers of a row, from which on its program has eight warps


def _norm_kernel(x_ref: Any, added_ref: Any, weight_ref: Any, *outs: Any, eps: float) -> None:
    """One row."""
    row, size = pl.program_id(0), x_ref.shape[1]
    each = pl.ds(0, 1 << (size - 1).bit_length())
    inside = jnp.arange(each.size, dtype=jnp.int32) < size

    def found(ref: Any) -> Any:
        return plt.load(ref, mask=inside, other=0)

    x = found(x_ref.at[row, each])
    added = sum(found(added_ref.at[np.int32(i), row, each]) for i in range(added_ref.shape[0]))
    total = x + added.astype(x.dtype)
    wide = total.astype(jnp.float32)
    scale = lax.rsqrt(jnp.sum(wide * wide) / np.float32(size) + np.float32(eps))
    normed = wide * scale * found(weight_ref.at[each]).astype(jnp.float32)
    for out_ref, value in zip(outs, (total, normed), strict=True):
        plt.store(out_ref.at[row, each], value.astype(out_ref.dtype), mask=inside)


def add_and_norm(
    x: Float[Array, "rows hidden"],
    added: Float[Array, "parts rows hidden"],
    weight: Float[Array, " hidden"],
    eps: float,
    interpret: bool = False,
) -> tuple[Float[Array, "rows hidden"], Float[Array, "rows hidden"]]:
    """See model.layers.add_and_norm."""
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    out: Any = pl.pallas_call(
        partial(_norm_kernel, eps=eps),
        out_shape=[like, like],
        grid=(x.shape[0],),
        name="add_and_norm",
        interpret=interpret,
        compiler_params=plt.CompilerParams(num_warps=8 if x.shape[1] >= _WIDE else 4, num_stages=1),
    )(x, added, weight)
    return out[0], out[1]


def _heads_kernel(*refs: Any, eps: float, given: tuple[bool, bool]) -> None:
    """One kv head of a row: its queries, key and value. given: whether it has a bias, norms."""
    layer_ref, idx_ref, cos_ref, sin_ref, qkv_ref, _, *others, q_ref, pool_ref = refs
    bias_ref = others.pop(0) if given[0] else None
    norm_refs = others if given[1] else (None, None)
    head, row = pl.program_id(0), pl.program_id(1)
    group, size = q_ref.shape[2:]
    halves = pl.ds(0, size // 2), pl.ds(size // 2, size // 2)
    cos, sin = cos_ref[row, halves[0]], sin_ref[row, halves[0]]

    def rounded(at: Any) -> list[Any]:
        both = [
            sum(qkv_ref[np.int32(i), row, head, at, half] for i in range(qkv_ref.shape[0]))
            for half in halves
        ]
        if bias_ref is not None:
            own = [bias_ref[head, at, half].astype(jnp.float32) for half in halves]
            both = [x + bias for x, bias in zip(both, own, strict=True)]
        return [x.astype(q_ref.dtype) for x in both]

    def turned(both: list[Any], norm_ref: Any) -> list[Any]:
        wide = [x.astype(jnp.float32) for x in both]
        if norm_ref is not None:
            total = sum(jnp.sum(x * x, axis=-1, keepdims=True) for x in wide)
            scale = lax.rsqrt(total / np.float32(size) + np.float32(eps))
            weights = [norm_ref[half].astype(jnp.float32) for half in halves]
            wide = [
                (x * scale * w).astype(q_ref.dtype).astype(jnp.float32)
                for x, w in zip(wide, weights, strict=True)
            ]
        first, second = wide
        both = [first * cos - second * sin, second * cos + first * sin]
        return [x.astype(q_ref.dtype) for x in both]

    # Queries past the group's last repeat the last, in all reads and writes.
    queries = jnp.arange(1 << (group - 1).bit_length(), dtype=jnp.int32)
    queries = jnp.minimum(queries, np.int32(group - 1))
    for half, query in zip(halves, turned(rounded(queries), norm_refs[0]), strict=True):
        q_ref[row, head, queries, half] = query

    page_size, idx = pool_ref.shape[3], idx_ref[row]
    is_there = (idx >= 0) & (idx < pool_ref.shape[2] * page_size)
    at = jnp.where(is_there, idx, np.int32(0))
    page, offset = at // np.int32(page_size), at % np.int32(page_size)
    key = turned(rounded(np.int32(group)), norm_refs[1])
    for plane, both in enumerate((key, rounded(np.int32(group + 1)))):
        for half, values in zip(halves, both, strict=True):
            where = pool_ref.at[layer_ref[0], np.int32(plane), page, offset, head, half]
            mask = jnp.broadcast_to(is_there, values.shape)
            plt.store(where, stored(values, pool_ref.dtype), mask=mask)


def place_heads(
    heads: Heads,
    pool: PagePool,
    layer: Int32[Array, ""],
    kv_idx: Int32[Array, " rows"],
    dtype: str,
    interpret: bool = False,
) -> tuple[Queries, PagePool]:
    """See model.heads.place_heads."""
    _, rows, kv_heads, width, head_dim = heads.qkv.shape
    takes_long = interpret and rows * kv_heads > _MOST_INTERPRETED
    if takes_long or not is_indexed(pool) or 2 * heads.cos.shape[1] != head_dim:
        return reference.place_heads(heads, pool, layer, kv_idx, dtype)
    extras = [] if heads.bias is None else [heads.bias]
    extras += [] if heads.norms is None else [*heads.norms]
    q = jax.ShapeDtypeStruct((rows, kv_heads, width - 2, head_dim), jnp.dtype(dtype))
    given = heads.bias is not None, heads.norms is not None
    args = layer.reshape(1), kv_idx, heads.cos, heads.sin, heads.qkv, pool, *extras
    out: Any = pl.pallas_call(
        partial(_heads_kernel, eps=heads.eps, given=given),
        out_shape=[q, jax.ShapeDtypeStruct(pool.shape, pool.dtype)],
        grid=(kv_heads, rows),
        input_output_aliases={_POOL: 1},
        name="place_heads",
        interpret=interpret,
        compiler_params=plt.CompilerParams(num_warps=1, num_stages=1),
    )(*args)
    return out[0], out[1]
