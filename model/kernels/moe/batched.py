"""Expert products for accelerators in plain XLA: few large products, no loop over experts.

A loop whose length is data makes the host wait for the device at every turn, and an expert taken
out of its stack by an index that is data is copied before it is multiplied. So products either read
the chosen experts where they lie, or have all experts in them. Which is cheaper depends on the
number of rows (docs/adr/0045).
"""

from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float, Int32

from model.coded import ExpertStacks, decoded
from model.layers import gated
from model.products import contract, zeros_after

# Up to about here, reading an expert takes longer than multiplying as many rows with it: on an H200
# up to 180 rows, operations a second over bytes a second, for weights of two bytes.
_ROWS_FOR_ALL: Final = 256
_ROOM: Final = 2  # places for rows of an expert in one round, as a multiple of its even share


class _Own(NamedTuple):
    """One layer's experts of this shard."""

    stacks: ExpertStacks  # without the axis of layers
    dtype: Any  # of products
    limit: float
    alpha: float

    @property
    def num_experts(self) -> int:
        return int(self.stacks.down.shape[0])

    def gate_up(self, at: Array | None = None) -> Float[Array, "experts hidden 2 f"]:
        """Weights of the first product, of all experts or of these."""
        return self._weights(self.stacks.gate_up, self.stacks.gate_up_scale, at)

    def down(self, at: Array | None = None) -> Float[Array, "experts f hidden"]:
        """Weights of the second product, of all experts or of these."""
        return self._weights(self.stacks.down, self.stacks.down_scale, at)

    def _weights(self, stack: Array, scales: Array | None, at: Array | None) -> Array:
        own = stack if at is None else stack[at]
        if scales is None:
            return own
        return decoded(own, scales if at is None else scales[at], 1, self.dtype, native=True)

    def inner(self, both: Array, bias: Array | None) -> Array:
        """The second product's input: gate and up, [..., 2, f], with their bias, made one."""
        if bias is not None:
            both = both + bias.astype(jnp.float32)
        flat = both.reshape(-1, 2 * both.shape[-1])
        return gated(flat, self.limit, self.alpha).reshape(*both.shape[:-2], -1)


def experts(
    x: Float[Array, "rows hidden"],
    local_ids: Int32[Array, "rows chosen"],
    weights: Float[Array, "rows chosen"],
    stacks: ExpertStacks,
    layer: Int32[Array, ""],
    limit: float = 0.0,
    alpha: float = 1.0,
) -> Float[Array, "rows hidden"]:
    """See model.kernels.moe.reference.experts."""
    rows, chosen = local_ids.shape
    own = _Own(jax.tree.map(lambda stack: stack[layer], stacks), x.dtype, limit, alpha)
    with jax.named_scope("experts"):
        if rows * chosen < own.num_experts:
            return _by_pair(x, local_ids, weights, own)
        if rows <= _ROWS_FOR_ALL:
            return _by_all(x, local_ids, weights, own)
        return _by_rounds(x, local_ids, weights, own)


def _by_pair(x: Array, ids: Array, weights: Array, own: _Own) -> Array:
    """Each row by each expert it chose, read where it lies, once for each row that chose it.

    Written as sums of elementwise products: XLA fuses taking an expert out of its stack into a sum,
    but not into a matrix product.
    """
    rows, chosen = ids.shape
    first_bias, last_bias = own.stacks.gate_up_bias, own.stacks.down_bias
    at = jnp.minimum(ids.reshape(-1), np.int32(own.num_experts - 1))
    wide = jnp.repeat(x.astype(jnp.float32), chosen, axis=0)
    both = jnp.sum(wide[:, :, None, None] * own.gate_up(at).astype(jnp.float32), axis=1)
    inner = own.inner(both, None if first_bias is None else first_bias[at])
    inner = inner.astype(own.dtype).astype(jnp.float32)
    out = jnp.sum(inner[:, :, None] * own.down(at).astype(jnp.float32), axis=1)
    if last_bias is not None:
        out += last_bias[at].astype(jnp.float32)
    out = out.reshape(rows, chosen, -1) * weights[:, :, None]
    here = ids[:, :, None] < own.num_experts
    return jnp.sum(jnp.where(here, out, np.float32(0)), axis=1)


def _by_all(x: Array, ids: Array, weights: Array, own: _Own) -> Array:
    """All rows by all experts, in two products, from which a row takes what it chose."""
    num_experts, rows = own.num_experts, x.shape[0]
    down, first_bias, last_bias = own.down(), own.stacks.gate_up_bias, own.stacks.down_bias
    is_chosen = ids[:, :, None] == jnp.arange(num_experts, dtype=jnp.int32)
    share = jnp.sum(jnp.where(is_chosen, weights[:, :, None], np.float32(0)), axis=1)
    spread = jnp.broadcast_to(x, (num_experts, *x.shape))
    both = contract(spread, own.gate_up(), ((2,), (1,)), ((0,), (0,)))
    inner = own.inner(both, None if first_bias is None else first_bias[:, None])
    # A row that did not choose an expert may overflow in it, and zero times infinity is NaN.
    share_of = share.T[:, :, None]
    inner = jnp.where(share_of > 0, inner * share_of, np.float32(0))
    turned = inner.transpose(1, 0, 2).reshape(rows, -1)
    out = contract(turned, down.reshape(-1, down.shape[2]), ((1,), (0,)))
    if last_bias is not None:
        out += contract(share, last_bias.astype(jnp.float32), ((1,), (0,)))
    return out


def _by_rounds(x: Array, ids: Array, weights: Array, own: _Own) -> Array:
    """Rounds in which every expert has places for equally many rows; the most chosen need several.

    The number of rounds is data: one, where rows are spread evenly enough.
    """
    num_experts, (rows, chosen) = own.num_experts, ids.shape
    gate_up, down = own.gate_up(), own.down()
    first_bias, last_bias = own.stacks.gate_up_bias, own.stacks.down_bias
    even = -(-rows * chosen // num_experts)
    size = min(rows, 2 ** (_ROOM * even - 1).bit_length())
    flat = ids.reshape(-1)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    counts = jnp.sum(flat[:, None] == jnp.arange(num_experts, dtype=jnp.int32), axis=0)
    counts = counts.astype(jnp.int32)
    firsts = jnp.cumsum(counts) - counts
    # How many pairs of the same expert come before each pair.
    padded = jnp.pad(firsts, (0, 1))
    before = jnp.zeros_like(flat).at[order].set(jnp.arange(len(flat), dtype=jnp.int32))
    before -= padded[flat]

    def turn(round_: Array, out: Array) -> Array:
        places = round_ * np.int32(size) + jnp.arange(size, dtype=jnp.int32)
        pairs = order.at[firsts[:, None] + places].get(mode="clip")
        both = contract(x[pairs // chosen], gate_up, ((2,), (1,)), ((0,), (0,)))
        inner = own.inner(both, None if first_bias is None else first_bias[:, None])
        done = contract(inner, down, ((2,), (1,)), ((0,), (0,)))
        if last_bias is not None:
            done += last_bias[:, None].astype(jnp.float32)
        at = before - round_ * np.int32(size)
        mine = (flat < num_experts) & (at >= 0) & (at < size)
        taken = done[jnp.minimum(flat, np.int32(num_experts - 1)), jnp.clip(at, 0, size - 1)]
        taken = jnp.where(mine[:, None], taken, np.float32(0)).reshape(rows, chosen, -1)
        return out + jnp.sum(taken * weights[:, :, None], axis=1)

    rounds = -(-jnp.max(counts) // np.int32(size))
    return lax.fori_loop(np.int32(0), rounds, turn, zeros_after(x))
