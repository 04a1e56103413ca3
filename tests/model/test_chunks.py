"""What may be asked of a chunk: separate programs give the same as one program for everything."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from model.buckets import prefill_buckets
from model.chunks import FirstSample
from model.pieces import Piece
from model.sampling import Asks
from prefill.engine import PrefillEngine
from prefill.scheduler import Prompt
from tests.model.harness import GOLDENS, open_plainly
from transfer.wire import SamplingParams

GREEDY = SamplingParams(max_new_tokens=4, temperature=0.0)
DRAWN = msgspec.structs.replace(GREEDY, temperature=1.0, seed=7)
FILTERED = msgspec.structs.replace(DRAWN, top_k=40, top_p=0.9)
TOLD = msgspec.structs.replace(DRAWN, num_top_logprobs=3)
WORDLESS = msgspec.structs.replace(GREEDY, bad_words=tuple((i,) for i in range(0, 256, 2)))
EDITED = msgspec.structs.replace(FILTERED, repetition_penalty=1.3)
ASKED = (
    (GREEDY,),
    (GREEDY, DRAWN),
    (FILTERED, GREEDY),
    (TOLD, DRAWN),
    (EDITED,),
    (WORDLESS, DRAWN),
)


def _engine(dp_size: int, apart: bool) -> PrefillEngine:
    path = GOLDENS / "qwen3_moe" / "model"
    opened = open_plainly(path, 16, 128, tp_size=2, dp_size=dp_size)
    buckets = replace(prefill_buckets(64, 2, 128, 16), tokens=(64,))
    return PrefillEngine(opened, buckets, 0.0, 256, 1, apart)


@pytest.mark.parametrize("dp_size", [1, 2])
def test_what_is_asked_of_a_chunk_apart_is_what_one_program_says(dp_size: int) -> None:
    """As on accelerators, where only the program that serves every request has a predicate."""
    ids = np.random.default_rng(3).integers(0, 256, (2, 40)).astype(np.int32)
    found, kinds = [], list[list[str]]()
    for apart in (False, True):
        engine = _engine(dp_size, apart)
        told, names = [], []
        for asked in ASKED:
            for wants in (False, True):
                prompts = [
                    Prompt(room, ids[room], 0.0, pages=[3 * room + n for n in range(3)])
                    for room in range(len(asked))
                ]
                for prompt in prompts:
                    prompt.logprobs_start = 0 if wants else -1
                pieces = tuple(Piece(prompt, 0, 24 + prompt.room) for prompt in prompts)
                chunk = engine.run_chunk([()] * (dp_size - 1) + [pieces])
                assert (chunk.prompt_logprobs is not None) is wants
                firsts = [
                    FirstSample(placed.row, params, placed.piece.prompt.token_ids, 24)
                    for placed, params in zip(chunk.pieces, asked, strict=True)
                ]
                kind, _ = engine._chunks.pack_firsts(firsts)
                names.append(engine._chunks._sample[kind].name)
                drawn = engine.sample_first(firsts)
                if asked[0] is WORDLESS:
                    assert int(drawn.ids[chunk.pieces[0].row]) % 2
                told.append((chunk.logits, chunk.prompt_logprobs or (), drawn))
        found.append(told)
        kinds.append(names)
    for (logits, asked_, drawn), (others, same, again) in zip(*found, strict=True):
        np.testing.assert_array_equal(logits, others)
        for one, other in zip((*asked_, *drawn), (*same, *again), strict=True):
            np.testing.assert_array_equal(one, other)
    whole = ["sample[anything, history=1]"] * 8 + ["sample[anything, history=128]"] * 4
    assert kinds[0] == whole
    least = [f"sample[{asks.name.lower()}, history=1]" for asks in list(Asks)[:3] for _ in range(2)]
    assert kinds[1] == [*least, *whole[6:]]


def test_only_the_draw_of_anything_has_a_predicate_apart() -> None:
    chunks = _engine(1, apart=True)._chunks
    programs = [*chunks._chunk.values(), *chunks._logprobs.values(), *chunks._sample]
    have = {p.name for p in programs if " conditional(" in str(p.compiled.as_text())}
    assert have == {"sample[anything, history=1]", "sample[anything, history=128]"}
    # Memory is planned for what outlives a chunk's program.
    assert chunks.hidden_bytes == 64 * chunks._model.cfg.hidden_size * 4
