"""Finite numbers of a checkpoint that would become infinite when they are loaded are refused."""

import shutil
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from model.config import ModelConfig
from model.errors import ModelError
from model.orbax import save_orbax
from model.quantised import open_checkpoint
from model.quantised_pairs import Quantised
from model.sharding import make_mesh
from model.transformer import Model
from model.weights import load_params
from tests.model.harness import GOLDENS

WEIGHT = "model.layers.0.mlp.down_proj.weight"
PART = slice(0, 1), slice(0, 8)
# Of each kind: what it stores, the suffix of its scales, and its largest code.
KINDS = {
    "fp8": ({WEIGHT: np.zeros((1, 8), ml_dtypes.float8_e4m3fn)}, "_scale_inv", 448),
    "int4": (
        {f"{WEIGHT}_packed": np.zeros((1, 1), np.int32), f"{WEIGHT}_shape": np.array([1, 8])},
        "_scale",
        8,
    ),
    "int8": ({WEIGHT: np.zeros((1, 8), np.int8)}, "_scale", 128),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_scale_whose_products_are_infinite_in_bfloat16_is_refused(
    kind: str, tmp_path: Path
) -> None:
    tensors, suffix, code = KINDS[kind]
    most = float(ml_dtypes.finfo(ml_dtypes.bfloat16).max) / code

    def opened(scale: float) -> Quantised:
        scales = {WEIGHT + suffix: np.full((1, 1), scale, np.float32)}
        save_file(tensors | scales, tmp_path / "model.safetensors")
        files = open_checkpoint(tmp_path, kind, (1, 8))
        assert isinstance(files, Quantised)
        return files

    files = opened(-0.99 * most)
    assert np.isfinite(files.read(WEIGHT, PART)).all()
    assert np.isfinite(files.read_scales(WEIGHT, PART, 8)).all()
    files = opened(-1.01 * most)
    refusal = rf"tensor {WEIGHT}{suffix}: a scale of .*; accepted: up to .* in bfloat16"
    with pytest.raises(ModelError, match=refusal):
        files.read(WEIGHT, PART)
    with pytest.raises(ModelError, match=refusal):
        files.read_scales(WEIGHT, PART, 8)


@pytest.mark.filterwarnings("error")
def test_a_number_that_float16_does_not_hold_is_refused_by_whatever_reads_it(
    tmp_path: Path,
) -> None:
    folder = shutil.copytree(GOLDENS / "llama" / "model", tmp_path / "source")
    tensors = load_file(folder / "model.safetensors")
    tensors[WEIGHT][3, 5] = 65504
    save_file(tensors, folder / "model.safetensors")
    model = Model.create(ModelConfig.from_dir(folder), make_mesh(2, 1), "float16", 16)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(load_params(folder, model)))
    tensors[WEIGHT][3, 5] = -65536
    save_file(tensors, folder / "model.safetensors")
    refusal = f"^tensor {WEIGHT}: has a number beyond 65,504, the most that float16 holds$"
    with pytest.raises(ModelError, match=refusal):
        load_params(folder, model)
    with pytest.raises(ModelError, match=refusal):
        save_orbax(folder, tmp_path / "out", model)
    assert not (tmp_path / "out").exists()
