"""Products of few rows in parts, beside whole ones."""

import jax.numpy as jnp
import numpy as np
import pytest

from model.kernels.products import product_parts
from model.products import Matrix, product


@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "dtype", "parts"),
    [
        (1, 1024, 192, "bfloat16", 8),
        (5, 256, 64, "bfloat16", 2),
        (64, 512, 128, "bfloat16", 4),
        (3, 1024, 64, "float32", 16),
        (65, 256, 64, "bfloat16", 1),  # too many rows to be bound by weights
        (4, 200, 64, "bfloat16", 1),  # inputs that make no tile
        (4, 256, 72, "bfloat16", 1),
    ],
)
def test_parts_add_up_to_the_product(
    rows: int, inputs: int, outputs: int, dtype: str, parts: int
) -> None:
    draw = np.random.default_rng(rows)
    x = jnp.asarray(draw.standard_normal((rows, inputs)), jnp.bfloat16)
    values = jnp.asarray(draw.standard_normal((inputs, outputs)), jnp.dtype(dtype))
    matrix = Matrix(values, None, values.dtype, on_cpu=False)
    found = np.asarray(product_parts(x, matrix, interpret=True))
    assert found.shape == (parts, rows, outputs)
    np.testing.assert_allclose(found.sum(axis=0), product(x, matrix), atol=1e-3)


def test_codes_are_multiplied_whole() -> None:
    codes = jnp.ones((128, 64), jnp.uint8)
    matrix = Matrix(codes, jnp.ones((1, 64), jnp.float32), jnp.bfloat16, on_cpu=False)
    assert product_parts(jnp.ones((4, 128), jnp.bfloat16), matrix, interpret=True).shape[0] == 1
