"""Routing against one row at a time, in plain Python, for every family's router."""

import dataclasses
import itertools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model import kernels
from model.config import ModelConfig
from model.config_experts import RouterConfig
from model.moe import route
from model.products import LayerWeights, product_parts
from tests.model.harness import GOLDENS

EXPERTS, CHOSEN, ROWS = 24, 4, 60
BASE = ModelConfig.from_dir(GOLDENS / "mixtral" / "model")
V3 = RouterConfig(
    sigmoid=True,
    normalise=True,
    scale=2.5,
    correction=True,
    num_groups=4,
    groups_per_tok=2,
    best_two=True,
)
ROUTERS = {
    "mixtral": RouterConfig(normalise=True),
    "qwen3_moe": RouterConfig(),
    "gpt_oss": RouterConfig(normalise=True, bias=True),
    "deepseek_v2": RouterConfig(scale=16.0, num_groups=6, groups_per_tok=2),
    "deepseek_v3": V3,
    "all_groups": dataclasses.replace(V3, groups_per_tok=4, scale=1.0),
    "one_group": dataclasses.replace(V3, num_groups=6, groups_per_tok=1, normalise=False),
    "pairs": dataclasses.replace(V3, num_groups=12, groups_per_tok=2),
}


class Routed(NamedTuple):
    """model.moe.Routing in numpy."""

    logits: np.ndarray
    expert_ids: np.ndarray
    weights: np.ndarray


def _routed(
    how: RouterConfig, logits: np.ndarray, bias: np.ndarray, correction: np.ndarray
) -> Routed:
    """Route with an identity as the router's weights, so that the inputs are the logits.

    All backends must agree, and so must an accelerator, which pads a single row with zeros.
    """
    cfg = dataclasses.replace(
        BASE, num_experts=EXPERTS, num_experts_per_tok=CHOSEN, router=how, hidden_size=EXPERTS
    )
    params = {
        "router": jnp.eye(EXPERTS, dtype=jnp.float32),
        "router_bias": jnp.asarray(bias),
        "router_correction": jnp.asarray(correction),
    }
    shape = kernels.ExpertsShape(
        "gpu", "float32", EXPERTS, 16, EXPERTS, CHOSEN, interpreted=True, router=how
    )
    seen = []
    for backend, on_cpu in itertools.product(kernels.BEST_EXPERTS, (True, False)):
        try:
            best = backend.build(shape)
        except NotImplementedError:
            assert how.num_groups > 1
            continue
        weights = LayerWeights(params, np.float32, on_cpu)
        run = jax.jit(
            lambda x, live, of=weights, best=best: route(cfg, x, of, live, best, product_parts)
        )
        alive = np.arange(len(logits)) % 3 < 2
        padded = Routed(*(np.asarray(x) for x in run(logits, alive)))
        seen.append(Routed(*(np.asarray(x) for x in run(logits, np.ones_like(alive)))))
        np.testing.assert_array_equal(padded.expert_ids[alive], seen[-1].expert_ids[alive])
        assert (padded.expert_ids[~alive] == EXPERTS).all()
    for other in seen[:-1]:
        np.testing.assert_array_equal(other.expert_ids, seen[-1].expert_ids)
        np.testing.assert_allclose(other.weights, seen[-1].weights, rtol=2e-6, atol=1e-9)
    return seen[-1]


def test_experts_without_a_score_are_chosen_once_each() -> None:
    shape = kernels.ExpertsShape("gpu", "float32", 8, 16, 5, 3, interpreted=True)
    best = kernels.BEST_EXPERTS[0].build(shape)
    for value in (-np.inf, np.nan):
        logits = np.array([[value, 1.0, value, value, value]], np.float32)
        ids, _ = best(jnp.asarray(logits)[None], None, jnp.ones(1, bool))
        assert len(set(np.asarray(ids)[0].tolist())) == 3
        assert 0 <= np.asarray(ids).min() <= np.asarray(ids).max() < 5


def test_many_rows_are_scored_in_float32_by_products_of_bfloat16() -> None:
    draw = np.random.default_rng(0)
    x = draw.standard_normal((600, 64)).astype(jnp.bfloat16)
    router = draw.standard_normal((64, EXPERTS)).astype(np.float32)
    cfg = dataclasses.replace(
        BASE,
        num_experts=EXPERTS,
        num_experts_per_tok=CHOSEN,
        router=RouterConfig(),
        hidden_size=64,
    )
    shape = kernels.ExpertsShape("gpu", "bfloat16", 64, 16, EXPERTS, CHOSEN, interpreted=True)
    best = kernels.BEST_EXPERTS[-1].build(shape)
    weights = LayerWeights({"router": jnp.asarray(router)}, np.float32, on_cpu=False)
    found = np.asarray(
        jax.jit(lambda x, live: route(cfg, x, weights, live, best, product_parts))(
            x, np.ones(600, bool)
        ).logits
    )
    expected = x.astype(np.float64) @ router.astype(np.float64)
    np.testing.assert_allclose(found, expected, atol=2e-5)


def _scores(how: RouterConfig, logits: list[float]) -> list[float]:
    if how.sigmoid:
        return [1.0 / (1.0 + math.exp(-x)) for x in logits]
    top = max(logits)
    powers = [math.exp(x - top) for x in logits]
    return [x / sum(powers) for x in powers]


def _one_row(how: RouterConfig, logits: list[float], correction: list[float]) -> dict[int, float]:
    """The experts of one row, with their weights."""
    scores = _scores(how, logits)
    choice = [s + c if how.correction else s for s, c in zip(scores, correction, strict=True)]
    size = EXPERTS // how.num_groups
    goodness = []
    for group in range(how.num_groups):
        best = sorted(choice[group * size : (group + 1) * size], reverse=True)
        goodness.append(best[0] + best[1] if how.best_two else best[0])
    groups = sorted(range(how.num_groups), key=lambda g: -goodness[g])[: how.groups_per_tok]
    allowed = [e for e in range(EXPERTS) if e // size in groups]
    ids = sorted(allowed, key=lambda e: -choice[e])[:CHOSEN]
    total = max(sum(scores[e] for e in ids), 1e-20) if how.normalise else 1.0
    return {e: how.scale * scores[e] / total for e in ids}


def _check(
    how: RouterConfig, logits: np.ndarray, bias: np.ndarray, correction: np.ndarray
) -> Routed:
    found = _routed(how, logits, bias, correction)
    whole = logits + bias if how.bias else logits
    np.testing.assert_array_equal(found.logits, whole)
    for row in range(len(logits)):
        expected = _one_row(how, whole[row].tolist(), correction.tolist())
        got = dict(zip(found.expert_ids[row].tolist(), found.weights[row].tolist(), strict=True))
        assert got.keys() == expected.keys(), row
        np.testing.assert_allclose(
            [got[e] for e in expected], list(expected.values()), rtol=2e-5, err_msg=str(row)
        )
    return found


def _drawn(spread: float, mean: float = 0.0) -> np.ndarray:
    draw = np.random.default_rng(3)
    return (mean + spread * draw.standard_normal((ROWS, EXPERTS))).astype(np.float32)


def _vector(spread: float, mean: float, seed: int) -> np.ndarray:
    draw = np.random.default_rng(seed)
    return (mean + spread * draw.standard_normal(EXPERTS)).astype(np.float32)


@pytest.mark.parametrize("spread", [0.2, 3.0])
@pytest.mark.parametrize("how", ROUTERS.values(), ids=ROUTERS)
def test_each_row_goes_where_plain_python_sends_it(how: RouterConfig, spread: float) -> None:
    found = _check(how, _drawn(spread), _vector(1.0, 0.0, 1), _vector(0.3, 0.0, 2))
    if how.normalise:
        np.testing.assert_allclose(found.weights.sum(-1), how.scale, rtol=1e-5)


@pytest.mark.parametrize("mean", [-1.5, -9.0])
@pytest.mark.parametrize("name", ["deepseek_v3", "one_group", "pairs"])
def test_choices_below_zero_still_stay_in_the_chosen_groups(name: str, mean: float) -> None:
    correction = _vector(0.2, mean, 5)
    assert correction.max() < -0.9
    logits = _drawn(2.0, -2.0)
    how = ROUTERS[name]
    found = _check(how, logits, np.zeros(EXPERTS, np.float32), correction)
    groups = found.expert_ids // (EXPERTS // how.num_groups)
    assert max(len(set(row)) for row in groups.tolist()) <= how.groups_per_tok
    assert (found.weights > 0).all()


def test_a_correction_changes_the_choice_and_not_the_weights() -> None:
    how = dataclasses.replace(V3, num_groups=1, groups_per_tok=1, normalise=False, scale=1.0)
    correction = np.where(np.arange(EXPERTS) < CHOSEN, np.float32(100.0), np.float32(-100.0))
    logits = _drawn(1.0)
    found = _check(how, logits, np.zeros(EXPERTS, np.float32), correction)
    assert (np.sort(found.expert_ids) == np.arange(CHOSEN)).all()
    own = np.take_along_axis(logits, found.expert_ids, axis=-1)
    np.testing.assert_allclose(found.weights, 1.0 / (1.0 + np.exp(-own)), rtol=1e-5)


@pytest.mark.parametrize(("mean", "total"), [(-30.0, 2.5), (-60.0, 0.0)])
def test_tiny_scores_are_normalised_as_far_as_there_is_something(mean: float, total: float) -> None:
    """Sigmoids of 1e-13 are normalised to sum to one; those of 1e-26 count as noise."""
    found = _check(V3, _drawn(1.0, mean), np.zeros(EXPERTS, np.float32), _vector(0.3, 0.0, 2))
    np.testing.assert_allclose(found.weights.sum(-1), total, atol=1e-4)


def test_scores_of_nothing_give_weights_of_nothing_and_no_nan() -> None:
    logits = np.full((3, EXPERTS), -200.0, np.float32)
    correction = -np.arange(EXPERTS, dtype=np.float32)
    found = _routed(V3, logits, np.zeros(EXPERTS, np.float32), correction)
    assert (np.sort(found.expert_ids) == np.arange(CHOSEN)).all()
    assert (found.weights == 0).all()


def test_softmax_of_the_chosen_is_that_of_all_normalised_over_them() -> None:
    """As in GPT-OSS: the best logits, bias included, then softmax over those alone."""
    logits, bias = _drawn(4.0), _vector(2.0, 0.0, 1)
    found = _routed(ROUTERS["gpt_oss"], logits, bias, np.zeros(EXPERTS, np.float32))
    whole = (logits + bias).astype(np.float64)
    best = np.argsort(-whole, axis=-1)[:, :CHOSEN]
    assert (found.expert_ids == best).all()
    powers = np.exp(np.take_along_axis(whole, best, axis=-1))
    np.testing.assert_allclose(found.weights, powers / powers.sum(-1, keepdims=True), rtol=1e-5)
