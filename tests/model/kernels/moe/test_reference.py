"""Grouped expert products against one row and one expert at a time, in plain numpy."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model import kernels
from model.kernels.moe.reference import block_rows
from tests.model.harness import i32

EXPERTS, CHOSEN, HIDDEN, WIDTH = 6, 3, 10, 7
SHAPE = kernels.ExpertsShape("cpu", "float32", HIDDEN, WIDTH, EXPERTS, CHOSEN)


def _ids(kind: str, rows: int) -> np.ndarray:
    draw = np.random.default_rng(rows)
    if kind == "spread":
        return np.array([draw.permutation(EXPERTS)[:CHOSEN] for _ in range(rows)])
    if kind == "crowded":
        return np.tile([4, 0, 1], (rows, 1))
    if kind == "elsewhere":
        return np.full((rows, CHOSEN), EXPERTS)
    return np.where(draw.random((rows, CHOSEN)) < 0.5, EXPERTS, _ids("spread", rows))


@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize("kind", ["spread", "crowded", "elsewhere", "mixed"])
@pytest.mark.parametrize("backend", kernels.EXPERTS, ids=lambda backend: backend.name)
def test_every_row_gets_the_weighted_sum_of_its_local_experts(
    backend: kernels.Backend, kind: str, rows: int
) -> None:
    experts: Callable[..., jax.Array] = backend.build(SHAPE)
    draw = np.random.default_rng(7)
    x = draw.standard_normal((rows, HIDDEN)).astype(np.float32)
    weights = draw.random((rows, CHOSEN)).astype(np.float32)
    gate_up = draw.standard_normal((2, EXPERTS, HIDDEN, 2, WIDTH)).astype(np.float32)
    down = draw.standard_normal((2, EXPERTS, WIDTH, HIDDEN)).astype(np.float32)
    ids = _ids(kind, rows)
    expected = np.zeros((rows, HIDDEN))
    for row in range(rows):
        for expert, weight in zip(ids[row], weights[row], strict=True):
            if expert < EXPERTS:
                gate, up = np.einsum("d,dxf->xf", x[row], gate_up[1, expert])
                expected[row] += weight * (gate / (1 + np.exp(-gate)) * up @ down[1, expert])
    arrays = [jnp.asarray(a) for a in (x, ids.astype(np.int32), weights, gate_up, down)]
    out = np.asarray(jax.jit(experts)(*arrays, i32(1)))
    np.testing.assert_allclose(out, expected, atol=2e-4)


def test_blocks_grow_with_the_rows_an_expert_gets() -> None:
    assert block_rows(1, 8, 128) == 1
    assert block_rows(16, 8, 128) == 2
    assert block_rows(512, 8, 128) == 64
    assert block_rows(4096, 8, 8) == 128
