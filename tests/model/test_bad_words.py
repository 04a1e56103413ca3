"""Sequences of tokens that no output may have, against a plain model of the rule."""

from dataclasses import dataclass

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model import sampling
from model.buckets import mask_words
from model.sampling import BAD_WORD_TOKENS, NOTHING_LEFT, NUM_BAD_WORDS
from transfer.wire import SamplingParams

VOCAB = 5  # so small that sequences often meet
HISTORY = 40
ROWS = 4


@dataclass(frozen=True)
class Told:
    """A request and its tokens so far; `mask`: what else may be drawn, None: anything."""

    words: tuple[tuple[int, ...], ...]
    prompt: tuple[int, ...]
    output: tuple[int, ...]
    mask: frozenset[int] | None = None


def forbidden(told: Told) -> set[int]:
    """The tokens that would make the output end with one of the sequences."""
    return {
        token
        for token in range(VOCAB)
        for word in told.words
        if (*told.output, token)[-len(word) :] == word
    }


@jax.jit
def _draw(logits, rows, ids, prompt_len, length, masks, bad_words):
    history, idx = (ids, prompt_len, length), length - prompt_len
    return sampling.sample(logits, rows, lambda: history, idx, lambda: masks, lambda: bad_words).ids


def draw(logits: np.ndarray, requests: list[Told]) -> list[int]:
    rows, tables = sampling.empty_rows(ROWS), sampling.no_bad_words(ROWS)
    ids = np.full((ROWS, HISTORY), 3, np.int32)  # 3: garbage that must not count
    lengths = np.zeros((2, ROWS), np.int32)
    masks = np.zeros((ROWS, mask_words(VOCAB)), np.uint32)
    for row, told in enumerate(requests):
        masked = "form" if told.mask is not None else ""
        params = SamplingParams(
            max_new_tokens=9, temperature=0.0, grammar=masked, bad_words=told.words
        )
        sampling.set_row(rows, row, params)
        sampling.set_bad_words(tables[row], params)
        tokens = told.prompt + told.output
        ids[row, : len(tokens)] = tokens
        lengths[:, row] = len(told.prompt), len(tokens)
        masks[row] = sum(1 << token for token in told.mask or ())
    return np.asarray(_draw(logits, rows, ids, *lengths, masks, tables)).tolist()


tokens = st.integers(0, VOCAB - 1)
requests = st.builds(
    Told,
    st.lists(st.lists(tokens, min_size=1, max_size=4).map(tuple), max_size=9).map(tuple),
    st.lists(tokens, min_size=1, max_size=6).map(tuple),
    st.lists(tokens, max_size=6).map(tuple),
    st.none() | st.frozensets(tokens, min_size=1),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(requests, min_size=1, max_size=ROWS), st.integers(0, 2**31 - 1))
def test_the_best_token_that_completes_no_sequence_is_drawn(asked: list[Told], seed: int) -> None:
    logits = np.random.default_rng(seed).normal(size=(ROWS, VOCAB)).astype(np.float32)
    for row, drawn in enumerate(draw(logits, asked)[: len(asked)]):
        left = (asked[row].mask or frozenset(range(VOCAB))) - forbidden(asked[row])
        assert drawn == max(left, key=lambda t: logits[row, t], default=NOTHING_LEFT)


def test_a_table_may_be_full() -> None:
    logits = np.zeros((ROWS, VOCAB), np.float32)
    logits[:, 1], logits[:, 2] = 2, 1
    begin = tuple(i % VOCAB for i in range(BAD_WORD_TOKENS - 1))
    others = [(0, *(4,) * (at % 14), at % VOCAB) for at in range(NUM_BAD_WORDS - 1)]
    words = (*others, (*begin, 1))
    for output, drawn in ((begin, 2), (begin[1:], 1), ((2, *begin), 2)):
        (found, *_) = draw(logits, [Told(words, (0, 0), output)])
        assert found == drawn


@pytest.mark.parametrize("words", [((1,),) * (NUM_BAD_WORDS + 1), ((1,) * (BAD_WORD_TOKENS + 1),)])
def test_more_than_a_table_holds_is_refused(words: tuple[tuple[int, ...], ...]) -> None:
    params = SamplingParams(max_new_tokens=1, bad_words=words)
    with pytest.raises(ValueError, match="at most 128 bad words of 16 tokens, got"):
        sampling.set_bad_words(sampling.no_bad_words(1)[0], params)
