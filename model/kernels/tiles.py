"""What kernels for GPUs share: tiles, the softmax over pages, and what may be indexed."""

import math
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

LOW: Final = np.float32(-1e30)  # a score of nothing; finite, so that differences are numbers
Parts = list[tuple[int, int]]
# Maximum and sum of the scores so far, and the weighted sum of each part of the values.
Running = tuple[Any, ...]
LEAST: Final = 16  # of a side of a tile that a matrix unit takes


@dataclass(frozen=True)
class Tiles:
    """How a product is cut: rows, outputs and inputs of a tile, and how it is run."""

    rows: int
    outputs: int
    inputs: int
    warps: int = 4
    stages: int = 3


def divisor(size: int, most: int) -> int:
    """The largest power of two that size is a multiple of, and at most so much."""
    return min(size & -size, most)


def parts_of(head_dim: int) -> Parts:
    """Where each part of a head begins and its size, powers of two: 576 is 512 and 64."""
    parts: Parts = []
    at = 0
    while at < head_dim:
        size = 1 << ((head_dim - at).bit_length() - 1)
        parts.append((at, size))
        at += size
    return parts


def is_indexed(array: Any) -> bool:
    """Whether a kernel finds all of it: up to 2**32 bytes offsets have 32 bits, one of them a sign.

    Source: jax-ml/jax: jax/_src/pallas/triton/lowering.py.
    """
    return bool(array.size < 2**31 or array.size * array.dtype.itemsize > 2**32)


def to_bits(scale: float) -> float:
    """Of scores whose softmax is of powers of two."""
    return scale * math.log2(math.e)


def exact(operand: Any) -> lax.Precision | None:
    """Of products of operands like this, which would else be rounded where they are float32."""
    return lax.Precision.HIGHEST if operand.dtype == jnp.float32 else None


def block_at(at: Any, positions: int, page_size: int) -> tuple[Any, Any]:
    """Which page in a list the positions from `at` on are in, and where in it.

    A block within a page has one page and a range, which keeps addresses out of the loop. at: a
    multiple of positions.
    """
    if page_size % positions == 0:
        return at // np.int32(page_size), pl.ds(at % np.int32(page_size), positions)
    each = at + jnp.arange(positions, dtype=jnp.int32)
    return each // np.int32(page_size), each % np.int32(page_size)


def keys_and_values(
    pool_ref: Any, layer: Any, where: tuple[Any, Any, Any], parts: Parts, dtype: Any
) -> tuple[list[Any], list[Any]]:
    """Some positions' parts, each [positions, size]. where: pages, offsets in them, a head.

    A page past the pool is some page, as in model.kv.read_pages.
    """
    pages, *within = where
    pages = jnp.clip(pages, np.int32(0), np.int32(pool_ref.shape[2] - 1))

    def plane(which: int) -> list[Any]:
        at = layer, np.int32(which), pages, *within
        return [numbers(pool_ref[(*at, pl.ds(*part))]).astype(dtype) for part in parts]

    keys = plane(0)
    return keys, keys if pool_ref.shape[1] == 1 else plane(1)


class Softmax(NamedTuple):
    """Of scores times scale. interpret: see Target in model/kernels."""

    scale: float
    interpret: bool

    def power(self, exponents: Any) -> Any:
        """Of two, by the unit that does it, which makes zero of what is too small for others."""
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
    """With one more block of positions. qs: parts of queries, each [queries, size].

    seen: what may be looked at, [queries, positions] or what broadcasts to it; None: all.
    """
    top, total, *accs = carry
    products = [plt.dot(q, key.T, precision=exact(q)) for q, key in zip(qs, keys, strict=True)]
    scores = sum(products[1:], products[0]) * np.float32(to_bits(how.scale))
    if seen is not None:
        scores = jnp.where(seen, scores, LOW)
    new_top = jnp.maximum(top, jnp.max(scores, axis=1))
    weights = how.power(scores - new_top[:, None])
    if seen is not None:
        # Where nothing was seen so far, nothing is as high as the highest.
        weights = jnp.where(seen, weights, np.float32(0))
    keep = how.power(top - new_top)
    weighed = weights.astype(qs[0].dtype)
    accs = [
        acc * keep[:, None] + plt.dot(weighed, value, precision=exact(weighed))
        for acc, value in zip(accs, values, strict=True)
    ]
    return (new_top, total * keep + jnp.sum(weights, axis=1), *accs)


def begin(queries: int, parts: Parts, sinks: Any) -> Running:
    """Before the first block. sinks: scores without a value, of each query, or None."""
    accs = [jnp.zeros((queries, size), jnp.float32) for _, size in parts]
    if sinks is None:
        return (jnp.full(queries, LOW), jnp.zeros(queries, jnp.float32), *accs)
    return (sinks * np.float32(to_bits(1.0)), jnp.ones(queries, jnp.float32), *accs)


def numbers(found: Any) -> Any:
    """What bytes in a pool or a stack of weights stand for."""
    if found.dtype == jnp.uint8:
        return lax.bitcast_convert_type(found, jnp.float8_e4m3fn)
    return found
