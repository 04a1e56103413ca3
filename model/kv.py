"""The page pool as an array: make it, write tokens and pages into it, gather pages out of it.

Pages of fp8 are an array of bytes. XLA has no gather or scatter of 8-bit floats on CPU: it would
convert the whole pool to a wider type and back for every token (294 ms against 39 us at 65 MB).
Only the rows that are written or read are converted.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Float, Int32, UInt8

from model.config import FP8, KVSpec
from model.sharding import POOL_SPEC, num_ranks

PagePool = (
    Float[Array, "layers planes pages page_size kv_heads head_dim"]
    | UInt8[Array, "layers planes pages page_size kv_heads head_dim"]
)
StagedPages = (
    Float[Array, "layers planes n page_size kv_heads head_dim"]
    | UInt8[Array, "layers planes n page_size kv_heads head_dim"]
)


def init_pool(spec: KVSpec, num_pages: int, mesh: Mesh) -> PagePool:
    """A pool of zeros, num_pages of each group for each rank.

    Keys are at index 0 of the second axis and values at 1, or a vector for both at 0
    (KVSpec.planes).
    """
    abstract = abstract_pool(spec, num_pages, mesh)
    return jnp.zeros(abstract.shape, abstract.dtype, device=abstract.sharding)


def abstract_pool(spec: KVSpec, num_pages: int, mesh: Mesh) -> jax.ShapeDtypeStruct:
    """Shape, dtype and sharding of a pool of num_pages of each group for each rank."""
    return abstract_pages(spec, spec.groups * num_pages, mesh)


def abstract_pages(spec: KVSpec, num_pages: int, mesh: Mesh) -> jax.ShapeDtypeStruct:
    """Shape, dtype and sharding of pages that travel together, num_pages for each rank."""
    pages = num_ranks(mesh) * num_pages
    each = spec.page_size, spec.num_kv_heads, spec.head_dim
    shape, dtype = (spec.num_layers, spec.planes, pages, *each), jnp.dtype(spec.stored_dtype)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, POOL_SPEC))


def write_tokens(
    pool: PagePool,
    layer: Int32[Array, ""],
    kv: Float[Array, "tokens planes kv_heads head_dim"],
    kv_idx: Int32[Array, " tokens"],
) -> PagePool:
    """Write one layer's new tokens. Returns the pool; runs inside a layer loop that carries it.

    kv_idx: page * page_size + offset, distinct; below zero or past the pool is dropped.
    """
    # The pool is indexed as it is, never reshaped: a reshape lets XLA choose another layout inside
    # the loop (one kv head per shard is enough), and copy the whole pool to get it.
    page, offset = jnp.divmod(kv_idx, np.int32(pool.shape[3]))
    row = pool.at[layer, :, page, offset]
    return row.set(stored(kv, pool.dtype), mode="drop", wrap_negative_indices=False)


def read_plane(
    pool: PagePool,
    layer: Int32[Array, ""],
    plane: int,
    page_ids: Int32[Array, "*n"],
) -> Float[Array, "*n page_size kv_heads head_dim"]:
    """As `read_pages`, of keys or of values alone. plane: -1 is the last."""
    pages = pool.at[layer, plane % pool.shape[1], page_ids]
    return _numbers(pages.get(mode="clip", wrap_negative_indices=False))


def read_pages(
    pool: PagePool,
    layer: Int32[Array, ""],
    page_ids: Int32[Array, "*n"],
) -> Float[Array, "*n planes page_size kv_heads head_dim"]:
    """One layer's keys and values of some pages; an id past the pool reads some page."""
    return _numbers(pool.at[layer, :, page_ids].get(mode="clip", wrap_negative_indices=False))


def gather_pages(
    pool: PagePool,
    page_ids: Int32[Array, " n"],
) -> StagedPages:
    """Pack pages, all their layers, into one array. Works shard by shard: no collective.

    page_ids: an id past the pool (padding) yields a page whose content means nothing.
    """
    with jax.named_scope("gather_pages"):
        return pool.at[:, :, page_ids].get(mode="clip", wrap_negative_indices=False)


def write_pages(
    pool: PagePool,
    staged: StagedPages,
    page_ids: Int32[Array, " n"],
    on_cpu: bool = True,
) -> PagePool:
    """Put packed pages in place; the inverse of gather_pages. Donate the pool when jitting.

    page_ids: distinct; those at the end that are below zero or past the pool (padding) are dropped.
    on_cpu: page by page, since XLA's scatter on a CPU first copies `staged` to new memory.
    """
    with jax.named_scope("write_pages"):
        if not on_cpu:
            row = pool.at[:, :, page_ids]
            return row.set(staged, mode="drop", wrap_negative_indices=False)

        def put(i: Array, pool: PagePool) -> PagePool:
            page = lax.dynamic_slice_in_dim(staged, i, 1, 2)
            return lax.dynamic_update_slice_in_dim(pool, page, page_ids[i], 2)

        in_pool = (page_ids >= 0) & (page_ids < pool.shape[2])
        return lax.fori_loop(np.int32(0), jnp.sum(in_pool, dtype=jnp.int32), put, pool)


def _numbers(pages: Array) -> Array:
    """What was read from a pool, as numbers."""
    if pages.dtype == jnp.uint8:
        return lax.bitcast_convert_type(pages, jnp.dtype(FP8))
    return pages


def stored(kv: Float[Array, "*n"], dtype: jnp.dtype) -> Array:
    """Keys and values as a pool of that dtype keeps them, in finite numbers only.

    What overflows becomes the largest value, and NaN becomes zero. Attention reads positions that
    it may not see, with weight zero, and pages are reused: otherwise one request's overflow would
    reach all others.
    """
    kept = jnp.dtype(FP8) if dtype == jnp.uint8 else dtype
    most = np.float32(jnp.finfo(kept).max)
    wide = kv.astype(jnp.float32)
    finite = jnp.where(jnp.isnan(wide), np.float32(0), jnp.clip(wide, -most, most)).astype(kept)
    return finite if kept == dtype else lax.bitcast_convert_type(finite, jnp.uint8)
