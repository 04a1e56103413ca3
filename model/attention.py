"""Attention of one layer over paged keys and values: project, rotate, write, attend, project."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int32

from model.adapted import with_adapters
from model.config import ModelConfig
from model.heads import Heads, rotate_and_write, split
from model.kv import PagePool
from model.layers import rms_norm_of_all
from model.page_groups import Place
from model.products import LayerWeights, ProductParts
from model.sharding import num_shards, sum_shards


class ChunkBatch(NamedTuple):
    """Tokens of up to S sequences packed into one chunk, and the pages they may attend to.

    All int32, replicated. A token whose kv_idx is out of range is padding: its key and value
    are dropped, experts skip it and its hidden state means nothing. seq_idx and page_seq of
    padding are S. The pages of a sequence stand together in the list, in order; they hold the
    positions already cached and those of this chunk. adapters: see model/adapted.py; None where
    the model has none.
    """

    token_ids: Int32[Array, " tokens"]
    positions: Int32[Array, " tokens"]
    seq_idx: Int32[Array, " tokens"]
    kv_idx: Int32[Array, " tokens"]
    page_ids: Int32[Array, " pages"]
    page_seq: Int32[Array, " pages"]
    page_pos: Int32[Array, " pages"]
    num_pages_used: Int32[Array, ""]
    adapters: Int32[Array, " tokens"] | None = None


class Rows(NamedTuple):
    """What attention needs to know of each row, the same in every layer."""

    cos: Float[Array, "rows half"]
    sin: Float[Array, "rows half"]
    kv_idx: Int32[Array, "groups rows"]


# (q [rows, kv_heads, group, head_dim], pool, place, sinks, window) -> as q, with a last axis of the
# size of a value. For sinks and window see model/kernels/attention/reference.py.
Attend = Callable[[Array, Array, Place, Array | None, Array | None], Array]


class Listed(NamedTuple):
    """The pages of a chunk's prompts, brought together in the order of the chunk's list.

    read: (pool, place) -> the keys as numbers, [num_pages, page_size, kv_heads, head_dim].
    attend: (q, a one-layer pool of such pages, window, value_dim) -> as Attend returns.
    """

    num_positions: int
    read: Callable[[Array, Place], Array]
    attend: Callable[[Array, Array, Array | None, int], Array]


# See model/heads.py.
PlaceHeads = Callable[[Heads, Array, Array, Array, str], tuple[Array, Array]]


def window_of(cfg: ModelConfig, layer: Int32[Array, ""]) -> Int32[Array, ""] | None:
    """Positions that a layer's tokens see, their own included; None where all layers see all."""
    if not any(cfg.window_layers):
        return None
    sizes = np.where(cfg.window_layers, cfg.sliding_window, np.iinfo(np.int32).max)
    return jnp.asarray(sizes.astype(np.int32))[layer]


def attention(
    cfg: ModelConfig,
    weights: LayerWeights,
    x: Float[Array, "rows hidden"],
    pool: PagePool,
    layer: Int32[Array, ""],
    place: Place,
    rows: Rows,
    attend: Attend,
    place_heads: PlaceHeads,
    product_parts: ProductParts,
) -> tuple[Float[Array, "parts rows hidden"], PagePool]:
    """Attention of this shard's heads, summed over shards; float32, in parts to be added up.

    weights: one layer's. place: where that layer is in the pool. The rows' keys and values are
    written to the pool before the rows attend. Returns the pool, too.
    Source: grouped queries arXiv:2305.13245; pages arXiv:2309.06180, section 4.1.
    """
    with jax.named_scope("attention"):
        heads, group, head_dim = weights.shape("o")[:3]
        qkv = product_parts(x, weights.matrix("qkv"))
        qkv = with_adapters(qkv, x, weights, "qkv")
        qkv = qkv.reshape(*qkv.shape[:2], heads, group + 2, head_dim)
        bias = weights["qkv_bias"] if cfg.qkv_bias else None
        norms = (weights["q_norm"], weights["k_norm"]) if cfg.qk_norm else None
        weight = None
        if norms is not None and cfg.turned_before_norm:
            # A rotation keeps a head's size, and a weight on one side of a product is on the other.
            weight = norms[0].astype(jnp.float32) * norms[1].astype(jnp.float32)
            norms = jnp.ones_like(norms[0]), jnp.ones_like(norms[1])
        found = Heads(qkv, bias, norms, cfg.rms_norm_eps, rows.cos, rows.sin)
        where = pool, place.layer, rows.kv_idx[place.group]
        if cfg.qk_norm_of_all:
            q, k, v = split(found, x.dtype.name)
            # A kv head that several shards hold counts once per shard, in the sum and in the size.
            sizes = cfg.num_heads * head_dim, heads * num_shards() * head_dim
            q, k = rms_norm_of_all(q, k, weights["qk_norm"], sizes, cfg.rms_norm_eps)
            q, pool = rotate_and_write(q, k, v, found, *where)
        else:
            q, pool = place_heads(found, *where, x.dtype.name)
        if weight is not None:
            q = (q.astype(jnp.float32) * weight).astype(q.dtype)
        out = attend(q, pool, place, weights.get("sinks"), window_of(cfg, layer))
        out = out.reshape(-1, heads * group * head_dim)
        parts = product_parts(out, weights.matrix("o", inputs=3))
        parts = with_adapters(parts, out, weights, "o", inputs=3)
        if num_shards() > 1:
            parts = sum_shards(jnp.sum(parts, axis=0))[None]
        if cfg.o_bias:
            bias = weights["o_bias"].astype(jnp.float32)
            parts = (jnp.sum(parts, axis=0) + bias)[None]
        return parts, pool
