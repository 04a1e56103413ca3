"""The page pool as an array: make it, write tokens and pages into it, gather pages out of it."""

import functools
from dataclasses import dataclass, replace
from typing import Any

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


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["rows"],
    meta_fields=["num_layers", "page_size", "kv_heads", "head_dim"],
)
@dataclass(frozen=True)
class ShardPool:
    """One shard's pool while the layers run, as a matrix: a row per layer, side and kv index.

    rows: [layers * 2 * pages * page_size, kv_heads * head_dim]; side 0 has keys, 1 values.
    Carried through the layer loop in this form because XLA, given more axes, prefers another
    layout inside the loop (one kv head is enough) and copies the whole pool to have it.
    """

    rows: Any
    num_layers: int
    page_size: int
    kv_heads: int
    head_dim: int

    @staticmethod
    def of(
        pool: Float[Array, "layers 2 pages page_size kv_heads head_dim"],
    ) -> "ShardPool":
        """The same memory as a matrix."""
        layers, _, _, page_size, heads, head_dim = pool.shape
        rows = pool.reshape(-1, heads * head_dim)
        return ShardPool(rows, layers, page_size, heads, head_dim)

    @property
    def num_slots(self) -> int:
        """Kv indices: pages * page_size."""
        return int(self.rows.shape[0]) // (2 * self.num_layers)

    def pages(self) -> Float[Array, "layers 2 pages page_size kv_heads head_dim"]:
        """The same memory with its axes."""
        shape = (self.num_layers, 2, -1, self.page_size, self.kv_heads, self.head_dim)
        return self.rows.reshape(shape)

    def sides(self, layer: Int32[Array, ""], unit: int) -> Int32[Array, " 2"]:
        """Where a layer's keys and values begin, counted in units of so many rows."""
        sides = layer * np.int32(2) + jnp.arange(2, dtype=jnp.int32)
        return sides * np.int32(self.num_slots // unit)


def write_tokens(
    pool: ShardPool,
    layer: Int32[Array, ""],
    kv: Float[Array, "tokens 2 kv_heads head_dim"],
    kv_idx: Int32[Array, " tokens"],
) -> ShardPool:
    """Write one layer's new tokens.

    kv_idx: page * page_size + offset, distinct; below zero or past the pool is dropped.
    """
    inside = (kv_idx >= 0) & (kv_idx < pool.num_slots)
    at = pool.sides(layer, 1) + kv_idx[:, None]
    at = jnp.where(inside[:, None], at, np.int32(pool.rows.shape[0]))
    new = kv.astype(pool.rows.dtype).reshape(*at.shape, -1)
    rows = pool.rows.at[at].set(new, mode="drop", wrap_negative_indices=False)
    return replace(pool, rows=rows)


def read_pages(
    pool: ShardPool, layer: Int32[Array, ""], page_ids: Int32[Array, "*n"]
) -> Float[Array, "2 *n page_size kv_heads head_dim"]:
    """One layer's keys and values of some pages; an id past the pool reads some page."""
    num_pages = pool.num_slots // pool.page_size
    pages = pool.rows.reshape(-1, pool.page_size * pool.kv_heads * pool.head_dim)
    at = jnp.clip(page_ids, 0, num_pages - 1)
    at = pool.sides(layer, pool.page_size).reshape(2, *[1] * page_ids.ndim) + at
    found = pages.at[at].get(mode="clip", wrap_negative_indices=False)
    return found.reshape(*at.shape, pool.page_size, pool.kv_heads, pool.head_dim)


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
