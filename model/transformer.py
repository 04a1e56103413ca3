"""The network: a loop over layers that carries the page pool, for one rank and for a mesh."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh
from jaxtyping import Bool, Float, Int32

from model import kernels
from model.adapted import chosen
from model.attention import Attend, ChunkBatch, Listed, Rows, attention
from model.config import DTYPE_BYTES, KVSpec, ModelConfig
from model.errors import ModelError
from model.kernels import Target
from model.kernels.attention.reference import short_context
from model.kv import PagePool, read_plane
from model.latent import latent_attention
from model.layers import embed, feed_forward, rope_tables
from model.moe import ExpertMap, Routing, moe, shared_experts, with_rows
from model.page_groups import (
    Place,
    decode_groups,
    group_of_layer,
    of_groups,
    or_dropped,
    place_of,
)
from model.params import (
    Params,
    Segment,
    dense_layer_bytes,
    lora_leaves,
    param_leaves,
    random_leaves,
    segments,
)
from model.products import LayerWeights, Matrix, product, up_to_last, zeros_after
from model.rope import rope_frequencies
from model.sharding import Dims, LoraShape, Stacks, gather_shards, kv_spec

# On CPU, dense layers from this size on have arrays of their own (docs/adr/0029); smaller ones
# stay in the processor's cache, and a copy out of a stack costs less than compiling every layer.
OWN_ARRAYS_BYTES: Final = 2 * 2**20


class Kernels(NamedTuple):
    """The backends chosen for one model; signatures as in model/kernels/*/reference.py."""

    prefill_attention: Callable[..., Any]
    decode_attention: Callable[..., Any]
    experts: Callable[..., Any]
    best_experts: Callable[..., Any]
    place_heads: Callable[..., Any]
    product_parts: Callable[..., Any]
    add_and_norm: Callable[..., Any]


@dataclass(frozen=True)
class Model:
    """Everything static about a network on a mesh; hashable, so it may be a static argument."""

    dims: Dims
    mesh: Mesh
    dtype: np.dtype
    page_size: int
    kernels: Kernels
    target: Target  # what forms of operations were chosen for

    @staticmethod
    def create(
        cfg: ModelConfig,
        mesh: Mesh,
        dtype: Any,
        page_size: int,
        share_experts: bool = False,
        stacks: Stacks | None = None,
        redundant_experts: int = 0,
        platform: str = "",
        coded: tuple[str, ...] = (),
        codes: str = "fp8",
        narrow: tuple[tuple[str, str], ...] = (),
        lora: LoraShape | None = None,
    ) -> "Model":
        """Choose sizes and kernels. dtype: of parameters and activations.

        share_experts, stacks, redundant_experts, coded, codes, narrow, lora: see Dims; stacks None
        means the fastest.
        platform: what the forms of operations are chosen for; "": that of the mesh.

        Raises ModelError when the mesh or the dtype does not fit the model.
        """
        kind = jnp.dtype(dtype)
        if kind.name not in DTYPE_BYTES:
            raise ModelError(f"dtype {kind.name}; accepted: {', '.join(DTYPE_BYTES)}")
        dims = Dims.of(cfg, mesh, share_experts, redundant_experts, coded, codes)
        device = mesh.devices.flat[0]
        platform, found = platform or device.platform, device.platform
        shared_bytes = int(getattr(device, "shared_memory_per_block_optin", 0))
        target = Target(platform, found == "cpu" != platform, shared_bytes)
        if stacks is None:
            stacks = _fastest(platform, dense_layer_bytes(dims, kind))
        as_head = cfg.tie_word_embeddings and platform == "cpu"
        dims = replace(dims, stacks=stacks, narrow=narrow, tied_as_head=as_head, lora=lora)
        shape = kernels.attention_shape(dims, target, kind.name, page_size)
        routed = kernels.experts_shape(dims, target, kind.name)
        chosen = Kernels(
            kernels.choose("prefill_attention", kernels.PREFILL_ATTENTION, shape),
            kernels.choose("decode_attention", kernels.DECODE_ATTENTION, shape),
            kernels.choose("experts", kernels.EXPERTS, routed),
            kernels.choose("best_experts", kernels.BEST_EXPERTS, routed),
            kernels.choose("place_heads", kernels.PLACE_HEADS, shape),
            kernels.choose("product_parts", kernels.PRODUCT_PARTS, shape),
            kernels.choose("add_and_norm", kernels.ADD_AND_NORM, shape),
        )
        return Model(dims, mesh, kind, page_size, chosen, target)

    @property
    def cfg(self) -> ModelConfig:
        """The network that the sizes are of."""
        return self.dims.cfg

    @property
    def on_cpu(self) -> bool:
        """Whether operations have their forms for a CPU."""
        return self.target.platform == "cpu"

    def short_context(self, rows: int) -> int:
        """Positions of short page tables, which steps of so many rows may use; 0: they use none."""
        whole = kernels.reads_whole_tables(self.kernels.decode_attention)
        return short_context(rows, accelerator=whole)

    def kv_spec(self, dtype: str | None = None) -> KVSpec:
        """The pages of this model, of its own dtype unless another is given."""
        return kv_spec(self.dims, self.page_size, dtype or self.dtype.name)

    def param_leaves(self) -> Params:
        """Shapes, dtypes and shardings of the parameters, in their tree, without adapters."""
        return param_leaves(self.dims, self.dtype)

    def lora_leaves(self) -> Params:
        """Those of adapters; empty where there are none."""
        return {"lora": lora_leaves(self.dims, self.dtype)} if self.dims.lora else {}

    def param_specs(self) -> Params:
        """How each parameter is split over the mesh, in their tree, those of adapters too."""
        leaves = self.param_leaves() | self.lora_leaves()
        specs: Params = jax.tree.map(lambda leaf: leaf.spec, leaves)
        return specs


def _fastest(platform: str, dense_bytes: int) -> Stacks:
    """Which layers to stack.

    On an accelerator none: XLA copies out of every stack, and captures no loop in a CUDA graph.
    """
    if platform != "cpu":
        return Stacks.NONE
    return Stacks.ALL if dense_bytes < OWN_ARRAYS_BYTES else Stacks.EXPERTS


Weights = dict[str, Array]


class _Kind(NamedTuple):
    """What tells layers apart that are traced separately. group: of pages; None: either group.

    alone: whether the layer is in no stack.
    """

    moe: bool
    group: int | None
    alone: bool


class _Inputs(NamedTuple):
    """What both kinds of step share, per row. used, adapters: see model.products.LayerWeights."""

    token_ids: Int32[Array, " rows"]
    positions: Int32[Array, " rows"]
    kv_idx: Int32[Array, "groups rows"]
    live: Bool[Array, " rows"]
    used: Int32[Array, ""] | None = None
    adapters: Bool[Array, "rows adapters"] | None = None


class _Carry(NamedTuple):
    """What goes from layer to layer. The pool must be here: anywhere else it would be copied.

    added: the last layer's output, not yet added to x, since the next norm takes both. seen: what a
    Watch returned last.
    """

    x: Array
    added: Array
    pool: Array
    loads: Array | None
    seen: Any


class Watch(NamedTuple):
    """What tests have done inside a forward pass; nobody else watches.

    begin: called with the embedded tokens. layer: called with what it, or begin, returned last, and
    with a layer's number, output and routing, which is None where the layer has no experts.
    """

    begin: Callable[[Array], Any]
    layer: Callable[[Any, Array, Array, Routing | None], Any]


def prefill_rows(
    model: Model,
    params: Params,
    pool: PagePool,
    batch: ChunkBatch,
    expert_map: ExpertMap | None = None,
    loads: Int32[Array, "1 layers experts"] | None = None,
) -> tuple[Float[Array, "tokens hidden"], PagePool, Array | None]:
    """One chunk of one rank through the network; inside `on_ranks`.

    pool: this device's part. expert_map: of all layers; None means as trained. loads: rows of this
    rank that chose each expert so far. Returns hidden states after the last norm, the pool, and
    the loads with those of this chunk.
    """
    out = _prefill(model, params, pool, batch, expert_map, loads)
    return out.x, out.pool, out.loads


def decode_rows(
    model: Model,
    params: Params,
    pool: PagePool,
    token_ids: Int32[Array, " rows"],
    positions: Int32[Array, " rows"],
    page_table: Int32[Array, "rows pages_per_row"],
    kv_idx: Int32[Array, " rows"],
    expert_map: ExpertMap | None = None,
    loads: Int32[Array, "1 layers experts"] | None = None,
    ring: Int32[Array, "rows ring"] | None = None,
    adapters: Int32[Array, " rows"] | None = None,
) -> tuple[Float[Array, "rows hidden"], PagePool, Array | None]:
    """One token of every row of one rank through the network; inside `on_ranks`.

    positions: below zero marks a padding row, whose key and value are dropped.
    page_table: pages of row b in order of position; entries past its length are ignored.
    kv_idx: page * page_size + offset of the token. ring: see model.page_groups. adapters: see
    model.adapted; None: no row has one. Returns as `prefill_rows`.
    """
    live = positions >= 0
    dropped = or_dropped(live, kv_idx)
    num_pages = pool.shape[2] // model.cfg.page_groups
    rows = decode_groups(
        model.cfg, model.page_size, num_pages, positions, page_table, dropped, ring
    )

    def attend(
        q: Array, pool: Array, place: Place, sinks: Array | None, window: Array | None
    ) -> Array:
        kernel = model.kernels.decode_attention
        out: Array = kernel(q, pool, place.layer, *rows.of(place.group), sinks, window)
        return out

    own = _chosen(model, adapters)
    inputs = _Inputs(token_ids, positions, rows.kv_idx, live, adapters=own)
    out = _layers(model, params, pool, inputs, _placed(model, expert_map), loads, attend)
    return out.x, out.pool, out.loads


def row_logits(
    model: Model, params: Params, hidden: Float[Array, "rows hidden"]
) -> Float[Array, "rows vocab"]:
    """Logits of hidden states of one rank: f32[rows, vocab_size]; inside `on_ranks`."""
    turned = "lm_head" not in params
    with jax.named_scope("logits"):
        table = params["embed" if turned else "lm_head"]
        head = Matrix(table, None, model.dtype, model.on_cpu, turned=turned)
        return gather_shards(product(hidden, head))[:, : model.cfg.vocab_size]


def random_params(model: Model, seed: int) -> Params:
    """Random parameters made on the devices. The same seed gives every mesh the same network."""
    return random_leaves(model.param_leaves(), model.mesh, seed)


def _prefill(
    model: Model,
    params: Params,
    pool: Array,
    batch: ChunkBatch,
    expert_map: ExpertMap | None,
    loads: Array | None,
    watch: Watch | None = None,
) -> _Carry:
    num_pages, page_size = pool.shape[2] // model.cfg.page_groups, pool.shape[3]
    page_ids = of_groups(model.cfg, batch.page_ids, num_pages)

    def attend(
        q: Array, pool: Array, place: Place, sinks: Array | None, window: Array | None
    ) -> Array:
        own = batch._replace(page_ids=page_ids[place.group])
        out: Array = model.kernels.prefill_attention(q, pool, place.layer, own, sinks, window)
        return out

    def attend_listed(q: Array, pages: Array, window: Array | None, value_dim: int) -> Array:
        own = batch._replace(page_ids=jnp.arange(len(batch.page_ids), dtype=jnp.int32))
        only = jnp.zeros((), jnp.int32)
        kernel = model.kernels.prefill_attention
        out: Array = kernel(q, pages, only, own, None, window, value_dim=value_dim)
        return out

    listed = Listed(
        len(batch.page_ids) * page_size,
        lambda pool, place: read_plane(pool, place.layer, 0, page_ids[place.group]),
        attend_listed,
    )
    live = (batch.kv_idx >= 0) & (batch.kv_idx < num_pages * page_size)
    dropped = or_dropped(live, batch.kv_idx)
    kv_idx = of_groups(model.cfg, dropped, num_pages, page_size)
    used = up_to_last(live) if model.on_cpu else None  # an accelerator waits for weights
    adapters = _chosen(model, batch.adapters)
    inputs = _Inputs(batch.token_ids, batch.positions, kv_idx, live, used, adapters)
    placed = _placed(model, expert_map)
    return _layers(model, params, pool, inputs, placed, loads, attend, listed, watch)


def _chosen(model: Model, adapters: Array | None) -> Array | None:
    """Which of the adapters each row has; None where the model has none, or no row has one."""
    shape = model.dims.lora
    return None if adapters is None or shape is None else chosen(adapters, shape.num)


def _placed(model: Model, expert_map: ExpertMap | None) -> ExpertMap | None:
    """The map as given, else that of experts as trained; None where these have no copies."""
    shape = model.cfg.num_layers, model.cfg.num_experts
    if expert_map is not None or model.dims.physical_experts == shape[1]:
        return expert_map
    places = jnp.broadcast_to(jnp.arange(shape[1], dtype=jnp.int32), shape)
    return ExpertMap(places[..., None], jnp.ones(shape, jnp.int32))


def _layers(
    model: Model,
    params: Params,
    pool: Array,
    inputs: _Inputs,
    expert_map: ExpertMap | None,
    loads: Array | None,
    attend: Attend,
    listed: Listed | None = None,
    watch: Watch | None = None,
) -> _Carry:
    cfg = model.cfg
    table = params["lm_head" if model.dims.tied_as_head else "embed"]
    x = embed(table, inputs.token_ids, model.dims.tied_as_head).astype(model.dtype)
    freq = rope_frequencies(cfg.rope, cfg.rope_dim)
    tables = rope_tables(freq, inputs.positions, cfg.rope.attention_factor)
    rows = Rows(*tables, inputs.kv_idx)
    carry = _Carry(x, zeros_after(x), pool, loads, None if watch is None else watch.begin(x))

    # Traced once for all layers of a kind, however many have arrays of their own.
    @partial(jax.jit, static_argnums=0)
    def block(kind: _Kind, idx: Array, layer: Array, weights: Weights, carry: _Carry) -> _Carry:
        own = kind, idx, layer, weights, carry
        return _block(model, *own, inputs, rows, expert_map, attend, listed, watch)

    runs = segments(model.dims)
    lora: tuple[Weights, ...] = params.get("lora") or ({},) * len(runs)
    for run, base, added in zip(runs, params["layers"], lora, strict=True):
        stacks = base | added
        alone = run.num_layers == 1
        group = group_of_layer(cfg, run.first) if alone else None
        carry = _run(model, run, stacks, carry, partial(block, _Kind(run.moe, group, alone)))
    with jax.named_scope("final_norm"):
        norm = model.kernels.add_and_norm
        _, x = norm(carry.x, carry.added[None], params["norm"], cfg.rms_norm_eps)
        return carry._replace(x=x)


def _run(
    model: Model, run: Segment, stacks: Weights, carry: _Carry, block: Callable[..., _Carry]
) -> _Carry:
    """Run layers of identical structure.

    Stacks of experts, and stacks that products read tiles of, are passed whole and indexed where
    they are used. XLA on CPU copies each layer's part out of any other stack, unless there is only
    one layer: then it drops the loop, and the stack is the layer.
    """
    whole = _read_in_stacks(model, run.num_layers == 1)
    small = [
        name
        for name in stacks
        if not name.startswith("experts_") and name.removesuffix("_scale") not in whole
    ]

    def layer_body(i: Array, carry: _Carry) -> _Carry:
        own = {name: lax.dynamic_index_in_dim(stacks[name], i, keepdims=False) for name in small}
        return block(i, i + np.int32(run.first), stacks | own, carry)

    with jax.named_scope(f"layers_{run.first}_to_{run.first + run.num_layers - 1}"):
        return lax.fori_loop(np.int32(0), np.int32(run.num_layers), layer_body, carry)


def _read_in_stacks(model: Model, alone: bool) -> frozenset[str]:
    """Parameters that products read within stacks. alone: whether the layer is in no stack."""
    return frozenset() if alone or not model.on_cpu else frozenset(model.dims.coded_inputs)


def _block(
    model: Model,
    kind: _Kind,
    idx: Array,
    layer: Array,
    arrays: Weights,
    carry: _Carry,
    inputs: _Inputs,
    rows: Rows,
    expert_map: ExpertMap | None,
    attend: Attend,
    listed: Listed | None,
    watch: Watch | None,
) -> _Carry:
    """One layer. arrays: its own, except whole stacks (see `_run`), where it is at `idx`."""
    cfg = model.cfg
    x, added, pool, loads, seen = carry
    stacked = _read_in_stacks(model, kind.alone)
    of_rows = inputs.used, inputs.adapters
    weights = LayerWeights(arrays, model.dtype, model.on_cpu, stacked, idx, *of_rows)
    chosen = model.kernels
    norm, eps = chosen.add_and_norm, cfg.rms_norm_eps
    x, inner = norm(x, added[None], weights["attn_norm"], eps)
    if cfg.latent:
        # What keys of each head gain on a CPU has not been measured.
        attend_layer = partial(latent_attention, listed=None if model.on_cpu else listed)
    else:
        attend_layer = partial(
            attention, place_heads=chosen.place_heads, product_parts=chosen.product_parts
        )
    place = place_of(cfg, layer, kind.group)
    out, pool = attend_layer(cfg, weights, inner, pool, layer, place, rows, attend)
    x, inner = norm(x, out, weights["mlp_norm"], eps)
    routing = None
    if kind.moe:
        out, routing = moe(
            cfg,
            inner,
            weights,
            idx,
            jax.tree.map(lambda of_layers: of_layers[layer], expert_map),
            inputs.live,
            chosen.best_experts,
            chosen.product_parts,
            chosen.experts,
            model.dims.ranks_share_experts,
        )
        if loads is not None:
            counts = with_rows(loads[0, layer], routing.expert_ids, inputs.live)
            loads = loads.at[0, layer].set(counts)
        if cfg.shared_intermediate_size:
            out += shared_experts(inner, weights)
    else:
        out = feed_forward(inner, weights)
    if watch is not None:
        seen = watch.layer(seen, layer, x + out.astype(x.dtype), routing)
    return _Carry(x, out, pool, loads, seen)
