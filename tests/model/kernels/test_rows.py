"""Kernels for the work between products, against their plain forms."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model import heads as reference
from model import kernels
from model.kernels import rows as fused
from model.layers import add_and_norm
from tests.model.harness import i32

SHAPE = kernels.AttentionShape("cuda", "bfloat16", 16, 2, 3, 32, interpreted=True)
LAYERS, PAGES = 2, 5


def _heads(
    rows: int, group: int, head_dim: int, bias: bool, norms: bool, dtype: str
) -> reference.Heads:
    draw = np.random.default_rng(rows)

    def numbers(*shape: int) -> jax.Array:
        return jnp.asarray(draw.standard_normal(shape), jnp.float32)

    own = numbers(2, group + 2, head_dim).astype(dtype) if bias else None
    weights = (numbers(head_dim).astype(dtype), numbers(head_dim).astype(dtype))
    angles = draw.random((rows, head_dim // 2)) * 6
    return reference.Heads(
        numbers(3, rows, 2, group + 2, head_dim),
        own,
        weights if norms else None,
        1e-6,
        jnp.asarray(np.cos(angles), jnp.float32),
        jnp.asarray(np.sin(angles), jnp.float32),
    )


def _placed(place: Callable[..., Any], heads: reference.Heads, *args: jax.Array, dtype: str) -> Any:
    """Run it as one program, as in use: op by op, there are dozens to compile."""

    def run(traced: reference.Heads, *args: jax.Array) -> Any:
        return place(traced._replace(eps=heads.eps), *args, dtype)

    return jax.jit(run)(heads, *args)


interpreted = partial(fused.place_heads, interpret=True)


@pytest.mark.parametrize(
    ("group", "head_dim", "bias", "norms", "dtype", "pages"),
    [
        (8, 128, False, True, "bfloat16", "bfloat16"),
        (3, 64, True, False, "bfloat16", "bfloat16"),
        (1, 32, True, True, "float32", "float32"),
        (4, 32, False, False, "bfloat16", "uint8"),
    ],
)
@pytest.mark.parametrize("rows", [1, 6])
def test_heads_are_normed_rotated_and_written_as_the_plain_form_does_it(
    group: int, head_dim: int, bias: bool, norms: bool, dtype: str, pages: str, rows: int
) -> None:
    heads = _heads(rows, group, head_dim, bias, norms, dtype)
    # Written nowhere: below the pool and past it; and written at the pool's last place.
    idx = np.array([-1, 3, PAGES * 16 - 1, 16, PAGES * 16, 17], np.int32)[-rows:]
    pool = jnp.ones((LAYERS, 2, PAGES, 16, 2, head_dim), jnp.dtype(pages))
    args = heads, pool, i32(1), jnp.asarray(idx)
    expected = _placed(reference.place_heads, *args, dtype=dtype)
    found = _placed(interpreted, *args, dtype=dtype)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
    atol = 1e-5 if dtype == "float32" else 0.02
    q, written = (np.asarray(x.astype(jnp.float32)) for x in found)
    plain_q, plain_written = (np.asarray(x.astype(jnp.float32)) for x in expected)
    np.testing.assert_allclose(q, plain_q, atol=atol)
    # fp8 is compared as bytes: a value rounded the other way differs by one.
    np.testing.assert_allclose(written, plain_written, atol=1 if pages == "uint8" else atol)
    assert (written[0] == 1).all()


def test_what_a_pool_cannot_hold_is_written_as_its_largest_number_and_none_as_zero() -> None:
    heads = _heads(2, 1, 32, bias=False, norms=False, dtype="bfloat16")
    heads = heads._replace(qkv=heads.qkv.at[:, 0].set(1e9).at[:, 1].set(np.nan))
    pool = jnp.zeros((LAYERS, 2, PAGES, 16, 2, 32), jnp.uint8)
    args = heads, pool, i32(0), jnp.asarray([3, 4], jnp.int32)
    found = _placed(interpreted, *args, dtype="bfloat16")[1]
    expected = _placed(reference.place_heads, *args, dtype="bfloat16")[1]
    np.testing.assert_array_equal(found[0, 1], expected[0, 1])


@pytest.mark.parametrize("hidden", [64, 80])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_a_layer_adds_is_in_the_sum_and_in_its_norm(hidden: int, dtype: str) -> None:
    draw = np.random.default_rng(hidden)
    x = jnp.asarray(draw.standard_normal((3, hidden)), jnp.dtype(dtype))
    added = jnp.asarray(draw.standard_normal((4, 3, hidden)), jnp.float32)
    weight = jnp.asarray(draw.standard_normal(hidden), jnp.dtype(dtype))
    found = jax.jit(partial(fused.add_and_norm, eps=1e-6, interpret=True))(x, added, weight)
    expected = jax.jit(partial(add_and_norm, eps=1e-6))(x, added, weight)
    tolerance = 1e-5 if dtype == "float32" else 0.01
    for pair in zip(found, expected, strict=True):
        one, other = (np.asarray(x.astype(jnp.float32)) for x in pair)
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)


def test_processors_latents_and_heads_that_are_no_powers_of_two_have_the_plain_form() -> None:
    build = kernels.PLACE_HEADS[0].build
    build(SHAPE)
    for shape, said in (
        (replace(SHAPE, platform="cpu"), "for GPUs, this is cpu"),
        (replace(SHAPE, planes=1), "keys and values apart"),
        (replace(SHAPE, head_dim=80), "powers of two from 32, heads have 80"),
        (replace(SHAPE, head_dim=16), "powers of two from 32, heads have 16"),
    ):
        with pytest.raises(NotImplementedError, match=said):
            build(shape)
