"""Latent attention of one layer: a position's one vector is key and value of every head.

Each head's projection of the latent vector is moved to the other side of both products: queries are
projected into the latent space, and what they find there is projected out of it. So pages hold only
the latent vector and the rotated key, and the kernels are those of grouped queries with one kv
head. A chunk of many tokens is cheaper with keys and values for each head, as in training: they are
computed from the latent vectors of all its prompts' positions, in each layer anew.
Source: arXiv:2405.04434, section 2.1.
"""

from typing import Final

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int32

from model.attention import Attend, Listed, Rows, window_of
from model.buckets import LIST_FACTOR
from model.config import ModelConfig
from model.config_attention import LatentConfig
from model.kernels.tiles import LEAST
from model.kv import PagePool, write_tokens
from model.layers import rms_norm, rotate
from model.page_groups import Place
from model.products import LayerWeights, contract, product
from model.sharding import sum_shards

# Of the norms of latent vectors, whatever the config says of other norms. Source: transformers,
# DeepseekV3Attention, and DeepSeek's own code.
_EPS: Final = 1e-6
_MOST_BYTES: Final = 1 << 30  # of keys and values of all heads


def latent_attention(
    cfg: ModelConfig,
    weights: LayerWeights,
    x: Float[Array, "rows hidden"],
    pool: PagePool,
    layer: Int32[Array, ""],
    place: Place,
    rows: Rows,
    attend: Attend,
    listed: Listed | None,
) -> tuple[Float[Array, "parts rows hidden"], PagePool]:
    """As model.attention.attention, for latent attention; every shard computes the latent vectors.

    weights: one layer's. The last entries of a head's query, and of kv_a, are rotated by halves:
    the loader has put them in that order. listed: for a chunk that may have keys and values made
    for each head.
    """
    latent = cfg.latent
    assert latent is not None
    with jax.named_scope("attention"):
        one, heads, nope, rank = weights["k_b"].shape
        assert one == 1, "a shard has one copy of the latent head"
        both = product(x, weights.matrix("kv_a")).astype(x.dtype)
        kv = rms_norm(both[:, :rank], weights["kv_a_norm"], _EPS)
        key = rotate(both[:, None, rank:], rows.cos, rows.sin)[:, 0]
        row = jnp.concatenate([kv, key], axis=-1)
        pool = write_tokens(pool, place.layer, row[:, None, None], rows.kv_idx[place.group])
        q = _queries(cfg, weights, x)
        turned = rotate(q[..., nope:], rows.cos, rows.sin)
        window = window_of(cfg, layer)
        of = heads, x.dtype.itemsize, len(x)
        if listed is not None and is_expanded(latent, *of, listed.num_positions):
            q = jnp.concatenate([q[..., :nope], turned], axis=-1)[:, :, None]
            pages = _of_heads(listed.read(pool, place).astype(x.dtype), weights)
            out = listed.attend(q, pages, window, latent.value_dim)
        else:
            inside = _by_head(q[..., :nope], weights["k_b"][0]).astype(x.dtype)
            q = jnp.concatenate([inside, turned], axis=-1)[:, None]
            out = _by_head(attend(q, pool, place, None, window)[:, 0], weights["v_b"][0])
        out = out.reshape(-1, heads * latent.value_dim)
        out = product(out, weights.matrix("o", inputs=3))
        return sum_shards(out)[None], pool


def is_expanded(
    latent: LatentConfig, heads: int, itemsize: int, tokens: int, positions: int
) -> bool:
    """Whether keys and values of each head are made for a chunk of so many tokens.

    They are made for all positions that its list has room for, up to four times those of its
    prompts (eight times in the longest list), and save operations for each token that attends to
    one. heads: of a shard. itemsize: bytes of a number.
    """
    both, size = latent.nope_dim + latent.value_dim, latent.nope_dim + latent.rope_dim
    fits = size % LEAST == latent.value_dim % LEAST == 0 and latent.value_dim <= size
    saved = tokens * (2 * latent.kv_rank - both)
    pays = saved > LIST_FACTOR * latent.kv_rank * both
    return fits and pays and 2 * positions * heads * size * itemsize <= _MOST_BYTES


def _of_heads(
    pages: Float[Array, "pages page_size one latent"], weights: LayerWeights
) -> Float[Array, "one planes pages page_size heads head_dim"]:
    """A one-layer pool of keys and zero-padded values of each head. weights: one layer's."""
    to_key, to_value = weights["k_b"][0], weights["v_b"][0]
    _, nope, rank = to_key.shape
    inner, turned = pages[:, :, 0, :rank], pages[:, :, :, rank:]
    key = contract(inner, to_key, ((2,), (2,))).astype(pages.dtype)
    value = contract(inner, to_value, ((2,), (1,))).astype(pages.dtype)
    turned = jnp.broadcast_to(turned, (*key.shape[:3], turned.shape[3]))
    short = nope + turned.shape[3] - value.shape[3]
    value = jnp.pad(value, ((0, 0), (0, 0), (0, 0), (0, short)))
    return jnp.stack([jnp.concatenate([key, turned], axis=-1), value])[None]


def _queries(
    cfg: ModelConfig, weights: LayerWeights, x: Float[Array, "rows hidden"]
) -> Float[Array, "rows heads head_dim"]:
    """Queries of this shard's heads, not rotated yet, in x's dtype."""
    name = "q"
    inner = x
    if cfg.latent is not None and cfg.latent.q_rank:
        name = "q_b"
        inner = product(x, weights.matrix("q_a")).astype(x.dtype)
        inner = rms_norm(inner, weights["q_a_norm"], _EPS)
    flat = product(inner, weights.matrix(name))
    return flat.reshape(-1, *weights.shape(name)[2:]).astype(x.dtype)


def _by_head(
    x: Float[Array, "rows heads a"], w: Float[Array, "heads a b"]
) -> Float[Array, "rows heads b"]:
    """Multiply each head by its own matrix, in float32, from operands of w's dtype."""
    return contract(x, w, ((2,), (1,)), ((1,), (0,))).transpose(1, 0, 2)
