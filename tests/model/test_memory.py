"""No program copies the page pool: a program's scratch memory does not grow with the pool."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from model.config import FP8, ModelConfig
from model.kv import abstract_pages, gather_pages, write_pages
from model.params import dense_layer_bytes
from model.replicated import decode_hidden, prefill_hidden
from model.sharding import POOL_SPEC, RANKS, Stacks, make_mesh, on_ranks
from model.transformer import ChunkBatch, Model
from tests.model.harness import GOLDENS

SMALL, LARGE = 64, 1024


def _model(name: str, dtype: str, tp: int, stacks: Stacks | None = None) -> Model:
    cfg = ModelConfig.from_dir(GOLDENS / name / "model")
    return Model.create(cfg, make_mesh(tp, 1), dtype, 16, stacks=stacks)


def _params(model: Model) -> Any:
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=leaf.sharding(model.mesh)
        ),
        model.param_leaves(),
    )


def _pages(model: Model, num_pages: int, dtype: str | None = None) -> jax.ShapeDtypeStruct:
    """num_pages: of each rank."""
    return abstract_pages(model.kv_spec(dtype), num_pages, model.mesh)


def _i32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def _decode(model: Model, num_pages: int, dtype: str | None = None) -> Any:
    run = jax.jit(decode_hidden, static_argnums=0, donate_argnums=2)
    rows = (_i32(4), _i32(4), _i32(4, 8), _i32(4))
    return run.lower(model, _params(model), _pages(model, num_pages, dtype), *rows).compile()


def _prefill(model: Model, num_pages: int, dtype: str | None = None) -> Any:
    run = jax.jit(prefill_hidden, static_argnums=0, donate_argnums=2)
    batch = ChunkBatch._make([*[_i32(16)] * 4, *[_i32(32)] * 3, _i32(), None])
    return run.lower(model, _params(model), _pages(model, num_pages, dtype), batch).compile()


def _write(model: Model, num_pages: int, dtype: str | None = None) -> Any:
    run = jax.jit(write_pages, donate_argnums=0)
    return run.lower(_pages(model, num_pages, dtype), _pages(model, 8, dtype), _i32(8)).compile()


def _gather(model: Model, num_pages: int, dtype: str | None = None) -> Any:
    return jax.jit(gather_pages).lower(_pages(model, num_pages, dtype), _i32(8)).compile()


@pytest.mark.parametrize(("dtype", "tp"), [("float32", 1), ("bfloat16", 2)])
@pytest.mark.parametrize("program", [_decode, _prefill, _write, _gather])
def test_scratch_memory_does_not_grow_with_the_pool(program: Any, dtype: str, tp: int) -> None:
    model = _model("mixtral", dtype, tp)
    small, large = (program(model, n).memory_analysis() for n in (SMALL, LARGE))
    assert large.temp_size_in_bytes == small.temp_size_in_bytes
    assert large.output_size_in_bytes - large.alias_size_in_bytes == (
        small.output_size_in_bytes - small.alias_size_in_bytes
    )
    if program is not _gather:
        pool_bytes = model.kv_spec().page_bytes * LARGE // tp
        assert large.alias_size_in_bytes >= pool_bytes


@pytest.mark.parametrize("program", [_decode, _prefill, _write, _gather])
def test_scratch_memory_does_not_grow_with_a_pool_of_fp8_either(program: Any) -> None:
    model = _model("mixtral", "float32", 2)
    small, large = (program(model, n, FP8).memory_analysis() for n in (SMALL, LARGE))
    assert large.temp_size_in_bytes == small.temp_size_in_bytes


@pytest.mark.parametrize(("program", "name"), [(_prefill, "gpt_oss"), (_decode, "deepseek_v3")])
def test_nor_with_pages_of_windows_and_latents(program: Any, name: str) -> None:
    model = _model(name, "bfloat16", 2)
    small, large = (program(model, n).memory_analysis() for n in (SMALL, LARGE))
    assert large.temp_size_in_bytes == small.temp_size_in_bytes


@pytest.mark.parametrize("dtype", ["float32", FP8])
def test_pages_are_put_in_place_without_another_copy(dtype: str) -> None:
    model = _model("mixtral", "float32", 1)
    assert _write(model, SMALL, dtype).memory_analysis().temp_size_in_bytes < 1024


@pytest.mark.parametrize("program", [_write, _gather])
def test_pages_move_without_collectives(program: Any) -> None:
    compiled = program(_model("mixtral", "bfloat16", 2), SMALL)
    text = compiled.as_text()
    for collective in ("all-reduce", "all-gather", "all-to-all", "collective-permute"):
        assert collective not in text
    out = jax.tree.leaves(compiled.output_shardings)[0]
    assert out.spec == POOL_SPEC


@pytest.mark.parametrize("function", [write_pages, gather_pages])
def test_pages_of_several_ranks_move_without_collectives_either(function: Any) -> None:
    cfg = ModelConfig.from_dir(GOLDENS / "mixtral" / "model")
    model = Model.create(cfg, make_mesh(2, 1, dp_size=2), "bfloat16", 16)
    ids = jax.ShapeDtypeStruct((8,), jnp.int32)
    args = [_pages(model, SMALL // 2), _pages(model, 4), ids]
    if function is gather_pages:
        del args[1]
    specs = (*[POOL_SPEC] * (len(args) - 1), RANKS)
    moved = on_ranks(model.mesh, function, specs, POOL_SPEC)
    text = str(jax.jit(moved).lower(*args).compile().as_text())
    for collective in ("all-reduce", "all-gather", "all-to-all", "collective-permute"):
        assert collective not in text


@pytest.mark.parametrize("program", [_decode, _prefill])
def test_layers_with_arrays_of_their_own_are_read_where_they_are(program: Any) -> None:
    """Neither the weights nor the pool are copied."""
    model = _model("llama", "float32", 1, Stacks.NONE)
    small, large = (program(model, n).memory_analysis() for n in (SMALL, LARGE))
    assert large.temp_size_in_bytes == small.temp_size_in_bytes
    stacks = program(_model("llama", "float32", 1, Stacks.ALL), SMALL).memory_analysis()
    layer = dense_layer_bytes(model.dims, model.dtype)
    assert small.temp_size_in_bytes < stacks.temp_size_in_bytes - layer // 2
