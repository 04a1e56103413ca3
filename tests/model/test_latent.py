"""Chunks that expand latents to keys and values per head give what chunks on latents give."""

from dataclasses import replace

import numpy as np
import pytest

from model import chunks, latent
from model.buckets import prefill_buckets
from model.config import FP8
from model.config_attention import LatentConfig
from model.pieces import Piece
from model.transformer import Model
from prefill.engine import PrefillEngine
from prefill.scheduler import Prompt
from tests.model.harness import GOLDENS, Golden, Harness, open_plainly

LITE = LatentConfig(q_rank=0, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128)


@pytest.mark.parametrize(("tp", "platform", "page_dtype"), [(1, "cuda", FP8), (4, "tpu", "")])
def test_prompts_of_several_chunks_end_alike(
    tp: int, platform: str, page_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = Golden("deepseek_v2")
    harness = Harness(recorded.checkpoint, tp, platform=platform, page_dtype=page_dtype)
    prompts = list(recorded.prompts.values())
    expected = harness.run(prompts, 1)
    monkeypatch.setattr(latent, "is_expanded", lambda *_: True)
    harness = Harness(recorded.checkpoint, tp, platform=platform, page_dtype=page_dtype)
    found = harness.run(prompts, 1)
    for one, other in zip(expected, found, strict=True):
        np.testing.assert_allclose(one.logits, other.logits, atol=2e-4)
    # The two really were computed in different ways.
    longest = int(np.argmax([len(prompt) for prompt in prompts]))
    assert not np.array_equal(expected[longest].logits, found[longest].logits)


@pytest.mark.parametrize(
    ("tokens", "positions", "changes", "expanded"),
    [
        (8192, 8192, {}, True),
        (683, 8192, {}, True),
        (682, 8192, {}, False),  # with four times the pages, as many operations either way
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
    assert latent.is_expanded(sizes, 16, 2, tokens, positions) is expanded


def _engine() -> PrefillEngine:
    """An engine with a latent pool, as on an accelerator."""
    opened = open_plainly(GOLDENS / "deepseek_v2" / "model", 16, 512, tp_size=2)
    cfg, mesh, stacks = opened.model.cfg, opened.model.mesh, opened.model.dims.stacks
    model = Model.create(cfg, mesh, "float32", 16, stacks=stacks, platform="tpu")
    buckets = replace(prefill_buckets(64, 2, 512, 16), tokens=(16,))
    return PrefillEngine(replace(opened, model=model), buckets, 0.0, 1024, 1)


def test_a_chunk_has_no_longer_a_list_of_pages_than_its_prompts_come_near(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ids = np.random.default_rng(3).integers(0, 256, 80).astype(np.int32)
    found = []
    for expanded in (False, True):
        for module in (latent, chunks):
            monkeypatch.setattr(module, "is_expanded", lambda *_, told=expanded: told)
        engine = _engine()
        prompts = [
            Prompt(room, ids, 0.0, pages=[*range(5 * room, 5 * room + 5)]) for room in (0, 1)
        ]
        told, lists = [], []
        for at in range(0, 80, 16):
            pieces = (Piece(prompts[0], at, 16),)
            lists.append(len(engine._chunks.pack([pieces]).arrays[4]))
            told.append(np.asarray(engine.run_chunk([pieces]).logits)[0])
        both = tuple(Piece(prompt, 64, 8) for prompt in prompts)
        lists.append(len(engine._chunks.pack([both]).arrays[4]))
        assert lists == ([3, 3, 3, 12, 12, 12] if expanded else [66] * 6)
        found.append(told)
    np.testing.assert_allclose(found[0], found[1], atol=2e-4)
