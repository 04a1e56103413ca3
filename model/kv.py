"""The page pool as an array: make it, write tokens and pages into it, gather pages out of it."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh
from jaxtyping import Float, Int32

from model.config import KVSpec
from model.sharding import pool_sharding


def init_pool(
    spec: KVSpec, num_pages: int, mesh: Mesh
) -> Float[Array, "layers 2 pages page_size kv_heads head_dim"]:
    """A pool of zeros: keys at index 0 of the second axis, values at 1; kv heads sharded."""
    shape = (spec.num_layers, 2, num_pages, spec.page_size, spec.num_kv_heads, spec.head_dim)
    return jnp.zeros(shape, jnp.dtype(spec.dtype), device=pool_sharding(mesh))


def write_tokens(
    pool: Float[Array, "layers 2 pages page_size kv_heads head_dim"],
    layer: Int32[Array, ""],
    kv: Float[Array, "tokens 2 kv_heads head_dim"],
    kv_idx: Int32[Array, " tokens"],
) -> Float[Array, "layers 2 pages page_size kv_heads head_dim"]:
    """Write one layer's new tokens. Returns the pool; runs inside a layer loop that carries it.

    kv_idx: page * page_size + offset, distinct; below zero or past the pool is dropped.
    """
    # The pool is indexed as it is, never reshaped: a reshape leaves XLA free to prefer another
    # layout inside the loop (one kv head per shard is enough), and to copy all of it to have it.
    page, offset = jnp.divmod(kv_idx, np.int32(pool.shape[3]))
    row = pool.at[layer, :, page, offset]
    return row.set(kv.astype(pool.dtype), mode="drop", wrap_negative_indices=False)


def read_pages(
    pool: Float[Array, "layers 2 pages page_size kv_heads head_dim"],
    layer: Int32[Array, ""],
    page_ids: Int32[Array, "*n"],
) -> Float[Array, "*n 2 page_size kv_heads head_dim"]:
    """One layer's keys and values of some pages; an id past the pool reads some page."""
    return pool.at[layer, :, page_ids].get(mode="clip", wrap_negative_indices=False)


def gather_pages(
    pool: Float[Array, "layers 2 pages page_size kv_heads head_dim"],
    page_ids: Int32[Array, " n"],
) -> Float[Array, "layers 2 n page_size kv_heads head_dim"]:
    """Pack pages, all layers, into one array. Works shard by shard: no collective.

    page_ids: an id past the pool (padding) yields a page whose content means nothing.
    """
    with jax.named_scope("gather_pages"):
        return pool.at[:, :, page_ids].get(mode="clip", wrap_negative_indices=False)


def write_pages(
    pool: Float[Array, "layers 2 pages page_size kv_heads head_dim"],
    staged: Float[Array, "layers 2 n page_size kv_heads head_dim"],
    page_ids: Int32[Array, " n"],
) -> Float[Array, "layers 2 pages page_size kv_heads head_dim"]:
    """Put packed pages in place; the inverse of gather_pages. Donate the pool when jitting.

    page_ids: distinct; an id below zero or past the pool (padding) is dropped.
    """
    with jax.named_scope("write_pages"):
        row = pool.at[:, :, page_ids]
        return row.set(staged.astype(pool.dtype), mode="drop", wrap_negative_indices=False)
