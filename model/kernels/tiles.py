"""What kernels for GPUs share: tiles of pages and of weights, and what may be indexed."""

import math
from typing import Any, Final

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

LOW: Final = np.float32(-1e30)  # a score of nothing; finite, so that differences are numbers
LEAST: Final = 16  # of a side of a tile that a matrix unit takes


def parts_of(head_dim: int) -> list[tuple[int, int]]:
    """Where each part of a head begins and its size, powers of two: 576 is 512 and 64."""
    parts, at = [], 0
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


def pool_tile(
    pool_ref: Any,
    layer: Any,
    plane: int,
    where: tuple[Any, Any, Any],
    part: tuple[int, int],
    dtype: Any,
) -> Any:
    """Part of a head at some positions, [positions, size]. where: pages, offsets in them, a head."""
    at, size = part
    return numbers(pool_ref[(layer, np.int32(plane), *where, pl.ds(at, size))]).astype(dtype)


def numbers(found: Any) -> Any:
    """What bytes in a pool or a stack of weights stand for."""
    if found.dtype == jnp.uint8:
        return lax.bitcast_convert_type(found, jnp.float8_e4m3fn)
    return found
