"""Runs of prompts' tokens that are packed into chunks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np


@runtime_checkable
class ChunkPrompt(Protocol):
    """What a chunk needs of a prompt."""

    @property
    def token_ids(self) -> np.ndarray:
        """i32[n]."""
        ...

    @property
    def pages(self) -> Sequence[int]:
        """Of all its tokens, in order."""
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
