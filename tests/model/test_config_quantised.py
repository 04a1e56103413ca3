"""How checkpoints store tensors: what is read of compressed-tensors, and what is refused."""

from pathlib import Path
from typing import Any

import pytest

from model.config_quantised import codes_of
from model.errors import ModelError
from tests.model.checkpoints import QWEN2, golden_config, read_config, refusal

WEIGHTS: dict[str, Any] = {
    "actorder": None,
    "block_structure": None,
    "dynamic": False,
    "group_size": 32,
    "num_bits": 4,
    "observer": "minmax",
    "observer_kwargs": {},
    "strategy": "group",
    "symmetric": True,
    "type": "int",
}
# As Kimi K2 Thinking is published.
INT4: dict[str, Any] = {
    "config_groups": {
        "group_0": {
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": WEIGHTS,
        }
    },
    "format": "pack-quantized",
    "ignore": [
        "lm_head",
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
    ],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}
GROUP: dict[str, Any] = INT4["config_groups"]["group_0"]


def _stored(change: dict[str, Any], base: dict[str, Any] = QWEN2) -> dict[str, Any]:
    return base | {"quantization_config": INT4 | change}


def _group(**change: Any) -> dict[str, Any]:
    return {"config_groups": {"group_0": GROUP | change}}


def _weights(**change: Any) -> dict[str, Any]:
    return _group(weights=WEIGHTS | change)


@pytest.mark.parametrize("base", [QWEN2, golden_config("deepseek_v3"), golden_config("qwen3_moe")])
def test_integers_of_four_bits_are_read_in_every_family(
    base: dict[str, Any], tmp_path: Path
) -> None:
    cfg = read_config(tmp_path, _stored({}, base))
    assert (cfg.quantization, cfg.quantized_block) == ("int4", (1, 32))
    assert read_config(tmp_path, _stored(_weights(group_size=128), base)).quantized_block[1] == 128


@pytest.mark.parametrize(
    ("stored", "kind"), [("pack-quantized", "int8-packed"), ("int-quantized", "int8")]
)
def test_integers_of_eight_bits_are_read_by_groups_and_by_rows(
    stored: str, kind: str, tmp_path: Path
) -> None:
    for own, share in (
        ({}, 32),
        ({"strategy": None}, 32),
        ({"strategy": "channel", "group_size": None}, 0),
        ({"strategy": "channel", "group_size": -1}, 0),
    ):
        cfg = read_config(tmp_path, _stored(_weights(num_bits=8, **own) | {"format": stored}))
        assert (cfg.quantization, cfg.quantized_block) == (kind, (1, share))
        assert cfg.scale_inputs == share


def test_integers_of_eight_bits_that_rows_are_rounded_for_are_refused(tmp_path: Path) -> None:
    """Such as W8A8 as it is published."""
    rows = {"num_bits": 8, "dynamic": True, "strategy": "token"}
    group = _group(weights=WEIGHTS | {"num_bits": 8}, input_activations=rows)
    said = refusal(tmp_path, _stored(group | {"format": "int-quantized"}))
    assert "input_activations is {'num_bits': 8, " in said
    assert "accepted: null" in said


def _floats(group: dict[str, Any] | None = None, **change: Any) -> dict[str, Any]:
    """As llm-compressor publishes FP8-dynamic, which it calls W8A8."""
    rows = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True}
    weights = WEIGHTS | {"num_bits": 8, "type": "float", "strategy": "channel", "group_size": None}
    groups = _group(weights=weights | change, input_activations=rows, **(group or {}))
    return _stored(groups | {"format": "float-quantized"})


@pytest.mark.parametrize(
    ("change", "kind", "block"),
    [
        ({}, "fp8-rows", (1, 0)),
        ({"strategy": "tensor"}, "fp8-rows", (1, 0)),
        ({"strategy": None}, "fp8-rows", (1, 0)),
        ({"strategy": "block", "block_structure": [128, 64]}, "fp8-blocks", (128, 64)),
    ],
)
def test_fp8_is_read_by_rows_and_by_blocks_whatever_rows_would_be_rounded_to(
    change: dict[str, Any], kind: str, block: tuple[int, int], tmp_path: Path
) -> None:
    cfg = read_config(tmp_path, _floats(**change))
    assert (cfg.quantization, cfg.quantized_block) == (kind, block)
    assert cfg.scale_inputs == block[1]
    once = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
    for rows in (None, once):
        said = _floats(**change)
        group = said["quantization_config"]["config_groups"]["group_0"]
        group["input_activations"] = rows
        assert read_config(tmp_path, said) == cfg


def test_fp8_without_blocks_has_a_scale_for_all(tmp_path: Path) -> None:
    for scheme in ("static", "dynamic"):
        said = {"quant_method": "fp8", "activation_scheme": scheme}
        cfg = read_config(tmp_path, QWEN2 | {"quantization_config": said})
        assert (cfg.quantization, cfg.quantized_block) == ("fp8-rows", (1, 0))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (_floats(num_bits=4), "num_bits is 4; accepted: 8"),
        (_floats(type="int"), "type is 'int'; accepted: \"float\""),
        (_floats(symmetric=False), "symmetric is False; accepted: true"),
        (_floats(group_size=32), "group_size is 32; accepted: null"),
        (_floats(strategy="group"), "strategy is 'group'; accepted: tensor, channel, block"),
        (_floats(strategy="block"), "block_structure is None; accepted: rows and columns of a b"),
        (_floats(block_structure=[128, 128]), "block_structure is [128, 128]; accepted: null"),
        (_floats({"output_activations": {"num_bits": 8}}), "output_activations is {'num_bits': 8}"),
    ],
)
def test_fp8_in_a_form_that_is_not_read_is_refused_by_name(
    config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    assert message in refusal(tmp_path, config)


def test_rows_that_would_be_rounded_to_four_bits_are_refused(tmp_path: Path) -> None:
    said = _floats()
    group = said["quantization_config"]["config_groups"]["group_0"]
    group["input_activations"] = group["input_activations"] | {"num_bits": 4}
    message = "group_0: input_activations: num_bits is 4; accepted: 8"
    assert message in refusal(tmp_path, said)


KINDS = "", "fp8", "fp8-blocks", "fp8-rows", "mxfp4", "int4", "int8", "int8-packed"


@pytest.mark.parametrize("published", KINDS)
def test_codes_are_kept_that_say_all_values_and_others_refused(published: str) -> None:
    kept = codes_of(published, "auto")
    assert kept == codes_of(published, "none") == codes_of(published, kept)
    assert kept == ("int8" if published.startswith("int8") else "fp8")
    if published in ("", "int4"):
        assert codes_of(published, "int8") == "int8"
        return
    (other,) = {"fp8", "int8"} - {kept}
    message = (
        f"--quantization {other}: .* weights are {published}, .*; accepted: auto, none, {kept}"
    )
    with pytest.raises(ModelError, match=message):
        codes_of(published, other)


@pytest.mark.parametrize(
    "change",
    [
        {"sparsity_config": {}, "transform_config": {}, "version": "0.14.0"},
        {"ignore": None, "quantization_status": None},
        _group(format="pack-quantized", targets=["re:.*experts.*"]),
        _weights(symmetric=None, dynamic=None, strategy=None, type=None),
        _weights(actorder="static"),
        _weights(actorder="weight"),
        {"sparsity_config": {"format": "dense", "sparsity_structure": "unstructured"}},
    ],
)
def test_what_changes_nothing_may_be_said_or_not(change: dict[str, Any], tmp_path: Path) -> None:
    cfg = read_config(tmp_path, _stored(change))
    assert cfg == read_config(tmp_path, _stored({}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "nvfp4-pack-quantized"}, "format is 'nvfp4-pack-quantized'; accepted: pack-qu"),
        ({"format": "naive-quantized"}, "format is 'naive-quantized'; accepted: pack-quantized,"),
        ({"format": "int-quantized"}, "num_bits is 4; accepted: 8"),
        ({"format": None}, "quantization_config: format is missing"),
        ({"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme is {'num_bits': 8}; accepted: nul"),
        (
            {"sparsity_config": {"format": "x"}},
            "sparsity_config is {'format': 'x'}; accepted: null, {},",
        ),
        ({"transform_config": {"a": 1}}, "transform_config is {'a': 1}; accepted: {}"),
        ({"config_groups": None}, "config_groups is None; accepted: one group"),
        ({"config_groups": {}}, "config_groups is []; accepted: one group"),
        (
            {"config_groups": {"a": GROUP, "b": GROUP}},
            "config_groups is ['a', 'b']; accepted: one group",
        ),
        ({"config_groups": {"a": None}}, "config_groups is {'a': None}; accepted: a group with"),
        ({"config_groups": {"a": 1}}, "config_groups: a is 1; accepted: an object or null"),
        (_group(weights=None), "accepted: a group with weights"),
        (_group(input_activations={"num_bits": 8}), "input_activations is {'num_bits': 8}; accep"),
        (_group(output_activations={"num_bits": 8}), "output_activations is {'num_bits': 8}; acc"),
        (_group(format="int-quantized"), "format is 'int-quantized'; accepted: \"pack-quantized\""),
        (_weights(num_bits=5), "num_bits is 5; accepted: 4 or 8"),
        (_weights(num_bits=None), "num_bits is missing"),
        (_weights(type="float"), "type is 'float'; accepted: \"int\""),
        (_weights(symmetric=False), "symmetric is False; accepted: true"),
        (_weights(strategy="channel"), "strategy is 'channel'; accepted: group"),
        (_weights(strategy="tensor", num_bits=8), "strategy is 'tensor'; accepted: group, channel"),
        (_weights(strategy="channel", num_bits=8), "group_size is 32; accepted: null or -1, since"),
        (_weights(group_size=6, num_bits=8), "group_size is 6; accepted: a multiple of 4"),
        (_weights(group_size=None, num_bits=8), "group_size is missing"),
        (_weights(group_size=None), "group_size is missing"),
        (_weights(group_size=-1), "group_size is -1; accepted: an integer of at least 1"),
        (_weights(group_size=12), "group_size is 12; accepted: a multiple of 8"),
        (_weights(actorder="group"), "actorder is 'group'; accepted: null, static, weight"),
        (_weights(actorder="dynamic"), "actorder is 'dynamic'; accepted: null, static, weight"),
        (_weights(actorder=[1]), "actorder is [1]; accepted: null, static, weight"),
        (_weights(dynamic=True), "dynamic is True; accepted: false"),
        (_weights(block_structure=[1, 2]), "block_structure is [1, 2]; accepted: null"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    said = refusal(tmp_path, _stored(change))
    assert message in said
    assert f"{tmp_path / 'config.json'}: quantization_config" in said
    assert "\n" not in said


ODD: tuple[Any, ...] = ([[1]], {"a": 1}, True, "12", -1.5, 1e150, [True])


def test_a_value_of_an_odd_type_is_read_or_refused_in_one_line(tmp_path: Path) -> None:
    changed = [
        *({name: odd} for name in INT4 for odd in ODD),
        *(_group(**{name: odd}) for name in GROUP for odd in ODD),
        *(_weights(**{name: odd}) for name in WEIGHTS for odd in ODD),
    ]
    said = [text for change in changed if (text := refusal(tmp_path, _stored(change)))]
    assert len(said) > len(changed) // 2
    assert all("config.json: " in text and "\n" not in text for text in said)
