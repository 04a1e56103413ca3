"""Blocks of rows that each belong to one expert, and the kernels that multiply them."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model import kernels
from model.coded import ExpertStacks
from model.kernels.moe import batched, grouped, sorting
from tests.model.harness import i32

# Each compiled as one program, as in use, but not optimized, since it is called once or twice.
soon = {"xla_backend_optimization_level": 0}
by_blocks = jax.jit(partial(grouped.experts, interpret=True), compiler_options=soon)
plainly = jax.jit(batched.experts, compiler_options=soon)
SHAPE = kernels.ExpertsShape("cuda", "bfloat16", 64, 32, 8, 3, interpreted=True)


@pytest.mark.parametrize("rows", [1, 7, 200, 900])
@pytest.mark.parametrize("size", [16, 64])
def test_each_pair_of_row_and_expert_has_a_slot_of_its_own_in_a_block_of_its_expert(
    rows: int, size: int
) -> None:
    experts, chosen = 8, 3
    draw = np.random.default_rng(rows)
    ids = np.array([draw.permutation(experts)[:chosen] for _ in range(rows)], np.int32)
    ids = np.where(draw.random(ids.shape) < 0.3, experts, ids).astype(np.int32)
    blocks = jax.jit(lambda ids: sorting.blocks(ids, experts, size, interpret=True))
    found = jax.tree.map(np.asarray, blocks(jnp.asarray(ids)))
    here = ids.reshape(-1) < experts
    slots = found.slots[here]
    assert len(set(slots.tolist())) == len(slots)
    assert len(found.rows) == size * len(found.experts)
    assert (found.rows[slots] == np.flatnonzero(here) // chosen).all()
    assert (found.experts[slots // size] == ids.reshape(-1)[here]).all()


def test_blocks_are_enough_however_the_pairs_are_spread() -> None:
    size, experts = 16, 8
    for pairs in (1, 8, 9, 100):
        most = sorting.num_blocks(pairs, experts, size)
        for begun in range(1, min(pairs, experts) + 1):
            counts = [1] * (begun - 1) + [pairs - begun + 1]
            assert sum(-(-count // size) for count in counts) <= most


def test_all_rows_by_one_expert_and_by_all_give_what_the_plain_form_does() -> None:
    draw = np.random.default_rng(3)
    stacks = ExpertStacks(
        jnp.asarray(draw.standard_normal((1, 8, 64, 2, 32)) / 8, jnp.bfloat16),
        jnp.asarray(draw.standard_normal((1, 8, 32, 64)) / 6, jnp.bfloat16),
    )
    rows = 180
    x = jnp.asarray(draw.standard_normal((rows, 64)), jnp.bfloat16)
    weights = jnp.asarray(draw.random((rows, 3)), jnp.float32)
    for ids in (np.tile([5, 0, 2], (rows, 1)), draw.permuted(np.tile(range(8), (rows, 1)), axis=1)):
        args = x, jnp.asarray(ids[:, :3].astype(np.int32)), weights, stacks, i32(0)
        out = by_blocks(*args)
        np.testing.assert_allclose(out, plainly(*args), atol=0.02)


@pytest.mark.parametrize("group", [32, 16, 8])
@pytest.mark.parametrize(
    ("rows", "kind"), [(2, np.uint8), (50, np.uint8), (700, np.uint8), (50, np.int8)]
)
def test_codes_are_decoded_in_the_kernel_whatever_number_of_inputs_shares_a_scale(
    rows: int, kind: type, group: int
) -> None:
    draw = np.random.default_rng(group)
    experts, hidden, width = 8, 64, 32

    def coded(*shape: int) -> jax.Array:
        if kind is np.int8:
            return jnp.asarray(draw.integers(-128, 127, shape, np.int8, endpoint=True))
        values = jnp.asarray(draw.standard_normal(shape), jnp.float8_e4m3fn)
        return jax.lax.bitcast_convert_type(values, jnp.uint8)

    def scales(*shape: int) -> jax.Array:
        return jnp.asarray(draw.random(shape) * 0.2, jnp.float32)

    stacks = ExpertStacks(
        coded(1, experts, hidden, 2, width),
        coded(1, experts, width, hidden),
        gate_up_scale=scales(1, experts, hidden // group, 2, width),
        down_scale=scales(1, experts, width // group, hidden),
    )
    x = jnp.asarray(draw.standard_normal((rows, hidden)), jnp.bfloat16)
    ids = np.array([draw.permutation(experts)[:3] for _ in range(rows)], np.int32)
    weights = jnp.asarray(draw.random((rows, 3)), jnp.float32)
    args = x, jnp.asarray(ids), weights, stacks, i32(0)
    expected = np.asarray(plainly(*args))
    out = np.asarray(by_blocks(*args))
    assert np.abs(out - expected).max() < 0.02 * np.abs(expected).max()


def test_sizes_that_no_matrix_unit_takes_and_processors_are_refused() -> None:
    build = next(backend.build for backend in kernels.EXPERTS if backend.name == "grouped")
    build(SHAPE)
    with pytest.raises(NotImplementedError, match="for GPUs, this is cpu"):
        build(replace(SHAPE, platform="cpu"))
    with pytest.raises(NotImplementedError, match="multiples of 16, intermediate size is 24"):
        build(replace(SHAPE, intermediate=24))


def test_products_have_as_many_stages_as_a_device_has_memory_for() -> None:
    sizes = (1, 128, 2048, 2, 768), (1, 128, 768, 2048)
    stacks = jax.eval_shape(
        lambda: ExpertStacks(*(jnp.zeros(size, jnp.bfloat16) for size in sizes))
    )

    def stages(rows: int, shared_bytes: int) -> list[int]:
        cuts = grouped.tiles(rows, 8, stacks, jnp.bfloat16, shared_bytes)
        return [cut.stages for cut in cuts]

    for enough in (0, 232448):  # not limited, and an H200's
        assert stages(8192, enough) == [3, 4]
    assert stages(8192, 101376) == [3, 3]  # an L40's
    assert stages(64, 101376) == stages(64, 0)
    assert stages(8192, 1) == [2, 2]
