"""Broken checkpoints are refused in one line; whole ones are loaded to where they belong."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from model.checkpoint import Checkpoint
from model.config import ModelConfig
from model.errors import ModelError
from model.sharding import make_mesh
from model.transformer import Model
from model.weights import load_params, model_digest
from tests.model.checkpoints import QWEN2, random_tensors, write_checkpoint, write_config
from tests.model.harness import GOLDENS

TIED = QWEN2 | {"tie_word_embeddings": True}
NORM = "model.layers.1.input_layernorm.weight"


def _model(folder: Path, tp: int = 1, ep: int = 1, dtype: str = "float32") -> Model:
    return Model.create(ModelConfig.from_dir(folder), make_mesh(tp, ep), dtype, 16)


def _rewrite(folder: Path, change: Callable[[dict[str, np.ndarray]], object]) -> None:
    tensors = random_tensors(QWEN2)
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def _truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def _garble_header(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\xff" * 64)


def _drop(folder: Path) -> None:
    _rewrite(folder, lambda tensors: tensors.pop(NORM))


def _reshape(folder: Path) -> None:
    _rewrite(folder, lambda tensors: tensors.update({NORM: np.ones(41, np.float32)}))


def _retype(folder: Path) -> None:
    _rewrite(folder, lambda tensors: tensors.update({NORM: np.ones(40, np.int8)}))


def _add(folder: Path) -> None:
    _rewrite(folder, lambda tensors: tensors.update({"model.extra": np.ones(1, np.float32)}))


def _remove(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def _lose_shard(folder: Path) -> None:
    weight_map = {NORM: "model-00002-of-00002.safetensors"}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))


def _break_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("{}")


def _nest_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("[" * 100_000)


def _name_unprintably(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {NORM: "a\0b", "model.norm.weight": "a\nb"}}))


def _name_at_length(folder: Path) -> None:
    weight_map = {NORM: "x" * 5_000}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))


def _spoil(dtype: str, value: float) -> Callable[[Path], None]:
    def change(tensors: dict[str, np.ndarray]) -> None:
        norm = tensors[NORM] = tensors[NORM].astype(dtype)
        norm[7] = value

    return lambda folder: _rewrite(folder, change)


def _point_outside(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {NORM: "../elsewhere.safetensors"}}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_truncate, "model.safetensors: not a whole safetensors file"),
        (_garble_header, "model.safetensors: not a whole safetensors file"),
        (_drop, f"tensor {NORM} is missing from model.safetensors"),
        (_reshape, f"tensor {NORM}: shape [41], expected [40]"),
        (_retype, f"tensor {NORM}: dtype I8; accepted: F32, BF16, F16"),
        (_add, "tensor model.extra is unknown in Qwen2ForCausalLM"),
        (_remove, "no model.safetensors and no model.safetensors.index.json"),
        (_lose_shard, "model-00002-of-00002.safetensors: no such file, but"),
        (_break_index, "index.json: not an index with a weight_map"),
        (_point_outside, "weight_map must name files of its own folder"),
        (_nest_index, "index.json: not an index with a weight_map"),
        (_name_unprintably, r"files of its own folder, got ['a\x00b', 'a\nb']"),
        (_name_at_length, "x: not a whole safetensors file: [Errno 36] File name too long"),
        *(
            (_spoil(dtype, value), f"tensor {NORM}: has a number that is not finite")
            for dtype in ("float32", "bfloat16", "float16")
            for value in (np.nan, np.inf, -np.inf)
        ),
    ],
)
def test_a_bad_checkpoint_is_refused_in_one_line(
    damage: Callable[[Path], None], message: str, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path, QWEN2)
    model = _model(tmp_path)
    damage(tmp_path)
    with pytest.raises(ModelError) as caught:
        load_params(tmp_path, model)
    assert message in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2", "F8_E8M0", "F4"])
def test_a_dtype_that_numpy_lacks_is_refused_by_the_digest(dtype: str, tmp_path: Path) -> None:
    write_config(tmp_path, QWEN2)
    size = 20 if dtype == "F4" else 40
    header = json.dumps({NORM: {"dtype": dtype, "shape": [40], "data_offsets": [0, size]}})
    head = len(header).to_bytes(8, "little") + header.encode()
    (tmp_path / "model.safetensors").write_bytes(head + bytes(size))
    with pytest.raises(ModelError) as caught:
        model_digest(tmp_path)
    assert f"tensor {NORM}: dtype {dtype}; accepted: F32, BF16, F16" in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_a_missing_shard_of_two_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "mixtral"
    shutil.copytree(GOLDENS / "mixtral" / "model", folder)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model-00002-of-00002.safetensors: no such file"):
        load_params(folder, _model(folder))


def test_a_whole_model_beside_shards_of_another_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "mixtral"
    shutil.copytree(GOLDENS / "mixtral" / "model", folder)
    shutil.copy(GOLDENS / "llama" / "model" / "model.safetensors", folder)
    with pytest.raises(ModelError, match=r"index\.json, which names other files; expected one"):
        load_params(folder, _model(folder))
    index = folder / "model.safetensors.index.json"
    named = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": dict.fromkeys(named, "model.safetensors")}))
    with pytest.raises(ModelError, match=r"model\.safetensors: tensor .*: shape"):
        load_params(folder, _model(folder))


def test_rotary_tables_and_a_doubled_tied_head_are_left_alone(tmp_path: Path) -> None:
    tensors = write_checkpoint(tmp_path, TIED)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(5, np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    params = load_params(tmp_path, _model(tmp_path))
    assert "embed" not in params
    assert (tensors["lm_head.weight"] == np.asarray(params["lm_head"]).T).all()


def test_a_doubled_tied_head_may_have_another_dtype(tmp_path: Path) -> None:
    tensors = write_checkpoint(tmp_path, TIED)
    half = tensors["model.embed_tokens.weight"].astype(np.float16)
    tensors |= {"model.embed_tokens.weight": half.astype(np.float32), "lm_head.weight": half}
    save_file(tensors, tmp_path / "model.safetensors")
    params = load_params(tmp_path, _model(tmp_path))
    assert (half == np.asarray(params["lm_head"]).T).all()


def _nudge_last(head: np.ndarray) -> np.ndarray:
    head[-1, -1] += 1.0
    return head


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_nudge_last, "lm_head.weight differs from model.embed_tokens.weight in rows 1024 to 1099"),
        (lambda head: head[:-1].copy(), "lm_head.weight: shape [1099, 40], expected [1100, 40]"),
    ],
)
def test_a_head_that_is_not_the_embedding_it_is_tied_to_is_refused(
    change: Callable[[np.ndarray], np.ndarray], message: str, tmp_path: Path
) -> None:
    tensors = write_checkpoint(tmp_path, TIED | {"vocab_size": 1100})
    tensors["lm_head.weight"] = change(tensors["model.embed_tokens.weight"].copy())
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError) as caught:
        load_params(tmp_path, _model(tmp_path))
    assert message in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_weights_are_cast_to_the_models_dtype_but_the_router_stays_exact() -> None:
    folder = GOLDENS / "mixtral" / "model"
    params = load_params(folder, _model(folder, dtype="bfloat16"))
    kinds = {name: str(leaf.dtype) for name, leaf in params["layers"][0].items()}
    assert kinds.pop("router") == "float32"
    assert set(kinds.values()) == {"bfloat16"}


def test_expert_stacks_hold_each_expert_on_its_own_shard() -> None:
    folder = GOLDENS / "mixtral" / "model"
    model = _model(folder, 4, 2)
    stack = load_params(folder, model)["layers"][0]["experts_down"]
    assert stack.shape == (3, 8, 96, 64)
    assert {shard.data.shape for shard in stack.addressable_shards} == {(3, 4, 48, 64)}
    file = load_file(folder / "model-00001-of-00002.safetensors")
    expert = file["model.layers.0.block_sparse_moe.experts.5.w2.weight"].astype(np.float32)
    assert (np.asarray(stack)[0, 5] == expert.T).all()


@pytest.mark.parametrize("tied", [True, False])
def test_a_shard_of_the_vocabulary_may_be_all_padding(tied: bool, tmp_path: Path) -> None:
    config = QWEN2 | {"vocab_size": 5, "eos_token_id": 4, "tie_word_embeddings": tied}
    tensors = write_checkpoint(tmp_path, config)
    params = load_params(tmp_path, _model(tmp_path, 4))
    whole = tensors["model.embed_tokens.weight"]
    head = whole.T if tied else tensors["lm_head.weight"].T
    assert (np.asarray(params["lm_head"]) == np.pad(head, [(0, 0), (0, 3)])).all()
    assert tied == ("embed" not in params)
    if not tied:
        assert (np.asarray(params["embed"]) == np.pad(whole, [(0, 3), (0, 0)])).all()


def test_nothing_is_in_memory_twice_while_it_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    folder, put, copied = GOLDENS / "mixtral" / "model", jax.device_put, []

    def watched(values: np.ndarray, device: jax.Device) -> jax.Array:
        placed = put(values, device)
        if not np.shares_memory(np.asarray(placed), values):
            copied.append(values.shape)
        return placed

    monkeypatch.setattr(jax, "device_put", watched)
    load_params(folder, _model(folder))
    assert not copied


def test_a_tensor_that_is_read_is_not_copied() -> None:
    files = Checkpoint(GOLDENS / "mixtral" / "model")
    one, other = (files.read("lm_head.weight", (slice(1, 9), slice(0, 4))) for _ in range(2))
    assert np.shares_memory(one, other)


def test_progress_counts_up_to_the_bytes_on_all_devices() -> None:
    folder = GOLDENS / "llama" / "model"
    seen: list[tuple[int, int]] = []
    params = load_params(folder, _model(folder, 4), lambda *counts: seen.append(counts))
    stored = sum(
        shard.data.nbytes for leaf in jax.tree.leaves(params) for shard in leaf.addressable_shards
    )
    assert seen[-1] == (stored, stored)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_copies_have_one_digest_and_other_weights_or_sizes_another(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "a", QWEN2)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    digest = model_digest(tmp_path / "a")
    assert len(digest) == 16
    assert model_digest(tmp_path / "b") == digest
    _rewrite(tmp_path / "b", lambda t: t.update({NORM: np.ones(40, np.float32)}))
    assert model_digest(tmp_path / "b") != digest
    write_checkpoint(tmp_path / "b", QWEN2 | {"rms_norm_eps": 1e-5})
    assert model_digest(tmp_path / "b") != digest
