"""Checkpoints in each quantised form and the values they represent, written where a test wants."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

from model.config import ModelConfig
from model.sharding import Dims, make_mesh
from model.tensors import param_sources
from model.transformer import Model
from model.weights import load_params
from tests.model.checkpoints import golden_config, write_config
from tests.model.harness import GOLDENS, Golden, Harness

Tensors = dict[str, np.ndarray]

# Widths are multiples of 32, but their halves and quarters are not.
GPT_OSS = golden_config("gpt_oss") | {
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
# As llm-compressor publishes W8A16; int8_pair also writes it unpacked.
INT8 = {
    "quantization_config": {
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 8, "type": "int", "strategy": "channel"},
            }
        },
        "format": "pack-quantized",
        "ignore": ["lm_head"],
        "quant_method": "compressed-tensors",
    }
}
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def _random(folder: Path) -> Tensors:
    """Every tensor, with random values, of the checkpoint whose configuration is in the folder."""
    cfg = ModelConfig.from_dir(folder)
    draw = np.random.default_rng(6)
    return {
        name: draw.standard_normal(shape).astype(ml_dtypes.bfloat16)
        for source in jax.tree.leaves(param_sources(Dims(cfg, 1, 1)))
        for name, shape in source.expected()
    }


def as_mxfp4(values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Blocks, scales and the nearest values that they can represent, of [experts, in, out]."""
    groups = np.ascontiguousarray(values.astype(np.float32).transpose(0, 2, 1))
    groups = groups.reshape(*groups.shape[:2], -1, 32)
    exponents = np.floor(np.log2(np.abs(groups).max(-1))) - 2  # scales the largest to 4 to 8
    scaled = groups / np.exp2(exponents)[..., None]
    codes = np.abs(scaled[..., None] - E2M1).argmin(-1).astype(np.uint8)
    blocks = codes[..., 0::2] | codes[..., 1::2] << 4
    decoded = E2M1[codes] * np.exp2(exponents)[..., None]
    shape = values.shape[0], values.shape[2], values.shape[1]
    whole = np.ascontiguousarray(decoded.reshape(shape).transpose(0, 2, 1))
    return blocks, (exponents + 127).astype(np.uint8), whole.astype(ml_dtypes.bfloat16)


def as_fp8(values: np.ndarray, block: tuple[int, int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Bytes, scales and the values that they represent, of [out, in]."""
    wide = values.astype(np.float32)
    counts = [-(-size // by) for size, by in zip(wide.shape, block, strict=True)]
    stored = np.empty(wide.shape, ml_dtypes.float8_e4m3fn)
    scales, whole = np.empty(counts, np.float32), np.empty(wide.shape, np.float32)
    for at in np.ndindex(*counts):
        part = tuple(slice(i * by, (i + 1) * by) for i, by in zip(at, block, strict=True))
        scales[at] = np.abs(wide[part]).max() / 448.0
        stored[part] = (wide[part] / scales[at]).astype(ml_dtypes.float8_e4m3fn)
        whole[part] = stored[part].astype(np.float32) * scales[at]
    return stored, scales, whole


def as_integers(
    values: np.ndarray, bits: int, group: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Integers, scales and the values they represent, of [out, in]. group: 0: one scale per row."""
    groups = values.astype(np.float32).reshape(len(values), -1, group or values.shape[1])
    half = 2 ** (bits - 1)
    scales = (np.abs(groups).max(-1) / (half - 0.5)).astype(ml_dtypes.bfloat16)
    wide = scales.astype(np.float32)[..., None]
    steps = np.rint(groups / wide).clip(-half, half - 1).astype(np.int8)
    whole = (steps * wide).reshape(values.shape)
    return steps.reshape(values.shape), scales, whole.astype(np.float32)


def in_words(steps: np.ndarray, bits: int) -> np.ndarray:
    """Integers of a row in i32, the first in the lowest bits, each with half its range added."""
    codes = (steps.astype(np.int32) + 2 ** (bits - 1)).astype(np.uint32)
    codes = codes.reshape(len(steps), -1, 32 // bits)
    words = (codes << np.arange(0, 32, bits, dtype=np.uint32)).sum(-1, dtype=np.uint32)
    return words.view(np.int32)


def _golden_tensors(name: str) -> Tensors:
    tensors: Tensors = {}
    for file in sorted((GOLDENS / name / "model").glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def int4_pair(quantised: Path, plain: Path, golden: str = "deepseek_v3") -> tuple[Path, Path]:
    """A network with int4 weights, and its plain twin.

    The routed experts are quantised, as in Kimi K2; in a network without experts, its projections.
    """
    tensors = _golden_tensors(golden)
    packed = dict(tensors)
    experts = [name for name in tensors if ".experts." in name]
    for name in experts or [name for name in tensors if "_proj.weight" in name]:
        steps, scales, tensors[name] = as_integers(packed.pop(name), 4, 32)
        packed |= {
            f"{name}_packed": in_words(steps, 4),
            f"{name}_scale": scales,
            f"{name}_shape": np.array(tensors[name].shape, np.int32),
        }
    config = golden_config(golden)
    save_file(tensors, write_config(plain, config) / "model.safetensors")
    save_file(packed, write_config(quantised, config | INT4) / "model.safetensors")
    return quantised, plain


def int8_pair(
    quantised: Path, plain: Path, golden: str = "deepseek_v3", group: int = 0, packed: bool = True
) -> tuple[Path, Path]:
    """A network with every projection in integers of eight bits, and its plain twin.

    group: how many values of a row share a scale; 0: all. packed: four integers to a word.
    """
    tensors = _golden_tensors(golden)
    stored = dict(tensors)
    for name in [name for name in tensors if "_proj" in name and name.endswith(".weight")]:
        steps, scales, tensors[name] = as_integers(stored.pop(name), 8, group)
        stored[f"{name}_scale"] = scales
        if packed:
            stored[f"{name}_packed"] = in_words(steps, 8)
            stored[f"{name}_shape"] = np.array(steps.shape, np.int64)
        else:
            stored[name] = steps
    config = golden_config(golden)
    save_file(tensors, write_config(plain, config) / "model.safetensors")
    own = json.loads(json.dumps(INT8))["quantization_config"]
    if group:
        own["config_groups"]["group_0"]["weights"] |= {"strategy": "group", "group_size": group}
    own["format"] = "pack-quantized" if packed else "int-quantized"
    written = write_config(quantised, config | {"quantization_config": own})
    save_file(stored, written / "model.safetensors")
    return quantised, plain


def mxfp4_pair(quantised: Path, plain: Path) -> tuple[Path, Path]:
    """GPT-OSS's network with quantised experts, and its plain twin."""
    tensors = _random(write_config(plain, GPT_OSS))
    packed: Tensors = {}
    for name, values in tensors.items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            blocks, scales, tensors[name] = as_mxfp4(values)
            packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        else:
            packed[name] = values
    assert len(packed) == len(tensors) + 4
    save_file(tensors, plain / "model.safetensors")
    save_file(packed, write_config(quantised, GPT_OSS | MXFP4) / "model.safetensors")
    return quantised, plain


def fp8_pair(
    golden: str,
    quantised: Path,
    plain: Path,
    block: tuple[int, int],
    change: Callable[[Tensors], None] = lambda _: None,
) -> tuple[Path, Path]:
    """A network with every projection quantised to fp8, and its plain twin.

    change: applied to the quantised tensors before they are written.
    """
    tensors = _golden_tensors(golden)
    packed = dict(tensors)
    for name in [name for name in tensors if "_proj" in name and name.endswith(".weight")]:
        values, scales, whole = as_fp8(tensors[name], block)
        packed[name], packed[f"{name}_scale_inv"], tensors[name] = values, scales, whole
    change(packed)
    config = golden_config(golden)
    save_file(tensors, write_config(plain, config) / "model.safetensors")
    fp8 = {"quant_method": "fp8", "weight_block_size": list(block)}
    save_file(
        packed,
        write_config(quantised, config | {"quantization_config": fp8}) / "model.safetensors",
    )
    return quantised, plain


def pair_of(
    store: Callable[[str, np.ndarray], tuple[Tensors, np.ndarray]],
    said: dict[str, Any],
    folders: tuple[Path, Path],
) -> tuple[Path, Path]:
    """A network of experts with every projection quantised, and its plain twin.

    store(name, values): the tensors that stand for a weight, and the values that they represent.
    said: what config.json says of them.
    """
    quantised, plain = folders
    tensors = _golden_tensors("qwen3_moe")
    packed = dict(tensors)
    for name in [name for name in tensors if "_proj" in name and name.endswith(".weight")]:
        own, tensors[name] = store(name, packed.pop(name))
        packed |= own
    config = golden_config("qwen3_moe")
    save_file(tensors, write_config(plain, config) / "model.safetensors")
    save_file(packed, write_config(quantised, config | said) / "model.safetensors")
    return quantised, plain


def check_parameters(pair: tuple[Path, Path], mesh: tuple[int, int]) -> None:
    """Both networks have the same parameters in float32."""
    own, plain = (
        load_params(x, Model.create(ModelConfig.from_dir(x), make_mesh(*mesh), "float32", 16))
        for x in pair
    )
    assert str(jax.tree.structure(own)) == str(jax.tree.structure(plain))
    for one, other in zip(jax.tree.leaves(own), jax.tree.leaves(plain), strict=True):
        assert (np.asarray(one) == np.asarray(other)).all()


def check_tokens(pair: tuple[Path, Path], codes: str) -> None:
    """The quantised network generates the same, of codes, as its plain twin."""
    quantised, plain = pair
    prompts = list(Golden("qwen3_moe").prompts.values())[:3]
    coded = Harness(quantised, coded=codes)
    assert coded.model.dims.coded
    for one, other in zip(coded.run(prompts, 8), Harness(plain).run(prompts, 8), strict=True):
        assert one.ids == other.ids
        assert np.abs(one.logits - other.logits).max() < 2e-4
