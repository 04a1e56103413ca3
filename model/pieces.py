"""Runs of prompts' tokens that are packed into chunks."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import numpy as np

from model.buckets import pages_for


@runtime_checkable
class ChunkPrompt(Protocol):
    """What a chunk needs of a prompt."""

    @property
    def token_ids(self) -> np.ndarray:
        """i32[n]."""
        ...

    @property
    def pages(self) -> Sequence[int]:
        """Pages of all its tokens, in order."""
        ...

    @property
    def num_tokens(self) -> int: ...

    @property
    def wants_logprobs(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Piece[Q: ChunkPrompt]:
    """A run of one prompt's tokens within a chunk."""

    prompt: Q
    start: int
    num_tokens: int

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

    @property
    def is_last(self) -> bool:
        return self.end == self.prompt.num_tokens


def tokens_of(left: int, tokens_left: int, chunk_tokens: int, shorter: int) -> int:
    """Tokens of a prompt that a chunk takes, the oldest prompts first; 0 where it has to wait.

    left: tokens left of the prompt. tokens_left: room left in the chunk. shorter: tokens of the
    prompts behind it that need no more than one chunk each. A prompt that needs more leaves them a
    quarter of the chunk, if they have so many: else they would wait for its last chunk.
    """
    if left > chunk_tokens:
        tokens_left = max(tokens_left - min(part_of_shorter(chunk_tokens), shorter), 0)
    return min(left, tokens_left)


def part_of_shorter(chunk_tokens: int) -> int:
    """Tokens of a chunk that a prompt of several chunks leaves to prompts that need only one."""
    return chunk_tokens // 4


def fill[P: Piece](pieces: list[P], tokens_left: int, pages_left: int, page_size: int) -> P | None:
    """Give a chunk's free room to the first piece whose prompt needs more; return its new piece.

    Shorter prompts may want less than was left to them: the chunk takes no more prompts, or a
    cache has what they begin with.
    """
    if not tokens_left:
        return None
    for at, piece in enumerate(pieces):
        if not piece.is_last:
            end = (pages_for(piece.end, page_size) + pages_left) * page_size
            more = min(tokens_left, end - piece.end, piece.prompt.num_tokens - piece.end)
            pieces[at] = replace(piece, num_tokens=piece.num_tokens + more)
            return pieces[at]
    return None
