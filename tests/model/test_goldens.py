"""Parity with the reference implementation's recorded numbers, on every kind of mesh."""

import shutil
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench.goldens import BFLOAT16_MEDIANS
from model.config import FP8, ModelConfig
from model.moe import ExpertMap
from model.sharding import Stacks
from model.transformer import Model
from model.weights import load_params
from tests.model.captured import prefill_captured
from tests.model.harness import GOLDENS, PAGE_SIZE, Golden, Harness, chunks, scattered_pages

DENSE = ("llama", "qwen3", "ernie4_5", "hunyuan_v1_dense")
ROUTED = (
    "mixtral",
    "qwen3_moe",
    "gpt_oss",
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe",
    "glm4_moe_lite",
    "qwen2_moe",
    "olmoe",
    "minimax_m2",
    "dots1",
    "ernie4_5_moe",
    "hunyuan_v1_moe",
    "hy_v3",
    "solar_open",
)
# Networks with layers alike share the meshes: each has some that the other has not.
CASES = [("llama", 2, 1, 1), ("llama", 4, 1, 1), ("qwen3", 1, 1, 1), ("qwen3", 2, 1, 1)]
CASES += [("ernie4_5", 2, 1, 1), ("hunyuan_v1_dense", 4, 1, 1)]
CASES += [("mixtral", *mesh, 1) for mesh in ((1, 1), (2, 2), (4, 2))]
CASES += [("qwen3_moe", *mesh, 1) for mesh in ((2, 1), (2, 2), (4, 1), (4, 4))]
CASES += [(name, *mesh, 1) for name in ROUTED[2:] for mesh in ((1, 1), (4, 2))]
# Ranks with their own experts, and ranks that share experts.
CASES += [("llama", 2, 1, 2), ("mixtral", 2, 2, 2), ("mixtral", 2, 4, 2), ("qwen3_moe", 1, 4, 4)]
CASES += [("gpt_oss", 2, 4, 2), ("deepseek_v3", 2, 4, 2)]
# Norms over all heads, with fewer heads on some shards, and with the same.
CASES += [("minimax_m2", 2, 1, 2), ("olmoe", 2, 2, 1)]
# Meshes on which each dense layer has its own arrays, as large layers have on CPU.
OWN_ARRAYS = {("llama", 2, 1, 1), ("qwen3", 1, 1, 1)}
# Meshes on which matrices stay in bfloat16, as those of large networks do on a CPU.
NARROW = {
    ("qwen3", 1, 1, 1),
    ("mixtral", 2, 2, 1),
    ("qwen3_moe", 4, 1, 1),
    ("gpt_oss", 1, 1, 1),
    ("deepseek_v2", 1, 1, 1),
    ("qwen2_moe", 1, 1, 1),
    ("minimax_m2", 2, 1, 2),
}
# Meshes on which everything takes the form that an accelerator runs.
AS_ON_CUDA = {
    ("llama", 2, 1, 2),
    ("qwen3", 2, 1, 1),
    ("mixtral", 4, 2, 1),
    ("qwen3_moe", 2, 2, 1),
    ("gpt_oss", 4, 2, 1),
    ("deepseek_v2", 4, 2, 1),
    ("deepseek_v3", 2, 4, 2),
    ("glm4_moe", 4, 2, 1),
    ("glm4_moe_lite", 4, 2, 1),
    ("qwen2_moe", 4, 2, 1),
    ("minimax_m2", 4, 2, 1),
    ("dots1", 4, 2, 1),
    ("ernie4_5_moe", 4, 2, 1),
    ("hunyuan_v1_moe", 4, 2, 1),
    ("hy_v3", 4, 2, 1),
}
# With these, one call of the interpreted kernels takes longer than optimizing them.
OPTIMIZED = {
    ("qwen3", 2, 1, 1),
    ("qwen3_moe", 2, 2, 1),
    ("gpt_oss", 4, 2, 1),
    ("hunyuan_v1_moe", 4, 2, 1),
    ("hy_v3", 4, 2, 1),
}
# The limits in tests/goldens/README.md for correct float32 runs.
LOGIT_ATOL, LOGIT_MEAN, HIDDEN_ATOL, WEIGHT_ATOL = 2e-4, 2e-5, 1e-4, 5e-5

golden = cache(Golden)


@pytest.mark.parametrize(("name", "tp", "ep", "dp"), CASES)
def test_chunked_prefill_and_paged_decode_give_the_recorded_logits_and_tokens(
    name: str, tp: int, ep: int, dp: int
) -> None:
    recorded = golden(name)
    mesh = name, tp, ep, dp
    platform = "cuda" if mesh in AS_ON_CUDA else ""
    stacks = Stacks.EXPERTS if mesh in OWN_ARRAYS else None
    harness = Harness(
        recorded.checkpoint,
        tp,
        ep,
        dp=dp,
        stacks=stacks,
        platform=platform,
        optimized=mesh in OPTIMIZED,
        narrow=mesh in NARROW,
    )
    ran = harness.run(list(recorded.prompts.values()), 24)
    for prompt, result in zip(recorded.prompts, ran, strict=True):
        expected = recorded.numbers[f"{prompt}.logits"]
        got = result.logits[recorded.first_position[prompt] :]
        assert got.shape == expected.shape
        distance = np.abs(got - expected)
        assert distance.max() < LOGIT_ATOL, prompt
        assert distance.mean() < LOGIT_MEAN, prompt
        assert (got.argmax(-1) == expected.argmax(-1)).all(), prompt
        assert result.ids == recorded.numbers[f"{prompt}.greedy.ids"].tolist(), prompt
        _check_steps(recorded, prompt, result.step_logits)


def _check_steps(recorded: Golden, prompt: str, steps: np.ndarray) -> None:
    chosen = recorded.numbers[f"{prompt}.greedy.ids"]
    got = np.take_along_axis(steps, chosen[:, None], axis=-1)[:, 0]
    assert np.abs(got - recorded.numbers[f"{prompt}.greedy.logits"]).max() < LOGIT_ATOL
    logprobs = np.asarray(jax.nn.log_softmax(jnp.asarray(steps), axis=-1))
    best = np.argsort(-steps, axis=-1, stable=True)[:, :5]
    assert (best == recorded.numbers[f"{prompt}.greedy.top5_ids"]).all()
    best_logprobs = np.take_along_axis(logprobs, best, axis=-1)
    recorded_logprobs = recorded.numbers[f"{prompt}.greedy.top5_logprobs"]
    assert np.abs(best_logprobs - recorded_logprobs).max() < LOGIT_ATOL


@pytest.mark.parametrize(
    ("name", "tp", "ep", "platform"),
    [
        ("llama", 4, 1, "cpu"),
        ("qwen3", 1, 1, "cpu"),
        ("mixtral", 4, 2, "cpu"),
        ("qwen3_moe", 1, 1, "cpu"),
        ("qwen3_moe", 4, 4, "cuda"),
        ("gpt_oss", 2, 1, "cpu"),
        ("deepseek_v2", 4, 2, "cuda"),
        ("deepseek_v3", 1, 1, "cpu"),
        ("glm4_moe", 1, 1, "cpu"),
        ("qwen2_moe", 4, 2, "cpu"),
        ("minimax_m2", 4, 1, "cpu"),
        ("ernie4_5_moe", 2, 2, "cpu"),
        ("hunyuan_v1_moe", 2, 1, "cpu"),
        ("hy_v3", 2, 2, "cpu"),
        ("solar_open", 1, 1, "cpu"),
    ],
)
def test_hidden_states_and_routing_are_the_recorded_ones(
    name: str, tp: int, ep: int, platform: str
) -> None:
    recorded = golden(name)
    harness = Harness(recorded.checkpoint, tp, ep, platform=platform)
    hidden, seen = harness.capture(recorded.prompts["p33"])

    def close(got: np.ndarray, key: str, atol: float) -> None:
        assert np.abs(got - recorded.numbers[f"p33.{key}"]).max() < atol, key

    close(np.asarray(seen.embed), "hidden.embed", HIDDEN_ATOL)
    close(hidden, "hidden.final_norm", HIDDEN_ATOL)
    for layer in range(harness.model.cfg.num_layers):
        close(np.asarray(seen.layers[layer]), f"hidden.layer{layer}", HIDDEN_ATOL)
    for layer in recorded.info["moe_layers"]:
        close(np.asarray(seen.router_logits[layer]), f"moe.layer{layer}.router_logits", LOGIT_ATOL)
        order = np.argsort(seen.expert_ids[layer], axis=-1)
        ids = np.take_along_axis(np.asarray(seen.expert_ids[layer]), order, axis=-1)
        weights = np.take_along_axis(np.asarray(seen.expert_weights[layer]), order, axis=-1)
        assert (ids == recorded.numbers[f"p33.moe.layer{layer}.expert_ids"]).all()
        close(weights, f"moe.layer{layer}.expert_weights", WEIGHT_ATOL)


@pytest.mark.parametrize("name", DENSE + ROUTED)
def test_both_forms_of_a_config_mean_the_same_model(name: str, tmp_path: Path) -> None:
    for file in ("generation_config.json",):
        shutil.copy(GOLDENS / name / "model" / file, tmp_path / file)
    shutil.copy(GOLDENS / name / "config.v5.json", tmp_path / "config.json")
    old, new = ModelConfig.from_dir(GOLDENS / name / "model"), ModelConfig.from_dir(tmp_path)
    assert old == new
    assert old.architecture == golden(name).info["architecture"]
    assert [i for i, moe in enumerate(old.moe_layers) if moe] == golden(name).info["moe_layers"]


@pytest.mark.parametrize(
    ("name", "tp", "ep", "platform"),
    [
        ("llama", 2, 1, "cpu"),
        ("qwen3_moe", 2, 2, "cpu"),
        ("qwen3_moe", 2, 2, "cuda"),
        ("gpt_oss", 1, 1, "cuda"),
        ("deepseek_v2", 1, 1, "cpu"),
        ("deepseek_v3", 2, 2, "cuda"),
        ("glm4_moe", 1, 1, "cpu"),
        ("qwen2_moe", 2, 1, "cpu"),
        ("minimax_m2", 4, 1, "cpu"),
        ("ernie4_5_moe", 1, 1, "cpu"),
        ("hunyuan_v1_moe", 2, 1, "cpu"),
        ("hy_v3", 1, 1, "cpu"),
        ("solar_open", 2, 1, "cpu"),
    ],
)
def test_bfloat16_stays_as_near_as_other_correct_bfloat16_runs(
    name: str, tp: int, ep: int, platform: str
) -> None:
    recorded = golden(name)
    optimized = platform == "cuda" and (name, tp, ep, 1) in OPTIMIZED
    harness = Harness(
        recorded.checkpoint, tp, ep, "bfloat16", platform=platform, optimized=optimized
    )
    ran = harness.run(list(recorded.prompts.values()), 1)
    distances = np.concatenate(
        [
            np.abs(
                result.logits[recorded.first_position[prompt] :]
                - recorded.numbers[f"{prompt}.logits"]
            ).mean(axis=-1)
            for prompt, result in zip(recorded.prompts, ran, strict=True)
        ]
    )
    assert distances.shape == (73,)
    assert np.median(distances) < 1.5 * BFLOAT16_MEDIANS[name]
    if name in DENSE:
        assert distances.mean() < 1.5 * 0.036


def test_experts_may_be_placed_anywhere_when_the_map_says_so() -> None:
    recorded = golden("qwen3_moe")
    harness = Harness(recorded.checkpoint, 2, 2)
    cfg = harness.model.cfg
    place = np.random.default_rng(3).permutation(cfg.num_experts)

    def moved(stack: jax.Array) -> jax.Array:
        values = np.zeros(stack.shape, stack.dtype)
        values[:, place] = np.asarray(stack)
        return jax.device_put(values, stack.sharding)

    layers = tuple(
        {key: moved(value) if key.startswith("experts_") else value for key, value in run.items()}
        for run in harness.params["layers"]
    )
    shape = cfg.num_layers, cfg.num_experts
    places = jnp.asarray(np.broadcast_to(place, shape)[..., None], jnp.int32)
    expert_map = ExpertMap(places, jnp.ones(shape, jnp.int32))
    prompt = recorded.prompts["p33"]
    (batch,) = chunks([prompt], scattered_pages([len(prompt)]), len(prompt))
    run = jax.jit(prefill_captured, static_argnums=0)
    hidden, _, _ = run(
        harness.model, harness.params | {"layers": layers}, harness.new_pool(), batch, expert_map
    )
    expected = recorded.numbers["p33.hidden.final_norm"]
    assert np.abs(np.asarray(hidden) - expected).max() < HIDDEN_ATOL


def test_copies_of_all_experts_are_as_good_as_trained_without_a_map() -> None:
    recorded = golden("qwen3_moe")
    harness = Harness(recorded.checkpoint, 2, 2)
    cfg, mesh = harness.model.cfg, harness.model.mesh
    model = Model.create(cfg, mesh, "float32", PAGE_SIZE, redundant_experts=cfg.num_experts)
    params = load_params(recorded.checkpoint, model)
    prompt = recorded.prompts["p33"]
    (batch,) = chunks([prompt], scattered_pages([len(prompt)]), len(prompt))
    run = jax.jit(prefill_captured, static_argnums=0)
    hidden, _, _ = run(model, params, harness.new_pool(), batch)
    expected = recorded.numbers["p33.hidden.final_norm"]
    assert np.abs(np.asarray(hidden) - expected).max() < HIDDEN_ATOL


@pytest.mark.parametrize(("name", "median"), [("llama", 0.15), ("qwen3", 0.06)])
def test_fp8_pages_keep_the_logits_near(name: str, median: float) -> None:
    recorded = golden(name)
    harness = Harness(recorded.checkpoint, page_dtype=FP8)
    ran = harness.run(list(recorded.prompts.values()), 1)
    distances = np.concatenate(
        [
            np.abs(
                result.logits[recorded.first_position[prompt] :]
                - recorded.numbers[f"{prompt}.logits"]
            ).mean(axis=-1)
            for prompt, result in zip(recorded.prompts, ran, strict=True)
        ]
    )
    assert 0 < np.median(distances) < median
