"""Weights that stay codes in memory: a byte per weight, and a scale per group of inputs.

A weight is its code's value times a scale, converted to the dtype of the products where it is
multiplied. uint8 codes are e4m3 (arXiv:2209.05433), which includes all values of MXFP4 and of
four-bit integers, so checkpoints of either are kept without rounding; int8 codes are integers. The
dtype alone says which. For each output, `group` neighbouring inputs of a product share one scale.
"""

from typing import Any, Final, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float, Float32, Int8, UInt8

# By what --quantization calls them; and the largest value that is used of each, of either sign.
CODE_DTYPES: Final = {"fp8": np.dtype(np.uint8), "int8": np.dtype(np.int8)}
LARGEST: Final = {np.dtype(np.uint8): np.float32(448), np.dtype(np.int8): np.float32(127)}
LEAST_GROUP: Final = 8  # its scales take half as much memory as its codes


class ExpertStacks(NamedTuple):
    """One shard's experts of some layers of equal structure.

    gate_up, down: in the products' dtype, or codes where there are scales. Scales are f32, with
    fewer entries along the axis of inputs. Only GPT-OSS has biases.
    """

    gate_up: Array  # [layers, experts, hidden, 2, f]
    down: Array  # [layers, experts, f, hidden]
    gate_up_bias: Array | None = None  # [layers, experts, 2, f]
    down_bias: Array | None = None  # [layers, experts, hidden]
    gate_up_scale: Array | None = None  # [layers, experts, groups, 2, f]
    down_scale: Array | None = None  # [layers, experts, groups, hidden]


def decoded(
    codes: UInt8[Array, "..."] | Int8[Array, "..."],
    scales: Float32[Array, "..."],
    axis: int,
    dtype: Any,
    native: bool,
) -> Float[Array, "..."]:
    """Codes times scales, rounded to dtype. axis: of inputs, along which scales are fewer.

    native: see from_codes.
    """
    size = codes.shape[axis] // scales.shape[axis]
    before, behind = codes.shape[:axis], codes.shape[axis + 1 :]
    apart = from_codes(codes, native).reshape(*before, scales.shape[axis], size, *behind)
    scaled = (apart * jnp.expand_dims(scales, axis + 1)).reshape(codes.shape)
    kind = jnp.finfo(dtype)
    if kind.dtype != scaled.dtype:
        # Without this XLA would skip the rounding where the result is widened again.
        scaled = lax.reduce_precision(scaled, kind.nexp, kind.nmant)
    return scaled.astype(dtype)


def from_codes(codes: UInt8[Array, "..."] | Int8[Array, "..."], native: bool) -> Array:
    """The values of codes in float32.

    native: whether the device converts e4m3 itself. A CPU does not, and XLA's own conversion there
    takes 20 times as long as the integer operations of `_from_bits`, which XLA vectorises. A CPU
    does convert one-byte integers.
    """
    values: Array = (converted if native or codes.dtype == jnp.int8 else _from_bits)(codes)
    return values


def converted(codes: Any) -> Any:
    """The values of codes in float32, converted by the device."""
    if codes.dtype == jnp.int8:
        return codes.astype(jnp.float32)
    return lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(jnp.float32)


def _from_bits(codes: Array) -> Array:
    """The values of e4m3 codes: a sign, four bits of exponent with bias 7, three of mantissa.

    NaN, which the loader refuses, becomes 480.
    """
    wide = codes.astype(jnp.int32)
    size = wide & np.int32(0x7F)
    normal = lax.bitcast_convert_type(
        (size + np.int32((127 - 7) << 3)) << np.int32(20), jnp.float32
    )
    small = size.astype(jnp.float32) * np.float32(2.0**-9)  # an exponent of zero: no leading one
    value = jnp.where(size < 8, small, normal)
    return jnp.where(wide >= 128, -value, value)
