"""The page pool against a plain numpy one."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding

from model.config import FP8, KVSpec
from model.kv import gather_pages, init_pool, read_pages, write_pages, write_tokens
from model.sharding import POOL_SPEC, make_mesh
from tests.model.harness import i32

SPEC = KVSpec(num_layers=2, num_kv_heads=4, head_dim=3, page_size=4, dtype="float32")
PAGES = 6


def _filled(mesh_size: int) -> tuple[jax.Array, np.ndarray]:
    pool = init_pool(SPEC, PAGES, make_mesh(mesh_size, 1))
    values = np.random.default_rng(0).standard_normal(pool.shape).astype(np.float32)
    return jax.device_put(values, pool.sharding), values


@pytest.mark.parametrize("on_cpu", [True, False])
@pytest.mark.parametrize("tp", [1, 4])
def test_pages_gathered_and_written_elsewhere_arrive_whole(tp: int, on_cpu: bool) -> None:
    pool, values = _filled(tp)
    ids = i32([5, 0, 3, PAGES])  # the last is padding
    staged = jax.jit(gather_pages)(pool, ids)
    sharding = NamedSharding(make_mesh(tp, 1), POOL_SPEC)
    assert staged.sharding.is_equivalent_to(sharding, staged.ndim)
    assert (np.asarray(staged)[:, :, :3] == values[:, :, [5, 0, 3]]).all()
    to = i32([1, 2, PAGES, -1])
    write = jax.jit(partial(write_pages, on_cpu=on_cpu), donate_argnums=0)
    written = np.asarray(write(pool, staged, to))
    expected = values.copy()
    expected[:, :, [1, 2]] = values[:, :, [5, 0]]
    assert (written == expected).all()


def test_tokens_are_written_at_their_kv_index_and_padding_is_dropped() -> None:
    pool, values = _filled(1)
    kv = np.random.default_rng(1).standard_normal((5, 2, 4, 3)).astype(np.float32)
    kv_idx = [7, 0, PAGES * 4, -1, 23]
    written = np.asarray(jax.jit(write_tokens)(pool, i32(1), jnp.asarray(kv), i32(kv_idx)))
    expected = values.copy()
    for row, at in enumerate(kv_idx):
        if 0 <= at < PAGES * 4:
            expected[1, :, at // 4, at % 4] = kv[row]
    assert (written == expected).all()


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("pool_dtype", ["float32", "bfloat16", "float16"])
def test_a_pool_holds_finite_numbers_whatever_was_computed(kv_dtype: str, pool_dtype: str) -> None:
    spec = dataclasses.replace(SPEC, dtype=pool_dtype)
    pool = init_pool(spec, PAGES, make_mesh(1, 1))
    odd = jnp.asarray([np.inf, -np.inf, np.nan, 1.0], kv_dtype)
    kv = jnp.broadcast_to(odd[:, None, None, None], (4, 2, 4, 3))
    written = jax.jit(write_tokens)(pool, i32(0), kv, i32(range(4)))
    found = np.asarray(written)[0].astype(np.float64).reshape(2, -1, 4, 3)[:, :4]
    most = float(jnp.finfo(pool_dtype).max)
    assert (found == np.array([most, -most, 0.0, 1.0])[:, None, None]).all()


def test_a_layers_pages_are_read_in_the_order_asked() -> None:
    pool, values = _filled(1)
    ids = [[4, 1], [0, 99]]
    found = np.asarray(jax.jit(read_pages)(pool, i32(1), i32(ids)))
    assert found.shape == (2, 2, 2, 4, 4, 3)
    assert (found[0, 0] == values[1, :, 4]).all()
    assert (found[1, 0] == values[1, :, 0]).all()


def test_a_position_may_have_one_vector_for_keys_and_values() -> None:
    spec = dataclasses.replace(SPEC, planes=1)
    pool = init_pool(spec, PAGES, make_mesh(1, 1))
    kv = np.random.default_rng(2).standard_normal((6, 1, 4, 3)).astype(np.float32)
    pool = jax.jit(write_tokens, donate_argnums=0)(pool, i32(1), kv, i32(list(range(4, 10))))
    read = np.asarray(jax.jit(read_pages)(pool, i32(1), i32([1, 2])))
    assert read.shape == (2, 1, 4, 4, 3)
    assert (read.transpose(0, 2, 1, 3, 4).reshape(8, 1, 4, 3)[:6] == kv).all()
    staged = jax.jit(gather_pages)(pool, i32([1, 2]))
    moved = jax.jit(write_pages)(init_pool(spec, PAGES, make_mesh(1, 1)), staged, i32([5, 0]))
    assert (np.asarray(moved)[1, 0, [5, 0]] == read[:, 0]).all()


def test_fp8_pages_hold_the_nearest_value_and_never_overflow() -> None:
    spec = dataclasses.replace(SPEC, dtype=FP8)
    assert (spec.page_bytes, SPEC.page_bytes) == (192, 768)
    pool = init_pool(spec, PAGES, make_mesh(1, 1))
    kv = np.random.default_rng(2).standard_normal((6, 2, 4, 3)).astype(np.float32) * 3
    kv[0, 0, 0] = [448.0, 1e9, -1e9]
    write = jax.jit(write_tokens, donate_argnums=0)
    pool = write(pool, jnp.int32(1), kv, i32(list(range(4, 10))))
    read = np.asarray(jax.jit(read_pages)(pool, jnp.int32(1), i32([1, 2])).astype(jnp.float32))
    found = read.transpose(0, 2, 1, 3, 4).reshape(8, 2, 4, 3)[:6]
    expected = np.clip(kv, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    assert (found == expected).all()
    assert (np.asarray(pool)[0] == 0).all(), "the other layer is as it was"


def test_fp8_pages_travel_as_they_are() -> None:
    spec = dataclasses.replace(SPEC, dtype=FP8)
    pool = init_pool(spec, PAGES, make_mesh(1, 1))
    values = np.random.default_rng(3).integers(0, 256, pool.shape, np.uint8)  # includes NaN
    staged = jax.jit(gather_pages)(jnp.asarray(values), i32([4, 1]))
    written = np.asarray(jax.jit(write_pages, donate_argnums=0)(pool, staged, i32([0, 5])))
    assert (written[:, :, [0, 5]] == values[:, :, [4, 1]]).all()
