"""Runs of prompts' tokens, and how they are packed into chunks."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol, runtime_checkable

import numpy as np

from model.buckets import bucket_for, pages_for

NO_ADAPTER: Final = -1  # the place of an adapter, of a prompt or a slot that has none
_CALL_TOKENS = 64  # as many take the time that a chunk takes beside its tokens, or less


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

    @property
    def adapter(self) -> int:
        """The place of the model's adapter that it has, or NO_ADAPTER: see model/adapted.py."""
        ...


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


class PackedPrompt(ChunkPrompt, Protocol):
    """A prompt that goes into chunks piece by piece."""

    @property
    def num_planned(self) -> int:
        """Tokens that are computed, cached or in a chunk that was dispatched."""
        ...


@dataclass(frozen=True, slots=True)
class ChunkLimits:
    """What one chunk of one rank takes at most.

    sizes: ascending lengths to which a chunk is padded, where padding costs as much as tokens do.
    """

    tokens: int
    seqs: int  # prompts
    pages: int  # of context, tokens of this chunk included
    page_size: int
    sizes: tuple[int, ...] = ()

    def tokens_for(self, waiting: int) -> int:
        """Tokens that the next chunk may have, when so many wait.

        A shorter size where several chunks of it, and what is left, take less time than one that
        has them all: 129 tokens would be padded to 512.
        """
        at = bisect_left(self.sizes, waiting)
        if not 0 < at < len(self.sizes):
            return self.tokens
        shorter = self.sizes[at - 1]
        whole, rest = divmod(waiting, shorter)
        several = whole * (shorter + _CALL_TOKENS)
        if rest:
            several += bucket_for(rest, self.sizes) + _CALL_TOKENS
        return shorter if several < self.sizes[at] + _CALL_TOKENS else self.tokens

    @property
    def part_of_shorter(self) -> int:
        """Tokens that a prompt of several chunks leaves to prompts that need only one."""
        return self.tokens // 4

    def tokens_of(self, left: int, tokens_left: int, shorter: int) -> int:
        """Tokens of a prompt that a chunk takes; 0 if the prompt has to wait for a later one.

        left: tokens left of the prompt. tokens_left: room left in the chunk. shorter: tokens of
        the prompts behind it that need no more than one chunk each. A prompt that needs more
        leaves them a quarter of the chunk, if they have so many: else they would wait for its last
        chunk.
        """
        if left > self.tokens:
            tokens_left = max(tokens_left - min(self.part_of_shorter, shorter), 0)
        return min(left, tokens_left)


def pack[Q: PackedPrompt](
    prompts: Sequence[Q],
    short: Sequence[int],
    limits: ChunkLimits,
    begin: Callable[[Q, int, int], bool],
    planned: Callable[[Piece[Q]], None],
) -> tuple[Piece[Q], ...]:
    """Pack one chunk: the prompts in their order, until a limit is reached.

    short: for each prompt the tokens left of it, if one chunk would do; else 0.
    begin: called with each prompt that is reached, and with the `tokens_left` and `shorter` of
    `tokens_of`; false if the prompt has to wait. planned: called with each piece, and again with a
    piece that got more tokens in the end.
    """
    pieces: list[Piece[Q]] = []
    waiting = sum(prompt.num_tokens - prompt.num_planned for prompt in prompts)
    tokens_left, pages_left = limits.tokens_for(waiting), limits.pages
    shorter = sum(short)  # tokens of the short prompts not reached yet
    for prompt, own in zip(prompts, short, strict=True):
        if not tokens_left or len(pieces) == limits.seqs:
            break
        shorter -= own
        if not begin(prompt, tokens_left, shorter):
            continue
        left = prompt.num_tokens - prompt.num_planned
        num_tokens = limits.tokens_of(left, tokens_left, shorter)
        if not num_tokens:
            continue
        num_pages = pages_for(prompt.num_planned + num_tokens, limits.page_size)
        if num_pages > pages_left:
            break
        piece = Piece(prompt, prompt.num_planned, num_tokens)
        pieces.append(piece)
        planned(piece)
        tokens_left -= num_tokens
        pages_left -= num_pages
    longer = _fill(pieces, tokens_left, pages_left, limits.page_size)
    if longer is not None:
        planned(longer)
    return tuple(pieces)


def _fill[P: Piece](pieces: list[P], tokens_left: int, pages_left: int, page_size: int) -> P | None:
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
