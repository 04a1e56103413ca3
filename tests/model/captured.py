"""What tests look at inside a forward pass, written layer by layer."""

from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec as P
from jaxtyping import Float, Int32

from model import transformer
from model.attention import ChunkBatch
from model.config import ModelConfig
from model.kv import PagePool
from model.moe import ExpertMap, Routing
from model.params import Params
from model.sharding import POOL_SPEC, on_ranks
from model.transformer import Model, Watch


class Captured(NamedTuple):
    """What happened in each layer, float32; layers without experts hold zeros."""

    embed: Float[Array, "rows hidden"]
    layers: Float[Array, "layers rows hidden"]
    router_logits: Float[Array, "layers rows experts"]
    expert_ids: Int32[Array, "layers rows chosen"]
    expert_weights: Float[Array, "layers rows chosen"]


def nothing_captured(cfg: ModelConfig, x: Float[Array, "rows hidden"]) -> Captured:
    """Before the first layer. x: the embedded tokens."""
    rows, layers = x.shape[0], cfg.num_layers
    return Captured(
        x.astype(jnp.float32),
        jnp.zeros((layers, rows, cfg.hidden_size), jnp.float32),
        jnp.zeros((layers, rows, cfg.num_experts), jnp.float32),
        jnp.zeros((layers, rows, cfg.num_experts_per_tok), jnp.int32),
        jnp.zeros((layers, rows, cfg.num_experts_per_tok), jnp.float32),
    )


def capture_layer(
    captured: Captured,
    layer: Int32[Array, ""],
    x: Float[Array, "rows hidden"],
    routing: Routing | None,
) -> Captured:
    """With the outcome of one layer. routing: None where it has no experts."""
    captured = captured._replace(layers=captured.layers.at[layer].set(x.astype(jnp.float32)))
    if routing is None:
        return captured
    return captured._replace(
        router_logits=captured.router_logits.at[layer].set(routing.logits),
        expert_ids=captured.expert_ids.at[layer].set(routing.expert_ids),
        expert_weights=captured.expert_weights.at[layer].set(routing.weights),
    )


def prefill_captured(
    model: Model,
    params: Params,
    pool: PagePool,
    batch: ChunkBatch,
    expert_map: ExpertMap | None = None,
) -> tuple[Float[Array, "tokens hidden"], PagePool, Captured]:
    """model.replicated.prefill_hidden that also returns what happened inside."""
    watch = Watch(partial(nothing_captured, model.cfg), capture_layer)

    def shard(
        params: Params, pool: Array, batch: ChunkBatch, expert_map: ExpertMap | None
    ) -> tuple[Array, Array, Captured]:
        out = transformer._prefill(model, params, pool, batch, expert_map, None, watch)
        return out.x, out.pool, out.seen

    specs = (model.param_specs(), POOL_SPEC, P(), P())
    run = on_ranks(model.mesh, shard, specs, (P(), POOL_SPEC, P()))
    hidden, pool, captured = run(params, pool, batch, expert_map)
    return hidden, pool, captured
