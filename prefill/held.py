"""What prefill knows of one room, and what its last chunk tells of it."""

from dataclasses import dataclass, field

import numpy as np

from model.chunks import FirstSample
from prefill.chunk_times import ChunkTimes
from prefill.scheduler import Prompt
from transfer import wire
from transfer.backend import Shipped
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
