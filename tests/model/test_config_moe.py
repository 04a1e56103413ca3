"""Configurations of GPT-OSS and DeepSeek: what is read from them, and refusals in one line."""

import math
from pathlib import Path
from typing import Any

import pytest

from model.config_attention import LatentConfig
from model.config_experts import RouterConfig
from model.errors import ModelError
from model.rope import RopeConfig, rope_frequencies
from tests.model.checkpoints import golden_config, read_config, refusal, write_config

GPT_OSS, DEEPSEEK_V2, DEEPSEEK_V3 = map(golden_config, ("gpt_oss", "deepseek_v2", "deepseek_v3"))
QWEN3, MIXTRAL = golden_config("qwen3"), golden_config("mixtral")
FP8 = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
MXFP4 = {"modules_to_not_convert": ["lm_head"], "quant_method": "mxfp4"}
SLIDING, FULL = "sliding_attention", "full_attention"


def _yarn(base: dict[str, Any], **change: Any) -> dict[str, Any]:
    return {"rope_scaling": base["rope_scaling"] | change}


def test_gpt_oss_has_sinks_windows_biases_and_a_clamped_activation(tmp_path: Path) -> None:
    cfg = read_config(tmp_path, GPT_OSS)
    assert (cfg.sinks, cfg.qkv_bias, cfg.o_bias, cfg.qk_norm) == (True, True, True, False)
    assert (cfg.sliding_window, cfg.window_layers) == (16, (True, False, True, False))
    assert cfg.router == RouterConfig(normalise=True, bias=True)
    assert (cfg.num_experts, cfg.num_experts_per_tok, cfg.moe_intermediate_size) == (16, 4, 48)
    assert (cfg.moe_layers, cfg.shared_intermediate_size) == ((True,) * 4, 0)
    assert (cfg.experts_bias, cfg.swiglu_limit, cfg.swiglu_alpha) == (True, 7.0, 1.702)
    assert (cfg.kv_planes, cfg.num_kv_heads, cfg.head_dim, cfg.rope_dim) == (2, 2, 32, 32)
    assert (cfg.latent, cfg.quantization, cfg.num_extra_layers) == (None, "", 0)
    rope = cfg.rope
    assert (rope.kind, rope.theta, rope.factor, rope.truncate) == ("yarn", 150000.0, 32.0, False)
    assert (rope.beta_fast, rope.beta_slow, rope.original_max_position) == (32.0, 1.0, 256)
    assert rope.attention_factor == pytest.approx(0.1 * math.log(32.0) + 1.0)
    assert cfg.softmax_scale == pytest.approx(32**-0.5)


@pytest.mark.parametrize("name", ["rope_theta", "rope_scaling"])
def test_gpt_oss_has_rotations_of_its_own_where_the_checkpoint_says_none(
    name: str, tmp_path: Path
) -> None:
    said = GPT_OSS | _yarn(GPT_OSS, original_max_position_embeddings=4096)
    cfg = read_config(tmp_path, said)
    assert read_config(tmp_path, said | {name: None}) == cfg
    assert read_config(tmp_path, {key: said[key] for key in said if key != name}) == cfg
    default = read_config(tmp_path, said | {"rope_scaling": {"rope_type": "default"}})
    assert default.rope == RopeConfig("default", 150000.0)


def test_deepseek_v2_has_latent_pages_and_routes_by_softmax(tmp_path: Path) -> None:
    cfg = read_config(tmp_path, DEEPSEEK_V2)
    assert cfg.latent == LatentConfig(0, 32, 32, 16, 32)
    assert (cfg.num_heads, cfg.num_kv_heads, cfg.group) == (4, 1, 4)
    assert (cfg.head_dim, cfg.kv_planes, cfg.rope_dim) == (32 + 16, 1, 16)
    assert cfg.router == RouterConfig()
    assert (cfg.moe_layers, cfg.shared_intermediate_size) == ((False, True, True), 2 * 32)
    assert (cfg.intermediate_size, cfg.moe_intermediate_size) == (176, 32)
    assert (cfg.sinks, cfg.window_layers, cfg.experts_bias, cfg.swiglu_limit) == (False, (), 0, 0.0)
    assert cfg.rope.attention_factor == 1.0
    mscale = 0.1 * 0.707 * math.log(40.0) + 1.0
    assert cfg.softmax_scale == pytest.approx(48**-0.5 * mscale**2)


def test_deepseek_v3_chooses_groups_by_corrected_sigmoids(tmp_path: Path) -> None:
    cfg = read_config(tmp_path, DEEPSEEK_V3)
    assert cfg.latent == LatentConfig(48, 32, 32, 16, 24)
    assert cfg.router == RouterConfig(
        sigmoid=True,
        normalise=True,
        scale=2.5,
        correction=True,
        num_groups=4,
        groups_per_tok=2,
        best_two=True,
    )
    assert (cfg.shared_intermediate_size, cfg.num_extra_layers) == (32, 1)
    assert cfg.softmax_scale == pytest.approx(48**-0.5 * (0.1 * math.log(40.0) + 1.0) ** 2)


def test_deepseek_v2_may_choose_groups_by_their_best_expert(tmp_path: Path) -> None:
    change = {"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3}
    cfg = read_config(tmp_path, DEEPSEEK_V2 | change | {"routed_scaling_factor": 16.0})
    assert cfg.router == RouterConfig(scale=16.0, num_groups=8, groups_per_tok=3)


def test_deepseek_v2_without_groups_heeds_no_number_of_them(tmp_path: Path) -> None:
    cfg = read_config(tmp_path, DEEPSEEK_V2 | {"n_group": 7, "topk_group": 9})
    assert cfg.router == RouterConfig()


@pytest.mark.parametrize("base", [GPT_OSS, DEEPSEEK_V2, DEEPSEEK_V3, QWEN3, MIXTRAL])
def test_blocks_of_fp8_are_read_in_every_family(base: dict[str, Any], tmp_path: Path) -> None:
    plain = read_config(tmp_path, base)
    assert (plain.quantization, plain.quantized_block) == ("", (128, 128))
    cfg = read_config(
        tmp_path, base | {"quantization_config": FP8 | {"weight_block_size": [64, 16]}}
    )
    assert (cfg.quantization, cfg.quantized_block) == ("fp8", (64, 16))


def test_gpt_oss_may_be_quantised_as_it_is_published(tmp_path: Path) -> None:
    cfg = read_config(tmp_path, GPT_OSS | {"quantization_config": MXFP4})
    assert (cfg.quantization, cfg.quantized_block) == ("mxfp4", (1, 32))


@pytest.mark.parametrize(
    ("base", "change"),
    [
        (GPT_OSS, {"layer_types": None}),
        (GPT_OSS, {"experts_per_token": None}),
        (GPT_OSS, {"swiglu_limit": None}),
        (GPT_OSS, {"attention_bias": None}),
        (GPT_OSS, {"quantization_config": None}),
        (GPT_OSS, {"num_experts": 16, "num_local_experts": None}),
        (DEEPSEEK_V2, {"num_key_value_heads": None, "head_dim": 16, "qk_head_dim": 48}),
        (DEEPSEEK_V2, {"rope_interleave": True, "attention_bias": None}),
        (DEEPSEEK_V2, {"topk_method": None, "scoring_func": None, "moe_layer_freq": None}),
        (DEEPSEEK_V3, {"topk_method": None, "scoring_func": None, "norm_topk_prob": None}),
        (DEEPSEEK_V3, {"num_experts": 3, "num_local_experts": 5}),
    ],
)
def test_what_says_the_same_again_or_nothing_changes_nothing(
    base: dict[str, Any], change: dict[str, Any], tmp_path: Path
) -> None:
    assert read_config(tmp_path, base | change) == read_config(tmp_path, base)


def test_gpt_oss_without_attention_bias_has_none(tmp_path: Path) -> None:
    cfg = read_config(tmp_path, GPT_OSS | {"attention_bias": False})
    assert (cfg.qkv_bias, cfg.o_bias) == (False, False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"layer_types": [SLIDING, FULL]},
            "layer_types is ['sliding_attention', 'full_attention']; accepted: full_attention",
        ),
        (
            {"layer_types": [SLIDING, FULL, SLIDING, "chunked_attention"]},
            "'chunked_attention']; accepted: full_attention or sliding_attention for each of 4",
        ),
        ({"layer_types": SLIDING}, "layer_types is 'sliding_attention'; accepted: full_att"),
        ({"sliding_window": None}, "sliding_window is missing"),
        ({"sliding_window": 0}, "sliding_window is 0; accepted: an integer of at least 1"),
        ({"swiglu_limit": 0}, "swiglu_limit is 0.0; accepted: a number above 0"),
        ({"swiglu_limit": -7.0}, "swiglu_limit is -7.0; accepted: a finite number"),
        (
            {"experts_per_token": 2},
            "experts_per_token is 2; accepted: 4, as num_experts_per_tok, or null",
        ),
        ({"num_experts_per_tok": 17}, "num_experts_per_tok is 17; accepted: at most 16 experts"),
        ({"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid'; accepted: \"softmax\""),
        ({"routed_scaling_factor": 2.0}, "routed_scaling_factor is 2.0; accepted: 1.0"),
        (
            {"quantization_config": {"quant_method": "hqq"}},
            "quantization_config is 'hqq'; accepted: fp8, mxfp4, compressed-tensors, awq, gptq, or",
        ),
        ({"quantization_config": {}}, "quantization_config: quant_method is missing"),
        ({"quantization_config": "mxfp4"}, "quantization_config is 'mxfp4'; accepted: an object"),
        (_yarn(GPT_OSS, mscale=0.7), "rope_scaling: mscale is 0.7; accepted: null; fields of rope"),
        (_yarn(GPT_OSS, betas=1), "rope_scaling: betas is 1; accepted: null; fields of rope_type"),
        (
            _yarn(GPT_OSS, beta_slow=33.0),
            "rope_scaling: beta_slow is 33.0; accepted: above 0, and at most beta_fast 32.0",
        ),
        (_yarn(GPT_OSS, beta_slow=0.0), "rope_scaling: beta_slow is 0.0; accepted: above 0"),
        (_yarn(GPT_OSS, factor=0.5), "rope_scaling: factor is 0.5; accepted: a finite number of"),
        (_yarn(GPT_OSS, truncate="no"), "rope_scaling: truncate is 'no'; accepted: true or false"),
        (
            _yarn(GPT_OSS, original_max_position_embeddings=None),
            "rope_scaling: original_max_position_embeddings is missing",
        ),
        ({"rope_theta": 1}, "rope_theta is 1.0; accepted: a number above 1 with rope_type 'yarn'"),
    ],
)
def test_what_is_not_computed_of_gpt_oss_is_refused_in_one_line(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    _refused(tmp_path, GPT_OSS | change, message)


@pytest.mark.parametrize("base", [DEEPSEEK_V2, DEEPSEEK_V3])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention_bias": True}, "attention_bias is True; accepted: false"),
        ({"rope_interleave": False}, "rope_interleave is False; accepted: true"),
        ({"head_dim": 48}, "head_dim is 48; accepted: 16, or null"),
        ({"qk_head_dim": 32}, "qk_head_dim is 32; accepted: 48, or null"),
        ({"num_key_value_heads": 2}, "num_key_value_heads is 2; accepted: 4, or null"),
        ({"qk_rope_head_dim": 15}, "qk_rope_head_dim is 15; accepted: an even number"),
        ({"kv_lora_rank": None}, "kv_lora_rank is missing"),
        ({"v_head_dim": 0}, "v_head_dim is 0; accepted: an integer of at least 1"),
        ({"moe_layer_freq": 2}, "moe_layer_freq is 2; accepted: 1"),
        ({"n_routed_experts": None}, "n_routed_experts is missing"),
        ({"num_experts_per_tok": 17}, "num_experts_per_tok is 17; accepted: at most 16 experts"),
        ({"mlp_bias": True}, "mlp_bias is True; accepted: false"),
        (
            {"sliding_window": 8, "use_sliding_window": True},
            "use_sliding_window is True; accepted:",
        ),
        ({"layer_types": [FULL, SLIDING, FULL]}, "layer_types is ['full_attention', 'sliding_att"),
        ({"quantization_config": MXFP4}, "quantization_config is 'mxfp4'; accepted: fp8, compr"),
        (
            {"quantization_config": FP8 | {"weight_block_size": 128}},
            "quantization_config: weight_block_size is 128; accepted: rows and columns of a block",
        ),
        (
            {"quantization_config": FP8 | {"weight_block_size": [128]}},
            "quantization_config: weight_block_size is [128]; accepted: rows and columns of a",
        ),
        (
            {"quantization_config": FP8 | {"weight_block_size": [128, 0]}},
            "quantization_config: weight_block_size is [128, 0]; accepted: rows and columns of a",
        ),
        (
            {"quantization_config": FP8 | {"weight_block_size": [True, 128]}},
            "quantization_config: weight_block_size is [True, 128]; accepted: rows and columns",
        ),
        (_yarn(DEEPSEEK_V3, mscale_all_dim=None), "rope_scaling: mscale is 1.0; accepted: a numb"),
        (_yarn(DEEPSEEK_V3, mscale=None), "rope_scaling: mscale is None; accepted: a number"),
        (
            _yarn(DEEPSEEK_V3, mscale=1e9, mscale_all_dim=1e9),
            "rope_scaling: mscale is 1000000000.0",
        ),
        (_yarn(DEEPSEEK_V3, beta_fast=1e300), "rope_scaling: beta_fast is 1e+300; accepted: a num"),
        (_yarn(DEEPSEEK_V3, attention_factor=0), "rope_scaling: attention_factor is 0; accepted"),
        ({"dtype": "float16"}, "torch_dtype is 'bfloat16'; accepted: 'float16', as in dtype"),
        ({"n_routed_experts": 10_048}, "n_routed_experts is 10048; accepted: at most 10000"),
        ({"num_nextn_predict_layers": 2**31 - 1}, "2147483647; accepted: at most 10000"),
        ({"num_hidden_layers": 10_001}, "num_hidden_layers is 10001; accepted: at most 10000"),
        (_yarn(DEEPSEEK_V3, mscale=-1), "rope_scaling: mscale is -1; accepted: a finite number"),
        ({"rope_theta": 1.0}, "rope_theta is 1.0; accepted: a number above 1"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type is 'dynamic'; accepted"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0, "mscale": 1.0}},
            "rope_scaling: mscale is 1.0; accepted: null; fields of rope_type 'linear'",
        ),
    ],
)
def test_what_is_not_computed_of_either_deepseek_is_refused_in_one_line(
    base: dict[str, Any], change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    _refused(tmp_path, base | change, message)


GROUPS = {"topk_method": "group_limited_greedy"}


@pytest.mark.parametrize(
    ("base", "change", "message"),
    [
        (DEEPSEEK_V2, {"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid'; accepted: softmax"),
        (DEEPSEEK_V3, {"routed_scaling_factor": None}, "routed_scaling_factor is missing"),
        (DEEPSEEK_V3, {"n_group": None}, "n_group is missing"),
        (DEEPSEEK_V3, {"topk_group": None}, "topk_group is missing"),
        (DEEPSEEK_V3, {"first_k_dense_replace": None}, "first_k_dense_replace is missing"),
        (DEEPSEEK_V3, {"scoring_func": "softmax"}, "scoring_func is 'softmax'; accepted: sigmoid"),
        (
            DEEPSEEK_V2,
            {"topk_method": "noaux_tc"},
            "topk_method is 'noaux_tc'; accepted: greedy, group_limited_greedy",
        ),
        (DEEPSEEK_V3, {"topk_method": "greedy"}, "topk_method is 'greedy'; accepted: noaux_tc"),
        (
            DEEPSEEK_V2,
            {"norm_topk_prob": True, "routed_scaling_factor": 16.0},
            "routed_scaling_factor is 16.0; accepted: 1.0 beside norm_topk_prob",
        ),
        (DEEPSEEK_V2, GROUPS | {"n_group": 3}, "n_group is 3; accepted: a divisor of 16 experts"),
        (
            DEEPSEEK_V2,
            GROUPS | {"n_group": 4, "topk_group": 5},
            "topk_group is 5; accepted: at most 4 groups, with at least 4 experts together",
        ),
        (DEEPSEEK_V3, {"n_group": 5}, "n_group is 5; accepted: a divisor of 16 experts"),
        (
            DEEPSEEK_V3,
            {"topk_group": 5},
            "topk_group is 5; accepted: at most 4 groups, with at least 4 experts together",
        ),
        (
            DEEPSEEK_V3,
            {"n_group": 8, "topk_group": 1},
            "topk_group is 1; accepted: at most 8 groups, with at least 4 experts together",
        ),
        (
            DEEPSEEK_V3,
            {"n_group": 16, "topk_group": 4},
            "n_group is 16; accepted: groups of two experts or more",
        ),
        (
            QWEN3,
            {"quantization_config": MXFP4},
            "quantization_config is 'mxfp4'; accepted: fp8, compressed-tensors, awq, gptq, or",
        ),
    ],
)
def test_what_only_one_family_means_is_refused_in_the_others(
    base: dict[str, Any], change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    _refused(tmp_path, base | change, message)


def test_a_band_of_yarn_may_be_a_step(tmp_path: Path) -> None:
    cfg = read_config(tmp_path, DEEPSEEK_V3 | _yarn(DEEPSEEK_V3, beta_fast=1.0, beta_slow=1.0))
    turned = rope_frequencies(cfg.rope, 16) / rope_frequencies(RopeConfig("default", 10000.0), 16)
    assert set(turned.astype(float).round(6).tolist()) == {1.0, 0.025}


def test_weights_that_are_normalised_need_no_factor_in_deepseek_v2(tmp_path: Path) -> None:
    cfg = read_config(tmp_path, DEEPSEEK_V2 | {"norm_topk_prob": True, "routed_scaling_factor": 1})
    assert cfg.router == RouterConfig(normalise=True)


def _refused(folder: Path, config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError) as caught:
        read_config(folder, config)
    assert message in str(caught.value)
    assert str(folder / "config.json") in str(caught.value)
    assert "\n" not in str(caught.value)


ODD: tuple[Any, ...] = ([[1]], {"a": 1}, True, "12", -1.5, 1e150)
ODD_YARN = {"mscale": 1.0, "mscale_all_dim": 1.0, "attention_factor": 1.0, "truncate": True}


@pytest.mark.parametrize("base", [GPT_OSS, DEEPSEEK_V3], ids=["gpt_oss", "deepseek_v3"])
def test_a_value_of_an_odd_type_is_read_or_refused_in_one_line(
    base: dict[str, Any], tmp_path: Path
) -> None:
    folder = write_config(tmp_path, base)
    nested = {"rope_scaling": base["rope_scaling"] | ODD_YARN, "quantization_config": FP8}
    extra = ("quantization_config", "attention_bias", "head_dim", "qk_head_dim", "swiglu_alpha")
    changed = [{name: odd} for name in (*base, *extra) for odd in ODD]
    for at, values in nested.items():
        changed += [{at: values | {name: odd}} for name in (*values, "rope_type") for odd in ODD]
    refusals = [error for change in changed if (error := refusal(folder, base | change))]
    assert len(refusals) > len(changed) // 2
    assert all(str(folder / "config.json") in error for error in refusals)
    assert all("\n" not in error for error in refusals)


@pytest.mark.parametrize(
    "number", [10**400, -(10**400), math.inf], ids=["large", "small", "infinite"]
)
@pytest.mark.parametrize("name", ["swiglu_limit", "rope_theta", "rms_norm_eps"])
def test_a_number_that_no_float_holds_is_refused(name: str, number: float, tmp_path: Path) -> None:
    _refused(tmp_path, GPT_OSS | {name: number}, f"{name} is {number!r}; accepted: a finite")
