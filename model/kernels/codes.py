"""How GPU kernels read tiles of what they multiply rows with: numbers, or codes of one byte.

A matrix unit takes operands of two bytes as they lie in shared memory, whichever axis is summed
over. It takes single bytes so only along that axis, and otherwise one by one. So codes are read in
pairs: two neighbours along the last axis as one number. A tile of pairs becomes two tiles, its
lanes: the even entries and the odd ones.
"""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from model.coded import converted
from model.kernels.tiles import LEAST, Part

# Converts two pairs of codes, a and b, to float16, which needs no rounding; x and y are the first
# of each pair, or the second. Source: NVIDIA's PTX manual, cvt.
_READ: Final = """
.reg .b16 a, b, first, second, x, y;
.reg .b32 s, t;
mov.b32 {{a, b}}, $1;
cvt.rn.f16x2.e4m3x2 s, a;
cvt.rn.f16x2.e4m3x2 t, b;
mov.b32 {{first, second}}, s;
mov.b16 x, {which};
mov.b32 {{first, second}}, t;
mov.b16 y, {which};
"""
# The same for integers. Below a byte of 0x64, a byte is a float16 of 1,024 plus that byte. With its
# highest bit flipped, the byte is the integer plus 128, so 1,152 is subtracted, which is 0x6480.
# Conversions of integers run at half the rate: with them, all of it would take a third longer.
_READ_INT8: Final = """
.reg .b16 x, y;
.reg .b32 s, more;
shr.b32 s, $1, {bits};
lop3.b32 s, s, 0x00FF00FF, 0x64806480, 0x6A;
mov.b32 more, 0x64806480;
sub.rn.f16x2 s, s, more;
mov.b32 {{x, y}}, s;
"""
_AS_THEY_ARE: Final = "mov.b32 $0, {x, y};"
_WIDE: Final = """
.reg .f32 p, q;
cvt.f32.f16 p, x;
cvt.f32.f16 q, y;
"""
_BY_SCALES: Final = "mul.f32 p, p, $2;\nmul.f32 q, q, $3;\n"
_ROUNDED: Final = {
    "bfloat16": "cvt.rn.bf16x2.f32 $0, q, p;",
    "float16": "cvt.rn.f16x2.f32 $0, q, p;",
}
# The dtype of a pair by the dtype of codes; it is signed where they are.
_PAIRS: Final = {
    np.dtype(codes): np.dtype(pair) for codes, pair in ((np.uint8, np.uint16), (np.int8, np.int16))
}


def in_pairs(array: Array) -> Array:
    """Codes [..., n] as [..., n / 2] of two bytes each, the first in the lower; nothing is moved.

    Numbers are returned as they are, and so are codes of which half a tile would be too small.
    """
    if array.dtype not in _PAIRS or array.shape[-1] % (2 * LEAST):
        return array
    apart = array.reshape(*array.shape[:-1], array.shape[-1] // 2, 2)
    return lax.bitcast_convert_type(apart, _PAIRS[array.dtype])


def lanes_of(ref: Any) -> int:
    """Tiles that one tile of ref becomes: two if it is `in_pairs`."""
    return 2 if ref.dtype in _PAIRS.values() else 1


def numbers(found: Any, lane: int, dtype: Any, interpret: bool, scales: Any = None) -> Any:
    """A lane of what was read, rounded to dtype. scales: of codes, broadcast to what was read.

    Codes without scales may become float16, which holds all of them.
    """
    of_codes = next((codes for codes, pair in _PAIRS.items() if found.dtype in (codes, pair)), None)
    if of_codes is None:
        return found.astype(dtype)
    if interpret or dtype == jnp.float32 or found.dtype == of_codes:
        codes = found if lane == 0 else found >> found.dtype.type(8)
        wide = converted(codes.astype(of_codes))
        return (wide if scales is None else wide * scales).astype(dtype)
    text, args = _text(of_codes, lane, jnp.dtype(dtype).name, scales is not None), [found]
    if scales is not None:
        args.append(jnp.broadcast_to(scales, found.shape))
    (rounded,) = plt.elementwise_inline_asm(
        f"{{{text}}}",
        args=args,
        constraints="=r,r" if scales is None else "=r,r,r,r",
        pack=2,
        result_shape_dtypes=[jax.ShapeDtypeStruct(found.shape, dtype)],
    )
    return rounded


def _text(codes: Any, lane: int, dtype: str, scaled: bool) -> str:
    """The PTX that converts a lane of two pairs of codes."""
    if codes == jnp.int8:
        read = _READ_INT8.format(bits=8 * lane)
    else:
        read = _READ.format(which=("first", "second")[lane])
    if dtype == "float16" and not scaled:
        return read + _AS_THEY_ARE
    return read + _WIDE + (_BY_SCALES if scaled else "") + _ROUNDED[dtype]


def keys_and_values(
    pool_ref: Any,
    at: tuple[Any, tuple[Any, Any, Any]],
    parts: Sequence[Part],
    num_of_values: int,
    how: tuple[Any, bool],
) -> tuple[list[Any], list[Any]]:
    """Parts of keys and of values at some positions, each [positions, size].

    Values that are read in pairs become float16 instead of bfloat16. num_of_values: how many of the
    parts, from the first on, have values. at: the layer, and in it the pages, offsets in them and a
    head. A page past the pool is some page, as in model.kv.read_pages. how: dtype, and see
    Target.interpreted.
    """
    layer, (pages, *within) = at
    pages = jnp.clip(pages, np.int32(0), np.int32(pool_ref.shape[2] - 1))
    dtype, interpret = how

    def plane(which: int, dtype: Any, parts: Sequence[Part]) -> list[Any]:
        tiles, found = [], None
        for part in parts:
            if part.lane == 0:
                own = pl.ds(part.at, part.size)
                found = pool_ref[(layer, np.int32(which), pages, *within, own)]
            tiles.append(numbers(found, part.lane, dtype, interpret))
        return tiles

    keys, last = plane(0, dtype, parts), pool_ref.shape[1] - 1
    # Attention weights are at most one: float16 holds them and codes, for less work than bfloat16.
    of_values = jnp.float16 if lanes_of(pool_ref) == 2 and dtype == jnp.bfloat16 else dtype
    if last == 0 and of_values == dtype:
        return keys, keys[:num_of_values]
    return keys, plane(last, of_values, parts[:num_of_values])


class Weights(NamedTuple):
    """A kernel's weights: [*stack, inputs, *halves, outputs], codes `in_pairs` of outputs.

    scale_ref: [*stack, groups, *halves, outputs]; None for numbers. interpret: see Target.
    """

    ref: Any
    scale_ref: Any
    interpret: bool

    @property
    def lanes(self) -> int:
        """See lanes_of."""
        return lanes_of(self.ref)

    def outputs(self, nth: Any, size: int, lane: int) -> Any:
        """Indices of the outputs in one lane of the nth tile of `size` outputs."""
        of_lane = jnp.arange(size // self.lanes, dtype=jnp.int32)
        return nth * np.int32(size) + (np.int32(self.lanes) * of_lane + np.int32(lane))

    def tile(
        self,
        at: tuple[tuple[Any, ...], tuple[Any, ...]],
        inputs: tuple[Any, int],
        outputs: tuple[Any, int],
        dtype: Any,
    ) -> list[Any]:
        """A tile as its lanes, each [inputs, outputs of a lane], rounded to dtype.

        at: indices of the axes before inputs, and of those behind. inputs: the first and how many.
        outputs: which tile, and how many outputs it has. Both counts are powers of two.
        """
        stack, halves = at
        (first_input, num_inputs), (nth, size) = inputs, outputs
        wide = size // self.lanes
        where = pl.ds(first_input, num_inputs), *halves, pl.ds(nth * np.int32(wide), wide)
        found = self.ref[(*stack, *where)]

        def scales(lane: int) -> Any:
            if self.scale_ref is None:
                return None
            axis, own = len(stack), self.outputs(nth, size, lane)
            group = self.ref.shape[axis] // self.scale_ref.shape[axis]
            if group % num_inputs == 0:
                of_all = first_input // np.int32(group)
                return self.scale_ref[(*stack, of_all, *halves, own)][None, :]
            of_each = (first_input + jnp.arange(num_inputs, dtype=jnp.int32)) // np.int32(group)
            return self.scale_ref[(*stack, of_each[:, None], *halves, own[None, :])]

        return [
            numbers(found, lane, dtype, self.interpret, scales(lane)) for lane in range(self.lanes)
        ]
