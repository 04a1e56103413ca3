"""Routed experts of one layer: choose them in float32, run this shard's, sum over shards.

Where data-parallel ranks share the experts, each rank's rows are first brought to all of them, and
the sums of its own rows brought back. All ranks have as many rows, padding included.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Bool, Float, Int32

from model.config import ModelConfig
from model.layers import product
from model.sharding import expert_shard_idx, gather_ranks, sum_shards, sum_to_ranks


class Routing(NamedTuple):
    """Which logical experts each row goes to. logits are before softmax; float32."""

    logits: Float[Array, "rows experts"]
    expert_ids: Int32[Array, "rows chosen"]
    weights: Float[Array, "rows chosen"]


# (x, local expert ids, weights, gate_up stack, down stack, index into the stacks) -> f32 like x.
Experts = Callable[[Array, Array, Array, Array, Array, Array], Array]


def route(
    cfg: ModelConfig, x: Float[Array, "rows hidden"], router: Float[Array, "hidden experts"]
) -> Routing:
    """Softmax over all experts, then the best; renormalised where the model does so.

    Source: arXiv:2401.04088, section 2.1; Qwen3-MoE's norm_topk_prob.
    """
    with jax.named_scope("router"):
        logits = product(x.astype(jnp.float32), router)
        weights, ids = lax.top_k(jax.nn.softmax(logits, axis=-1), cfg.num_experts_per_tok)
        if cfg.norm_topk_prob:
            weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
        return Routing(logits, ids.astype(jnp.int32), weights)


def moe(
    cfg: ModelConfig,
    x: Float[Array, "rows hidden"],
    router: Float[Array, "hidden experts"],
    gate_up: Float[Array, "layers local_experts hidden 2 f"],
    down: Float[Array, "layers local_experts f hidden"],
    idx: Int32[Array, ""],
    physical: Int32[Array, " experts"],
    live: Bool[Array, " rows"],
    experts: Experts,
    share_experts: bool = False,
) -> tuple[Float[Array, "rows hidden"], Routing]:
    """This shard's experts on the rows that chose them, summed over shards; float32.

    gate_up, down: stacks over layers, of which `idx` is this one: a kernel takes its slices.
    physical: where each logical expert is placed. live: rows that are not padding.
    share_experts: the ranks do; gate_up and down are this shard's part of all.
    """
    with jax.named_scope("moe"):
        routing = route(cfg, x, router)
        placed = jnp.where(live[:, None], physical[routing.expert_ids], np.int32(-1))
        rows, weights = x, routing.weights
        if share_experts:
            placed, rows, weights = map(gather_ranks, (placed, rows, weights))
        num_local = gate_up.shape[1]
        local = placed - expert_shard_idx(share_experts) * np.int32(num_local)
        mine = (placed >= 0) & (local >= 0) & (local < num_local)
        local = jnp.where(mine, local, np.int32(num_local))
        out = experts(rows, local, weights, gate_up, down, idx)
        return sum_shards(sum_to_ranks(out) if share_experts else out), routing
