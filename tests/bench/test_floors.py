"""Floors beside figures worked out by hand and beside the published sizes of the models."""

import dataclasses

import pytest

from bench.floors import (
    Ceilings,
    Cost,
    attention_params,
    decode_step_cost,
    dense_params,
    expert_params,
    experts_touched,
    kv_bytes_per_token,
    prefill_chunk_cost,
)
from bench.shapes import QWEN3_8B, QWEN3_30B_A3B, SHAPES, Shape

H200 = Ceilings(copy_gb_s=4300, matmul_tflop_s=790)


def total_params(shape: Shape) -> int:
    cfg = shape.cfg
    tables = cfg.vocab_size * cfg.hidden_size * (1 if cfg.tie_word_embeddings else 2)
    layers = 0
    for routed in cfg.moe_layers:
        experts = cfg.num_experts * (expert_params(cfg) + cfg.hidden_size)
        layers += attention_params(cfg) + (experts if routed else dense_params(cfg))
    return tables + layers


@pytest.mark.parametrize(("shape", "billions"), [(QWEN3_8B, 8.19), (QWEN3_30B_A3B, 30.53)])
def test_shapes_have_the_published_number_of_parameters(shape, billions):
    assert total_params(shape) / 1e9 == pytest.approx(billions, rel=2e-3)


@pytest.mark.parametrize(
    ("shape", "slots", "tokens_per_s"),
    [
        (QWEN3_30B_A3B, 1, 695),
        (QWEN3_30B_A3B, 64, 4173),
        (QWEN3_8B, 1, 281),
        (QWEN3_8B, 256, 20464),
    ],
)
def test_decode_floors_at_the_measured_ceilings_of_an_h200(shape, slots, tokens_per_s):
    floor_s = decode_step_cost(shape, slots, 1024).floor_s(H200)
    assert slots / floor_s == pytest.approx(tokens_per_s, rel=0.005)


def test_a_long_prefill_is_bound_by_products():
    cost = prefill_chunk_cost(QWEN3_8B, 8192)
    assert cost.floor_s(H200) == pytest.approx(cost.flops / 790e12)
    assert 8192 / cost.floor_s(H200) == pytest.approx(48_000, rel=0.02)


def test_experts_touched_grows_to_all_of_them():
    cfg = QWEN3_30B_A3B.cfg
    assert experts_touched(cfg, 1) == pytest.approx(8)
    assert experts_touched(cfg, 16) == pytest.approx(82, abs=0.5)
    assert experts_touched(cfg, 10_000) == pytest.approx(128)


def test_kv_bytes_of_a_token():
    assert kv_bytes_per_token(QWEN3_30B_A3B) == 48 * 2 * 4 * 128 * 2


def test_the_floor_is_the_slower_of_moving_and_multiplying():
    ceilings = Ceilings(copy_gb_s=1.0, matmul_tflop_s=1.0)
    assert Cost(2e9, 1e12).floor_s(ceilings) == 2.0
    assert Cost(1e9, 3e12).floor_s(ceilings) == 3.0


def test_every_named_shape_is_found_by_its_name_and_tiles_its_pages():
    for name, shape in SHAPES.items():
        assert name == shape.name
        assert all(tokens % shape.page_size == 0 for tokens in shape.chunks)
        assert len(shape.cfg.moe_layers) == shape.cfg.num_layers
        assert dataclasses.replace(shape) == shape
