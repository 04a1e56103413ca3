"""Prompts that decode computes itself: seated, waiting for chunks. Pure.

Each rank packs its prompts into a chunk in the order in which they were seated, until the chunk's
tokens, rows or context pages are used up. A longer prompt goes on in the next chunk, and leaves
part of each to shorter ones.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from decode.admission import Admission, Seat
from model.buckets import PrefillBuckets, pages_for, prefill_buckets
from model.pieces import NO_ADAPTER, ChunkLimits, Piece, pack
from transfer.prefix_cache import Sharing

MAX_SEQS = 8  # prompts of one chunk and rank


@dataclass(slots=True)
class LocalPrompt:
    """One prompt in the pages of its seat."""

    seat: Seat
    sharing: Sharing
    wants_logprobs: bool = False
    adapter: int = NO_ADAPTER
    num_planned: int = 0  # tokens cached, computed or in a chunk that was dispatched

    @property
    def room(self) -> int:
        return self.seat.room

    @property
    def rank(self) -> int:
        return self.seat.rank

    @property
    def token_ids(self) -> np.ndarray:
        return self.sharing.token_ids

    @property
    def num_tokens(self) -> int:
        return self.seat.num_tokens

    @property
    def num_cached(self) -> int:
        """Tokens that were in the prefix cache."""
        return self.seat.num_cached

    @property
    def num_left(self) -> int:
        """Tokens that are in no chunk yet."""
        return self.num_tokens - self.num_planned

    @property
    def pages(self) -> Sequence[int]:
        return self.seat.pages


def local_buckets(
    local_tokens: int, chunk_tokens: int, page_size: int, padding_costs: bool = False
) -> PrefillBuckets:
    """Shapes of chunks for prompts of up to local_tokens tokens, chunk_tokens at once.

    padding_costs: see PrefillBuckets.
    """
    whole = pages_for(local_tokens, page_size) * page_size
    most = min(chunk_tokens, whole)
    return prefill_buckets(most, MAX_SEQS, whole, page_size, padding_costs=padding_costs)


class LocalQueue:
    """The prompts that wait for chunks, by rank."""

    def __init__(
        self,
        admission: Admission,
        chunk_tokens: int,
        chunk_pages: int,
        sizes: tuple[int, ...] = (),
    ) -> None:
        """chunk_tokens, chunk_pages: limits of one rank's chunk; the pages hold a whole prompt.

        sizes: see ChunkLimits; of several ranks none can choose the length alone.
        """
        self._admission = admission
        self._waiting: list[deque[LocalPrompt]] = [deque() for _ in admission.caches]
        own = sizes if len(self._waiting) == 1 else ()
        self._limits = ChunkLimits(chunk_tokens, MAX_SEQS, chunk_pages, admission.page_size, own)

    def add(self, prompt: LocalPrompt) -> None:
        """Queue a prompt."""
        self._waiting[prompt.rank].append(prompt)

    def remove(self, room: int) -> None:
        """The room is over. Rooms that do not wait here are ignored."""
        for rank, waiting in enumerate(self._waiting):
            self._waiting[rank] = deque(prompt for prompt in waiting if prompt.room != room)

    def plan(self) -> list[Sequence[Piece[LocalPrompt]]]:
        """The next chunk, by rank; its tokens count as planned at once."""
        return [self._take(waiting) for waiting in self._waiting]

    def left(self, rank: int) -> tuple[int, int]:
        """Prompts that wait on a rank, and their tokens that are in no chunk yet."""
        waiting = self._waiting[rank]
        return len(waiting), sum(prompt.num_left for prompt in waiting)

    def _take(self, waiting: deque[LocalPrompt]) -> Sequence[Piece[LocalPrompt]]:
        most = self._limits.tokens
        short = [x.num_left if x.num_left <= most else 0 for x in waiting]
        return pack(tuple(waiting), short, self._limits, self._begin, self._planned)

    def _begin(self, prompt: LocalPrompt, tokens_left: int, shorter: int) -> bool:
        if prompt.num_planned <= prompt.seat.num_cached:
            # None of it is computed yet, and others may have computed its beginning by now.
            self._admission.share(prompt.seat)
            prompt.num_planned = prompt.seat.num_cached
        return True

    def _planned(self, piece: Piece[LocalPrompt]) -> None:
        piece.prompt.num_planned = piece.end
        if piece.is_last:
            self._waiting[piece.prompt.rank].remove(piece.prompt)
        self._admission.filled(piece.prompt.seat, piece.end)

    def __len__(self) -> int:
        return sum(map(len, self._waiting))
