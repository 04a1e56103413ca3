"""Routed experts of one layer: choose them in float32, run this shard's, sum over shards."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Bool, Float, Int32

from model.config import ModelConfig
from model.layers import product
from model.sharding import expert_shard_idx, sum_shards


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
) -> tuple[Float[Array, "rows hidden"], Routing]:
    """This shard's experts on the rows that chose them, summed over shards; float32.

    gate_up, down: stacks over layers, of which `idx` is this one: a kernel takes its slices.
    physical: where each logical expert is placed. live: rows that are not padding.
    """
    with jax.named_scope("moe"):
        routing = route(cfg, x, router)
        num_local = gate_up.shape[1]
        local = physical[routing.expert_ids] - expert_shard_idx() * np.int32(num_local)
        mine = (local >= 0) & (local < num_local) & live[:, None]
        local = jnp.where(mine, local, np.int32(num_local))
        return sum_shards(experts(x, local, routing.weights, gate_up, down, idx)), routing
