"""How many tokens a chunk takes where padding costs as much as tokens do."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.buckets import bucket_for, chunk_sizes
from model.pieces import ChunkLimits, Piece, pack

SIZES = 32, 128, 512
CALL = 64  # tokens' time that a chunk takes beside its tokens


def limits(sizes: tuple[int, ...] = SIZES, seqs: int = 8) -> ChunkLimits:
    return ChunkLimits(512, seqs, 4096, 16, sizes)


@pytest.mark.parametrize(
    ("waiting", "tokens"),
    [
        (1, 512),  # one chunk of 32
        (33, 512),  # one chunk of 128
        (128, 512),
        (129, 128),  # 128 and 32 instead of 512
        (288, 128),
        (289, 512),
        (512, 512),
        (5000, 512),
    ],
)
def test_several_chunks_take_what_one_would_pad_too_much(waiting: int, tokens: int) -> None:
    assert limits().tokens_for(waiting) == tokens


@given(st.integers(1, 5000))
def test_where_padding_costs_little_a_chunk_takes_all_it_can(waiting: int) -> None:
    assert limits(()).tokens_for(waiting) == 512


@given(st.integers(16, 8192), st.data())
def test_several_chunks_never_take_longer_than_one(largest: int, data: st.DataObject) -> None:
    sizes = chunk_sizes(largest)
    waiting = data.draw(st.integers(1, largest))
    chosen = ChunkLimits(largest, 8, 4096, 16, sizes)
    spent, left = 0, waiting
    while left:
        tokens = min(chosen.tokens_for(left), left)
        spent += bucket_for(tokens, sizes) + CALL
        left -= tokens
    assert spent <= bucket_for(waiting, sizes) + CALL


@dataclass
class Prompt:
    num_tokens: int
    num_planned: int = 0
    token_ids: Any = None
    pages: Any = ()
    wants_logprobs: bool = False
    adapter: int = -1


def packed(lengths: list[int], chosen: ChunkLimits) -> list[list[int]]:
    """The pieces of each chunk until all prompts are computed."""
    prompts = [Prompt(length, token_ids=np.zeros(length, np.int32)) for length in lengths]
    chunks = []

    def planned(piece: Piece[Prompt]) -> None:
        piece.prompt.num_planned = piece.end

    while waiting := [p for p in prompts if p.num_planned < p.num_tokens]:
        short = [p.num_tokens - p.num_planned for p in waiting]
        pieces = pack(waiting, short, chosen, lambda *_: True, planned)
        chunks.append([piece.num_tokens for piece in pieces])
    return chunks


def test_prompts_are_cut_where_chunks_end() -> None:
    assert packed([200], limits()) == [[128], [72]]
    assert packed([200], limits(())) == [[200]]
    assert packed([100, 60, 10], limits()) == [[100, 28], [32, 10]]
    assert packed([300, 300], limits()) == [[300, 212], [88]]
