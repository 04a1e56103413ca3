"""Prompts that decode computes itself: seated, waiting for a chunk. Pure.

A chunk takes whole prompts, in the order in which they were seated, one packed chunk a rank.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from model.buckets import PrefillBuckets, pages_for, prefill_buckets
from model.pieces import Piece

MAX_SEQS = 8  # prompts of one chunk and rank


@dataclass(frozen=True, slots=True)
class LocalPrompt:
    """One prompt in its reserved pages."""

    room: int
    rank: int
    token_ids: np.ndarray  # i32[n]
    pages: list[int]

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def wants_logprobs(self) -> bool:
        return False  # those go to prefill


class LocalPiece(Piece[LocalPrompt]):
    """The whole of one prompt within a chunk."""

    __slots__ = ()


def local_buckets(local_tokens: int, page_size: int) -> PrefillBuckets:
    """Shapes of chunks that hold any prompt of up to local_tokens tokens."""
    whole = pages_for(local_tokens, page_size) * page_size
    return prefill_buckets(whole, MAX_SEQS, whole, page_size)


class LocalQueue:
    """Who waits for a chunk, by rank."""

    def __init__(self, dp_size: int, most_tokens: int) -> None:
        """most_tokens: of one chunk and rank."""
        self._waiting: list[deque[LocalPrompt]] = [deque() for _ in range(dp_size)]
        self._most_tokens = most_tokens

    def add(self, prompt: LocalPrompt) -> None:
        """Queue a prompt that fits a chunk."""
        assert prompt.num_tokens <= self._most_tokens, f"{prompt.num_tokens} tokens"
        self._waiting[prompt.rank].append(prompt)

    def remove(self, room: int) -> None:
        """The room is over. Rooms that do not wait here are ignored."""
        for rank, waiting in enumerate(self._waiting):
            self._waiting[rank] = deque(prompt for prompt in waiting if prompt.room != room)

    def plan(self) -> list[Sequence[LocalPiece]]:
        """The next chunk, by rank; those in it wait no more."""
        return [self._take(waiting) for waiting in self._waiting]

    def _take(self, waiting: deque[LocalPrompt]) -> Sequence[LocalPiece]:
        pieces: list[LocalPiece] = []
        tokens_left = self._most_tokens
        while waiting and len(pieces) < MAX_SEQS and waiting[0].num_tokens <= tokens_left:
            prompt = waiting.popleft()
            tokens_left -= prompt.num_tokens
            pieces.append(LocalPiece(prompt, 0, prompt.num_tokens))
        return pieces

    def __len__(self) -> int:
        return sum(map(len, self._waiting))
