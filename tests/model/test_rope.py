"""Rotary frequencies against one pair at a time, and which configurations may use yarn."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from model.config import ModelConfig
from model.rope import RopeConfig, rope_frequencies
from tests.model.checkpoints import golden_config, write_config

YARN = RopeConfig("yarn", 10000.0, 40.0, original_max_position=64)


def _turns(rope: RopeConfig, size: int, pair: float) -> float:
    """Full turns that a pair (its number may be fractional) makes in the original context."""
    return rope.original_max_position * rope.theta ** (-2.0 * pair / size) / (2.0 * math.pi)


def _pair_of(rope: RopeConfig, size: int, turns: float) -> float:
    """The pair that makes this many turns, by bisection: pairs with smaller numbers are faster."""
    low, high = -10.0 * size, 10.0 * size
    for _ in range(200):
        middle = (low + high) / 2.0
        low, high = (middle, high) if _turns(rope, size, middle) > turns else (low, middle)
    return low


def _yarn_frequency(rope: RopeConfig, size: int, pair: int) -> float:
    first, last = (_pair_of(rope, size, x) for x in (rope.beta_fast, rope.beta_slow))
    if rope.truncate:
        first, last = float(math.floor(first)), float(math.ceil(last))
    first, last = max(first, 0.0), min(last, size - 1.0)
    plain = rope.theta ** (-2.0 * pair / size)
    if pair <= first:
        return plain
    if pair >= last:
        return plain / rope.factor
    kept = (last - pair) / (last - first)
    return kept * plain + (1.0 - kept) * plain / rope.factor


@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize(
    ("theta", "factor", "original", "fast", "slow", "size"),
    [
        (10000.0, 40.0, 64, 32.0, 1.0, 16),  # the goldens' DeepSeek
        (150000.0, 32.0, 256, 32.0, 1.0, 32),  # ... and GPT-OSS
        (150000.0, 32.0, 4096, 32.0, 1.0, 64),  # as published
        (10000.0, 40.0, 4096, 32.0, 1.0, 64),
        (1e6, 4.0, 32768, 32.0, 1.0, 128),
        (1e6, 4.0, 1 << 30, 32.0, 1.0, 8),  # the band ends after the last pair
        (500.0, 1.0, 100, 7.5, 0.3, 10),  # nothing is stretched
    ],
)
def test_yarn_stretches_pairs_by_the_turns_they_make(
    truncate: bool,
    theta: float,
    factor: float,
    original: int,
    fast: float,
    slow: float,
    size: int,
) -> None:
    rope = RopeConfig(
        "yarn",
        theta,
        factor,
        original_max_position=original,
        beta_fast=fast,
        beta_slow=slow,
        truncate=truncate,
    )
    found = rope_frequencies(rope, size)
    assert found.dtype == np.float32
    expected = [_yarn_frequency(rope, size, pair) for pair in range(size // 2)]
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_cutting_the_band_to_whole_pairs_is_a_choice() -> None:
    whole = rope_frequencies(YARN, 16)
    exact = rope_frequencies(RopeConfig(**(vars(YARN) | {"truncate": False})), 16)
    assert (whole != exact).any()
    assert whole[0] == exact[0] == 1.0
    assert whole[-1] == exact[-1] == np.float32(10000.0 ** (-14 / 16) / 40.0)


def test_linear_divides_all_and_default_none() -> None:
    plain = rope_frequencies(RopeConfig("default", 100.0), 4)
    np.testing.assert_allclose(plain, [1.0, 0.1], rtol=1e-6)
    stretched = rope_frequencies(RopeConfig("linear", 100.0, 4.0), 4)
    np.testing.assert_allclose(stretched, [0.25, 0.025], rtol=1e-6)


def _read(folder: Path, name: str, settings: dict[str, Any]) -> RopeConfig:
    config = golden_config(name)
    return ModelConfig.from_dir(write_config(folder, config | {"rope_scaling": settings})).rope


@pytest.mark.parametrize("name", ["llama", "qwen3", "mixtral", "qwen3_moe"])
def test_any_family_may_have_yarn(name: str, tmp_path: Path) -> None:
    settings = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    rope = _read(tmp_path, name, settings)
    theta = float(golden_config(name)["rope_theta"])
    assert rope == RopeConfig(
        "yarn",
        theta,
        4.0,
        original_max_position=128,
        attention_factor=0.1 * math.log(4.0) + 1.0,
    )


def test_an_attention_factor_that_is_said_is_obeyed(tmp_path: Path) -> None:
    settings = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    rope = _read(tmp_path, "qwen3", settings | {"attention_factor": 0.75})
    assert (rope.attention_factor, rope.softmax_factor) == (0.75, 1.0)
    scales = {"mscale": 0.5, "mscale_all_dim": 2.0}
    rope = _read(tmp_path, "deepseek_v3", settings | scales | {"attention_factor": 0.75})
    assert rope.attention_factor == 0.75
    assert rope.softmax_factor == pytest.approx((0.2 * math.log(4.0) + 1.0) ** 2)


def test_deepseeks_two_scales_are_of_the_tables_and_of_the_softmax(tmp_path: Path) -> None:
    settings = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    rope = _read(tmp_path, "deepseek_v2", settings | {"mscale": 0.5, "mscale_all_dim": 2.0})
    each, every = 0.05 * math.log(4.0) + 1.0, 0.2 * math.log(4.0) + 1.0
    assert rope.attention_factor == pytest.approx(each / every)
    assert rope.softmax_factor == pytest.approx(every**2)
    plain = _read(tmp_path, "deepseek_v2", settings)
    assert plain.attention_factor == pytest.approx(0.1 * math.log(4.0) + 1.0)
    assert plain.softmax_factor == 1.0
