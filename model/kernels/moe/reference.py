"""Grouped expert products in plain XLA: rows sorted by expert, one small product per block.

Each block has rows of one expert, whose weights are taken by a dynamic index; the number of
blocks is data. Only experts that were chosen are read, which is what decoding pays for.
"""

from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float, Int32

from model.coded import ExpertStacks
from model.layers import gated
from model.products import Matrix, product

_MANY: Final = 16  # rows of an expert from which on products are bound by operations


def block_rows(rows: int, chosen: int, experts: int) -> int:
    """Rows of a block: an expert's share or, if small, twice that; a power of two, at most 128.

    A larger block multiplies more unused rows, a smaller one reads its expert more often.
    """
    even = -(-rows * chosen // experts)
    wanted = even if even >= _MANY else 2 * even
    return int(min(128, 2 ** (wanted - 1).bit_length(), 2 ** (rows - 1).bit_length()))


def experts(
    x: Float[Array, "rows hidden"],
    local_ids: Int32[Array, "rows chosen"],
    weights: Float[Array, "rows chosen"],
    stacks: ExpertStacks,
    layer: Int32[Array, ""],
    limit: float = 0.0,
    alpha: float = 1.0,
) -> Float[Array, "rows hidden"]:
    """Weighted sum of the chosen experts that live here; float32.

    x: of the products' dtype. local_ids: experts of this shard; the number of experts means
    "elsewhere", adding nothing. layer: of the stacks. limit, alpha: see model.layers.gated.
    """
    num_rows, chosen = local_ids.shape
    hidden, num_experts, width = x.shape[1], *stacks.down.shape[1:3]
    size = block_rows(num_rows, chosen, num_experts)
    flat = local_ids.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    counts = jnp.sum(flat[:, None] == jnp.arange(num_experts, dtype=jnp.int32), axis=0)
    row_ends = jnp.cumsum(counts.astype(jnp.int32))
    block_ends = jnp.cumsum(-(-counts.astype(jnp.int32) // np.int32(size)))
    by_expert = jnp.pad(x[order // chosen], ((0, size), (0, 0)))

    def of_expert(stack: Array, scales: Array | None, e: Array) -> Matrix:
        flat = stack.reshape(*stack.shape[:3], -1)
        own = None if scales is None else scales.reshape(*scales.shape[:3], -1)
        return Matrix(flat, own, x.dtype, on_cpu=True, at=(layer, e))

    def block(b: Array, out: Array) -> Array:
        e = jnp.searchsorted(block_ends, b, side="right").astype(jnp.int32)
        first_block = jnp.where(e > 0, block_ends[e - 1], np.int32(0))
        first_row = jnp.where(e > 0, row_ends[e - 1], np.int32(0))
        start = first_row + (b - first_block) * np.int32(size)
        rows = lax.dynamic_slice(by_expert, (start, np.int32(0)), (size, hidden))
        both_out = product(rows, of_expert(stacks.gate_up, stacks.gate_up_scale, e))
        if stacks.gate_up_bias is not None:
            both_out += stacks.gate_up_bias[layer, e].reshape(2 * width).astype(jnp.float32)
        done = product(gated(both_out, limit, alpha), of_expert(stacks.down, stacks.down_scale, e))
        if stacks.down_bias is not None:
            done += stacks.down_bias[layer, e].astype(jnp.float32)
        # Rows past this expert's last belong to the next block, which comes later and
        # overwrites them, or to no expert here, and then they must be zero.
        own = start + jnp.arange(size, dtype=jnp.int32) < row_ends[e]
        done = jnp.where(own[:, None], done, np.float32(0))
        return lax.dynamic_update_slice(out, done, (start, np.int32(0)))

    with jax.named_scope("experts"):
        out = jnp.zeros((num_rows * chosen + size, hidden), jnp.float32)
        out = lax.fori_loop(np.int32(0), block_ends[-1], block, out)
        back = out[jnp.argsort(order)].reshape(num_rows, chosen, hidden)
        return jnp.sum(back * weights[:, :, None], axis=1)
