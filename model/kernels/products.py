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

from model.kernels.tiles import LEAST, Tiles, divisor, exact, is_indexed
from model.products import Matrix, product

_MOST_ROWS: Final = {2: 64, 4: 16}  # by bytes of a weight: more of float32 take XLA less time
_PROGRAMS: Final = 256  # that there are at least, where inputs are enough
_MOST_PARTS: Final = 16


def _cut(rows: int, w: Matrix) -> Tiles | None:
    """None: of weights like these the whole product is made."""
    inputs, outputs = w.shape
    if w.scales is not None or w.turned or w.at or not is_indexed(w.values):
        return None
    size = w.values.dtype.itemsize
    if rows > _MOST_ROWS.get(size, 0):
        return None
    wide = size > 2
    most = max(LEAST, 1 << (rows - 1).bit_length())
    cut = Tiles(
        most, divisor(outputs, 64), divisor(inputs, 32 if wide else 128), 4, 2 if wide else 3
    )
    return cut if min(cut.outputs, cut.inputs) >= LEAST else None


def _parts(cut: Tiles, w: Matrix) -> int:
    inputs, outputs = w.shape
    wanted = -(-_PROGRAMS * cut.outputs // outputs)
    return divisor(inputs // cut.inputs, min(_MOST_PARTS, 1 << (wanted - 1).bit_length()))


def _kernel(x_ref: Any, w_ref: Any, out_ref: Any, *, cut: Tiles) -> None:
    """A tile of outputs, over a part of the inputs."""
    outputs, part = pl.ds(pl.program_id(0) * np.int32(cut.outputs), cut.outputs), pl.program_id(1)
    # What is more than the rows is the last once more, in all that is read and written.
    rows = jnp.arange(cut.rows, dtype=jnp.int32)
    rows = jnp.minimum(rows, np.int32(x_ref.shape[0] - 1))
    steps = w_ref.shape[0] // cut.inputs // out_ref.shape[0]

    def step(k: Any, acc: Any) -> Any:
        first = (part * np.int32(steps) + k) * np.int32(cut.inputs)
        inputs = pl.ds(first, cut.inputs)
        w = w_ref[inputs, outputs]
        return acc + plt.dot(x_ref[rows, inputs].astype(w.dtype), w, precision=exact(w))

    zeros = jnp.zeros((cut.rows, cut.outputs), jnp.float32)
    out_ref[part, rows, outputs] = lax.fori_loop(np.int32(0), np.int32(steps), step, zeros)


def product_parts(
    x: Float[Array, "rows a"], w: Matrix, interpret: bool = False
) -> Float[Array, "parts rows b"]:
    """See model.products.product_parts."""
    cut = _cut(len(x), w)
    if cut is None:
        return product(x, w)[None]
    parts, outputs = _parts(cut, w), w.shape[1]
    found: Array = pl.pallas_call(
        partial(_kernel, cut=cut),
        out_shape=jax.ShapeDtypeStruct((parts, len(x), outputs), jnp.float32),
        grid=(outputs // cut.outputs, parts),
        name="product_parts",
        interpret=interpret,
        compiler_params=plt.CompilerParams(num_warps=cut.warps, num_stages=cut.stages),
    )(x, w.values)
    return found
