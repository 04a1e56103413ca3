"""Logprobs of one prompt, collected chunk by chunk and sent whole."""

from collections.abc import Sequence

import numpy as np

from model.pieces import ChunkPrompt, Piece
from transfer import wire


class CollectedLogprobs:
    """Logprobs of the positions from `start` on that belong to the prompt itself."""

    def __init__(self, start: int, num_prompt_tokens: int) -> None:
        """num_prompt_tokens: without tokens of earlier attempts, which the client already has."""
        self._start = max(start, 1)  # nothing precedes the first token
        self._num_prompt_tokens = num_prompt_tokens
        self._parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []

    def add(self, piece: Piece[ChunkPrompt], token_row: int, arrays: Sequence[np.ndarray]) -> None:
        """Take a piece's part of a chunk.

        token_row: row of the piece's first token. arrays: logprobs f32[T], top ids i32[T, 20] and
        top logprobs f32[T, 20] of the whole chunk.
        """
        # Row r is about the token after it: position piece.start + r + 1.
        skip = max(self._start - (piece.start + 1), 0)
        last = min(piece.end, self._num_prompt_tokens - 1) - piece.start
        if skip < last:
            rows = slice(token_row + skip, token_row + last)
            logprobs, top_ids, tops = (array[rows] for array in arrays)
            self._parts.append((logprobs, top_ids, tops))

    def told(self, token_ids: np.ndarray) -> wire.PromptLogprobs:
        """All logprobs, once the last piece was added. token_ids: i32[n], of the prompt."""
        ids = token_ids[self._start : self._num_prompt_tokens]
        if not self._parts:
            return wire.PromptLogprobs(self._start, wire.pack_i32(ids[:0]), b"", b"", b"")
        logprobs, top_ids, tops = (np.concatenate(part) for part in zip(*self._parts, strict=True))
        assert len(ids) == len(logprobs), (len(ids), len(logprobs))
        return wire.PromptLogprobs(
            self._start,
            wire.pack_i32(ids),
            wire.pack_f32(logprobs),
            wire.pack_i32(top_ids),
            wire.pack_f32(tops),
        )
