"""Expert products for GPUs as Pallas kernels: rows sorted into blocks of one expert each.

A block of rows is multiplied with its expert's weights where they lie. So an expert is read once
for each block of its rows, an expert that no row chose is not read at all, and skewed routing costs
what its rows cost. Source: arXiv:2211.15841 for blocks of one expert.
"""

from functools import partial
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Float, Int32

from model.coded import ExpertStacks, decoded
from model.kernels.codes import Weights, in_pairs
from model.kernels.moe import batched, tuned
from model.kernels.moe.sorting import Blocks, blocks
from model.kernels.tiles import Tiles, add_products, divisor, is_indexed, within

_SUM_OUTPUTS: Final = 1024  # of a row, that one program sums
_TUNED: Final = tuned.read()
# Rows per expert; with more, codes are decoded once instead of block by block.
MOST_OF_CODES: Final = 256


def tiles(
    rows: int, chosen: int, stacks: ExpertStacks, dtype: Any, shared_bytes: int = 0
) -> tuple[Tiles, Tiles]:
    """Tiles of the first and second product. dtype: of products. shared_bytes: see `experts`."""
    width, hidden = stacks.down.shape[2:]
    even = _even(rows, chosen, stacks)
    first, second = tuned.tiles_for(_TUNED, (weights_of(stacks), hidden, width), even)
    size = jnp.dtype(dtype).itemsize
    first = fitted(first, width, hidden, size)
    second = fitted(second, hidden, width, size)
    return within(first, 2, size, shared_bytes), within(second, 1, size, shared_bytes)


def weights_of(stacks: ExpertStacks) -> str:
    """The kind of the weights, as the table calls it."""
    if stacks.down_scale is None:
        return tuned.NUMBERS
    return "int8" if stacks.down.dtype == jnp.int8 else "fp8"


def _even(rows: int, chosen: int, stacks: ExpertStacks) -> float:
    """Rows of each expert, if all have equally many."""
    return rows * chosen / int(stacks.down.shape[1])


def _decoded(stacks: ExpertStacks, layer: Int32[Array, ""], dtype: Any) -> ExpertStacks:
    """One layer's experts as numbers."""

    def own(array: Array | None) -> Any:
        return None if array is None else lax.dynamic_index_in_dim(array, layer)

    def numbers(codes: Array, scales: Array | None) -> Array:
        return decoded(own(codes), own(scales), 2, dtype, native=True)

    return ExpertStacks(
        numbers(stacks.gate_up, stacks.gate_up_scale),
        numbers(stacks.down, stacks.down_scale),
        own(stacks.gate_up_bias),
        own(stacks.down_bias),
    )


def fitted(cut: Tiles, outputs: int, inputs: int, itemsize: int) -> Tiles:
    """The cut, as wide as the sizes allow. Wider numbers take no more shared memory per tile."""
    most, stages = (cut.inputs // 2, 2) if itemsize > 2 else (cut.inputs, cut.stages)
    sizes = divisor(outputs, cut.outputs), divisor(inputs, most)
    return Tiles(cut.rows, *sizes, cut.warps, stages)


def _first_kernel(
    *refs: Any, cut: Tiles, given: tuple[bool, bool], limit: float, alpha: float, interpret: bool
) -> None:
    """One tile of the second product's input. given: whether there are scales, and biases."""
    layer_ref, expert_ref, row_ref, x_ref, w_ref, *others, out_ref = refs
    weights = Weights(w_ref, others.pop(0) if given[0] else None, interpret)
    bias_ref = others.pop(0) if given[1] else None
    nth, block = pl.program_id(0), pl.program_id(1)
    layer, expert = layer_ref[0], expert_ref[block]
    num_experts, hidden = w_ref.shape[1:3]

    @pl.when(expert < num_experts)
    def _() -> None:
        slots = block * np.int32(cut.rows) + jnp.arange(cut.rows, dtype=jnp.int32)
        # An unused slot may hold anything.
        rows = jnp.clip(row_ref[slots], np.int32(0), np.int32(x_ref.shape[0] - 1))

        def step(k: Any, halves: tuple[Any, ...]) -> tuple[Any, ...]:
            first = k * np.int32(cut.inputs)
            x = x_ref[rows, pl.ds(first, cut.inputs)]
            wide = (first, cut.inputs), (nth, cut.outputs)

            def half(accs: Any, which: int) -> Any:
                at = (layer, expert), (np.int32(which),)
                return add_products(accs, x, weights.tile(at, *wide, x.dtype))

            return half(halves[0], 0), half(halves[1], 1)

        zeros = (jnp.zeros((cut.rows, cut.outputs // weights.lanes), jnp.float32),) * weights.lanes
        done = lax.fori_loop(0, hidden // cut.inputs, step, (zeros, zeros))
        for lane, (gate, up) in enumerate(zip(*done, strict=True)):
            outputs = weights.outputs(nth, cut.outputs, lane)
            if bias_ref is not None:
                gate += bias_ref[layer, expert, 0, outputs].astype(jnp.float32)[None, :]
                up += bias_ref[layer, expert, 1, outputs].astype(jnp.float32)[None, :]
            if limit:
                gate = jnp.minimum(gate, np.float32(limit))
                up = jnp.clip(up, np.float32(-limit), np.float32(limit)) + np.float32(1)
            inner = gate * jax.nn.sigmoid(np.float32(alpha if limit else 1.0) * gate) * up
            out_ref[slots[:, None], outputs[None, :]] = inner.astype(out_ref.dtype)


def _second_kernel(*refs: Any, cut: Tiles, given: tuple[bool, bool], interpret: bool) -> None:
    """One tile of an expert's output. given: whether there are scales, and biases."""
    layer_ref, expert_ref, x_ref, w_ref, *others, out_ref = refs
    weights = Weights(w_ref, others.pop(0) if given[0] else None, interpret)
    bias_ref = others.pop(0) if given[1] else None
    nth, block = pl.program_id(0), pl.program_id(1)
    layer, expert = layer_ref[0], expert_ref[block]
    num_experts, width = w_ref.shape[1:3]

    @pl.when(expert < num_experts)
    def _() -> None:
        slots = block * np.int32(cut.rows) + jnp.arange(cut.rows, dtype=jnp.int32)

        def step(k: Any, accs: Any) -> Any:
            first = k * np.int32(cut.inputs)
            x = x_ref[slots, pl.ds(first, cut.inputs)]
            wide = (first, cut.inputs), (nth, cut.outputs)
            return add_products(accs, x, weights.tile(((layer, expert), ()), *wide, x.dtype))

        zeros = (jnp.zeros((cut.rows, cut.outputs // weights.lanes), jnp.float32),) * weights.lanes
        done = lax.fori_loop(0, width // cut.inputs, step, zeros)
        for lane, out in enumerate(done):
            outputs = weights.outputs(nth, cut.outputs, lane)
            if bias_ref is not None:
                out += bias_ref[layer, expert, outputs].astype(jnp.float32)[None, :]
            out_ref[slots[:, None], outputs[None, :]] = out.astype(out_ref.dtype)


def _sum_kernel(*refs: Any, cut: int, chosen: int, num_experts: int) -> None:
    """A part of a row: the weighted sum of its experts' outputs, added one after the other."""
    id_ref, weight_ref, slot_ref, done_ref, out_ref = refs
    row, first = pl.program_id(0), pl.program_id(1) * np.int32(cut)
    outputs, hidden = pl.ds(first, cut), out_ref.shape[1]
    inside = first + jnp.arange(cut, dtype=jnp.int32) < hidden
    total = jnp.zeros(cut, jnp.float32)
    for nth in range(chosen):
        at = row * np.int32(chosen) + np.int32(nth)
        # An output that nothing wrote may be NaN, which even a weight of zero would not remove.
        there = inside & (id_ref[at] < num_experts)
        found = plt.load(done_ref.at[slot_ref[at], outputs], mask=there, other=0.0)
        total += found.astype(jnp.float32) * weight_ref[at]
    plt.store(out_ref.at[row, outputs], total, mask=inside)


def _summed(
    local_ids: Array, weights: Array, slots: Array, done: Array, experts: int, interpret: bool
) -> Array:
    """Each row's weighted sum. As one XLA operation, it takes thirty times as long."""
    num_rows, chosen = local_ids.shape
    hidden = done.shape[1]
    cut = min(_SUM_OUTPUTS, 2 ** (hidden - 1).bit_length())
    out: Array = pl.pallas_call(
        partial(_sum_kernel, cut=cut, chosen=chosen, num_experts=experts),
        out_shape=jax.ShapeDtypeStruct((num_rows, hidden), jnp.float32),
        grid=(num_rows, -(-hidden // cut)),
        name="experts_sum",
        interpret=interpret,
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
    )(local_ids.reshape(-1), weights.reshape(-1), slots, done)
    return out


def gate_up(
    x: Float[Array, "rows hidden"],
    sorted_: Blocks,
    stacks: ExpertStacks,
    layer: Int32[Array, ""],
    cut: Tiles,
    limit: float = 0.0,
    alpha: float = 1.0,
    interpret: bool = False,
) -> Float[Array, "slots width"]:
    """The second product's input; unused slots hold anything. See `experts`."""
    weights = in_pairs(stacks.gate_up), stacks.gate_up_scale, stacks.gate_up_bias
    out = jax.ShapeDtypeStruct((len(sorted_.rows), stacks.down.shape[2]), x.dtype)
    args = layer.reshape(1), sorted_.experts, sorted_.rows, x
    kernel = partial(_first_kernel, limit=limit, alpha=alpha)
    return _multiplied(kernel, "experts_gate_up", cut, out, args, weights, interpret)


def down(
    inner: Float[Array, "slots width"],
    sorted_: Blocks,
    stacks: ExpertStacks,
    layer: Int32[Array, ""],
    cut: Tiles,
    interpret: bool = False,
) -> Float[Array, "slots hidden"]:
    """The experts' outputs; unused slots hold anything. See `experts`."""
    weights = in_pairs(stacks.down), stacks.down_scale, stacks.down_bias
    out = jax.ShapeDtypeStruct((len(inner), stacks.down.shape[3]), inner.dtype)
    args = layer.reshape(1), sorted_.experts, inner
    return _multiplied(_second_kernel, "experts_down", cut, out, args, weights, interpret)


def _multiplied(
    kernel: Any,
    name: str,
    cut: Tiles,
    out: jax.ShapeDtypeStruct,
    args: tuple[Array, ...],
    stacks: tuple[Array, Array | None, Array | None],
    interpret: bool,
) -> Array:
    """Run one product's kernel. args: layer, experts of blocks, and the rest before the weights."""
    weights, scales, bias = stacks
    grid = out.shape[1] // cut.outputs, out.shape[0] // cut.rows
    call = pl.pallas_call(
        partial(kernel, cut=cut, given=(scales is not None, bias is not None), interpret=interpret),
        out_shape=out,
        grid=grid,
        name=name,
        interpret=interpret,
        compiler_params=plt.CompilerParams(num_warps=cut.warps, num_stages=cut.stages),
    )
    given: Array = call(*args, weights, *(a for a in (scales, bias) if a is not None))
    return given


def experts(
    x: Float[Array, "rows hidden"],
    local_ids: Int32[Array, "rows chosen"],
    weights: Float[Array, "rows chosen"],
    stacks: ExpertStacks,
    layer: Int32[Array, ""],
    limit: float = 0.0,
    alpha: float = 1.0,
    cuts: tuple[Tiles, Tiles] | None = None,
    shared_bytes: int = 0,
    interpret: bool = False,
) -> Float[Array, "rows hidden"]:
    """See model.kernels.moe.reference.experts.

    cuts: of both products, with equally many rows. shared_bytes: shared memory of a program on the
    device; 0: enough.
    """
    num_rows, chosen = local_ids.shape
    num_experts = stacks.down.shape[1]
    of_codes = stacks.down_scale is not None and cuts is None
    if of_codes and _even(num_rows, chosen, stacks) > MOST_OF_CODES:
        stacks, layer = _decoded(stacks, layer, x.dtype), jnp.zeros_like(layer)
    first, second = cuts or tiles(num_rows, chosen, stacks, x.dtype, shared_bytes)
    if not (is_indexed(in_pairs(stacks.gate_up)) and is_indexed(in_pairs(stacks.down))):
        return batched.experts(x, local_ids, weights, stacks, layer, limit, alpha)
    with jax.named_scope("experts"):
        sorted_ = blocks(local_ids, num_experts, first.rows, interpret)
        inner = gate_up(x, sorted_, stacks, layer, first, limit, alpha, interpret)
        done = down(inner, sorted_, stacks, layer, second, interpret)
        return _summed(local_ids, weights, sorted_.slots, done, num_experts, interpret)
