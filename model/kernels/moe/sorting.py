"""Pairs of row and expert, sorted into blocks of one expert each, for products on a GPU."""

from functools import partial
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Int32

_FEW_PAIRS: Final = 2048  # most that kernels sort: each of their programs looks at all pairs


class Blocks(NamedTuple):
    """Where pairs of row and expert stand: in slots, of which a block has those of one expert.

    experts: of each block; the number of experts means that the block is unused. rows: the row in
    each slot; anything in unused slots. slots: of each pair, row by row; any slot where the pair's
    expert is not here.
    """

    experts: Int32[Array, " blocks"]
    rows: Int32[Array, " slots"]
    slots: Int32[Array, " pairs"]


def num_blocks(pairs: int, experts: int, size: int) -> int:
    """Most blocks that so many pairs fill: one begun for each expert with any, the rest full."""
    begun = min(pairs, experts)
    return begun + (pairs - begun) // size


def blocks(
    local_ids: Int32[Array, "rows chosen"], experts: int, size: int, interpret: bool = False
) -> Blocks:
    """Sort pairs into blocks of `size` slots; few pairs are sorted by kernels."""
    num_rows, chosen = local_ids.shape
    flat = local_ids.reshape(-1)
    pairs = len(flat)
    at = jnp.arange(pairs, dtype=jnp.int32)
    if num_rows == 1:  # a row chooses an expert once
        rows = jnp.zeros(pairs * size, jnp.int32)
        return Blocks(flat, rows, at * np.int32(size))
    if pairs <= _FEW_PAIRS:
        return _by_kernels(flat, _How(experts, size, chosen), interpret)
    each = jnp.arange(experts, dtype=jnp.int32)
    counts = jnp.sum(flat[:, None] == each, axis=0, dtype=jnp.int32)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    sorted_at = jnp.zeros_like(flat).at[order].set(at, unique_indices=True)
    place = sorted_at - jnp.pad(jnp.cumsum(counts) - counts, (0, 1))[flat]
    filled = -(-counts // np.int32(size))
    # A sum over a matrix, since XLA's running sum takes several launches.
    first = jnp.sum(jnp.where(each[:, None] > each, filled, np.int32(0)), axis=1)
    total = num_blocks(pairs, experts, size)
    slots = jnp.pad(first, (0, 1))[flat] * np.int32(size) + place
    here = jnp.where(flat < experts, slots, np.int32(total * size))
    nobody = jnp.zeros(total * size, jnp.int32)
    rows = nobody.at[here].set(at // np.int32(chosen), mode="drop")
    block = jnp.arange(total, dtype=jnp.int32)[:, None]
    of_block = jnp.sum((first + filled) <= block, axis=1, dtype=jnp.int32)
    return Blocks(of_block, rows, jnp.where(flat < experts, slots, np.int32(0)))


class _How(NamedTuple):
    """Experts, rows of a block, and experts that a row chooses."""

    experts: int
    size: int
    chosen: int


def _found(id_ref: Any, pair: Any, how: _How) -> Any:
    return plt.load(id_ref.at[pair], mask=pair < id_ref.shape[0], other=np.int32(how.experts))


def _all(size: int) -> Any:
    """Indices from zero on, as many as the power of two that holds so many."""
    return jnp.arange(1 << (size - 1).bit_length(), dtype=jnp.int32)


def _count_kernel(id_ref: Any, count_ref: Any, *, how: _How) -> None:
    """One expert's pairs."""
    expert = pl.program_id(0)
    is_own = _found(id_ref, _all(id_ref.shape[0]), how) == expert
    count_ref[expert] = jnp.sum(is_own.astype(jnp.int32))


def _sort_kernel(
    id_ref: Any, count_ref: Any, block_ref: Any, row_ref: Any, slot_ref: Any, *, how: _How
) -> None:
    """One expert: its blocks, and its pairs' slots."""
    expert, last = pl.program_id(0), pl.program_id(0) == np.int32(how.experts - 1)
    pairs, nobody, each = id_ref.shape[0], np.int32(how.experts), _all(how.experts)
    counts = plt.load(count_ref.at[each], mask=each < nobody, other=np.int32(0))
    filled = (counts + np.int32(how.size - 1)) // np.int32(how.size)
    first = jnp.sum(jnp.where(each < expert, filled, np.int32(0)))
    own = jnp.sum(jnp.where(each == expert, filled, np.int32(0)))

    total = block_ref.shape[0]
    at = _all(total)
    behind = at >= first + own
    mine = (at >= first) & (~behind | last) & (at < total)
    plt.store(block_ref.at[at], jnp.where(behind, nobody, expert), mask=mine)

    pair = _all(pairs)
    ids = _found(id_ref, pair, how)
    is_own = ids == expert
    place = jnp.cumsum(is_own.astype(jnp.int32)) - np.int32(1)
    slots = jnp.where(is_own, first * np.int32(how.size) + place, np.int32(0))
    rows = pair // np.int32(how.chosen)
    # Interpreted, a masked store puts back what was there, so it must not point to a slot.
    where = jnp.where(is_own, slots, np.int32(row_ref.shape[0]))
    plt.store(row_ref.at[where], rows, mask=is_own)
    is_elsewhere = (ids >= nobody) & (pair < pairs) & last
    plt.store(slot_ref.at[pair], slots, mask=is_own | is_elsewhere)


def _by_kernels(flat: Int32[Array, " pairs"], how: _How, interpret: bool) -> Blocks:
    """One kernel counts, another places: a single one would count all experts in each program."""
    total = num_blocks(len(flat), how.experts, how.size)

    def run(name: str, kernel: Any, sizes: tuple[int, ...], *args: Array) -> Any:
        return pl.pallas_call(
            partial(kernel, how=how),
            out_shape=[jax.ShapeDtypeStruct((size,), jnp.int32) for size in sizes],
            grid=(how.experts,),
            name=name,
            interpret=interpret,
            compiler_params=plt.CompilerParams(num_warps=8, num_stages=1),
        )(*args)

    (counts,) = run("experts_count", _count_kernel, (how.experts,), flat)
    sizes = total, total * how.size, len(flat)
    return Blocks(*run("experts_sort", _sort_kernel, sizes, flat, counts))
