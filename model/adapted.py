"""Products of rows that may each have an adapter: what low rank adds to a matrix (LoRA).

All adapters lie side by side in two matrices, one into their ranks and one out of them. Every row
is multiplied by all of them, and what is not of its own adapter becomes zero in between. So a
program does the same whatever its rows ask for, and gathers no weights: some hundred more columns
cost less than that. On a CPU it leaves all of it out while no row has an adapter.
Source: arXiv:2106.09685, section 4.1.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Bool, Float, Int32

from model.products import LayerWeights, product

INTO, OUT_OF = "_lora_a", "_lora_b"  # suffixes of a parameter's two matrices


def chosen(adapters: Int32[Array, " rows"], num: int) -> Bool[Array, "rows adapters"]:
    """Whether a row has an adapter; NO_ADAPTER (model/pieces.py): it has none of them."""
    return adapters[:, None] == jnp.arange(num, dtype=jnp.int32)


def with_adapters(
    parts: Float[Array, "parts rows b"],
    x: Float[Array, "rows a"],
    weights: LayerWeights,
    name: str,
    inputs: int = 1,
) -> Float[Array, "parts rows b"]:
    """The product of x and a parameter, with what each row's adapter adds to it; float32.

    parts: the product, see model.products.product_parts. inputs: see LayerWeights.matrix.
    """
    own = weights.adapters
    if own is None or name + INTO not in weights:
        return parts

    def added(parts: Float[Array, "parts rows b"]) -> Float[Array, "parts rows b"]:
        rows, num = own.shape
        inner = product(x, weights.matrix(name + INTO, inputs)).reshape(rows, num, -1)
        # Not times zero, which is NaN where another adapter's sum is infinite.
        inner = jnp.where(own[:, :, None], inner, np.float32(0))
        return parts.at[0].add(product(inner.reshape(rows, -1), weights.matrix(name + OUT_OF)))

    with jax.named_scope("adapters"):
        if not weights.on_cpu:  # the host would have to wait for the answer
            return added(parts)
        return lax.cond(jnp.any(own), added, lambda parts: parts, parts)
