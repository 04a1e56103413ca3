"""Performance floors against figures worked out by hand and the models' published sizes."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from bench.floors import (
    Ceilings,
    Cost,
    Weights,
    attention_biases,
    attention_weights,
    decode_attention_cost,
    decode_step_cost,
    dense_weights,
    expert_biases,
    expert_weights,
    experts_touched,
    kv_bytes_per_token,
    moe_cost,
    prefill_attention_cost,
    prefill_chunk_cost,
    router_biases,
    shared_weights,
)
from bench.shapes import (
    DEEPSEEK_V2_LITE,
    DEMO_GPT_OSS,
    DEMO_LATENT,
    GPT_OSS_20B,
    QWEN3_8B,
    QWEN3_30B_A3B,
    SHAPES,
    Shape,
)
from model.params import param_leaves
from model.sharding import Dims, kv_spec, make_mesh

H200 = Ceilings(copy_gb_s=4300, matmul_tflop_s=790)

# (bytes, floating-point operations) of a decode step for each of the shape's slot counts, then of a
# chunk for each of its sizes; no latent attention, shared experts, biases or windows.
PLAIN = {
    "demo": [
        (17309696.0, 8912896.0),
        (21037056.0, 71303168.0),
        (17825792.0, 413270016.0),
    ],
    "demo-moe": [
        (17383424.0, 8945664.0),
        (45700544.0, 71565312.0),
        (46727167.619089216, 415367168.0),
    ],
    "middle": [
        (673349632.0, 341835776.0),
        (747896832.0, 2734686208.0),
        (704643072.0, 40958427136.0),
    ],
    "middle-moe": [
        (417873920.0, 212008960.0),
        (1051724288.0, 1696071680.0),
        (1122369536.0, 24606932992.0),
    ],
    "qwen3-8b": [
        (15287779328.0, 15740174336.0),
        (17561550848.0, 251842789376.0),
        (24837619712.0, 1007371157504.0),
        (53941895168.0, 4029484630016.0),
        (16948133888.0, 29688662589440.0),
        (22383951872.0, 133594323353600.0),
    ],
    "qwen3-30b-a3b": [
        (6185156608.0, 6888620032.0),
        (41425069547.231804, 110217920512.0),
        (66027357348.43272, 440871682048.0),
        (86513283295.95508, 1763486728192.0),
        (63260065792.0, 12834789916672.0),
        (71715782656.0, 71128501977088.0),
    ],
}


def total_params(shape: Shape) -> int:
    """All parameters that the floors count: everything but the norms."""
    cfg = shape.cfg
    tables = cfg.vocab_size * cfg.hidden_size * (1 if cfg.tie_word_embeddings else 2)
    expert = _count(expert_weights(cfg)) + expert_biases(cfg) + cfg.hidden_size
    routed = cfg.num_experts * expert + router_biases(cfg) + _count(shared_weights(cfg))
    attention = _count(attention_weights(cfg)) + attention_biases(cfg)
    dense = _count(dense_weights(cfg))
    return tables + sum(attention + (routed if moe else dense) for moe in cfg.moe_layers)


def _count(weights: Weights) -> int:
    return sum(weights.values())


@pytest.mark.parametrize("name", PLAIN)
def test_costs_of_plain_networks_are_what_they_were(name):
    shape = SHAPES[name]
    costs = [decode_step_cost(shape, slots, shape.context) for slots in shape.slots]
    costs += [prefill_chunk_cost(shape, tokens) for tokens in shape.chunks]
    assert [(cost.num_bytes, cost.flops) for cost in costs] == PLAIN[name]


@pytest.mark.parametrize(
    ("shape", "billions"),
    [(QWEN3_8B, 8.19), (QWEN3_30B_A3B, 30.53), (DEEPSEEK_V2_LITE, 15.706), (GPT_OSS_20B, 20.915)],
)
def test_shapes_have_the_published_number_of_parameters(shape, billions):
    assert total_params(shape) / 1e9 == pytest.approx(billions, rel=2e-3)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_parameters_counted_are_those_of_the_model(shape):
    dims = Dims.of(shape.cfg, make_mesh(1, 1, jax.devices()[:1]))
    leaves = jax.tree.leaves(param_leaves(dims, jnp.dtype(shape.dtype)))
    assert total_params(shape) == sum(math.prod(leaf.canonical) for leaf in leaves if leaf.std)


@pytest.mark.parametrize(
    ("shape", "slots", "tokens_per_s"),
    [
        (QWEN3_30B_A3B, 1, 695),
        (QWEN3_30B_A3B, 64, 4173),
        (QWEN3_8B, 1, 281),
        (QWEN3_8B, 256, 20464),
        (DEEPSEEK_V2_LITE, 1, 873),
        (DEEPSEEK_V2_LITE, 16, 2694),
        (DEEPSEEK_V2_LITE, 64, 8346),
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
    assert kv_bytes_per_token(DEEPSEEK_V2_LITE) == 27 * (512 + 64) * 2
    assert kv_bytes_per_token(GPT_OSS_20B) == 24 * 2 * 8 * 64 * 2


@pytest.mark.parametrize("shape", [DEMO_LATENT, DEMO_GPT_OSS, DEEPSEEK_V2_LITE, GPT_OSS_20B])
def test_kv_bytes_are_those_of_the_pages(shape):
    mesh = make_mesh(1, 1, jax.devices()[:1])
    spec = kv_spec(Dims.of(shape.cfg, mesh), shape.page_size, shape.dtype)
    assert spec.all_layers_bytes == shape.page_size * kv_bytes_per_token(shape)


def test_latent_queries_meet_latent_keys_and_find_values_of_the_latent_rank():
    cost = decode_attention_cost(DEEPSEEK_V2_LITE, [1000] * 3)
    assert cost.flops == 2 * 3 * 1000 * 16 * (576 + 512)
    assert cost.num_bytes == 3 * 1000 * 576 * 2 + 3 * 16 * (576 + 512) * 2


def test_a_prompt_of_its_own_may_attend_with_keys_and_values_of_each_head():
    cost = prefill_attention_cost(DEEPSEEK_V2_LITE, 1000)
    assert cost.flops == pytest.approx(1000 * 1001 * 16 * (128 + 64 + 128))


def test_queries_of_low_rank_are_two_products():
    # q_a and q_b, kv_a, k_b and v_b, o.
    each = (256 * 96 + 96 * 8 * 48, 256 * 80, 8 * 64 * (32 + 32), 8 * 32 * 256)
    assert _count(attention_weights(DEMO_LATENT.cfg)) == sum(each)


def test_a_layer_with_a_window_reads_no_more_keys_than_are_in_it():
    def decode(context: int, windowed: bool) -> Cost:
        return decode_attention_cost(GPT_OSS_20B, [context] * 2, windowed)

    assert decode(1024, windowed=True) == decode(128, windowed=False)
    assert decode(100, windowed=True) == decode(100, windowed=False)
    long, short = (prefill_attention_cost(GPT_OSS_20B, 200, windowed) for windowed in (False, True))
    assert short.num_bytes == long.num_bytes
    seen = sum(min(position + 1, 128) for position in range(200))
    assert short.flops == pytest.approx(4 * seen * 64 * 64)
    assert prefill_attention_cost(GPT_OSS_20B, 128, True).flops == 4 * (128 * 129 / 2) * 64 * 64


def test_half_of_the_layers_have_the_window():
    near, far = (decode_step_cost(GPT_OSS_20B, 1, context).num_bytes for context in (128, 1024))
    assert far - near == 12 * (1024 - 128) * 2 * 8 * 64 * 2


def test_shared_experts_are_read_in_every_step_but_not_by_the_kernel_of_routed_ones():
    alone = replace(DEMO_LATENT, cfg=replace(DEMO_LATENT.cfg, shared_intermediate_size=0))
    weights = 3 * (3 * 256 * 192)  # one shared expert in each of three layers
    for tokens in (1, 8):
        cost, without = (decode_step_cost(shape, tokens, 10) for shape in (DEMO_LATENT, alone))
        assert cost.num_bytes - without.num_bytes == pytest.approx(weights * 4)
        assert cost.flops - without.flops == 2 * tokens * weights
        assert moe_cost(DEMO_LATENT, tokens) == moe_cost(alone, tokens)


def test_biases_are_bytes_and_no_products():
    cfg = replace(GPT_OSS_20B.cfg, qkv_bias=False, o_bias=False, sinks=False, experts_bias=False)
    bare = replace(GPT_OSS_20B, cfg=replace(cfg, router=replace(cfg.router, bias=False)))
    cost, without = (decode_step_cost(shape, 1, 10) for shape in (GPT_OSS_20B, bare))
    # qkv, o, sinks, router, four experts.
    each = (64 + 2 * 8) * 64 + 2880 + 64 + 32 + 4 * 3 * 2880
    assert cost.num_bytes - without.num_bytes == pytest.approx(24 * each * 2)
    assert cost.flops == without.flops


def test_the_floor_is_the_slower_of_moving_and_multiplying():
    ceilings = Ceilings(copy_gb_s=1.0, matmul_tflop_s=1.0)
    assert Cost(2e9, 1e12).floor_s(ceilings) == 2.0
    assert Cost(1e9, 3e12).floor_s(ceilings) == 3.0


def test_every_named_shape_is_found_by_its_name_and_tiles_its_pages():
    for name, shape in SHAPES.items():
        assert name == shape.name
        assert all(tokens % shape.page_size == 0 for tokens in shape.chunks)
        assert len(shape.cfg.moe_layers) == shape.cfg.num_layers
        assert replace(shape) == shape
