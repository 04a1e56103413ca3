"""The network: layers stacked, looped, over a pool that is carried; one shard_map around it all."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Bool, Float, Int32

from model import kernels
from model.attention import Attend, ChunkBatch, Rows, attention
from model.config import DTYPE_BYTES, KVSpec, ModelConfig
from model.errors import ModelError
from model.kv import PagePool
from model.layers import embed, feed_forward, product, rms_norm, rope_frequencies, rope_tables
from model.moe import moe
from model.params import Params, Segment, param_leaves, random_leaves, segments
from model.sharding import POOL_SPEC, SHARDS, Dims, gather_shards, kv_spec


class Kernels(NamedTuple):
    """The backends chosen for one model; signatures as in model/kernels/*/reference.py."""

    prefill_attention: Callable[..., Any]
    decode_attention: Callable[..., Any]
    experts: Callable[..., Any]


@dataclass(frozen=True)
class Model:
    """Everything static about a network on a mesh; hashable, so it may be a static argument."""

    cfg: ModelConfig
    dims: Dims
    mesh: Mesh
    dtype: np.dtype
    page_size: int
    kernels: Kernels

    @staticmethod
    def create(cfg: ModelConfig, mesh: Mesh, dtype: Any, page_size: int) -> "Model":
        """Choose sizes and kernels. dtype: of parameters and activations.

        Raises ModelError when the mesh or the dtype does not fit the model.
        """
        kind = jnp.dtype(dtype)
        if kind.name not in DTYPE_BYTES:
            raise ModelError(f"dtype {kind.name}; accepted: {', '.join(DTYPE_BYTES)}")
        dims = Dims.of(cfg, mesh)
        platform = mesh.devices.flat[0].platform
        shape = kernels.AttentionShape(
            platform, kind.name, page_size, dims.kv_heads // dims.tp, dims.group, cfg.head_dim
        )
        routed = kernels.ExpertsShape(
            platform,
            kind.name,
            cfg.hidden_size,
            dims.moe_intermediate * dims.ep // dims.tp,
            cfg.num_experts // dims.ep,
            cfg.num_experts_per_tok,
        )
        chosen = Kernels(
            kernels.choose("prefill_attention", kernels.PREFILL_ATTENTION, shape),
            kernels.choose("decode_attention", kernels.DECODE_ATTENTION, shape),
            kernels.choose("experts", kernels.EXPERTS, routed),
        )
        return Model(cfg, dims, mesh, kind, page_size, chosen)

    def kv_spec(self, dtype: str | None = None) -> KVSpec:
        """The pages of this model, of its own dtype unless another is given."""
        return kv_spec(self.cfg, self.dims, self.page_size, dtype or self.dtype.name)

    def param_leaves(self) -> Params:
        """Shapes, dtypes and shardings of the parameters, in their tree."""
        return param_leaves(self.cfg, self.dims, self.dtype)


class Captured(NamedTuple):
    """What tests look at inside a forward pass, float32; layers without experts hold zeros."""

    embed: Float[Array, "rows hidden"]
    layers: Float[Array, "layers rows hidden"]
    router_logits: Float[Array, "layers rows experts"]
    expert_ids: Int32[Array, "layers rows chosen"]
    expert_weights: Float[Array, "layers rows chosen"]


class _Inputs(NamedTuple):
    """What both kinds of step share, per row."""

    token_ids: Int32[Array, " rows"]
    positions: Int32[Array, " rows"]
    kv_idx: Int32[Array, " rows"]
    live: Bool[Array, " rows"]


class _Carry(NamedTuple):
    """What goes from layer to layer. The pool must be here: anywhere else it would be copied."""

    x: Array
    pool: Array
    captured: Captured | None


def prefill_hidden(
    model: Model,
    params: Params,
    pool: PagePool,
    batch: ChunkBatch,
    expert_map: Int32[Array, "layers experts"] | None = None,
) -> tuple[Float[Array, "tokens hidden"], PagePool]:
    """One chunk through the network. Returns hidden states after the last norm, and the pool.

    pool: sharded by kv head, donated by the caller's jit. expert_map: physical place of each
    layer's logical experts; None means as trained.
    """
    hidden, pool, _ = _prefill(model, params, pool, batch, expert_map, False)
    return hidden, pool


def prefill_captured(
    model: Model,
    params: Params,
    pool: PagePool,
    batch: ChunkBatch,
    expert_map: Int32[Array, "layers experts"] | None = None,
) -> tuple[
    Float[Array, "tokens hidden"],
    PagePool,
    Captured,
]:
    """prefill_hidden that also returns what happened inside; for tests."""
    hidden, pool, captured = _prefill(model, params, pool, batch, expert_map, True)
    assert captured is not None
    return hidden, pool, captured


def decode_hidden(
    model: Model,
    params: Params,
    pool: PagePool,
    token_ids: Int32[Array, " rows"],
    positions: Int32[Array, " rows"],
    page_table: Int32[Array, "rows pages_per_row"],
    kv_idx: Int32[Array, " rows"],
    expert_map: Int32[Array, "layers experts"] | None = None,
) -> tuple[Float[Array, "rows hidden"], PagePool]:
    """One token of every row through the network. Returns hidden states after the last norm.

    positions: below zero marks a padding row, whose key and value are dropped.
    page_table: pages of row b in order of position; entries past its length are not looked at.
    kv_idx: page * page_size + offset of the token.
    """

    def attend_with(positions: Array, page_table: Array) -> Attend:
        return lambda q, pool, layer: model.kernels.decode_attention(
            q, pool, layer, positions, page_table
        )

    live = positions >= 0
    dropped = jnp.where(live, kv_idx, np.int32(-1))
    inputs = _Inputs(token_ids, positions, dropped, live)
    meta = (positions, page_table)
    hidden, pool, _ = _sharded(model, params, pool, inputs, expert_map, attend_with, meta, False)
    return hidden, pool


def logits(
    model: Model, params: Params, hidden: Float[Array, "rows hidden"]
) -> Float[Array, "rows vocab"]:
    """Logits of hidden states as the steps return them: f32[rows, vocab_size], replicated."""
    tied = model.cfg.tie_word_embeddings
    head = params["embed" if tied else "lm_head"]

    def shard(head: Array, hidden: Array) -> Array:
        return gather_shards(product(hidden, head, transposed=tied))

    spec = P(SHARDS, None) if tied else P(None, SHARDS)
    with jax.named_scope("logits"):
        mapped = jax.shard_map(
            shard, mesh=model.mesh, in_specs=(spec, P()), out_specs=P(), check_vma=False
        )
        return mapped(head, hidden)[:, : model.cfg.vocab_size]


def random_params(model: Model, seed: int) -> Params:
    """Random parameters made on the devices. The same seed gives every mesh the same network."""
    return random_leaves(model.param_leaves(), model.mesh, seed)


def _prefill(
    model: Model,
    params: Params,
    pool: Array,
    batch: ChunkBatch,
    expert_map: Array | None,
    capture: bool,
) -> tuple[Array, Array, Captured | None]:
    def attend_with(batch: ChunkBatch) -> Attend:
        return lambda q, pool, layer: model.kernels.prefill_attention(q, pool, layer, batch)

    live = (batch.kv_idx >= 0) & (batch.kv_idx < pool.shape[2] * pool.shape[3])
    inputs = _Inputs(batch.token_ids, batch.positions, batch.kv_idx, live)
    return _sharded(model, params, pool, inputs, expert_map, attend_with, (batch,), capture)


def _sharded(
    model: Model,
    params: Params,
    pool: Array,
    inputs: _Inputs,
    expert_map: Array | None,
    attend_with: Callable[..., Attend],
    meta: tuple[Any, ...],
    capture: bool,
) -> tuple[Array, Array, Captured | None]:
    """Run the layers on every shard; all but parameters and pool is replicated."""
    if expert_map is None:
        experts = jnp.arange(model.cfg.num_experts, dtype=jnp.int32)
        expert_map = jnp.broadcast_to(experts, (model.cfg.num_layers, model.cfg.num_experts))

    def shard(
        params: Params, pool: Array, inputs: _Inputs, expert_map: Array, meta: tuple[Any, ...]
    ) -> tuple[Array, Array, Captured | None]:
        attend = attend_with(*meta)
        out = _layers(model, params, pool, inputs, expert_map, attend, capture)
        return out.x, out.pool, out.captured

    specs = jax.tree.map(lambda leaf: leaf.spec, model.param_leaves())
    mapped = jax.shard_map(
        shard,
        mesh=model.mesh,
        in_specs=(specs, POOL_SPEC, P(), P(), P()),
        out_specs=(P(), POOL_SPEC, P()),
        check_vma=False,
    )
    return mapped(params, pool, inputs, expert_map, meta)


def _layers(
    model: Model,
    params: Params,
    pool: Array,
    inputs: _Inputs,
    expert_map: Array,
    attend: Attend,
    capture: bool,
) -> _Carry:
    cfg = model.cfg
    x = embed(params["embed"], inputs.token_ids)
    freq = rope_frequencies(cfg.rope, cfg.head_dim)
    rows = Rows(*rope_tables(freq, inputs.positions), inputs.kv_idx)
    carry = _Carry(x, pool, _nothing_captured(cfg, x) if capture else None)
    for run, stacks in zip(segments(cfg), params["layers"], strict=True):
        carry = _run(model, run, stacks, carry, inputs, rows, expert_map, attend)
    with jax.named_scope("final_norm"):
        return carry._replace(x=rms_norm(carry.x, params["norm"], cfg.rms_norm_eps))


def _run(
    model: Model,
    run: Segment,
    stacks: dict[str, Array],
    carry: _Carry,
    inputs: _Inputs,
    rows: Rows,
    expert_map: Array,
    attend: Attend,
) -> _Carry:
    """Layers of identical structure. Expert stacks go whole to their kernel, which indexes them."""
    cfg = model.cfg
    small = {name: stack for name, stack in stacks.items() if not name.startswith("experts_")}

    def layer_body(i: Array, carry: _Carry) -> _Carry:
        x, pool, captured = carry
        layer = i + np.int32(run.first)
        weights = {
            name: lax.dynamic_index_in_dim(stack, i, keepdims=False)
            for name, stack in small.items()
        }
        inner = rms_norm(x, weights["attn_norm"], cfg.rms_norm_eps)
        out, pool = attention(cfg, weights, inner, pool, layer, rows, attend)
        x = x + out.astype(x.dtype)
        inner = rms_norm(x, weights["mlp_norm"], cfg.rms_norm_eps)
        routing = None
        if run.moe:
            out, routing = moe(
                cfg,
                inner,
                weights["router"],
                stacks["experts_gate_up"],
                stacks["experts_down"],
                i,
                expert_map[layer],
                inputs.live,
                model.kernels.experts,
            )
        else:
            out = feed_forward(inner, weights["gate_up"], weights["down"])
        x = x + out.astype(x.dtype)
        if captured is not None:
            captured = captured._replace(
                layers=captured.layers.at[layer].set(x.astype(jnp.float32))
            )
            if routing is not None:
                captured = captured._replace(
                    router_logits=captured.router_logits.at[layer].set(routing.logits),
                    expert_ids=captured.expert_ids.at[layer].set(routing.expert_ids),
                    expert_weights=captured.expert_weights.at[layer].set(routing.weights),
                )
        return _Carry(x, pool, captured)

    with jax.named_scope(f"layers_{run.first}_to_{run.first + run.num_layers - 1}"):
        return lax.fori_loop(np.int32(0), np.int32(run.num_layers), layer_body, carry)


def _nothing_captured(cfg: ModelConfig, x: Array) -> Captured:
    rows, layers = x.shape[0], cfg.num_layers
    return Captured(
        x.astype(jnp.float32),
        jnp.zeros((layers, rows, cfg.hidden_size), jnp.float32),
        jnp.zeros((layers, rows, cfg.num_experts), jnp.float32),
        jnp.zeros((layers, rows, cfg.num_experts_per_tok), jnp.int32),
        jnp.zeros((layers, rows, cfg.num_experts_per_tok), jnp.float32),
    )
