"""Products of few rows computed in parts, against whole products."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.coded import decoded
from model.kernels.products import product_parts
from model.kernels.tiles import Tiles, add_products
from model.products import Matrix, product


def _run(multiply: Callable[..., jax.Array], x: jax.Array, matrix: Matrix, *cut: Any) -> jax.Array:
    """Run it as one program, as in use: op by op, there are dozens to compile."""

    def run(x: jax.Array, values: jax.Array, scales: jax.Array | None) -> jax.Array:
        return multiply(x, replace(matrix, values=values, scales=scales), *cut)

    found: jax.Array = jax.jit(run)(x, matrix.values, matrix.scales)
    return found


interpreted = partial(product_parts, interpret=True)


@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "dtype", "parts"),
    [
        (1, 1024, 192, "bfloat16", 8),
        (5, 256, 64, "bfloat16", 2),
        (64, 512, 128, "bfloat16", 4),
        (3, 1024, 64, "float32", 16),
        (70, 1024, 64, "float32", 16),  # two blocks of rows
        (65, 256, 64, "bfloat16", 1),  # with so many rows weights are not the bottleneck
        (4, 200, 64, "bfloat16", 1),  # inputs that fill no tile
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
    found = np.asarray(_run(interpreted, x, matrix))
    assert found.shape == (parts, rows, outputs)
    np.testing.assert_allclose(found.sum(axis=0), _run(product, x, matrix), atol=1e-3)


def _codes(draw: np.random.Generator, shape: tuple[int, int], dtype: type) -> jax.Array:
    if dtype is np.int8:
        return jnp.asarray(draw.integers(-128, 127, shape, np.int8, endpoint=True))
    values = jnp.asarray(draw.standard_normal(shape), jnp.float8_e4m3fn)
    return jax.lax.bitcast_convert_type(values, jnp.uint8)


@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "group", "parts"),
    [
        (1, 1024, 256, 128, 8),
        (70, 256, 64, 32, 2),  # two blocks of rows
        (4, 256, 64, 8, 2),
        (257, 256, 64, 32, 1),  # the codes are decoded first
        (4, 256, 48, 32, 2),  # half of the outputs fill no tile, so outputs are read one by one
    ],
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("kind", "largest"), [(np.uint8, 0.2), (np.int8, 0.003)])
def test_codes_are_decoded_where_they_are_multiplied(
    rows: int,
    inputs: int,
    outputs: int,
    group: int,
    parts: int,
    dtype: str,
    kind: type,
    largest: float,
) -> None:
    draw = np.random.default_rng(rows)
    x = jnp.asarray(draw.standard_normal((rows, inputs)), dtype)
    codes = _codes(draw, (inputs, outputs), kind)
    scales = jnp.asarray(draw.random((inputs // group, outputs)) * largest, jnp.float32)
    matrix = Matrix(codes, scales, jnp.dtype(dtype), on_cpu=False)
    found = np.asarray(_run(interpreted, x, matrix))
    if dtype == "bfloat16":
        assert found.shape[0] == parts
    np.testing.assert_allclose(found.sum(axis=0), _run(product, x, matrix), atol=1e-4)


@pytest.mark.parametrize("rows", [4, 40, 64])
@pytest.mark.parametrize("kind", [np.uint8, np.int8])
def test_codes_of_few_rows_give_bit_for_bit_what_their_numbers_do(rows: int, kind: type) -> None:
    draw = np.random.default_rng(rows)
    x = jnp.asarray(draw.standard_normal((rows, 1024)), jnp.bfloat16)
    codes = _codes(draw, (1024, 256), kind)
    scales = jnp.asarray(draw.random((8, 256)) * 0.2, jnp.float32)
    weights = decoded(codes, scales, 0, jnp.bfloat16, native=True)
    found = [
        _run(interpreted, x, Matrix(own, scale, jnp.bfloat16, on_cpu=False))
        for own, scale in ((codes, scales), (weights, None))
    ]
    np.testing.assert_array_equal(found[0], found[1])


@pytest.mark.parametrize("cut", [(Tiles(16, 32, 64), 4), (Tiles(32, 128, 16), 8)])
def test_parts_add_up_however_a_product_is_cut(cut: tuple[Tiles, int]) -> None:
    draw = np.random.default_rng(2)
    x = jnp.asarray(draw.standard_normal((20, 256)), jnp.bfloat16)
    values = jnp.asarray(draw.standard_normal((256, 128)), jnp.bfloat16)
    matrix = Matrix(values, None, values.dtype, on_cpu=False)
    found = np.asarray(_run(interpreted, x, matrix, cut))
    assert found.shape == (cut[1], 20, 128)
    np.testing.assert_allclose(found.sum(axis=0), _run(product, x, matrix), atol=1e-3)


def test_rows_of_bfloat16_lose_nothing_of_weights_of_float32() -> None:
    """As in a kernel that is not interpreted; in an interpreted one, both would be float32."""
    draw = np.random.default_rng(3)
    x = jnp.asarray(draw.standard_normal((16, 64)), jnp.bfloat16)
    tile = jnp.asarray(draw.standard_normal((64, 32)), jnp.float32)
    (found,) = add_products((jnp.zeros((16, 32), jnp.float32),), x, (tile,))
    exact = np.asarray(x, np.float64) @ np.asarray(tile, np.float64)
    np.testing.assert_allclose(found, exact, atol=2e-5)
    rounded = np.asarray(x, np.float64) @ np.asarray(tile.astype(jnp.bfloat16), np.float64)
    assert np.abs(rounded - exact).max() > 1e-3
