"""Configurations of GLM, MiniMax, OLMoE and Qwen2-MoE: what is read of them, what is refused."""

from pathlib import Path
from typing import Any

import pytest

from model.config_attention import LatentConfig
from model.config_experts import RouterConfig
from model.errors import ModelError
from tests.model.checkpoints import golden_config, read_config, refusal

GLM, FLASH, QWEN, OLMOE, MINIMAX = map(
    golden_config, ("glm4_moe", "glm4_moe_lite", "qwen2_moe", "olmoe", "minimax_m2")
)
GLM_V5 = golden_config("glm4_moe", "config.v5.json")
FLASH_V5 = golden_config("glm4_moe_lite", "config.v5.json")
MINIMAX_V5 = golden_config("minimax_m2", "config.v5.json")
CORRECTED = RouterConfig(sigmoid=True, normalise=True, correction=True)


def _rope(base: dict[str, Any], **change: Any) -> dict[str, Any]:
    return {"rope_parameters": base["rope_parameters"] | change}


def test_glm_turns_half_of_a_head_and_routes_as_deepseek_v3(tmp_path: Path) -> None:
    cfg = read_config(tmp_path, GLM)
    assert (cfg.head_dim, cfg.rope_dim, cfg.softmax_scale) == (32, 16, 32**-0.5)
    assert (cfg.qkv_bias, cfg.o_bias, cfg.qk_norm, cfg.qk_norm_of_all) == (True, False, True, False)
    assert cfg.router == RouterConfig(
        sigmoid=True, normalise=True, scale=2.5, correction=True, best_two=True
    )
    assert (cfg.moe_layers, cfg.num_extra_layers) == ((False, True, True), 1)
    assert (cfg.shared_intermediate_size, cfg.shared_gate) == (32, False)


def test_glm_has_norms_of_heads_only_where_it_says_so(tmp_path: Path) -> None:
    assert not read_config(tmp_path, GLM | {"use_qk_norm": None}).qk_norm


def test_glm_turns_half_where_nothing_says_how_much(tmp_path: Path) -> None:
    assert read_config(tmp_path, GLM | {"partial_rotary_factor": None}).rope_dim == 16
    assert read_config(tmp_path, GLM | {"partial_rotary_factor": 0.25}).rope_dim == 8


def test_glm_flash_is_latent_and_may_list_which_layers_are_dense(tmp_path: Path) -> None:
    cfg = read_config(tmp_path, FLASH)
    assert cfg.latent == LatentConfig(48, 32, 24, 16, 32)
    assert (cfg.num_kv_heads, cfg.head_dim, cfg.rope_dim) == (1, 48, 16)
    assert (cfg.router.scale, cfg.router.sigmoid, cfg.router.correction) == (1.8, True, True)
    listed = FLASH | {"first_k_dense_replace": None}
    kinds = {"mlp_layer_types": ["dense", "sparse", "sparse"]}
    assert read_config(tmp_path, listed | kinds) == cfg
    kinds = {"mlp_layer_types": ["sparse", "dense", "sparse"]}
    assert read_config(tmp_path, listed | kinds).moe_layers == (True, False, True)


def test_qwen2_moe_has_a_shared_expert_behind_a_gate(tmp_path: Path) -> None:
    cfg = read_config(tmp_path, QWEN)
    assert (cfg.shared_intermediate_size, cfg.shared_gate) == (88, True)
    assert (cfg.moe_intermediate_size, cfg.intermediate_size) == (40, 160)
    assert (cfg.qkv_bias, cfg.o_bias, cfg.qk_norm) == (True, False, False)
    assert cfg.router == RouterConfig()
    assert cfg.moe_layers == (True, False, True)
    assert not read_config(tmp_path, QWEN | {"qkv_bias": False}).qkv_bias
    assert read_config(tmp_path, QWEN | {"norm_topk_prob": True}).router == RouterConfig(
        normalise=True
    )


@pytest.mark.parametrize("window", [0, None, 64])
def test_qwen2_moe_has_no_window(window: int | None, tmp_path: Path) -> None:
    assert read_config(tmp_path, QWEN | {"sliding_window": window}).window_layers == ()


def test_olmoe_norms_all_heads_together(tmp_path: Path) -> None:
    cfg = read_config(tmp_path, OLMOE)
    assert (cfg.qk_norm, cfg.qk_norm_of_all, cfg.qkv_bias) == (False, True, False)
    assert (cfg.router, cfg.moe_intermediate_size) == (RouterConfig(), 40)
    assert (cfg.moe_layers, cfg.shared_intermediate_size) == ((True,) * 3, 0)


def test_minimax_turns_a_part_that_is_a_number_of_entries(tmp_path: Path) -> None:
    cfg = read_config(tmp_path, MINIMAX)
    assert (cfg.head_dim, cfg.rope_dim, cfg.rope.theta) == (32, 16, 5e6)
    assert (cfg.qk_norm_of_all, cfg.qkv_bias, cfg.router) == (True, False, CORRECTED)
    assert (cfg.num_experts, cfg.moe_intermediate_size) == (16, 40)
    assert read_config(tmp_path, MINIMAX | {"rope_theta": None}) == cfg
    assert read_config(tmp_path, MINIMAX | {"rotary_dim": None}).rope_dim == 32
    both = MINIMAX | {"rotary_dim": None, "partial_rotary_factor": 0.5}
    assert read_config(tmp_path, both) == cfg


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (GLM | {"partial_rotary_factor": 0}, "partial_rotary_factor is 0.0; accepted: a number ab"),
        (GLM | {"partial_rotary_factor": 1.5}, "partial_rotary_factor is 1.5; accepted: a number"),
        (GLM | {"partial_rotary_factor": 0.1}, "partial_rotary_factor is 0.1; accepted: a part of"),
        (GLM | {"partial_rotary_factor": 0.01}, "a part of head_dim 32 that is an even number abo"),
        (
            GLM_V5 | {"partial_rotary_factor": 0.25},
            "partial_rotary_factor is 0.25; accepted: 0.5, as",
        ),
        (GLM | {"scoring_func": "softmax"}, "scoring_func is 'softmax'; accepted: sigmoid"),
        (GLM | {"n_group": None}, "n_group is missing"),
        (GLM | {"first_k_dense_replace": None}, "first_k_dense_replace is missing"),
        (GLM | {"routed_scaling_factor": None}, "routed_scaling_factor is missing"),
        (
            FLASH | {"partial_rotary_factor": 0.5},
            "config.json: partial_rotary_factor is 0.5; accepted: 1.0",
        ),
        (
            FLASH_V5 | _rope(FLASH_V5, partial_rotary_factor=0.5),
            "rope_parameters: partial_rotary_factor is 0.5; accepted: 1.0",
        ),
        (FLASH_V5 | {"mlp_layer_types": "dense"}, "mlp_layer_types is 'dense'; accepted: one for"),
        (FLASH_V5 | {"mlp_layer_types": ["dense"] * 2}, "accepted: one for each of 3 layers"),
        (FLASH_V5 | {"mlp_layer_types": ["dense", "moe", "sparse"]}, "accepted: dense or sparse"),
        (
            FLASH_V5 | {"first_k_dense_replace": 2},
            "first_k_dense_replace is 2; accepted: what mlp_layer_types says, or one of the two",
        ),
        (
            QWEN | {"use_sliding_window": True},
            "use_sliding_window is True; accepted: false in Qwen2MoeForCausalLM",
        ),
        (
            QWEN | {"shared_expert_intermediate_size": None},
            "shared_expert_intermediate_size is missing",
        ),
        (QWEN | {"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid'; accepted: \"softmax\""),
        (OLMOE | {"clip_qkv": 8.0}, "clip_qkv is 8.0; accepted: null"),
        (OLMOE | {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; accepted: 1.0"),
        (MINIMAX | {"use_qk_norm": False}, "use_qk_norm is False; accepted: true"),
        (MINIMAX | {"qk_norm_type": "per_head"}, "qk_norm_type is 'per_head'; accepted: \"per_l"),
        (MINIMAX | {"attn_type_list": [1, 0, 1]}, "attn_type_list is [1, 0, 1]; accepted: 1, whi"),
        (MINIMAX | {"attn_type_list": 1}, "attn_type_list is 1; accepted: 1, which is full"),
        (MINIMAX | {"use_routing_bias": False}, "use_routing_bias is False; accepted: true"),
        (MINIMAX | {"shared_intermediate_size": 64}, "shared_intermediate_size is 64; accepted: 0"),
        (MINIMAX | {"layernorm_mlp_beta": 3.5}, "layernorm_mlp_beta is 3.5; accepted: 1.0"),
        (MINIMAX | {"scoring_func": "softmax"}, "scoring_func is 'softmax'; accepted: \"sigmoid"),
        (MINIMAX | {"rotary_dim": 15}, "a part of head_dim 32 that is an even number above 0"),
        (MINIMAX | {"rotary_dim": 64}, "rotary_dim is 64; accepted: 32, which is head_dim, or"),
        (
            MINIMAX_V5 | {"rotary_dim": 8},
            "rotary_dim is 8; accepted: 16, as partial_rotary_factor has it, or null",
        ),
    ],
)
def test_what_is_not_computed_is_refused_in_one_line(
    config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError) as raised:
        read_config(tmp_path, config)
    text = str(raised.value)
    assert message in text
    assert "\n" not in text


ODD: tuple[Any, ...] = ([[1]], {"a": 1}, True, "12", -1.5, 1e150, [True], 0.5)


@pytest.mark.parametrize("name", ["glm4_moe", "glm4_moe_lite", "qwen2_moe", "olmoe", "minimax_m2"])
@pytest.mark.parametrize("file", ["model/config.json", "config.v5.json"])
def test_a_value_of_an_odd_type_is_read_or_refused_in_one_line(
    name: str, file: str, tmp_path: Path
) -> None:
    base = golden_config(name, file)
    changed = [{field: odd} for field in (*base, "mlp_layer_types", "rotary_dim") for odd in ODD]
    refusals = [error for change in changed if (error := refusal(tmp_path, base | change))]
    assert len(refusals) > len(changed) // 3
    assert all(str(tmp_path / "config.json") in error for error in refusals)
    assert all("\n" not in error for error in refusals)
