"""Attention of one layer over paged keys and values: project, rotate, write, attend, project."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int32

from model.config import ModelConfig
from model.kv import PagePool, write_tokens
from model.layers import rms_norm, rms_norm_of_all, rotate
from model.page_groups import Place
from model.products import LayerWeights, product
from model.sharding import num_shards, sum_shards


class ChunkBatch(NamedTuple):
    """Tokens of up to S sequences packed into one chunk, and the pages they may attend to.

    All int32, replicated. A token whose kv_idx is out of range is padding: its key and value
    are dropped, experts skip it and its hidden state means nothing. seq_idx and page_seq of
    padding are S. The pages of a sequence stand together in the list, in order; they hold the
    positions already cached and those of this chunk.
    """

    token_ids: Int32[Array, " tokens"]
    positions: Int32[Array, " tokens"]
    seq_idx: Int32[Array, " tokens"]
    kv_idx: Int32[Array, " tokens"]
    page_ids: Int32[Array, " pages"]
    page_seq: Int32[Array, " pages"]
    page_pos: Int32[Array, " pages"]
    num_pages_used: Int32[Array, ""]


class Rows(NamedTuple):
    """What attention needs to know of each row, the same in every layer."""

    cos: Float[Array, "rows half"]
    sin: Float[Array, "rows half"]
    kv_idx: Int32[Array, "groups rows"]


# (q [rows, kv_heads, group, head_dim], pool, place, sinks, window) -> the same shape as q.
# The last two as in model/kernels/attention/reference.py.
Attend = Callable[[Array, Array, Place, Array | None, Array | None], Array]


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
) -> tuple[Float[Array, "rows hidden"], PagePool]:
    """Attention of this shard's heads, summed over shards; float32. Returns also the pool.

    weights: one layer's. place: where the pool has it. The rows' keys and values are there before
    they attend.
    Source: grouped queries arXiv:2305.13245; pages arXiv:2309.06180, section 4.1.
    """
    with jax.named_scope("attention"):
        heads, group, head_dim = weights.shape("o")[:3]
        qkv = product(x, weights.matrix("qkv")).reshape(-1, heads, group + 2, head_dim)
        if cfg.qkv_bias:
            qkv = qkv + weights["qkv_bias"].astype(jnp.float32)
        qkv = qkv.astype(x.dtype)
        q, k, v = qkv[:, :, :group], qkv[:, :, group], qkv[:, :, group + 1]
        if cfg.qk_norm:
            q = rms_norm(q, weights["q_norm"], cfg.rms_norm_eps)
            k = rms_norm(k, weights["k_norm"], cfg.rms_norm_eps)
        elif cfg.qk_norm_of_all:
            # A kv head that several shards hold is in the sum each time, and in its size, too.
            sizes = cfg.num_heads * head_dim, heads * num_shards() * head_dim
            q, k = rms_norm_of_all(q, k, weights["qk_norm"], sizes, cfg.rms_norm_eps)
        q = rotate(q.reshape(-1, heads * group, head_dim), rows.cos, rows.sin)
        k = rotate(k, rows.cos, rows.sin)
        pool = write_tokens(pool, place.layer, jnp.stack([k, v], axis=1), rows.kv_idx[place.group])
        q = q.reshape(-1, heads, group, head_dim)
        out = attend(q, pool, place, weights.get("sinks"), window_of(cfg, layer))
        out = out.reshape(-1, heads * group * head_dim)
        out = sum_shards(product(out, weights.matrix("o", inputs=3)))
        if cfg.o_bias:
            out = out + weights["o_bias"].astype(jnp.float32)
        return out, pool
