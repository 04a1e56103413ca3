"""Grouped expert products against one row and one expert at a time, in plain numpy."""

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model import kernels
from model.coded import ExpertStacks
from model.kernels.moe.reference import block_rows
from tests.model.harness import i32

EXPERTS, CHOSEN, HIDDEN, WIDTH = 6, 3, 10, 7
TILED = 48, 16  # sizes that a matrix unit takes
SHAPE = kernels.ExpertsShape("cuda", "float32", HIDDEN, WIDTH, EXPERTS, CHOSEN, interpreted=True)
GPT_OSS = replace(SHAPE, limit=2.0, alpha=1.702, bias=True)


def _sized(backend: kernels.Backend, shape: kernels.ExpertsShape) -> kernels.ExpertsShape:
    """The shape with sizes that the backend takes."""
    hidden, width = TILED if backend.name == "grouped" else (HIDDEN, WIDTH)
    return replace(shape, hidden=hidden, intermediate=width)


def _stacks(shape: kernels.ExpertsShape, draw: np.random.Generator) -> tuple[np.ndarray, ...]:
    """Two layers' weights, scaled so that products are as large for all sizes."""
    hidden, width = shape.hidden, shape.intermediate
    gate_up = draw.standard_normal((2, EXPERTS, hidden, 2, width)) * (HIDDEN / hidden) ** 0.5
    down = draw.standard_normal((2, EXPERTS, width, hidden)) * (WIDTH / width) ** 0.5
    return gate_up.astype(np.float32), down.astype(np.float32)


def _ids(kind: str, rows: int) -> np.ndarray:
    draw = np.random.default_rng(rows)
    if kind == "spread":
        return np.array([draw.permutation(EXPERTS)[:CHOSEN] for _ in range(rows)])
    if kind == "crowded":
        return np.tile([4, 0, 1], (rows, 1))
    if kind == "elsewhere":
        return np.full((rows, CHOSEN), EXPERTS)
    return np.where(draw.random((rows, CHOSEN)) < 0.5, EXPERTS, _ids("spread", rows))


@pytest.mark.parametrize("rows", [1, 5, 40, 300])
@pytest.mark.parametrize("kind", ["spread", "crowded", "elsewhere", "mixed"])
@pytest.mark.parametrize("backend", kernels.EXPERTS, ids=lambda backend: backend.name)
def test_every_row_gets_the_weighted_sum_of_its_local_experts(
    backend: kernels.Backend, kind: str, rows: int
) -> None:
    shape = _sized(backend, SHAPE)
    experts: Callable[..., jax.Array] = backend.build(shape)
    draw = np.random.default_rng(7)
    x = draw.standard_normal((rows, shape.hidden)).astype(np.float32)
    weights = draw.random((rows, CHOSEN)).astype(np.float32)
    gate_up, down = _stacks(shape, draw)
    ids = _ids(kind, rows)
    expected = np.zeros((rows, shape.hidden))
    for row in range(rows):
        for expert, weight in zip(ids[row], weights[row], strict=True):
            if expert < EXPERTS:
                gate, up = np.einsum("d,dxf->xf", x[row], gate_up[1, expert])
                expected[row] += weight * (gate / (1 + np.exp(-gate)) * up @ down[1, expert])
    rows_of = [jnp.asarray(a) for a in (x, ids.astype(np.int32), weights)]
    stacks = ExpertStacks(jnp.asarray(gate_up), jnp.asarray(down))
    out = np.asarray(jax.jit(experts)(*rows_of, stacks, i32(1)))
    np.testing.assert_allclose(out, expected, atol=2e-4)


def _gated(shape: kernels.ExpertsShape, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    if not shape.limit:
        return gate / (1 + np.exp(-gate)) * up
    gate = np.where(gate > shape.limit, shape.limit, gate)
    up = np.where(np.abs(up) > shape.limit, np.sign(up) * shape.limit, up)
    return gate / (1 + np.exp(-shape.alpha * gate)) * (up + 1)


@pytest.mark.parametrize(
    ("shape", "kind", "rows"),
    [
        (GPT_OSS, "spread", 40),
        (GPT_OSS, "mixed", 40),
        (GPT_OSS, "elsewhere", 40),
        (GPT_OSS, "mixed", 1),
        (replace(GPT_OSS, limit=0.0), "mixed", 5),
        (replace(GPT_OSS, alpha=0.5, bias=False), "mixed", 5),
    ],
)
@pytest.mark.parametrize("backend", kernels.EXPERTS, ids=lambda backend: backend.name)
def test_biases_are_added_and_activations_clamped_where_the_rows_are(
    backend: kernels.Backend, shape: kernels.ExpertsShape, kind: str, rows: int
) -> None:
    shape = _sized(backend, shape)
    experts: Callable[..., jax.Array] = backend.build(shape)
    draw = np.random.default_rng(8)
    x = draw.standard_normal((rows, shape.hidden)).astype(np.float32)
    weights = draw.random((rows, CHOSEN)).astype(np.float32)
    sizes = (2, EXPERTS, 2, shape.intermediate), (2, EXPERTS, shape.hidden)
    of_biases = [draw.standard_normal(size).astype(np.float32) for size in sizes]
    stacks = [*_stacks(shape, draw), *of_biases]
    biases = stacks[2:] if shape.bias else [np.zeros_like(stack) for stack in stacks[2:]]
    ids = _ids(kind, rows)
    expected = np.zeros((rows, shape.hidden))
    seen = []
    for row in range(rows):
        for expert, weight in zip(ids[row], weights[row], strict=True):
            if expert < EXPERTS:
                both = np.einsum("d,dxf->xf", x[row], stacks[0][1, expert]) + biases[0][1, expert]
                seen.append(both)
                done = _gated(shape, *both) @ stacks[1][1, expert] + biases[1][1, expert]
                expected[row] += weight * done
    if kind == "spread":  # every bound of both halves takes effect
        assert np.abs(seen).max(axis=(0, 2)).min() > GPT_OSS.limit
        assert np.min(seen) < -GPT_OSS.limit
    rows_of = [jnp.asarray(a) for a in (x, ids.astype(np.int32), weights)]
    given = ExpertStacks(*map(jnp.asarray, stacks if shape.bias else stacks[:2]))
    out = np.asarray(jax.jit(experts)(*rows_of, given, i32(1)))
    np.testing.assert_allclose(out, expected, atol=2e-4)
    if kind == "elsewhere":
        assert (out == 0).all()


def test_blocks_grow_with_the_rows_an_expert_gets() -> None:
    assert block_rows(1, 8, 128) == 1
    assert block_rows(16, 8, 128) == 2
    assert block_rows(64, 8, 128) == 8
    assert block_rows(512, 8, 128) == 32
    assert block_rows(4096, 8, 8) == 128
