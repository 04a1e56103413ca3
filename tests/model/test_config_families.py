"""Configurations of younger mixtures of experts: what is read, and what is refused."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from model.config import ModelConfig
from model.config_attention import LatentConfig
from model.config_experts import RouterConfig
from model.errors import ModelError
from model.rope import rope_frequencies
from tests.model.checkpoints import golden_config, read_config, refusal, write_config

NAMES = (
    "glm4_moe",
    "glm4_moe_lite",
    "qwen2_moe",
    "olmoe",
    "minimax_m2",
    "dots1",
    "ernie4_5_moe",
    "ernie4_5",
    "hunyuan_v1_moe",
    "hunyuan_v1_dense",
    "hy_v3",
    "solar_open",
)
GLM, FLASH, QWEN, OLMOE, MINIMAX, DOTS, *others = map(golden_config, NAMES)
ERNIE, ERNIE_DENSE, HUNYUAN, HUNYUAN_DENSE, HY, SOLAR = others
GLM_V5 = golden_config("glm4_moe", "config.v5.json")
FLASH_V5 = golden_config("glm4_moe_lite", "config.v5.json")
MINIMAX_V5 = golden_config("minimax_m2", "config.v5.json")
DOTS_V5 = golden_config("dots1", "config.v5.json")
# As Kimi K2 Instruct is published: DeepSeek V3's network with one group of experts.
KIMI: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {
        "AutoConfig": "configuration_deepseek.DeepseekV3Config",
        "AutoModel": "modeling_deepseek.DeepseekV3Model",
        "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
    },
    "aux_loss_alpha": 0.001,
    "bos_token_id": 163584,
    "eos_token_id": 163586,
    "ep_size": 1,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "initializer_range": 0.02,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 131072,
    "model_type": "kimi_k2",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 384,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0,
    "pretraining_tp": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-06,
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "rope_scaling": {
        "beta_fast": 1.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.48.3",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 163840,
}
CORRECTED = RouterConfig(sigmoid=True, normalise=True, correction=True)
NORMALISED = RouterConfig(normalise=True)


def _without(config: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in names}


def _rope(base: dict[str, Any], name: str = "rope_parameters", **change: Any) -> dict[str, Any]:
    return {name: base[name] | change}


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


def test_kimi_k2_is_deepseek_v3_with_one_group_of_experts(tmp_path: Path) -> None:
    cfg = read_config(tmp_path, KIMI)
    assert cfg.latent == LatentConfig(1536, 512, 128, 64, 128)
    assert (cfg.num_heads, cfg.num_kv_heads, cfg.head_dim, cfg.kv_planes) == (64, 1, 576, 1)
    assert cfg.router == RouterConfig(
        sigmoid=True, normalise=True, scale=2.827, correction=True, best_two=True
    )
    assert (cfg.num_experts, cfg.num_experts_per_tok, cfg.moe_intermediate_size) == (384, 8, 2048)
    assert (cfg.moe_layers, cfg.num_extra_layers) == ((False,) + (True,) * 60, 0)
    assert (cfg.shared_intermediate_size, cfg.vocab_size) == (2048, 163840)
    assert (cfg.quantization, cfg.quantized_block) == ("fp8", (128, 128))


@pytest.mark.parametrize(("factor", "beta_fast"), [(32.0, 1.0), (64.0, 1.0), (64.0, 32.0)])
def test_kimi_k2_stretches_positions_as_far_as_each_of_its_models_does(
    factor: float, beta_fast: float, tmp_path: Path
) -> None:
    scaling = KIMI["rope_scaling"] | {"factor": factor, "beta_fast": beta_fast}
    positions = int(4096 * factor)
    said = {"rope_scaling": scaling, "max_position_embeddings": positions}
    cfg = read_config(tmp_path, KIMI | said)
    assert (cfg.rope.kind, cfg.rope.theta, cfg.rope.factor) == ("yarn", 50000.0, factor)
    assert (cfg.rope.beta_fast, cfg.rope.attention_factor) == (beta_fast, 1.0)
    assert cfg.softmax_scale == pytest.approx(192**-0.5 * (0.1 * math.log(factor) + 1.0) ** 2)
    frequencies = rope_frequencies(cfg.rope, cfg.rope_dim)
    assert (frequencies[0], len(frequencies)) == (1.0, 32)
    assert frequencies[-1] == pytest.approx(50000.0 ** (-62 / 64) / factor)


@pytest.mark.parametrize(
    ("said", "generation", "ends"),
    [
        (163586, [163586], (163586,)),
        (163585, 163586, (163586, 163585)),  # an answer ends at what either file names
        (163586, None, (163586,)),
    ],
)
def test_kimi_k2_ends_with_what_its_files_say_ends_a_turn(
    said: int, generation: Any, ends: tuple[int, ...], tmp_path: Path
) -> None:
    folder = write_config(tmp_path, KIMI | {"eos_token_id": said})
    if generation is not None:
        more = json.dumps({"max_length": 131072, "eos_token_id": generation})
        (folder / "generation_config.json").write_text(more)
    cfg = ModelConfig.from_dir(folder)
    assert cfg.eos_token_ids == ends


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


def test_dots_norms_each_head_and_routes_as_deepseek_v3(tmp_path: Path) -> None:
    cfg = read_config(tmp_path, DOTS)
    assert (cfg.num_kv_heads, cfg.head_dim, cfg.rope.theta) == (4, 16, 1e7)
    assert (cfg.qk_norm, cfg.qkv_bias, cfg.o_bias, cfg.window_layers) == (True, False, False, ())
    assert cfg.router == replace(CORRECTED, scale=2.5, best_two=True)
    assert (cfg.moe_layers, cfg.shared_intermediate_size) == ((False, True, True), 64)
    assert read_config(tmp_path, DOTS | {"scoring_func": "sigmoid"}) == cfg
    biased = read_config(tmp_path, DOTS | {"attention_bias": True})
    assert (biased.qkv_bias, biased.o_bias) == (True, True)


def test_dots_takes_plain_numbers_where_a_checkpoint_gives_none(tmp_path: Path) -> None:
    numbers = "n_group", "topk_group", "routed_scaling_factor", "norm_topk_prob", "scoring_func"
    cfg = read_config(tmp_path, _without(DOTS, "first_k_dense_replace", "rope_theta", *numbers))
    assert cfg.router == replace(CORRECTED, normalise=False, best_two=True)
    assert (cfg.moe_layers, cfg.rope.theta) == ((True,) * 3, 10000.0)


@pytest.mark.parametrize(
    ("said", "size", "layers"),
    [
        ({"sliding_window": 64, "max_window_layers": 1}, 64, (False, True, True)),
        ({"sliding_window": 64}, 0, ()),  # there is a window from layer 62 on
        ({"max_window_layers": 2, "max_position_embeddings": 8192}, 4096, (False, False, True)),
    ],
)
def test_dots_has_a_window_from_a_layer_on_unless_it_says_null(
    said: dict[str, Any], size: int, layers: tuple[bool, ...], tmp_path: Path
) -> None:
    cfg = read_config(tmp_path, _without(DOTS, "sliding_window") | said)
    assert (cfg.sliding_window, cfg.window_layers) == (size, layers)


def test_ernie_turns_neighbours_and_corrects_a_softmax_when_choosing(tmp_path: Path) -> None:
    cfg = read_config(tmp_path, ERNIE)
    assert (cfg.head_dim, cfg.rope.theta, cfg.tie_word_embeddings) == (16, 500000.0, True)
    assert (cfg.neighbours_turned, cfg.qkv_bias, cfg.qk_norm) == (True, False, False)
    assert cfg.router == RouterConfig(normalise=True, correction=True)
    assert (cfg.num_experts, cfg.num_experts_per_tok, cfg.moe_intermediate_size) == (16, 4, 32)
    assert (cfg.moe_layers, cfg.shared_intermediate_size) == ((False, True, True), 64)
    assert cfg.num_extra_layers == 0  # what predicts further tokens is no layer
    names = "moe_num_shared_experts", "moe_layer_start_index", "moe_layer_end_index", "rope_theta"
    unsaid = _without(ERNIE, *names, "moe_layer_interval", "tie_word_embeddings", "use_bias")
    assert read_config(tmp_path, unsaid) == cfg
    assert not read_config(tmp_path, ERNIE | {"tie_word_embeddings": False}).tie_word_embeddings


@pytest.mark.parametrize(
    ("first", "last", "step", "layers"),
    [(0, -1, 1, "111111"), (2, 4, 1, "001110"), (0, 5, 2, "010101"), (3, -1, 3, "000001")],
)
def test_ernie_has_experts_in_some_layers_between_two(
    first: int, last: int, step: int, layers: str, tmp_path: Path
) -> None:
    said = {"moe_layer_start_index": first, "moe_layer_end_index": last, "moe_layer_interval": step}
    cfg = read_config(tmp_path, ERNIE | {"num_hidden_layers": 6} | said)
    assert "".join(str(int(moe)) for moe in cfg.moe_layers) == layers


def test_dense_ernie_has_only_its_rotation_of_its_own(tmp_path: Path) -> None:
    cfg = read_config(tmp_path, ERNIE_DENSE)
    assert (cfg.head_dim, cfg.neighbours_turned, cfg.tie_word_embeddings) == (32, True, True)
    assert (cfg.num_experts, cfg.moe_layers, cfg.rope.theta) == (0, (False,) * 3, 500000.0)
    unsaid = _without(ERNIE_DENSE, "tie_word_embeddings", "rope_theta", "use_bias")
    assert read_config(tmp_path, unsaid) == cfg


def test_hunyuan_norms_heads_after_turning_them_and_shares_one_expert(tmp_path: Path) -> None:
    cfg = read_config(tmp_path, HUNYUAN)
    assert (cfg.head_dim, cfg.qkv_bias, cfg.tie_word_embeddings) == (32, False, True)
    assert (cfg.qk_norm, cfg.turned_before_norm, cfg.router) == (True, True, NORMALISED)
    assert (cfg.num_experts, cfg.num_experts_per_tok, cfg.moe_intermediate_size) == (16, 4, 40)
    assert (cfg.moe_layers, cfg.shared_intermediate_size) == ((True,) * 3, 40)
    alike = {"moe_topk": 4, "num_experts": [16] * 3, "num_shared_expert": 1, "norm_type": "rms"}
    names = "moe_intermediate_size", "use_qk_norm", "use_mixed_mlp_moe", "rope_theta", "use_cla"
    assert read_config(tmp_path, _without(HUNYUAN | alike, *names)) == cfg
    assert not read_config(tmp_path, _without(HUNYUAN, "tie_word_embeddings")).tie_word_embeddings


def test_dense_hunyuan_has_the_attention_of_its_mixture(tmp_path: Path) -> None:
    cfg, mixture = read_config(tmp_path, HUNYUAN_DENSE), read_config(tmp_path, HUNYUAN)
    assert (cfg.qk_norm, cfg.turned_before_norm, cfg.rope) == (True, True, mixture.rope)
    assert (cfg.num_experts, cfg.moe_layers, cfg.head_dim) == (0, (False,) * 3, 32)


def test_hunyuan_raises_theta_by_alpha_whatever_the_length(tmp_path: Path) -> None:
    cfg = read_config(tmp_path, HUNYUAN)
    assert (cfg.rope.kind, cfg.rope.theta, cfg.rope.factor) == ("dynamic", 10000.0, 1000.0)
    raised = 10000.0 * 1000.0 ** (32 / 30)
    want = raised ** -(np.arange(0, 32, 2) / 32)
    assert rope_frequencies(cfg.rope, cfg.rope_dim) == pytest.approx(want, rel=1e-6)
    assert rope_frequencies(cfg.rope, 2) == pytest.approx([1.0])
    plain = read_config(tmp_path, HUNYUAN | {"rope_scaling": None})
    assert (plain.rope.kind, plain.rope.theta) == ("default", 10000.0)


def test_hy3_routes_as_deepseek_v3_out_of_one_group_behind_dense_layers(tmp_path: Path) -> None:
    cfg = read_config(tmp_path, HY)
    assert (cfg.num_kv_heads, cfg.head_dim, cfg.rope.theta) == (2, 32, 11158840.0)
    assert (cfg.qk_norm, cfg.turned_before_norm, cfg.qkv_bias) == (True, False, False)
    assert cfg.router == replace(CORRECTED, scale=2.826)
    assert (cfg.moe_layers, cfg.shared_intermediate_size) == ((False, True, True), 32)
    assert cfg.num_extra_layers == 1
    names = "router_scaling_factor", "num_shared_experts", "first_k_dense_replace", "qk_norm"
    assert read_config(tmp_path, _without(HY, *names, "rope_parameters", "route_norm")) == cfg
    listed = {"mlp_layer_types": ["dense", "dense", "sparse"], "first_k_dense_replace": None}
    assert read_config(tmp_path, HY | listed).moe_layers == (False, False, True)
    biased = read_config(tmp_path, HY | {"attention_bias": True})
    assert (biased.qkv_bias, biased.o_bias) == (True, True)


def test_solar_open_has_llamas_attention_and_experts_in_every_layer(tmp_path: Path) -> None:
    cfg = read_config(tmp_path, SOLAR)
    assert (cfg.num_kv_heads, cfg.head_dim, cfg.rope.theta) == (2, 32, 1e6)
    assert (cfg.rope.kind, cfg.rope.factor, cfg.rope.original_max_position) == ("yarn", 2.0, 256)
    assert (cfg.qk_norm, cfg.qkv_bias, cfg.o_bias) == (False, False, False)
    assert cfg.router == replace(CORRECTED, best_two=True)
    assert (cfg.moe_layers, cfg.shared_intermediate_size) == ((True,) * 3, 32)
    names = "routed_scaling_factor", "norm_topk_prob", "n_shared_experts", "rope_theta"
    assert read_config(tmp_path, _without(SOLAR, *names, "first_k_dense_replace")) == cfg
    assert read_config(tmp_path, _without(SOLAR, "intermediate_size")).moe_layers == (True,) * 3
    biased = read_config(tmp_path, SOLAR | {"attention_bias": True})
    assert (biased.qkv_bias, biased.o_bias) == (True, False)


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
            "first_k_dense_replace is 2; accepted: as many as in mlp_layer_types, or only",
        ),
        (
            QWEN | {"use_sliding_window": True},
            "use_sliding_window is True; accepted: false in Qwen2MoeForCausalLM",
        ),
        (
            QWEN | {"shared_expert_intermediate_size": None},
            "shared_expert_intermediate_size is missing",
        ),
        (QWEN | {"num_experts": 10_001}, "num_experts is 10001; accepted: at most 10000"),
        (QWEN | {"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid'; accepted: \"softmax\""),
        (OLMOE | {"clip_qkv": 8.0}, "clip_qkv is 8.0; accepted: null"),
        (OLMOE | {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; accepted: 1.0"),
        (DOTS | {"scoring_func": "softmax"}, "scoring_func is 'softmax'; accepted: sigmoid, noaux"),
        (DOTS | {"topk_method": "greedy"}, "topk_method is 'greedy'; accepted: noaux_tc"),
        (DOTS | {"moe_layer_freq": 2}, "moe_layer_freq is 2; accepted: 1"),
        (DOTS_V5 | {"layer_types": ["sliding_attention"] * 3}, "accepted: full_attention for each"),
        (ERNIE | {"use_bias": True}, "use_bias is True; accepted: false"),
        (ERNIE | {"use_rmsnorm": False}, "use_rmsnorm is False; accepted: true"),
        (ERNIE | {"moe_gate_act": "sigmoid"}, "moe_gate_act is 'sigmoid'; accepted: \"softmax\""),
        (ERNIE | {"moe_norm_min": 0.1}, "moe_norm_min is 0.1; accepted: 1e-12"),
        (ERNIE | {"moe_k": 17}, "moe_k is 17; accepted: at most 16 experts"),
        (ERNIE | {"num_experts": 8}, "num_experts is 8; accepted: 16"),
        (ERNIE | {"num_experts_per_tok": 2}, "num_experts_per_tok is 2; accepted: 4"),
        (
            ERNIE | {"moe_num_experts": [16, 16]},
            "moe_num_experts is [16, 16]; accepted: an i",
        ),
        (ERNIE | {"moe_num_experts": 10_001}, "moe_num_experts is 10001; accepted: at most 10000"),
        (ERNIE | {"moe_layer_end_index": -2}, "accepted: an integer of at least -1"),
        (ERNIE_DENSE | {"compression_ratio": 2.0}, "compression_ratio is 2.0; accepted: 1.0"),
        (HUNYUAN | {"use_qk_norm": False}, "use_qk_norm is False; accepted: true"),
        (HUNYUAN | {"use_cla": True}, "use_cla is True; accepted: false"),
        (HUNYUAN | {"use_mla": True}, "use_mla is True; accepted: false"),
        (HUNYUAN | {"norm_type": "fused"}, "norm_type is 'fused'; accepted: rms, hf_rms"),
        (HUNYUAN | {"group_limited_greedy": True}, "group_limited_greedy is True; accepted: false"),
        (HUNYUAN | {"routed_scaling_factor": 2.5}, "routed_scaling_factor is 2.5; accepted: 1.0"),
        (HUNYUAN | {"position_embedding_xdrope": True}, "xdrope is True; accepted: false"),
        (HUNYUAN | {"attention_head_dim": 16}, "attention_head_dim is 16; accepted: 32"),
        (HUNYUAN | {"use_mixed_mlp_moe": False}, "use_mixed_mlp_moe is False; accepted: true"),
        (HUNYUAN | {"moe_layer_num_skipped": 1}, "moe_layer_num_skipped is 1; accepted: 0"),
        (HUNYUAN | {"norm_topk_prob": False}, "norm_topk_prob is False; accepted: true"),
        (HUNYUAN | {"num_experts": 10_001}, "num_experts is 10001; accepted: at most 10000"),
        (HUNYUAN | {"num_experts_per_tok": 2}, "num_experts_per_tok is 2; accepted: 4"),
        (HUNYUAN | {"moe_topk": [4, 4]}, "accepted: one integer, the same for each of 3 layers"),
        (HUNYUAN | {"moe_topk": [4, 4, 2]}, "moe_topk is [4, 4, 2]; accepted: one integer, the s"),
        (HUNYUAN | {"moe_topk": [17] * 3}, "moe_topk is [17, 17, 17]; accepted: at most 16 exper"),
        (HUNYUAN | {"num_shared_expert": 2}, "num_shared_expert is 2; accepted: 1, for each layer"),
        (HUNYUAN | {"moe_intermediate_size": 64}, "moe_intermediate_size is 64; accepted: 40, for"),
        (HUNYUAN | _rope(HUNYUAN, "rope_scaling", alpha=None), "rope_scaling: alpha is missing"),
        (HUNYUAN | _rope(HUNYUAN, "rope_scaling", alpha=0), "alpha is 0; accepted: a finite numbe"),
        (
            HUNYUAN | {"rope_scaling": KIMI["rope_scaling"]},
            "'yarn'; accepted: default, linear, llama3",
        ),
        (HUNYUAN_DENSE | {"use_qk_norm": False}, "use_qk_norm is False; accepted: true"),
        (HY | {"moe_router_use_sigmoid": False}, "moe_router_use_sigmoid is False; accepted: true"),
        (HY | {"moe_router_enable_expert_bias": False}, "expert_bias is False; accepted: true"),
        (HY | {"route_norm": False}, "route_norm is False; accepted: true"),
        (HY | {"qk_norm": False}, "qk_norm is False; accepted: true"),
        (HY | {"expert_hidden_dim": 16}, "expert_hidden_dim is 16; accepted: 32"),
        (HY | {"num_experts": 10_001}, "num_experts is 10001; accepted: at most 10000"),
        (SOLAR | {"first_k_dense_replace": 1}, "first_k_dense_replace is 1; accepted: 0"),
        (SOLAR | {"use_qk_norm": True}, "use_qk_norm is True; accepted: false"),
        (SOLAR | {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; accepted: 1.0"),
        (QWEN | {"rope_scaling": HUNYUAN["rope_scaling"]}, "'dynamic'; accepted: default, linear"),
        (MINIMAX | {"use_qk_norm": False}, "use_qk_norm is False; accepted: true"),
        (MINIMAX | {"qk_norm_type": "per_head"}, "qk_norm_type is 'per_head'; accepted: \"per_l"),
        (MINIMAX | {"attn_type_list": [1, 0, 1]}, "attn_type_list is [1, 0, 1]; accepted: 1, whi"),
        (MINIMAX | {"num_local_experts": 10_001}, "num_local_experts is 10001; accepted: at most"),
        (MINIMAX | {"attn_type_list": 1}, "attn_type_list is 1; accepted: 1, which is full"),
        (MINIMAX | {"use_routing_bias": False}, "use_routing_bias is False; accepted: true"),
        (MINIMAX | {"shared_intermediate_size": 64}, "shared_intermediate_size is 64; accepted: 0"),
        (MINIMAX | {"layernorm_mlp_beta": 3.5}, "layernorm_mlp_beta is 3.5; accepted: 1.0"),
        (MINIMAX | {"scoring_func": "softmax"}, "scoring_func is 'softmax'; accepted: \"sigmoid"),
        (MINIMAX | {"rotary_dim": 15}, "a part of head_dim 32 that is an even number above 0"),
        (MINIMAX | {"rotary_dim": 64}, "rotary_dim is 64; accepted: at most head_dim, which is 32"),
        (
            MINIMAX_V5 | {"rotary_dim": 8},
            "rotary_dim is 8; accepted: 16, as in partial_rotary_factor, or null",
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


@pytest.mark.parametrize("name", NAMES)
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
