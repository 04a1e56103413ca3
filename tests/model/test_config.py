"""Configurations: what is read from them, and that everything else is refused in one line."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from model.config import KVSpec, ModelConfig
from model.errors import ModelError
from model.rope import RopeConfig
from tests.model.checkpoints import QWEN2, golden_config, read_config, write_config
from tests.model.harness import GOLDENS

MIXTRAL, QWEN3_MOE, LLAMA3 = map(golden_config, ("mixtral", "qwen3_moe", "llama"))
LINEAR: dict[str, Any] = {"type": "linear", "factor": 2.0}


def test_a_link_whose_file_was_left_behind_is_named_as_such(tmp_path: Path) -> None:
    (tmp_path / "config.json").symlink_to("../../blobs/0a1b")
    with pytest.raises(ModelError, match=r"config.json: a link to nothing, ../../blobs/0a1b;"):
        ModelConfig.from_dir(tmp_path)


def test_each_family_turns_on_its_features() -> None:
    def features(name: str) -> ModelConfig:
        return ModelConfig.from_dir(GOLDENS / name / "model")

    llama, qwen3, mixtral = features("llama"), features("qwen3"), features("mixtral")
    assert (llama.rope.kind, llama.rope.theta, llama.rope.original_max_position) == (
        "llama3",
        500000.0,
        64,
    )
    assert (llama.qk_norm, llama.qkv_bias, llama.head_dim, llama.group) == (False, False, 16, 3)
    assert llama.eos_token_ids == (1019, 1017)
    assert (qwen3.qk_norm, qwen3.tie_word_embeddings, qwen3.head_dim) == (True, True, 32)
    assert (mixtral.num_experts, mixtral.num_experts_per_tok) == (8, 2)
    assert (mixtral.moe_intermediate_size, mixtral.router.normalise) == (96, True)
    routed = features("qwen3_moe")
    assert routed.moe_layers == (True, False, True, True)
    assert (routed.intermediate_size, routed.moe_intermediate_size) == (160, 48)


def test_qwen2_has_biases_and_a_window_that_is_switched_off(tmp_path: Path) -> None:
    cfg = ModelConfig.from_dir(write_config(tmp_path, QWEN2))
    assert (cfg.qkv_bias, cfg.o_bias) == (True, False)
    assert cfg.moe_layers == (False, False)


def test_windows_are_where_each_family_has_them(tmp_path: Path) -> None:
    def windows(config: dict[str, Any], change: dict[str, Any]) -> tuple[int, tuple[bool, ...]]:
        cfg = ModelConfig.from_dir(write_config(tmp_path, config | change))
        return cfg.sliding_window, cfg.window_layers

    mistral = QWEN2 | {"architectures": ["MistralForCausalLM"]}
    switched = {"use_sliding_window": True}
    assert windows(mistral, {}) == (128, (True, True))
    assert windows(mistral, {"sliding_window": None}) == (0, ())
    assert windows(mistral, {"sliding_window": 256}) == (0, ())  # as long as the context
    assert windows(MIXTRAL, {"sliding_window": 64, "use_sliding_window": False})[0] == 64
    unread = {"layer_types": ["full_attention"] * MIXTRAL["num_hidden_layers"]}
    assert windows(MIXTRAL, {"sliding_window": 4096} | unread) == (0, ())
    assert windows(QWEN2, switched) == (0, ())  # layers have windows from layer 28 on
    assert windows(QWEN2, switched | {"max_window_layers": 1}) == (128, (False, True))
    listed = ["sliding_attention", "full_attention"]
    assert windows(QWEN2, switched | {"layer_types": listed}) == (128, (True, False))


def test_a_window_that_is_not_said_is_the_usual_one_and_null_is_none(tmp_path: Path) -> None:
    def window(config: dict[str, Any], **change: Any) -> int:
        unsaid = {name: value for name, value in config.items() if name != "sliding_window"}
        long = {"max_position_embeddings": 8192}
        return ModelConfig.from_dir(write_config(tmp_path, unsaid | long | change)).sliding_window

    mistral = QWEN2 | {"architectures": ["MistralForCausalLM"]}
    assert window(mistral) == 4096
    assert window(mistral, sliding_window=None) == 0
    assert window(mistral, max_position_embeddings=4096) == 0  # as long as the context
    assert window(QWEN2) == 0  # switched off
    assert window(QWEN2, use_sliding_window=True, max_window_layers=0) == 4096
    assert window(MIXTRAL) == 0


def test_generation_config_adds_end_tokens_and_sampling_defaults(tmp_path: Path) -> None:
    write_config(tmp_path, QWEN2)
    extra = {"eos_token_id": [9, 7], "temperature": 0.6, "top_p": 0.95, "top_k": 20}
    (tmp_path / "generation_config.json").write_text(json.dumps(extra))
    cfg = ModelConfig.from_dir(tmp_path)
    assert cfg.eos_token_ids == (9, 7)
    assert (cfg.default_temperature, cfg.default_top_p, cfg.default_top_k) == (0.6, 0.95, 20)


def test_a_top_k_of_minus_one_is_off_as_it_is_for_clients(tmp_path: Path) -> None:
    write_config(tmp_path, QWEN2)
    (tmp_path / "generation_config.json").write_text('{"top_k": -1}')
    assert ModelConfig.from_dir(tmp_path).default_top_k == 0
    (tmp_path / "generation_config.json").write_text('{"top_k": -2}')
    with pytest.raises(ModelError, match="top_k is -2; accepted: an integer of at least -1"):
        ModelConfig.from_dir(tmp_path)


@pytest.mark.parametrize(
    ("base", "change", "message"),
    [
        (QWEN2, {"architectures": ["GPT2LMHeadModel"]}, "architectures is 'GPT2LMHeadModel'; acc"),
        (QWEN2, {"architectures": []}, "architectures is []; accepted: a list with one of Llama"),
        (QWEN2, {"vocab_size": None}, "vocab_size is missing"),
        (QWEN2, {"vocab_size": "many"}, "vocab_size is 'many'; accepted: an integer of at least 1"),
        (QWEN2, {"num_hidden_layers": 0}, "num_hidden_layers is 0; accepted: an integer of at"),
        (QWEN2, {"rms_norm_eps": True}, "rms_norm_eps is True; accepted: a number"),
        (QWEN2, {"rms_norm_eps": float("nan")}, "rms_norm_eps is nan; accepted: a finite"),
        (QWEN2, {"num_key_value_heads": 3}, "num_key_value_heads is 3; accepted: a divisor of 4"),
        (QWEN2, {"hidden_size": 42}, "hidden_size is 42; accepted: a multiple of 4 heads"),
        (QWEN2, {"head_dim": 5}, "head_dim is 5; accepted: an even number"),
        (QWEN2, {"hidden_act": "gelu"}, "hidden_act is 'gelu'; accepted: silu"),
        (QWEN2, {"use_sliding_window": "yes"}, "use_sliding_window is 'yes'; accepted: true or"),
        (QWEN2, {"layer_types": ["sliding_attention"]}, "layer_types is ['sliding_attention']; "),
        (QWEN2, {"mlp_bias": True}, "mlp_bias is True; accepted: false"),
        (QWEN2, {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; accepted: 1.0"),
        (QWEN2, {"torch_dtype": "int8"}, "torch_dtype is 'int8'; accepted: float32, bfloat16"),
        (QWEN2, {"eos_token_id": "end"}, "eos_token_id is 'end'; accepted: a token id"),
        (QWEN2, {"eos_token_id": [2, 1 << 31]}, "eos_token_id is [2, 2147483648]; accepted: a to"),
        (QWEN2, {"quantization_config": {"quant_method": "hqq"}}, "quantization_config is 'hqq'"),
        (QWEN2, {"rope_scaling": {"type": "su", "factor": 4.0}}, "rope_type is 'su'; accepted"),
        (QWEN2, {"rope_theta": 0}, "rope_theta is 0.0; accepted: a finite number above 0"),
        (QWEN2, {"rope_theta": -1.0}, "rope_theta is -1.0; accepted: a finite number"),
        (QWEN2, {"rope_theta": float("nan")}, "rope_theta is nan; accepted: a finite number"),
        (QWEN2, {"rope_parameters": {"rope_theta": 0.0}}, "rope_parameters: rope_theta is 0.0;"),
        (
            QWEN2,
            {"rope_parameters": {"rope_theta": 1e6}},
            "rope_theta is 10000.0; accepted: 1000000.0, as in rope_parameters, or only one of",
        ),
        (
            QWEN2,
            {"rope_scaling": LINEAR, "rope_parameters": {"rope_type": "default"}},
            "rope_scaling is {'type': 'linear', 'factor': 2.0}; accepted: what rope_parameters",
        ),
        (
            QWEN2 | {"rope_theta": None},
            {"rope_scaling": LINEAR, "rope_parameters": LINEAR | {"rope_theta": 1e6}},
            "rope_scaling is {'type': 'linear', 'factor': 2.0}; accepted: what rope_parameters",
        ),
        (
            QWEN2,
            {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 2.0}}},
            "rope_parameters: full_attention is {'rope_type': 'linear', 'factor': 2.0}; accepted:",
        ),
        (
            QWEN2,
            {"rope_scaling": {"rope_type": "default", "mrope_section": [16, 24, 24]}},
            "rope_scaling: mrope_section is [16, 24, 24]; accepted: null; fields of rope_type 'def",
        ),
        (
            QWEN2,
            {"rope_scaling": {"rope_type": "default", "type": "yarn", "factor": 4.0}},
            "rope_scaling: type is 'yarn'; accepted: 'default', as in rope_type",
        ),
        (
            QWEN2,
            {"rope_scaling": {"factor": 4.0}},
            "rope_scaling: factor is 4.0; accepted: null; fields of rope_type 'default'",
        ),
        (
            LLAMA3,
            {"original_max_position_embeddings": 32},
            "original_max_position_embeddings is 32; accepted: 64, as",
        ),
        (QWEN2, {"rope_scaling": [1]}, "rope_scaling is [1]; accepted: an object or null"),
        (QWEN2, {"rope_scaling": {"rope_type": "llama3"}}, "rope_scaling: factor is missing"),
        (
            QWEN2,
            {"dual_chunk_attention_config": {"chunk_size": 8}},
            "dual_chunk_attention_config is",
        ),
        (QWEN2, {"is_causal": False}, "is_causal is False; accepted: true"),
        (QWEN2, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0; accepted: null"),
        (QWEN2, {"logit_scale": 0.5}, "logit_scale is 0.5; accepted: 1.0"),
        (
            QWEN3_MOE,
            {"scoring_func": "sigmoid"},
            "scoring_func is 'sigmoid'; accepted: \"softmax\"",
        ),
        (
            QWEN3_MOE,
            {"sliding_window": 64, "use_sliding_window": True},
            "use_sliding_window is True; accepted: false in Qwen3MoeForCausalLM",
        ),
        (MIXTRAL, {"num_local_experts": None}, "num_local_experts is missing"),
        (QWEN2, {"intermediate_size": 10**400}, "intermediate_size is larger than 2147483647"),
        (MIXTRAL, {"num_experts_per_tok": 9}, "num_experts_per_tok is 9; accepted: at most 8"),
        (
            MIXTRAL,
            {
                "sliding_window": 64,
                "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            },
            "accepted: sliding_attention for each layer, or null",
        ),
        (QWEN3_MOE, {"mlp_only_layers": 1}, "mlp_only_layers is 1; accepted: a list of layer"),
    ],
)
def test_what_cannot_be_computed_is_refused_in_one_line(
    base: dict[str, Any], change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError) as caught:
        ModelConfig.from_dir(write_config(tmp_path, base | change))
    assert message in str(caught.value)
    assert str(tmp_path / "config.json") in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        {"rope_scaling": LINEAR},
        {"rope_scaling": LINEAR, "rope_parameters": {}},
        {"rope_scaling": {}, "rope_parameters": {"rope_type": "linear", "factor": 2}},
        {"rope_scaling": LINEAR, "rope_parameters": {"rope_type": "linear", "factor": 2}},
        {"rope_theta": None, "rope_parameters": LINEAR | {"rope_theta": 10000}},
        {"rope_scaling": LINEAR, "rope_parameters": LINEAR | {"rope_theta": 10000}},
        {"rope_scaling": LINEAR | {"rope_type": "linear", "mrope_section": None}},
    ],
)
def test_every_way_to_say_one_rotation_is_read_alike(
    change: dict[str, Any], tmp_path: Path
) -> None:
    rope = ModelConfig.from_dir(write_config(tmp_path, QWEN2 | change)).rope
    assert rope == RopeConfig("linear", 10000.0, factor=2.0)


@pytest.mark.parametrize(
    ("base", "theta"), [(QWEN2, 1e4), (LLAMA3, 1e4), (QWEN3_MOE, 1e4), (MIXTRAL, 1e6)]
)
def test_theta_is_the_architectures_own_where_the_checkpoint_says_none(
    base: dict[str, Any], theta: float, tmp_path: Path
) -> None:
    folder = write_config(tmp_path, base | {"rope_theta": None})
    assert ModelConfig.from_dir(folder).rope.theta == theta


def test_fields_of_derived_networks_may_say_what_changes_nothing(tmp_path: Path) -> None:
    neutral = {"mlp_bias": False, "logit_scale": 1, "is_causal": True, "scale_depth": None}
    cfg = ModelConfig.from_dir(write_config(tmp_path, QWEN2 | neutral))
    assert cfg == ModelConfig.from_dir(write_config(tmp_path, QWEN2))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not readable as JSON"),
        ("[" * 100_000, "not readable as JSON"),
        ("[1]", "expected a JSON object, got list"),
    ],
)
def test_a_broken_config_file_is_named(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=message):
        ModelConfig.from_dir(tmp_path)
    with pytest.raises(ModelError, match="is not a folder"):
        ModelConfig.from_dir(tmp_path / "elsewhere")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_pipe_in_place_of_a_file_is_refused_and_not_waited_for(name: str, tmp_path: Path) -> None:
    folder = write_config(tmp_path, QWEN2)
    (folder / "gone").symlink_to("nowhere")  # nobody reads it, so it does no harm
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with pytest.raises(ModelError, match=rf"{name}: a pipe, socket or device; expected a file"):
        ModelConfig.from_dir(folder)


def test_page_bytes_count_keys_and_values_of_all_layers() -> None:
    assert KVSpec(3, 2, 16, 8, "bfloat16").page_bytes == 3 * 2 * 8 * 2 * 16 * 2
    assert KVSpec(3, 2, 16, 8, "bfloat16", planes=1).page_bytes == 3 * 2 * 8 * 16 * 2
    assert (
        KVSpec(3, 2, 16, 8, "float32").page_bytes == 2 * KVSpec(3, 2, 16, 8, "float16").page_bytes
    )


@pytest.mark.parametrize(
    ("name", "kv_heads", "head_dim"),
    [
        ("llama", 64, 20),
        ("mixtral", 8, 20),
        ("qwen2_moe", 16, 20),
        ("qwen3", 32, 128),
        ("qwen3_moe", 4, 20),
        ("glm4_moe", 8, 20),
        ("minimax_m2", 8, 128),
        ("dots1", 32, 20),
        ("ernie4_5_moe", 4, 20),
        ("ernie4_5", 2, 128),
        ("hy_v3", 8, 128),
        ("solar_open", 8, 128),
        ("gpt_oss", 8, 64),
    ],
)
def test_heads_that_a_checkpoint_does_not_give_are_as_transformers_has_them(
    name: str, kv_heads: int, head_dim: int, tmp_path: Path
) -> None:
    config = golden_config(name) | {"num_attention_heads": 64, "hidden_size": 1280}
    null = {"num_key_value_heads": None, "head_dim": None}
    cfg = read_config(tmp_path, {x: value for x, value in config.items() if x not in null})
    assert (cfg.num_kv_heads, cfg.head_dim) == (kv_heads, head_dim)
    cfg = read_config(tmp_path, config | null)
    assert (cfg.num_kv_heads, cfg.head_dim) == (64, 20)
