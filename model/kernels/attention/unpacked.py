"""Paged decode attention for processors: keys and values are used where they lie in their pages.

XLA's CPU products want each head's keys together, and pages have each position's heads together, so
the reference copies all of them into that order first. Here scores and sums are elementwise, which
XLA fuses into one pass over the pages. Latent pages, of one head and one plane, gain nothing by it.
"""

from functools import partial
from typing import Final

import jax.numpy as jnp
import numpy as np
from jax import Array

from model.kernels.attention.reference import Running, decode
from model.kv import PagePool, read_plane


def _add(
    queries: Array,
    pool: PagePool,
    layer: Array,
    ids: Array,
    allowed: Array,
    running: Running,
    scale: np.float32,
) -> Running:
    """See model.kernels.attention.reference.add_by_products."""
    rows, heads, _, head_dim = queries.shape

    def positions(plane: int) -> Array:
        pages = read_plane(pool, layer, plane, ids).astype(jnp.float32)
        return pages.reshape(rows, allowed.shape[-1], heads, 1, head_dim)

    scores = jnp.sum(positions(0) * queries[:, None], axis=-1).transpose(0, 2, 3, 1) * scale

    def weighed(weights: Array) -> Array:
        return jnp.sum(weights.transpose(0, 3, 1, 2)[..., None] * positions(-1), axis=1)

    return running.add(scores, allowed, weighed)


unpacked_decode: Final = partial(decode, add=_add)
