"""Products of few rows for GPUs, computed in parts that the consumer adds up.

A product of few rows takes as long as its weights take to read. Reading them at full speed takes
more programs than there are tiles of outputs, so inputs are split among programs, too. As parts are
added up where they are used, that costs no launch of its own; and a single row needs no rows of
zeros beside it (model.products.with_company).
"""

from functools import partial
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Float

from model.kernels.codes import Weights, in_pairs, lanes_of
from model.kernels.tiles import LEAST, Tiles, add_products, divisor, is_indexed
from model.products import Matrix, product


class _How(NamedTuple):
    """How products of a kind are cut: the most of tiles and parts. Measured on an H200.

    most_rows: products of more rows are computed whole, which then takes less time.
    programs: wanted in all, if tiles were 64 by 64 and there were inputs enough.
    """

    most_rows: int
    rows: int
    outputs: int
    inputs: int
    stages: int = 3
    parts: int = 16
    programs: int = 256


_UNIT: Final = 64
_OF_NUMBERS: Final = _How(64, 64, 64, 128)
# Inputs and parts as for numbers, so that sums are added up in the same order, except for many
# rows, where products of numbers are computed whole. With tiles of 64 rows, a matrix unit takes
# both operands from shared memory, where decoded weights are not.
_OF_CODES: Final = _How(64, 32, 128, 128)
_OF_CODES_BY_MANY: Final = _How(256, 64, 128, 128, programs=512)
_OF_FLOAT32: Final = _How(16, 16, 64, 32, stages=2)
# float32 by bfloat16, see add_products.
_OF_ROUTERS: Final = _How(256, 64, 32, 64, stages=2, parts=32)


def _how(x: Array, w: Matrix) -> _How:
    if w.dtype == jnp.float32:
        return _OF_ROUTERS if x.dtype == jnp.bfloat16 and w.scales is None else _OF_FLOAT32
    if w.scales is not None and len(x) > _OF_CODES.most_rows:
        return _OF_CODES_BY_MANY
    how = _OF_NUMBERS if w.scales is None else _OF_CODES
    # With many rows, parts take time to write.
    return how if len(x) <= LEAST else how._replace(programs=160)


def _cut(x: Array, w: Matrix) -> tuple[Tiles, int] | None:
    """Tiles and number of parts. None: products of such rows and weights are computed whole."""
    rows, (inputs, outputs), how = len(x), w.shape, _how(x, w)
    values = in_pairs(w.values)
    if rows > how.most_rows or w.turned or w.at or not is_indexed(values):
        return None
    tile_rows = min(max(LEAST, 1 << (rows - 1).bit_length()), how.rows)
    sides = divisor(outputs, how.outputs), divisor(inputs, how.inputs)
    tile = Tiles(tile_rows, *sides, stages=how.stages)
    if min(tile.outputs // lanes_of(values), tile.inputs) < LEAST:
        return None
    wanted = -(-how.programs // (-(-outputs // _UNIT) * -(-rows // _UNIT)))
    parts = divisor(inputs // tile.inputs, min(how.parts, 1 << (wanted - 1).bit_length()))
    return tile, parts


def _kernel(x_ref: Any, w_ref: Any, *others: Any, cut: Tiles, dtype: Any, interpret: bool) -> None:
    """A tile of outputs, over a part of the inputs."""
    *scale_refs, out_ref = others
    weights = Weights(w_ref, scale_refs[0] if scale_refs else None, interpret)
    nth, part, block = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    # Rows past the last repeat the last, in all reads and writes.
    rows = block * np.int32(cut.rows) + jnp.arange(cut.rows, dtype=jnp.int32)
    rows = jnp.minimum(rows, np.int32(x_ref.shape[0] - 1))
    steps = w_ref.shape[0] // cut.inputs // out_ref.shape[0]

    def step(k: Any, accs: tuple[Any, ...]) -> tuple[Any, ...]:
        first = (part * np.int32(steps) + k) * np.int32(cut.inputs)
        x = x_ref[rows, pl.ds(first, cut.inputs)]
        if interpret or dtype != jnp.float32 or x.dtype != jnp.bfloat16:
            x = x.astype(dtype)
        tiles = weights.tile(((), ()), (first, cut.inputs), (nth, cut.outputs), dtype)
        return add_products(accs, x, tiles)

    zeros = (jnp.zeros((cut.rows, cut.outputs // weights.lanes), jnp.float32),) * weights.lanes
    done = lax.fori_loop(np.int32(0), np.int32(steps), step, zeros)
    for lane, out in enumerate(done):
        outputs = weights.outputs(nth, cut.outputs, lane)
        out_ref[part, rows[:, None], outputs[None, :]] = out


def product_parts(
    x: Float[Array, "rows a"],
    w: Matrix,
    cut: tuple[Tiles, int] | None = None,
    interpret: bool = False,
) -> Float[Array, "parts rows b"]:
    """See model.products.product_parts. cut: tiles, and the number of parts."""
    cut = cut or _cut(x, w)
    if cut is None:
        return product(x, w)[None]
    (tiles, parts), outputs = cut, w.shape[1]
    given = (in_pairs(w.values), *(() if w.scales is None else (w.scales,)))
    found: Array = pl.pallas_call(
        partial(_kernel, cut=tiles, dtype=jnp.dtype(w.dtype), interpret=interpret),
        out_shape=jax.ShapeDtypeStruct((parts, len(x), outputs), jnp.float32),
        grid=(outputs // tiles.outputs, parts, -(-len(x) // tiles.rows)),
        name="product_parts",
        interpret=interpret,
        compiler_params=plt.CompilerParams(num_warps=tiles.warps, num_stages=tiles.stages),
    )(x, *given)
    return found
