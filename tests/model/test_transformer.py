"""The network against plain numpy, with sizes that no mesh divides, and with padding."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from model.config import ModelConfig
from model.errors import ModelError
from model.replicated import logits
from model.sharding import Stacks, make_mesh
from model.transformer import Model, random_params
from tests.model.checkpoints import LLAMA, MISTRAL, QWEN2, QWEN2_WINDOW, forward, write_checkpoint
from tests.model.harness import GOLDENS, Harness


@pytest.mark.parametrize(
    ("config", "tp"),
    [
        (QWEN2, 1),
        (QWEN2, 2),
        (QWEN2, 4),
        (QWEN2_WINDOW, 1),
        (LLAMA, 1),
        (LLAMA, 4),
        (LLAMA, 8),
        (MISTRAL, 2),
    ],
)
def test_biased_models_of_odd_sizes_agree_with_plain_numpy(
    config: dict[str, Any], tp: int, tmp_path: Path
) -> None:
    tensors = write_checkpoint(tmp_path, config)
    draw = np.random.default_rng(1)
    prompts = [[int(i) for i in draw.integers(0, config["vocab_size"], n)] for n in (5, 37)]
    for prompt, ran in zip(prompts, Harness(tmp_path, tp).run(prompts, 6), strict=True):
        expected = forward(config, tensors, [*prompt, *ran.ids[:-1]])
        assert ran.logits.shape == (len(prompt), config["vocab_size"])
        assert np.abs(ran.logits - expected[: len(prompt)]).max() < 5e-5
        assert np.abs(ran.step_logits - expected[len(prompt) - 1 :]).max() < 5e-5
        assert ran.ids == expected[len(prompt) - 1 :].argmax(-1).tolist()


def test_a_seed_gives_every_mesh_the_same_random_model() -> None:
    cfg = ModelConfig.from_dir(GOLDENS / "llama" / "model")
    hidden = jax.numpy.asarray(np.random.default_rng(2).standard_normal((3, 96)), "float32")
    found = []
    for tp in (1, 4):
        model = Model.create(cfg, make_mesh(tp, 1), "float32", 16)
        params = random_params(model, seed=11)
        leaves = jax.tree.leaves(model.param_leaves())
        for leaf, array in zip(leaves, jax.tree.leaves(params), strict=True):
            assert (array.shape, array.dtype) == (leaf.shape, leaf.dtype)
            assert array.sharding == leaf.sharding(model.mesh)
        found.append(np.asarray(jax.jit(logits, static_argnums=0)(model, params, hidden)))
    assert found[0].shape == (3, cfg.vocab_size)
    np.testing.assert_allclose(found[0], found[1], atol=1e-5)


def test_on_cpu_large_layers_have_arrays_of_their_own() -> None:
    cfg = ModelConfig.from_dir(GOLDENS / "llama" / "model")
    large = dataclasses.replace(cfg, intermediate_size=1 << 16)
    small, apart = (Model.create(c, make_mesh(1, 1), "float32", 16) for c in (cfg, large))
    assert (small.dims.stacks, apart.dims.stacks) == (Stacks.ALL, Stacks.EXPERTS)
    assert len(small.param_leaves()["layers"]) < cfg.num_layers
    assert len(apart.param_leaves()["layers"]) == cfg.num_layers


def test_a_dtype_no_one_serves_is_refused() -> None:
    cfg = ModelConfig.from_dir(GOLDENS / "llama" / "model")
    with pytest.raises(ModelError, match="int8; accepted: float32, bfloat16"):
        Model.create(cfg, make_mesh(1, 1), "int8", 16)
