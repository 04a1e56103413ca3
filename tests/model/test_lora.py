"""Adapters: parity with PEFT's numbers on every kind of mesh, and folders that are refused."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from model.config import ModelConfig
from model.errors import ModelError
from model.lora import adapters_digest, lora_shape, read_adapters
from model.opening import OpenedModel
from model.pieces import NO_ADAPTER
from tests.model.harness import GOLDENS, Golden, Harness, open_plainly

LORA = GOLDENS / "lora"
LOGIT_ATOL = 2e-4  # as of tests/goldens/README.md for float32
PROMPTS = ("p7", "p33")
STEPS = 12
TENSOR = "base_model.model.model.layers.{}.{}.lora_{}.weight"


def cfg_of(base: str) -> ModelConfig:
    return ModelConfig.from_dir(GOLDENS / base / "model")


@pytest.mark.parametrize(
    ("base", "adapters", "mesh"),
    [
        ("llama", ("all", "queries"), {}),
        ("llama", ("all", "queries"), {"tp": 2}),
        ("llama", ("queries", "all"), {"tp": 4, "dp": 2}),
        ("llama", ("all",), {"tp": 2, "platform": "cuda"}),
        ("llama", ("all",), {"coded": "int8"}),
        ("qwen3_moe", ("attention",), {"tp": 4, "ep": 2}),
        ("qwen3_moe", ("attention",), {"narrow": True}),
        ("ernie4_5", ("whole",), {"tp": 2}),
        ("gpt_oss", ("attention",), {"tp": 2, "ep": 1}),
    ],
)
def test_each_prompt_of_a_batch_has_its_own_adapter(
    base: str, adapters: tuple[str, ...], mesh: dict[str, Any]
) -> None:
    recorded, folders = Golden(base), [(name, LORA / f"{base}_{name}") for name in adapters]
    harness = Harness(recorded.checkpoint, lora=folders, **mesh)
    # Every prompt without an adapter and with each, side by side in the same chunks and steps.
    asked = [(prompt, at) for at in (NO_ADAPTER, *range(len(adapters))) for prompt in PROMPTS]
    prompts = [recorded.prompts[prompt] for prompt, _ in asked]
    ran = harness.run(prompts, STEPS, [at for _, at in asked])
    rounded = mesh.get("coded") == "int8"
    for (prompt, at), result in zip(asked, ran, strict=True):
        if at == NO_ADAPTER:
            logits = recorded.numbers[f"{prompt}.logits"][-4:]
            ids = recorded.numbers[f"{prompt}.greedy.ids"][:STEPS]
        else:
            numbers = load_file(folders[at][1] / "golden.safetensors")
            logits, ids = numbers[f"{prompt}.logits"], numbers[f"{prompt}.greedy_ids"]
        distance = np.abs(result.logits[-4:] - logits)
        if rounded:  # the base model's weights are codes, the adapter's are not
            assert distance.mean() < 0.1 * np.abs(logits).mean(), (prompt, at)
        else:
            assert distance.max() < LOGIT_ATOL, (prompt, at)
            assert result.ids == ids.tolist(), (prompt, at)


def test_room_is_made_for_the_largest_adapter_and_for_what_any_changes() -> None:
    cfg = cfg_of("llama")
    folders = [(name, LORA / f"llama_{name}") for name in ("queries", "all")]
    adapters = read_adapters(folders, cfg)
    assert lora_shape(adapters) == (2, 8, ("qkv", "o", "gate_up", "down"))
    assert lora_shape(adapters[:1]) == (1, 8, ("qkv",))
    assert lora_shape(()) is None


def test_alpha_is_a_modules_own_and_divided_by_its_own_rank() -> None:
    (adapter,) = read_adapters([("queries", LORA / "llama_queries")], cfg_of("llama"))
    assert adapter.ranks["0.self_attn.q_proj"] == 8
    assert adapter.ranks["1.self_attn.q_proj"] == 2
    # With use_rslora it is divided by the root.
    assert adapter.factors["0.self_attn.q_proj"] == pytest.approx(16 / 8**0.5)
    assert adapter.factors["1.self_attn.q_proj"] == pytest.approx(16 / 2**0.5)
    assert adapter.factors["1.self_attn.v_proj"] == pytest.approx(4 / 8**0.5)


def test_the_digest_covers_names_order_weights_and_factors(tmp_path: Path) -> None:
    cfg, folder = cfg_of("llama"), LORA / "llama_all"
    other, changed = LORA / "llama_queries", copied(tmp_path / "a", folder)
    numbers = load_file(changed / "adapter_model.safetensors")
    next(iter(numbers.values()))[0, 0] += 1
    save_file(numbers, changed / "adapter_model.safetensors")
    scaled = copied(tmp_path / "b", folder)
    rewrite(scaled, lora_alpha=9)
    digests = [
        adapters_digest(read_adapters(folders, cfg))
        for folders in (
            [("a", folder)],
            [("b", folder)],
            [("a", changed)],
            [("a", scaled)],
            [("a", folder), ("b", other)],
            [("b", other), ("a", folder)],
        )
    ]
    assert len(set(digests)) == len(digests)
    again = adapters_digest(read_adapters([("a", copied(tmp_path / "c", folder))], cfg))
    assert again == digests[0]


def copied(to: Path, folder: Path) -> Path:
    shutil.copytree(folder, to)
    return to


def rewrite(folder: Path, **fields: Any) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'; accepted: \"LORA\""),
        ({"use_dora": True}, "use_dora is True; accepted: false"),
        ({"bias": "lora_only"}, "bias is 'lora_only'; accepted: \"none\""),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is ['lm_head']; accepted: null"),
        ({"target_parameters": ["mlp.experts.down_proj"]}, "target_parameters is"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights is 'pissa_niter_4'; accepted"),
        ({"init_lora_weights": "OLoRA"}, "init_lora_weights is 'OLoRA'; accepted"),
        ({"lora_alpha": "16"}, "lora_alpha is '16'; accepted: a number"),
        ({"alpha_pattern": {"q_proj": -1}}, "q_proj is -1; accepted"),
        ({"alpha_pattern": {"q_(proj": 1}}, "alpha_pattern is"),
        ({"r": 8}, "lora_A.weight: 4 rows, but adapter_config.json gives it rank 8"),
        ({"r": 0}, "r is 0; accepted: an integer of at least 1"),
        ({"r": 8, "rank_pattern": {"(q|k|v|o)_proj": 4}}, "mlp.down_proj.lora_A.weight: 4 rows, b"),
        ({"rank_pattern": {"v_proj": 2}}, "v_proj.lora_A.weight: 4 rows, but adapter_config.json"),
        ({"rank_pattern": {"q_(proj": 1}}, "rank_pattern is"),
    ],
)
def test_a_config_that_asks_for_other_sums_is_refused(
    tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    folder = copied(tmp_path / "a", LORA / "llama_all")
    rewrite(folder, **fields)
    with pytest.raises(ModelError) as refused:
        read_adapters([("a", folder)], cfg_of("llama"))
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_folder_that_is_no_adapters_is_refused_as_such(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nowhere", GOLDENS / "llama" / "model"):
        with pytest.raises(ModelError) as refused:
            read_adapters([("a", folder)], cfg_of("llama"))
        file = folder / "adapter_config.json"
        assert str(refused.value) == (
            f"{file}: no such file; expected the config of an adapter (--lora-paths), as PEFT "
            "saves it"
        )


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_pipe_in_place_of_a_file_is_refused_and_not_waited_for(name: str, tmp_path: Path) -> None:
    folder = copied(tmp_path / "a", LORA / "llama_all")
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(ModelError, match=rf"{name}: a pipe, socket or device; expected a file"):
        read_adapters([("a", folder)], cfg_of("llama"))


Q_A, Q_B = (TENSOR.format(0, "self_attn.q_proj", half) for half in "AB")


@pytest.mark.parametrize(
    ("base", "drop", "add", "message"),
    [
        ("llama", Q_B, {}, f"tensor {Q_B} is missing from adapter_model.safetensors"),
        ("llama", Q_A, {}, f"tensor {Q_A} is missing from adapter_model.safetensors"),
        ("llama", "", {Q_B: (96, 3)}, f"tensor {Q_B}: shape [96, 3], expected [96, 4]"),
        ("llama", "", {Q_A: (4, 95)}, f"tensor {Q_A}: shape [4, 95], expected [4, 96]"),
        ("llama", "", {Q_A: (0, 96)}, f"tensor {Q_A} has no rows"),
        ("llama", "", {Q_A: ()}, f"tensor {Q_A} has no rows"),
        ("llama", "", {TENSOR.format(3, "mlp.up_proj", "A"): (4, 96)}, "of N below 3"),
        ("llama", "", {TENSOR.format("9" * 5000, "mlp.up_proj", "A"): (4, 96)}, "of N below 3"),
        ("llama", "", {TENSOR.format("00", "mlp.up_proj", "A"): (4, 96)}, "of N below 3"),
        ("llama", "", {"base_model.model.lm_head.lora_A.weight": (4, 96)}, "tensor base_model."),
        ("qwen3_moe", "", {TENSOR.format(0, "mlp.up_proj", "A"): (4, 64)}, "tensor base_model."),
        ("qwen3_moe", "", {TENSOR.format(1, "mlp.gate", "A"): (4, 64)}, "mlp.down_proj"),
        ("gpt_oss", "", {TENSOR.format(1, "mlp.up_proj", "A"): (4, 64)}, "self_attn.o_proj"),
    ],
)
def test_tensors_that_do_not_fit_the_network_are_named(
    tmp_path: Path, base: str, drop: str, add: dict[str, tuple[int, ...]], message: str
) -> None:
    name = {"llama": "all"}.get(base, "attention")
    folder = copied(tmp_path / "a", LORA / f"{base}_{name}")
    numbers = load_file(folder / "adapter_model.safetensors")
    numbers.pop(drop, None)
    numbers |= {tensor: np.zeros(shape, np.float32) for tensor, shape in add.items()}
    save_file(numbers, folder / "adapter_model.safetensors")
    with pytest.raises(ModelError) as refused:
        Harness(GOLDENS / base / "model", lora=[("a", folder)])
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_what_one_adapter_makes_infinite_reaches_no_other_row(tmp_path: Path) -> None:
    recorded, folder = Golden("llama"), copied(tmp_path / "a", LORA / "llama_all")
    numbers = load_file(folder / "adapter_model.safetensors")
    numbers[Q_A][:] = np.finfo(np.float32).max
    save_file(numbers, folder / "adapter_model.safetensors")
    harness = Harness(recorded.checkpoint, lora=[("huge", folder), ("all", LORA / "llama_all")])
    prompt = recorded.prompts["p7"]
    _, plain, other = harness.run([prompt] * 3, STEPS, [0, NO_ADAPTER, 1])
    assert plain.ids == recorded.numbers["p7.greedy.ids"][:STEPS].tolist()
    golden = load_file(LORA / "llama_all" / "golden.safetensors")
    assert other.ids == golden["p7.greedy_ids"].tolist()


@pytest.mark.parametrize(("dtype", "largest"), [("float32", 3e38), ("bfloat16", 3.4e38)])
def test_numbers_that_alpha_or_rounding_makes_infinite_are_refused(
    tmp_path: Path, dtype: str, largest: float
) -> None:
    folder = copied(tmp_path / "a", LORA / "llama_all")
    numbers = load_file(folder / "adapter_model.safetensors")
    tensor = Q_A if dtype == "bfloat16" else Q_B
    numbers[tensor][1, 1] = largest
    save_file(numbers, folder / "adapter_model.safetensors")
    with pytest.raises(ModelError, match=f"tensor {tensor}, times .* not finite"):
        Harness(GOLDENS / "llama" / "model", dtype=dtype, lora=[("a", folder)])


def test_a_folder_without_an_adapter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"adapter_config\.json: no such file"):
        read_adapters([("a", tmp_path)], cfg_of("llama"))
    folder = copied(tmp_path / "a", LORA / "llama_all")
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"adapter_model\.safetensors: no such file$"):
        read_adapters([("a", folder)], cfg_of("llama"))
    (folder / "adapter_model.safetensors").write_bytes(b"\0" * 40)
    with pytest.raises(ModelError, match="not a whole safetensors file"):
        read_adapters([("a", folder)], cfg_of("llama"))
    save_file({}, folder / "adapter_model.safetensors")
    with pytest.raises(ModelError, match="has no lora_A"):
        read_adapters([("a", folder)], cfg_of("llama"))


def test_an_adapter_that_does_not_fit_is_refused_before_weights_are_read(tmp_path: Path) -> None:
    folder = copied(tmp_path / "a", LORA / "llama_all")
    numbers = load_file(folder / "adapter_model.safetensors")
    save_file(numbers | {Q_A: np.ones((4, 95), np.float32)}, folder / "adapter_model.safetensors")

    def about_to_read(_: OpenedModel) -> None:
        raise AssertionError

    with pytest.raises(ModelError, match=r"shape \[4, 95\]"):
        open_plainly(
            GOLDENS / "llama" / "model",
            16,
            128,
            lora_paths=[("a", folder)],
            before_weights=about_to_read,
        )


def test_a_network_with_latent_attention_takes_none() -> None:
    with pytest.raises(ModelError, match="DeepseekV2ForCausalLM has latent attention"):
        read_adapters([("a", LORA / "llama_all")], cfg_of("deepseek_v2"))
