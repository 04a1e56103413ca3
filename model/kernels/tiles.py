"""What GPU kernels share: tiles, the softmax over pages, and which arrays they can address."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

LOW: Final = np.float32(-1e30)  # the score of what is not seen; finite: differences are numbers
# Maximum and sum of the scores so far, and the weighted sum of each part of the values.
Running = tuple[Any, ...]
LEAST: Final = 16  # the shortest side of a tile that a matrix unit takes


@dataclass(frozen=True)
class Tiles:
    """How a product is cut: rows, outputs and inputs of a tile, and how it is run."""

    rows: int
    outputs: int
    inputs: int
    warps: int = 4
    stages: int = 3


def divisor(size: int, most: int) -> int:
    """The largest power of two that divides size, or `most` if that is smaller."""
    return min(size & -size, most)


def within(cut: Tiles, products: int, itemsize: int, shared_bytes: int) -> Tiles:
    """The cut with as many stages as a device has shared memory for, but at least two.

    products: of the same rows, side by side. shared_bytes: 0: enough for all stages.
    """
    stage = (cut.rows + products * cut.outputs) * cut.inputs * itemsize
    # The last stage is read while the first is overwritten.
    fits = shared_bytes // stage + 1 if shared_bytes else cut.stages
    return replace(cut, stages=max(2, min(cut.stages, fits)))


def queries_within(queries: int, positions: int, numbers: int, size: int, shared: int) -> int:
    """Queries of a program, at most so many, that a device has shared memory for.

    They stay there, beside a block of positions and its scores. numbers: of each query and of each
    position; each number has `size` bytes. shared: bytes; 0: enough for all.
    """
    while shared and queries > LEAST:
        if ((queries + positions) * numbers + queries * positions) * size <= shared:
            break
        queries //= 2
    return queries


class Part(NamedTuple):
    """A part of a head: `size` numbers from `at` on, as they are read; of pairs, one lane's."""

    at: int
    size: int
    lane: int = 0
    lanes: int = 1

    def of(self, *heads: Any) -> tuple[Any, ...]:
        """The index of these numbers in an array whose heads are not in pairs."""
        if self.lanes == 1:
            return *heads, pl.ds(self.at, self.size)
        pairs = np.int32(self.at) + jnp.arange(self.size, dtype=jnp.int32)
        own = pairs * np.int32(self.lanes) + np.int32(self.lane)
        return *(at[:, None] if jnp.ndim(at) else at for at in heads), own[None, :]


def parts_of(head_dim: int, lanes: int = 1, most: int | None = None, first: int = 0) -> list[Part]:
    """The parts of a head, powers of two: 576 is 512 and 64, or 256 and 32 in each of two lanes.

    most: numbers of a part, over its lanes. first: the head's numbers before it are left out.
    """
    parts: list[Part] = []
    at, end = first // lanes, head_dim // lanes
    while at < end:
        size = min(1 << ((end - at).bit_length() - 1), (most or head_dim) // lanes)
        parts += [Part(at, size, lane, lanes) for lane in range(lanes)]
        at += size
    return parts


def values_read(head_dim: int, value_dim: int | None, lanes: int) -> int:
    """Numbers of a value that kernels read: only those wanted, if products can be cut there."""
    rest = head_dim - (value_dim or head_dim)
    return head_dim - rest if rest % (LEAST * lanes) == 0 else head_dim


def is_indexed(array: Any) -> bool:
    """Whether kernels can address all of an array: up to 2**32 bytes, offsets are signed 32 bits.

    Source: jax-ml/jax: jax/_src/pallas/triton/lowering.py.
    """
    return bool(array.size < 2**31 or array.size * array.dtype.itemsize > 2**32)


def to_bits(scale: float) -> float:
    """The scale of scores for a softmax of powers of two."""
    return scale * math.log2(math.e)


def exact(operand: Any) -> lax.Precision | None:
    """The precision of products of such operands: by default, float32 would be rounded."""
    return lax.Precision.HIGHEST if operand.dtype == jnp.float32 else None


def add_products(accs: Sequence[Any], x: Any, tiles: Sequence[Any]) -> tuple[Any, ...]:
    """Add to each sum the product of some rows and a tile of weights.

    With bfloat16 rows and float32 weights, no product is rounded: the 24 bits of a weight are three
    bfloat16 numbers.
    """

    def added(acc: Any, tile: Any) -> Any:
        if tile.dtype == x.dtype:
            return acc + plt.dot(x, tile, precision=exact(x))
        for _ in range(3):
            part = tile.astype(x.dtype)
            acc += plt.dot(x, part)
            tile -= part.astype(tile.dtype)
        return acc

    return tuple(added(acc, tile) for acc, tile in zip(accs, tiles, strict=True))


def block_at(at: Any, positions: int, page_size: int) -> tuple[Any, Any]:
    """In which pages of a list the positions from `at` on are, and at which offsets in them.

    A block within one page has one page and a range, which keeps addresses out of the loop. at: a
    multiple of positions.
    """
    if page_size % positions == 0:
        return at // np.int32(page_size), pl.ds(at % np.int32(page_size), positions)
    each = at + jnp.arange(positions, dtype=jnp.int32)
    return each // np.int32(page_size), each % np.int32(page_size)


class Softmax(NamedTuple):
    """The softmax of scores times scale. interpret: see Target in model/kernels.

    apart: add up the products of parts at the end, so that none waits for another.
    """

    scale: float
    interpret: bool
    apart: bool = False

    def power(self, exponents: Any) -> Any:
        """Powers of two, by the GPU's unit for them, which flushes subnormals to zero."""
        if self.interpret:
            return jnp.exp2(exponents)
        (powers,) = plt.elementwise_inline_asm(
            "ex2.approx.ftz.f32 $0, $1;",
            args=[exponents],
            constraints="=f,f",
            pack=1,
            result_shape_dtypes=[jax.ShapeDtypeStruct(exponents.shape, exponents.dtype)],
        )
        return powers


def add_block(
    carry: Running, qs: list[Any], keys: list[Any], values: list[Any], how: Softmax, seen: Any
) -> Running:
    """Add one more block of positions. qs: parts of queries, each [queries, size].

    values: of fewer parts, where those of the last are not wanted. seen: which positions may be
    looked at, [queries, positions] or what broadcasts to it; None: all.
    """
    top, total, *accs = carry
    products = [plt.dot(q, key.T, precision=exact(q)) for q, key in zip(qs, keys, strict=True)]
    scale = np.float32(to_bits(how.scale))
    if how.apart:  # scaled first, so that the compiler accumulates no product onto another
        scores = sum(product * scale for product in products)
    else:
        scores = sum(products[1:], products[0]) * scale
    if seen is not None:
        scores = jnp.where(seen, scores, LOW)
    new_top = jnp.maximum(top, jnp.max(scores, axis=1))
    weights = how.power(scores - new_top[:, None])
    if seen is not None:
        # Where nothing was seen so far, the maximum is LOW, and its power would be one.
        weights = jnp.where(seen, weights, np.float32(0))
    keep = how.power(top - new_top)
    weighed = weights.astype(values[0].dtype)
    accs = [
        acc * keep[:, None] + plt.dot(weighed, value, precision=exact(weighed))
        for acc, value in zip(accs, values, strict=True)
    ]
    return (new_top, total * keep + jnp.sum(weights, axis=1), *accs)


def begin(queries: int, parts: Sequence[Part], sinks: Any) -> Running:
    """The state before the first block. sinks: of each query, a score without a value; or None."""
    accs = [jnp.zeros((queries, part.size), jnp.float32) for part in parts]
    if sinks is None:
        return (jnp.full(queries, LOW), jnp.zeros(queries, jnp.float32), *accs)
    return (sinks * np.float32(to_bits(1.0)), jnp.ones(queries, jnp.float32), *accs)
