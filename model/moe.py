"""Routed experts of one layer: choose them in float32, run this shard's, sum over shards.

Where data-parallel ranks share the experts, each rank's rows are first sent to all ranks, and the
sums of its own rows are sent back. All ranks have the same number of rows, padding included.
"""

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Bool, Float, Int32

from model.coded import ExpertStacks
from model.config import ModelConfig
from model.layers import feed_forward
from model.products import LayerWeights, Matrix, ProductParts, contract, product
from model.sharding import expert_shard_idx, gather_ranks, rank_idx, sum_shards, sum_to_ranks


class ExpertMap(NamedTuple):
    """Where logical experts are placed, of all layers or of one.

    places: of each expert's copies, repeated past their number. counts: how many copies it has.
    """

    places: Int32[Array, "*layers experts most"]
    counts: Int32[Array, "*layers experts"]


class Routing(NamedTuple):
    """Which logical experts each row goes to. logits are before softmax; float32.

    expert_ids: the number of experts stands for no expert, as in rows that are padding.
    """

    logits: Float[Array, "rows experts"]
    expert_ids: Int32[Array, "rows chosen"]
    weights: Float[Array, "rows chosen"]


# (x, local expert ids, weights, stacks, index into the stacks) -> f32 like x.
Experts = Callable[..., Array]
# (logits in parts, correction or None, live) -> ids and weights; see model.kernels.moe.routing.
Best = Callable[[Array, Array | None, Array], tuple[Array, Array]]
_MANY_ROWS: Final = 512  # from here on a router's products take longer than their launches


def route(
    cfg: ModelConfig,
    x: Float[Array, "rows hidden"],
    params: LayerWeights,
    live: Bool[Array, " rows"],
    best: Best,
    product_parts: ProductParts,
) -> Routing:
    """Scores of all experts, the best of them, and their weights, as cfg.router says.

    params: one layer's. live: rows that are not padding. Source: arXiv:2401.04088, section 2.1, and
    the sources of RouterConfig.
    """
    how = cfg.router
    with jax.named_scope("router"):
        parts = _scores(x, params, product_parts)
        logits = jnp.sum(parts, axis=0)
        if how.bias:
            logits += params["router_bias"]
            parts = logits[None]
        correction = params["router_correction"] if how.correction else None
        return Routing(logits, *best(parts, correction, live))


def _scores(
    x: Float[Array, "rows hidden"], params: LayerWeights, product_parts: ProductParts
) -> Float[Array, "parts rows experts"]:
    """A product in float32, in parts to be added up."""
    router = params["router"]
    if params.on_cpu:
        return contract(x, router, ((1,), (0,)))[None]
    if len(x) < _MANY_ROWS or x.dtype != jnp.bfloat16:
        return product_parts(x, Matrix(router, None, router.dtype, params.on_cpu))
    # The 24 bits of a float32 are three bfloat16 numbers, whose products are all exact.
    parts, rest = [], router.astype(jnp.float32)
    for _ in range(3):
        part = lax.reduce_precision(rest, 8, 7)
        parts.append(part.astype(x.dtype))
        rest = rest - part
    whole = contract(x, jnp.concatenate(parts, axis=1), ((1,), (0,)))
    first, second, third = jnp.split(whole, 3, axis=1)
    return (first + (second + third))[None]


def moe(
    cfg: ModelConfig,
    x: Float[Array, "rows hidden"],
    params: LayerWeights,
    idx: Int32[Array, ""],
    placed: ExpertMap | None,
    live: Bool[Array, " rows"],
    best: Best,
    product_parts: ProductParts,
    experts: Experts,
    share_experts: bool = False,
) -> tuple[Float[Array, "rows hidden"], Routing]:
    """This shard's experts on the rows that chose them, summed over shards; float32.

    params: one layer's, except the experts', which are stacks over layers that a kernel slices;
    `idx` is this layer's index in them. placed: this layer's map, None where experts are as trained
    and have no copies. live: rows that are not padding.
    share_experts: whether ranks share them; a shard then has a part of the experts of all ranks.
    """
    with jax.named_scope("moe"):
        routing = route(cfg, x, params, live, best, product_parts)
        physical = _physical(placed, routing.expert_ids, live)
        rows, weights = x, routing.weights
        if share_experts:
            physical, rows, weights = map(gather_ranks, (physical, rows, weights))
        stacks = expert_stacks(params)
        local, num_local = physical, stacks.down.shape[1]
        if placed is not None or num_local < cfg.num_experts:
            local -= expert_shard_idx(share_experts) * np.int32(num_local)
            mine = (local >= 0) & (local < num_local)
            local = jnp.where(mine, local, np.int32(num_local))
        out = experts(rows, local, weights, stacks, idx)
        return sum_shards(sum_to_ranks(out) if share_experts else out), routing


def expert_stacks(params: Mapping[str, Array]) -> ExpertStacks:
    """The experts of a run of layers, on this device."""
    down_bias = params.get("experts_down_bias")
    return ExpertStacks(
        params["experts_gate_up"],
        params["experts_down"],
        params.get("experts_gate_up_bias"),
        # Each device that shares an expert's width has one; only the first's is not zero.
        None if down_bias is None else down_bias[:, :, 0],
        params.get("experts_gate_up_scale"),
        params.get("experts_down_scale"),
    )


def shared_experts(
    x: Float[Array, "rows hidden"], params: LayerWeights
) -> Float[Array, "rows hidden"]:
    """The output of the experts that all rows go to; float32. params: one layer's."""
    out = feed_forward(x, params, ("shared_gate_up", "shared_down"))
    if "shared_gate" in params:
        out *= jax.nn.sigmoid(product(x, params.matrix("shared_gate")))
    return out


def with_rows(
    counts: Int32[Array, " experts"],
    expert_ids: Int32[Array, "rows chosen"],
    live: Bool[Array, " rows"],
) -> Int32[Array, " experts"]:
    """The counts with one more for every expert of every row that is not padding.

    A count that would overflow becomes the largest integer: nothing bounds how many calls add to
    it, and below zero it would say that the most chosen expert has the least to do.
    """
    more = counts.at[expert_ids].add(live[:, None].astype(jnp.int32))
    return jnp.where(more < counts, np.int32(np.iinfo(np.int32).max), more)


def _physical(
    placed: ExpertMap | None, expert_ids: Int32[Array, "rows chosen"], live: Bool[Array, " rows"]
) -> Int32[Array, "rows chosen"]:
    """The copy that each row uses of its experts: rows take copies in turn, which loads all alike.

    Rows that are padding get an id that no shard has.
    """
    if placed is None:
        return expert_ids
    if placed.places.shape[-1] == 1:
        found = placed.places[:, 0][expert_ids]
    else:
        row = jnp.arange(expert_ids.shape[0], dtype=jnp.int32)[:, None] + rank_idx()
        found = placed.places[expert_ids, row % placed.counts[expert_ids]]
    return jnp.where(live[:, None], found, np.int32(-1))
