"""On a CPU, matrices of a large network keep the checkpoint's two bytes, for float32 products."""

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from model import opening, processors, products
from model.opening import OpenedModel
from model.orbax import save_orbax
from model.sharding import make_mesh
from model.transformer import Model, random_params
from model.weights import stored_bytes
from tests.model.checkpoints import golden_config, write_config
from tests.model.harness import GOLDENS, Golden, Harness, open_plainly, sizes_of_products

PROMPTS = [list(range(3, 40)), list(range(90, 95)), [7]]


def _open(folder: Path, **more: Any) -> OpenedModel:
    return open_plainly(folder, 16, 64, **{"dtype": "auto", **more})


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every network is one of a large hidden size."""
    monkeypatch.setattr(processors, "_SMALL", 0)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe", "gpt_oss", "deepseek_v2"])
@pytest.mark.usefixtures("large")
def test_matrices_of_a_large_network_have_the_numbers_in_half_the_bytes(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = GOLDENS / name / "model"
    narrow = _open(folder)
    monkeypatch.setattr(processors, "_SMALL", 1 << 20)
    wide = _open(folder)
    assert wide.model.dims.narrow == ()
    assert set(dict(narrow.model.dims.narrow)) >= {"embed", "lm_head", "o"}
    assert stored_bytes(narrow.model) < 0.6 * stored_bytes(wide.model)
    assert narrow.digest == wide.digest
    assert narrow.model.dtype == np.float32
    assert (narrow.model.dtype, narrow.kv) == (wide.model.dtype, wide.kv)
    for one, other in zip(*map(jax.tree.leaves, (narrow.params, wide.params)), strict=True):
        np.testing.assert_array_equal(np.asarray(one).astype(other.dtype), np.asarray(other))


@pytest.mark.parametrize("prompts", [PROMPTS, PROMPTS[:1]], ids=["in a batch", "alone"])
@pytest.mark.parametrize("name", ["qwen3", "mixtral", "deepseek_v3"])
def test_answers_are_those_of_float32_weights(name: str, prompts: list[list[int]]) -> None:
    folder = Golden(name).checkpoint
    narrow, wide = (Harness(folder, narrow=how).run(prompts, 8) for how in (True, False))
    for one, other in zip(narrow, wide, strict=True):
        assert one.ids == other.ids
        np.testing.assert_allclose(one.step_logits, other.step_logits, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe", "deepseek_v3"])
def test_a_chunk_without_the_rows_that_pad_it_gives_what_the_whole_chunk_does(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Golden(name).checkpoint
    prompts = [PROMPTS[0], list(range(90, 106))]  # three whole chunks, and five rows of another
    whole = Harness(folder, narrow=True).run(prompts, 8)
    asked: list[bool] = []
    in_blocks = products.Matrix.in_blocks

    def noted(matrix: products.Matrix, rows: int) -> bool:
        asked.append(in_blocks(matrix, rows))
        return asked[-1]

    monkeypatch.setattr(products.Matrix, "in_blocks", noted)
    tiny = {"_SMALL": 64, "_LARGE": 64, "_COLUMNS": 32, "_BLOCK": 4}
    with sizes_of_products(tiny):
        found = Harness(folder, narrow=True).run(prompts, 8)
    for one, other in zip(found, whole, strict=True):
        assert one.ids == other.ids
        np.testing.assert_allclose(one.logits, other.logits, rtol=0, atol=1e-4)
    assert any(asked)


def _in_float16(folder: Path, source: Path, *left: str) -> Path:
    """A copy of a checkpoint with its tensors in float16, but not those with names in `left`."""
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    for name in set(tensors) - set(left):
        tensors[name] = tensors[name].astype(np.float16)
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_bytes())
    (folder / "config.json").write_text(json.dumps({**config, "torch_dtype": "float16"}))
    return folder


def test_float16_stays_so_too_and_gives_what_float32_does(tmp_path: Path) -> None:
    folder = _in_float16(tmp_path / "half", Golden("qwen3_moe").checkpoint)
    narrow, wide = (Harness(folder, narrow=how) for how in (True, False))
    held = {str(leaf.dtype) for leaf in jax.tree.leaves(narrow.params)}
    assert held == {"float16", "float32"}
    assert set(dict(narrow.model.dims.narrow).values()) == {"float16"}
    for one, other in zip(*map(jax.tree.leaves, (narrow.params, wide.params)), strict=True):
        np.testing.assert_array_equal(np.asarray(one).astype(other.dtype), np.asarray(other))
    for one, other in zip(narrow.run(PROMPTS, 8), wide.run(PROMPTS, 8), strict=True):
        assert one.ids == other.ids
        np.testing.assert_allclose(one.step_logits, other.step_logits, rtol=0, atol=1e-4)


@pytest.mark.usefixtures("large")
def test_each_matrix_keeps_the_two_bytes_that_it_has(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    head = "lm_head.weight"
    folder = _in_float16(tmp_path / "half", GOLDENS / "qwen3_moe" / "model", head)
    with caplog.at_level("INFO"):
        opened = _open(folder)
    narrow = dict(opened.model.dims.narrow)
    assert (narrow["lm_head"], narrow["embed"], narrow["o"]) == ("bfloat16", "float16", "float16")
    assert str(opened.params["lm_head"].dtype) == "bfloat16"
    assert "(lm_head: bfloat16)" in caplog.text
    half = (", ".join(name for name in narrow if name != "lm_head"), "float16")
    assert f"({half[0]}: {half[1]})" in caplog.text


@pytest.mark.usefixtures("large")
def test_a_parameter_with_a_tensor_of_another_dtype_stays_in_float32(tmp_path: Path) -> None:
    folder = tmp_path / "mixed"
    shutil.copytree(GOLDENS / "qwen3" / "model", folder)
    tensors = load_file(folder / "model.safetensors")
    odd = "model.layers.1.self_attn.k_proj.weight"
    tensors[odd] = tensors[odd].astype(np.float32) * np.float32(1.001)
    save_file(tensors, folder / "model.safetensors")
    opened = _open(folder)
    assert "qkv" not in dict(opened.model.dims.narrow)
    assert {"o", "gate_up", "down", "lm_head"} <= set(dict(opened.model.dims.narrow))
    assert {str(run["qkv"].dtype) for run in opened.params["layers"]} == {"float32"}


@pytest.mark.usefixtures("large")
def test_float32_checkpoints_codes_and_other_devices_are_as_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    qwen = GOLDENS / "qwen3" / "model"
    assert _open(GOLDENS / "llama" / "model").model.dims.narrow == ()
    assert _open(qwen, dtype="bfloat16").model.dims.narrow == ()
    coded = _open(qwen, quantization="int8").model.dims
    assert set(dict(coded.narrow)) == {"embed", "lm_head"}
    monkeypatch.setattr(opening, "on_cpu", lambda: False)
    assert _open(qwen, dtype="float32").model.dims.narrow == ()


@pytest.mark.parametrize("name", ["qwen3", "deepseek_v2", "gpt_oss", "half"])
@pytest.mark.usefixtures("large")
def test_an_orbax_folder_is_held_as_the_checkpoint_it_was_made_of(
    name: str, tmp_path: Path
) -> None:
    """qwen3 has a tied table, half is in float16; deepseek_v2 has layers of two kinds."""
    folder = GOLDENS / name / "model"
    if name == "half":
        folder = _in_float16(tmp_path / name, GOLDENS / "qwen3" / "model")
    opened = _open(folder)
    cfg = opened.model.cfg
    as_stored = Model.create(cfg, make_mesh(1, 1), jnp.dtype(cfg.torch_dtype), 16)
    save_orbax(folder, tmp_path / "orbax", as_stored)
    restored = _open(tmp_path / "orbax")
    assert restored.model.dims.narrow == opened.model.dims.narrow != ()
    for one, other in zip(*map(jax.tree.leaves, (restored.params, opened.params)), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
    save_orbax(folder, tmp_path / "wide", opened.model)
    assert _open(tmp_path / "wide").model.dims.narrow == ()


def test_a_tied_table_has_the_same_random_numbers_however_it_lies() -> None:
    cfg = _open(GOLDENS / "qwen3" / "model").model.cfg
    cpu, other = (
        random_params(Model.create(cfg, make_mesh(2, 1), "float32", 16, platform=platform), 5)
        for platform in ("cpu", "cuda")
    )
    assert "embed" not in cpu
    assert "lm_head" not in other
    np.testing.assert_array_equal(np.asarray(cpu["lm_head"]).T, np.asarray(other["embed"]))


def test_random_weights_in_bfloat16_have_a_digest_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_config(tmp_path / "bare", golden_config("qwen3_moe"))
    wide = _open(folder, load_format="dummy")
    monkeypatch.setattr(processors, "_SMALL", 0)
    narrow = _open(folder, load_format="dummy")
    assert {str(narrow.params[name].dtype) for name in ("embed", "lm_head")} == {"bfloat16"}
    assert narrow.digest == _open(folder, load_format="dummy").digest != wide.digest
