"""What prefill knows of one room, and what its last chunk tells of it."""

from dataclasses import dataclass, field

import numpy as np

from model.sampling import SampleOut
from prefill.chunk_times import ChunkTimes
from prefill.engine import FirstSample
from prefill.scheduler import Prompt
from transfer import wire
from transfer.backend import Shipped
from transfer.emit import Rows
from transfer.role import HeldRoom


@dataclass(slots=True)
class Held(HeldRoom):
    """What prefill knows of one room."""

    prompt: Prompt
    grant: wire.Grant | None = None
    shipped_pages: int = 0
    chunks: list[ChunkTimes] = field(default_factory=list)
    shipped: Shipped | None = None
    logprobs: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = field(default_factory=list)


def first_sample(held: Held, row: int) -> FirstSample:
    """How to draw its first token. row: of its last piece in the chunk."""
    submit = held.submit
    return FirstSample(row, submit.sampling, held.prompt.token_ids, submit.num_prompt_tokens)


def first_rows(rows: list[tuple[int, Held, int]], out: SampleOut) -> Rows:
    """Pack first tokens. rows: (row of the chunk, its room, finish)."""
    at = np.array([row for row, _, _ in rows], np.int32)
    wants = np.array([held.submit.sampling.num_top_logprobs for _, held, _ in rows], np.int32)
    packed = Rows(
        rooms=np.array([held.submit.room for _, held, _ in rows], np.int64),
        token_ids=out.ids[at],
        token_idx=np.array([held.submit.num_generated for _, held, _ in rows], np.int32),
        finish=np.array([finish for _, _, finish in rows], np.uint8),
    )
    if (wants >= 0).any():
        packed.logprobs = out.logprobs[at]
    if (wants > 0).any():
        packed.top_rows = np.flatnonzero(wants > 0).astype(np.int32)
        packed.top_ids = out.top_ids[at][packed.top_rows]
        packed.top_logprobs = out.top_logprobs[at][packed.top_rows]
    return packed


def joined_logprobs(held: Held) -> wire.PromptLogprobs | None:
    """Of the whole prompt, once its last chunk is there; None when nobody asked."""
    if not held.prompt.wants_logprobs:
        return None
    start = max(held.prompt.logprobs_start, 1)
    ids = held.prompt.token_ids[start : held.submit.num_prompt_tokens]
    if not held.logprobs:
        return wire.PromptLogprobs(start, wire.pack_i32(ids[:0]), b"", b"", b"")
    logprobs, top_ids, tops = (np.concatenate(parts) for parts in zip(*held.logprobs, strict=True))
    assert len(ids) == len(logprobs), (len(ids), len(logprobs))
    return wire.PromptLogprobs(
        start,
        wire.pack_i32(ids),
        wire.pack_f32(logprobs),
        wire.pack_i32(top_ids),
        wire.pack_f32(tops),
    )
