"""Which experts a row goes to and with what weights: in plain XLA, and in one kernel for GPUs."""

from functools import partial
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Bool, Float, Int32

from model.config_experts import RouterConfig

LEAST: Final = np.float32(1e-20)  # least sum to normalise by: sigmoids may all be zero


def best_experts(
    logits: Float[Array, "parts rows experts"],
    correction: Float[Array, " experts"] | None,
    live: Bool[Array, " rows"],
    how: RouterConfig,
    chosen: int,
) -> tuple[Int32[Array, "rows chosen"], Float[Array, "rows chosen"]]:
    """Ids of the experts that score best, best first, and their weights; float32.

    logits: in parts to be added up. correction: added to the scores when choosing, where the router
    has one. live: rows that are not padding; every id of padding is the number of experts.
    """
    whole = jnp.sum(logits, axis=0)
    scores = jax.nn.sigmoid(whole) if how.sigmoid else jax.nn.softmax(whole, axis=-1)
    choice = scores if correction is None else scores + correction
    if how.num_groups > 1:
        choice = _in_best_groups(how, choice)
    _, ids = lax.top_k(choice, chosen)
    weights = jnp.take_along_axis(scores, ids, axis=-1)
    if how.normalise:
        weights = weights / jnp.maximum(jnp.sum(weights, axis=-1, keepdims=True), LEAST)
    ids = jnp.where(live[:, None], ids.astype(jnp.int32), np.int32(whole.shape[-1]))
    return ids, weights * np.float32(how.scale)


def _in_best_groups(
    how: RouterConfig, choice: Float[Array, "rows experts"]
) -> Float[Array, "rows experts"]:
    """Rule out experts outside the best groups, whatever their score."""
    groups = choice.reshape(choice.shape[0], how.num_groups, -1)
    best, _ = lax.top_k(groups, 2 if how.best_two else 1)
    _, chosen = lax.top_k(jnp.sum(best, axis=-1), how.groups_per_tok)
    inside = jnp.any(chosen[:, :, None] == jnp.arange(how.num_groups), axis=1)
    return jnp.where(inside[:, :, None], groups, -jnp.inf).reshape(choice.shape)


def _kernel(*refs: Any, how: RouterConfig, chosen: int) -> None:
    """One row, whose experts are found one after the other."""
    logit_ref, live_ref, *others, id_ref, weight_ref = refs
    row, (parts, _, num_experts) = pl.program_id(0), logit_ref.shape
    each = jnp.arange(1 << (num_experts - 1).bit_length(), dtype=jnp.int32)
    # Entries past the last expert repeat it, and cannot be chosen.
    at, left = jnp.minimum(each, np.int32(num_experts - 1)), each < num_experts
    whole = sum(logit_ref[np.int32(i), row, at] for i in range(parts))
    logits = jnp.where(left, whole, -jnp.inf)
    if how.sigmoid:
        scores = jax.nn.sigmoid(logits)
    else:
        weights = jnp.exp(logits - jnp.max(logits))
        scores = weights / jnp.sum(weights)
    choice = scores + others[0][at] if others else scores
    nobody = np.int32(num_experts)
    found = []
    for nth in range(chosen):
        best = jnp.max(jnp.where(left, choice, -jnp.inf))
        first = jnp.min(jnp.where(left & (choice >= best), each, nobody))
        # Where scores are NaN, none is best, and any expert that is left will do.
        expert = jnp.where(first < nobody, first, jnp.min(jnp.where(left, each, nobody)))
        id_ref[row, nth] = jnp.where(live_ref[row] != 0, expert, nobody)
        found.append(jnp.sum(jnp.where(each == expert, scores, np.float32(0))))
        left &= each != expert
    share = jnp.maximum(sum(found), LEAST) if how.normalise else np.float32(1)
    for nth, weight in enumerate(found):
        weight_ref[row, nth] = weight / share * np.float32(how.scale)


def best_experts_by_kernel(
    logits: Float[Array, "parts rows experts"],
    correction: Float[Array, " experts"] | None,
    live: Bool[Array, " rows"],
    how: RouterConfig,
    chosen: int,
    interpret: bool = False,
) -> tuple[Int32[Array, "rows chosen"], Float[Array, "rows chosen"]]:
    """As `best_experts`, for a router without groups."""
    sizes = logits.shape[1], chosen
    out: Any = pl.pallas_call(
        partial(_kernel, how=how, chosen=chosen),
        out_shape=[jax.ShapeDtypeStruct(sizes, kind) for kind in (jnp.int32, jnp.float32)],
        grid=(sizes[0],),
        name="router",
        interpret=interpret,
        compiler_params=plt.CompilerParams(num_warps=1, num_stages=1),
    )(logits, live.astype(jnp.int32), *(() if correction is None else (correction,)))
    return out[0], out[1]
