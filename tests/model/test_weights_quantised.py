"""Quantised checkpoints load to exactly the parameters of the values they represent."""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from model.config import ModelConfig
from model.sharding import make_mesh
from model.transformer import Model
from model.weights import load_params, model_digest
from tests.model.checkpoints import write_config
from tests.model.harness import Golden, Harness
from tests.model.quantised_checkpoints import fp8_pair, int4_pair, mxfp4_pair

# Blocks that divide neither the tensors nor their shards.
BLOCK = (24, 20)
MESHES = [(1, 1), (2, 1), (4, 2)]


@pytest.fixture(scope="module")
def int4(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return int4_pair(tmp_path_factory.mktemp("int4"), tmp_path_factory.mktemp("float32"))


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return mxfp4_pair(tmp_path_factory.mktemp("mxfp4"), tmp_path_factory.mktemp("bfloat16"))


@pytest.fixture(scope="module", params=["qwen3", "deepseek_v3", "ernie4_5_moe"])
def fp8(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    folders = tmp_path_factory.mktemp("fp8"), tmp_path_factory.mktemp("float32")
    return fp8_pair(request.param, *folders, BLOCK)


def _check_same(folders: tuple[Path, Path], mesh: tuple[int, int], dtype: str) -> None:
    quantised, plain = (
        load_params(x, Model.create(ModelConfig.from_dir(x), make_mesh(*mesh), dtype, 16))
        for x in folders
    )
    others = dict(jax.tree.leaves_with_path(plain))
    assert len(others) == len(jax.tree.leaves(quantised))
    for path, leaf in jax.tree.leaves_with_path(quantised):
        other = others[path]
        assert (leaf.dtype, leaf.sharding) == (other.dtype, other.sharding), path
        assert (np.asarray(leaf).view(np.uint8) == np.asarray(other).view(np.uint8)).all(), path
        assert np.asarray(leaf).any(), path


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("mesh", MESHES)
def test_experts_in_mxfp4_are_those_stored_in_bfloat16(
    gpt_oss: tuple[Path, Path], mesh: tuple[int, int], dtype: str
) -> None:
    _check_same(gpt_oss, mesh, dtype)


@pytest.mark.parametrize("mesh", MESHES)
def test_gates_and_ups_of_mxfp4_are_parted_and_down_is_as_it_lies(
    gpt_oss: tuple[Path, Path], mesh: tuple[int, int]
) -> None:
    quantised, plain = gpt_oss
    model = Model.create(ModelConfig.from_dir(quantised), make_mesh(*mesh), "bfloat16", 16)
    (found,) = load_params(quantised, model)["layers"]
    tensors = load_file(plain / "model.safetensors")
    for layer in range(2):
        at = f"model.layers.{layer}.mlp.experts"
        both, down = tensors[f"{at}.gate_up_proj"], tensors[f"{at}.down_proj"]
        stored = np.asarray(found["experts_gate_up"][layer])
        assert (stored[..., 0, :] == both[..., 0::2]).all()
        assert (stored[..., 1, :] == both[..., 1::2]).all()
        assert (np.asarray(found["experts_down"][layer]) == down).all()


@pytest.mark.parametrize("mesh", MESHES[:2])
def test_projections_in_fp8_are_their_products_stored_in_float32(
    fp8: tuple[Path, Path], mesh: tuple[int, int]
) -> None:
    _check_same(fp8, mesh, "float32")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("mesh", MESHES)
def test_experts_in_int4_are_their_products(
    int4: tuple[Path, Path], mesh: tuple[int, int], dtype: str
) -> None:
    _check_same(int4, mesh, dtype)


@pytest.mark.parametrize("mesh", MESHES[:2])
def test_a_network_of_int4_generates_what_its_products_do(
    int4: tuple[Path, Path], mesh: tuple[int, int]
) -> None:
    prompts = list(Golden("deepseek_v3").prompts.values())[:3]
    quantised, plain = (Harness(folder, *mesh).run(prompts, 12) for folder in int4)
    for one, other in zip(quantised, plain, strict=True):
        assert one.ids == other.ids
        assert (one.logits == other.logits).all()
        assert (one.step_logits == other.step_logits).all()


def test_a_digest_tells_int4_from_what_it_stands_for(
    int4: tuple[Path, Path], tmp_path: Path
) -> None:
    quantised, plain = _digests(int4, tmp_path / "copy")
    assert quantised != plain


def _digests(folders: tuple[Path, Path], elsewhere: Path) -> tuple[str, str]:
    quantised, plain = map(model_digest, folders)
    shutil.copytree(folders[0], elsewhere)
    assert model_digest(elsewhere) == quantised
    return quantised, plain


def test_a_digest_tells_mxfp4_from_what_it_stands_for(
    gpt_oss: tuple[Path, Path], tmp_path: Path
) -> None:
    quantised, plain = _digests(gpt_oss, tmp_path / "copy")
    assert quantised != plain
    tensors = load_file(gpt_oss[0] / "model.safetensors")
    name = "model.layers.1.mlp.experts.down_proj_scales"
    tensors[name] = tensors[name] + np.uint8(1)
    save_file(tensors, tmp_path / "copy" / "model.safetensors")
    assert model_digest(tmp_path / "copy") not in (quantised, plain)


def test_a_digest_tells_fp8_from_what_it_stands_for(fp8: tuple[Path, Path], tmp_path: Path) -> None:
    quantised, plain = _digests(fp8, tmp_path / "copy")
    assert quantised != plain
    config = json.loads((tmp_path / "copy" / "config.json").read_text())
    write_config(tmp_path / "copy", config | {"rms_norm_eps": 1e-3})
    assert model_digest(tmp_path / "copy") not in (quantised, plain)
