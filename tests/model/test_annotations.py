"""The shapes and dtypes in array annotations are checked while tests run."""

import jax.numpy as jnp
import jaxtyping
import pytest

from model import layers


def test_an_array_of_another_shape_than_the_annotation_names_is_refused() -> None:
    x, weight = jnp.ones((3, 8), jnp.float32), jnp.ones(8, jnp.float32)
    assert layers.rms_norm(x, weight, 1e-6).shape == x.shape
    with pytest.raises(jaxtyping.TypeCheckError, match="rms_norm"):
        layers.rms_norm(x, jnp.ones(4, jnp.float32), 1e-6)


def test_an_array_of_another_dtype_than_the_annotation_names_is_refused() -> None:
    with pytest.raises(jaxtyping.TypeCheckError, match="rms_norm"):
        layers.rms_norm(jnp.ones((3, 8), jnp.int32), jnp.ones(8, jnp.float32), 1e-6)
