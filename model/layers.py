"""The small parts of a layer: norms, rotary embedding, the dense feed-forward."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float, Int32

from model.adapted import with_adapters
from model.products import LayerWeights, product
from model.sharding import shard_idx, sum_shards


def rms_norm(
    x: Float[Array, "*rows size"], weight: Float[Array, " size"], eps: float
) -> Float[Array, "*rows size"]:
    """Root-mean-square norm, computed in float32, of x's dtype. Source: arXiv:1910.07467."""
    wide = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + np.float32(eps))
    return (wide * scale * weight.astype(jnp.float32)).astype(x.dtype)


def add_and_norm(
    x: Float[Array, "rows hidden"],
    added: Float[Array, "parts rows hidden"],
    weight: Float[Array, " hidden"],
    eps: float,
) -> tuple[Float[Array, "rows hidden"], Float[Array, "rows hidden"]]:
    """The sum of both, and its norm, of x's dtype.

    added: float32, in parts whose sum is rounded before it is added.
    """
    total = x + jnp.sum(added, axis=0).astype(x.dtype)
    return total, rms_norm(total, weight, eps)


def rms_norm_of_all(
    q: Float[Array, "rows kv_heads group head_dim"],
    k: Float[Array, "rows kv_heads head_dim"],
    weight: Float[Array, "kv_heads group_and_one head_dim"],
    sizes: tuple[int, int],
    eps: float,
) -> tuple[Float[Array, "rows kv_heads group head_dim"], Float[Array, "rows kv_heads head_dim"]]:
    """As `rms_norm`, but over all heads of a row, including those of other shards.

    weight: of a kv head's queries, then of its key. sizes: entries of q and of k over all shards,
    without queries that are padding, which are zero.
    """
    wide = q.astype(jnp.float32), k.astype(jnp.float32)[:, :, None]
    sums = sum_shards(jnp.stack([jnp.sum(jnp.square(x), axis=(1, 2, 3)) for x in wide]))
    scales = lax.rsqrt(sums / np.array(sizes, np.float32)[:, None] + np.float32(eps))
    weights = weight[:, :-1].astype(jnp.float32), weight[:, -1:].astype(jnp.float32)
    new_q, new_k = (
        (x * scale[:, None, None, None] * w).astype(q.dtype)
        for x, scale, w in zip(wide, scales, weights, strict=True)
    )
    return new_q, new_k[:, :, 0]


def rope_tables(
    freq: np.ndarray, positions: Int32[Array, " rows"], factor: float = 1.0
) -> tuple[Float[Array, "rows half"], Float[Array, "rows half"]]:
    """Cosines and sines of every position, times factor, float32, made once for all layers."""
    angles = positions.astype(jnp.float32)[:, None] * jnp.asarray(freq)
    return jnp.cos(angles) * np.float32(factor), jnp.sin(angles) * np.float32(factor)


def rotate(
    x: Float[Array, "rows heads head_dim"],
    cos: Float[Array, "rows half"],
    sin: Float[Array, "rows half"],
) -> Float[Array, "rows heads head_dim"]:
    """Rotate the pairs (i, i + half), in float32, of x's dtype; later entries stay as they are."""
    size = 2 * cos.shape[-1]
    first, second = jnp.split(x[..., :size].astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    turned = turned.astype(x.dtype)
    return turned if size == x.shape[-1] else jnp.concatenate([turned, x[..., size:]], axis=-1)


def gated(
    gate_up: Float[Array, "rows two_f"], limit: float = 0.0, alpha: float = 1.0
) -> Float[Array, "rows f"]:
    """SiLU(gate) * up of a product whose columns are all gates, then all ups; float32.

    limit above 0: gate * sigmoid(alpha * gate) * (up + 1), gate at most limit and up within it, as
    GPT-OSS has it. Source: openai/gpt-oss: gpt_oss/torch/model.py.
    """
    gate, up = jnp.split(gate_up, 2, axis=-1)
    if not limit:
        return jax.nn.silu(gate) * up
    gate, up = jnp.minimum(gate, np.float32(limit)), jnp.clip(up, -limit, limit)
    return gate * jax.nn.sigmoid(np.float32(alpha) * gate) * (up + np.float32(1))


def feed_forward(
    x: Float[Array, "rows hidden"],
    weights: LayerWeights,
    names: tuple[str, str] = ("gate_up", "down"),
) -> Float[Array, "rows hidden"]:
    """Dense SwiGLU over this shard's part of the intermediate, summed over shards; float32.

    names: of both parameters. The outputs of the first are all gates, then all ups.
    """

    def by(x: Float[Array, "rows a"], name: str) -> Float[Array, "rows b"]:
        parts = product(x, weights.matrix(name))[None]
        return with_adapters(parts, x, weights, name)[0]

    with jax.named_scope("mlp"):
        return sum_shards(by(gated(by(x, names[0])), names[1]))


def embed(
    table: Float[Array, "..."], token_ids: Int32[Array, " rows"], as_head: bool
) -> Float[Array, "rows hidden"]:
    """Rows of an embedding sharded by vocabulary; exact, since only one shard adds to a row.

    table: [vocab, hidden], or [hidden, vocab] where it lies as_head.
    """
    with jax.named_scope("embed"):
        size = table.shape[1 if as_head else 0]
        local = token_ids - shard_idx() * np.int32(size)
        mine = (local >= 0) & (local < size)
        at = table.at[:, local] if as_head else table.at[local]
        found = at.get(mode="clip", wrap_negative_indices=False)
        rows = found.T if as_head else found
        return sum_shards(jnp.where(mine[:, None], rows, jnp.zeros_like(rows)))
