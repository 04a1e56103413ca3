"""Chunks that have keys and values of each head find what those find that have the latent alone."""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from model import latent
from model.attention import Listed
from model.config import FP8
from model.config_attention import LatentConfig
from tests.model.harness import Golden, Harness

LITE = LatentConfig(q_rank=0, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128)


def _nothing(*args: Any) -> Any:
    raise AssertionError(args)


@pytest.mark.parametrize(("tp", "platform", "page_dtype"), [(1, "cuda", FP8), (4, "tpu", "")])
def test_prompts_of_several_chunks_end_alike(
    tp: int, platform: str, page_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = Golden("deepseek_v2")
    harness = Harness(recorded.checkpoint, tp, platform=platform, page_dtype=page_dtype)
    prompts = list(recorded.prompts.values())
    expected = harness.run(prompts, 1)
    monkeypatch.setattr(latent, "_is_expanded", lambda *_: True)
    harness = Harness(recorded.checkpoint, tp, platform=platform, page_dtype=page_dtype)
    found = harness.run(prompts, 1)
    for one, other in zip(expected, found, strict=True):
        np.testing.assert_allclose(one.logits, other.logits, atol=2e-4)
    # They were computed otherwise.
    longest = int(np.argmax([len(prompt) for prompt in prompts]))
    assert not np.array_equal(expected[longest].logits, found[longest].logits)


@pytest.mark.parametrize(
    ("tokens", "positions", "changes", "expanded"),
    [
        (8192, 8192, {}, True),
        (172, 8192, {}, True),
        (170, 8192, {}, False),  # as many operations either way
        (8192, 87_000, {}, True),
        (8192, 88_000, {}, False),  # more than a gibibyte
        (8192, 8192, {"rope_dim": 60}, False),
        (8192, 8192, {"value_dim": 120}, False),
        (8192, 8192, {"value_dim": 256}, False),
    ],
)
def test_each_head_has_its_own_where_that_takes_fewer_operations_and_fits(
    tokens: int, positions: int, changes: dict[str, int], expanded: bool
) -> None:
    sizes = replace(LITE, **changes)
    x = jnp.zeros((tokens, 2), jnp.bfloat16)
    assert latent._is_expanded(sizes, 16, x, Listed(positions, _nothing, _nothing)) is expanded
