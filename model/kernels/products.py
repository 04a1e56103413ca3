"""Products of few rows for GPUs: in parts, which whoever takes them adds up.

Few rows are multiplied as fast as weights are read, which takes more programs than there are tiles
of outputs: so inputs are split among programs, too. Added up where they are used, parts cost no
launch of their own, nor does a row alone its company (model.products.with_company).
"""

from functools import partial
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Float

from model.kernels.codes import Weights, in_pairs
from model.kernels.tiles import LEAST, Tiles, add_products, divisor, is_indexed
from model.products import Matrix, product

# By bytes of a weight: more take XLA less time, which decodes codes first, and of float32 that of
# rows of bfloat16, see add_products.
_MOST_ROWS: Final = {1: 256, 2: 64, 4: 256}
_MOST_WIDE_ROWS: Final = 16  # of float32 by float32
_TILE_ROWS: Final = 64
_PROGRAMS: Final = 256  # that there are at least, where inputs are enough
_MOST_PARTS: Final = 16


def _tiles(x: Array, w: Matrix) -> Tiles | None:
    """None: of rows and weights like these the whole product is made."""
    rows, (inputs, outputs) = len(x), w.shape
    if w.turned or w.at or not is_indexed(in_pairs(w.values)):
        return None
    size = w.values.dtype.itemsize
    wide, exact = w.dtype == jnp.float32, w.dtype == jnp.float32 and x.dtype == jnp.bfloat16
    if rows > (_MOST_WIDE_ROWS if wide and not exact else _MOST_ROWS[size]):
        return None
    # Of codes a tile becomes two, of half the outputs each.
    most = {1: 128, 2: 64, 4: 32 if exact else 64}[size], 32 if wide else 128
    sides = divisor(outputs, most[0]), divisor(inputs, most[1])
    least = LEAST if size > 1 else 2 * LEAST, LEAST
    if any(side < enough for side, enough in zip(sides, least, strict=True)):
        return None
    tile_rows = min(max(LEAST, 1 << (rows - 1).bit_length()), _TILE_ROWS)
    return Tiles(tile_rows, *sides, 4, 2 if wide else 3)


def _parts(cut: Tiles, rows: int, w: Matrix) -> int:
    inputs, outputs = w.shape
    wanted = -(-_PROGRAMS // (outputs // cut.outputs * -(-rows // cut.rows)))
    return divisor(inputs // cut.inputs, min(_MOST_PARTS, 1 << (wanted - 1).bit_length()))


def _kernel(x_ref: Any, w_ref: Any, *others: Any, cut: Tiles, dtype: Any, interpret: bool) -> None:
    """A tile of outputs, over a part of the inputs."""
    *scale_refs, out_ref = others
    weights = Weights(w_ref, scale_refs[0] if scale_refs else None, interpret)
    nth, part, block = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    # What is more than the rows is the last once more, in all that is read and written.
    rows = block * np.int32(cut.rows) + jnp.arange(cut.rows, dtype=jnp.int32)
    rows = jnp.minimum(rows, np.int32(x_ref.shape[0] - 1))
    steps = w_ref.shape[0] // cut.inputs // out_ref.shape[0]

    def step(k: Any, accs: tuple[Any, ...]) -> tuple[Any, ...]:
        first = (part * np.int32(steps) + k) * np.int32(cut.inputs)
        x = x_ref[rows, pl.ds(first, cut.inputs)]
        if interpret or dtype != jnp.float32:
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
    """See model.products.product_parts. cut: tiles, and parts of as many of them."""
    tiles, outputs = cut[0] if cut else _tiles(x, w), w.shape[1]
    if tiles is None:
        return product(x, w)[None]
    parts = cut[1] if cut else _parts(tiles, len(x), w)
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
