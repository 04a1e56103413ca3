"""Quantised checkpoints load to the very parameters of the values that they stand for."""

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from model.config import ModelConfig
from model.sharding import Dims, make_mesh
from model.tensors import param_sources
from model.transformer import Model
from model.weights import load_params, model_digest
from tests.model.checkpoints import write_config
from tests.model.harness import GOLDENS, Golden, Harness

Tensors = dict[str, np.ndarray]

# Widths that are multiples of 32, and of which halves and quarters are not.
GPT_OSS: dict[str, Any] = json.loads(
    (GOLDENS / "gpt_oss" / "model" / "config.json").read_text()
) | {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "layer_types": None,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "experts_per_token": None,
    "head_dim": 16,
    "vocab_size": 50,
    "eos_token_id": 7,
}
MXFP4 = {"quantization_config": {"quant_method": "mxfp4"}}
# Blocks that divide neither the tensors nor their shards.
BLOCK = (24, 20)
INT4 = {
    "quantization_config": {
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32},
            }
        },
        "format": "pack-quantized",
        "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"],
        "quant_method": "compressed-tensors",
    }
}
FP8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": list(BLOCK)}}
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
MESHES = [(1, 1), (2, 1), (4, 2)]


def _random(folder: Path) -> Tensors:
    """Every tensor of the checkpoint whose configuration is there."""
    cfg = ModelConfig.from_dir(folder)
    draw = np.random.default_rng(6)
    return {
        name: draw.standard_normal(shape).astype(ml_dtypes.bfloat16)
        for source in jax.tree.leaves(param_sources(cfg, Dims(cfg, 1, 1)))
        for name, shape in source.expected()
    }


def _as_mxfp4(values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Blocks, scales, and the nearest values that they can say: of [experts, in, out]."""
    groups = np.ascontiguousarray(values.astype(np.float32).transpose(0, 2, 1))
    groups = groups.reshape(*groups.shape[:2], -1, 32)
    exponents = np.floor(np.log2(np.abs(groups).max(-1))) - 2  # the largest comes to 4 to 8
    scaled = groups / np.exp2(exponents)[..., None]
    codes = np.abs(scaled[..., None] - E2M1).argmin(-1).astype(np.uint8)
    blocks = codes[..., 0::2] | codes[..., 1::2] << 4
    decoded = E2M1[codes] * np.exp2(exponents)[..., None]
    shape = values.shape[0], values.shape[2], values.shape[1]
    whole = np.ascontiguousarray(decoded.reshape(shape).transpose(0, 2, 1))
    return blocks, (exponents + 127).astype(np.uint8), whole.astype(ml_dtypes.bfloat16)


def _as_fp8(values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Bytes, scales, and the values that they stand for: of [out, in]."""
    wide = values.astype(np.float32)
    counts = [-(-size // by) for size, by in zip(wide.shape, BLOCK, strict=True)]
    stored = np.empty(wide.shape, ml_dtypes.float8_e4m3fn)
    scales, whole = np.empty(counts, np.float32), np.empty(wide.shape, np.float32)
    for at in np.ndindex(*counts):
        part = tuple(slice(i * by, (i + 1) * by) for i, by in zip(at, BLOCK, strict=True))
        scales[at] = np.abs(wide[part]).max() / 448.0
        stored[part] = (wide[part] / scales[at]).astype(ml_dtypes.float8_e4m3fn)
        whole[part] = stored[part].astype(np.float32) * scales[at]
    return stored, scales, whole


def _as_int4(values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Words, scales, and the values that they stand for: of [out, in]."""
    groups = values.astype(np.float32).reshape(len(values), -1, 32)
    scales = (np.abs(groups).max(-1) / 7.5).astype(ml_dtypes.bfloat16)
    steps = np.rint(groups / scales.astype(np.float32)[..., None]).clip(-8, 7).astype(np.int8)
    whole = (steps * scales.astype(np.float32)[..., None]).reshape(values.shape)
    codes = (steps + np.int8(8)).astype(np.uint32).reshape(len(values), -1, 8)
    words = (codes << np.arange(0, 32, 4, dtype=np.uint32)).sum(-1, dtype=np.uint32)
    return words.view(np.int32), scales, whole.astype(np.float32)


def _golden_tensors(name: str) -> Tensors:
    tensors: Tensors = {}
    for file in sorted((GOLDENS / name / "model").glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


@pytest.fixture(scope="module")
def int4(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """DeepSeek V3's network with its routed experts quantised, as Kimi K2's are, and without."""
    quantised, plain = tmp_path_factory.mktemp("int4"), tmp_path_factory.mktemp("float32")
    tensors = _golden_tensors("deepseek_v3")
    packed = dict(tensors)
    experts = [name for name in tensors if ".experts." in name]
    assert experts
    for name in experts:
        words, scales, tensors[name] = _as_int4(packed.pop(name))
        packed |= {
            f"{name}_packed": words,
            f"{name}_scale": scales,
            f"{name}_shape": np.array(tensors[name].shape, np.int32),
        }
    config = json.loads((GOLDENS / "deepseek_v3" / "model" / "config.json").read_text())
    save_file(tensors, write_config(plain, config) / "model.safetensors")
    save_file(packed, write_config(quantised, config | INT4) / "model.safetensors")
    return quantised, plain


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same network, quantised and not."""
    quantised, plain = tmp_path_factory.mktemp("mxfp4"), tmp_path_factory.mktemp("bfloat16")
    tensors = _random(write_config(plain, GPT_OSS))
    packed: Tensors = {}
    for name, values in tensors.items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            blocks, scales, tensors[name] = _as_mxfp4(values)
            packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        else:
            packed[name] = values
    assert len(packed) == len(tensors) + 4
    save_file(tensors, plain / "model.safetensors")
    save_file(packed, write_config(quantised, GPT_OSS | MXFP4) / "model.safetensors")
    return quantised, plain


@pytest.fixture(scope="module", params=["qwen3", "deepseek_v3"])
def fp8(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """The same network with every projection quantised, and with what those then stand for."""
    quantised, plain = tmp_path_factory.mktemp("fp8"), tmp_path_factory.mktemp("float32")
    golden = GOLDENS / request.param / "model"
    tensors = _golden_tensors(request.param)
    packed = dict(tensors)
    for name in [name for name in tensors if "_proj" in name and name.endswith(".weight")]:
        packed[name], packed[f"{name}_scale_inv"], tensors[name] = _as_fp8(tensors[name])
    config = json.loads((golden / "config.json").read_text())
    save_file(tensors, write_config(plain, config) / "model.safetensors")
    save_file(packed, write_config(quantised, config | FP8) / "model.safetensors")
    return quantised, plain


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
