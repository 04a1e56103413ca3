"""What attention does to heads between its first product and its pages, in plain XLA."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int32

from model.kv import PagePool, write_tokens
from model.layers import rms_norm, rotate


class Heads(NamedTuple):
    """The first product's output for each head, and what is applied to it before attention.

    qkv: float32, in parts to be added up; of each kv head its queries, then its key and its value.
    bias: added to it.
    norms: weights for queries and for keys, or nothing. eps: of norms. cos, sin: of every row.
    """

    qkv: Float[Array, "parts rows kv_heads group_and_two head_dim"]
    bias: Float[Array, "kv_heads group_and_two head_dim"] | None
    norms: tuple[Float[Array, " head_dim"], Float[Array, " head_dim"]] | None
    eps: float
    cos: Float[Array, "rows half"]
    sin: Float[Array, "rows half"]


Queries = Float[Array, "rows kv_heads group head_dim"]


def place_heads(
    heads: Heads, pool: PagePool, layer: Int32[Array, ""], kv_idx: Int32[Array, " rows"], dtype: str
) -> tuple[Queries, PagePool]:
    """Norm and rotate, and write keys and values to their pages. Returns queries, and the pool.

    dtype: of queries, and of intermediate results. kv_idx: see model.kv.write_tokens.
    """
    q, k, v = split(heads, dtype)
    if heads.norms is not None:
        q, k = (rms_norm(x, w, heads.eps) for x, w in zip((q, k), heads.norms, strict=True))
    return rotate_and_write(q, k, v, heads, pool, layer, kv_idx)


def split(
    heads: Heads, dtype: str
) -> tuple[Queries, Float[Array, "rows kv_heads head_dim"], Float[Array, "rows kv_heads head_dim"]]:
    """Queries, keys and values, with their biases, rounded."""
    qkv = jnp.sum(heads.qkv, axis=0)
    if heads.bias is not None:
        qkv = qkv + heads.bias.astype(jnp.float32)
    qkv = qkv.astype(dtype)
    return qkv[:, :, :-2], qkv[:, :, -2], qkv[:, :, -1]


def rotate_and_write(
    q: Queries,
    k: Float[Array, "rows kv_heads head_dim"],
    v: Float[Array, "rows kv_heads head_dim"],
    heads: Heads,
    pool: PagePool,
    layer: Int32[Array, ""],
    kv_idx: Int32[Array, " rows"],
) -> tuple[Queries, PagePool]:
    """The last steps of `place_heads`."""
    flat = q.reshape(q.shape[0], -1, q.shape[-1])
    k = rotate(k, heads.cos, heads.sin)
    pool = write_tokens(pool, layer, jnp.stack([k, v], axis=1), kv_idx)
    return rotate(flat, heads.cos, heads.sin).reshape(q.shape), pool
