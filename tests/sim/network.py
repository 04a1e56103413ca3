"""A network that can be computed by hand: a position's kv depends on every token up to there.

The kv of a position holds a running hash of all tokens so far, so any reader notices a page with
wrong contents or in the wrong place; the next token follows from the last hash.
"""

from collections.abc import Sequence

import numpy as np

from model.buckets import mask_words
from model.pieces import NO_ADAPTER
from model.sampling import NOT_A_TOKEN
from transfer.stops import finish_of
from transfer.wire import SamplingParams

ADAPTERS = ("sql",)
START = 17
VOCAB = 40
FIRST_ID = 3
SEEDS = 100  # below are those of requests whose logits are always finite
_MODULUS = 1_000_003  # below 2**24: exact in f32


def start_of(adapter: int) -> int:
    """The hash before the first token. adapter: its place, or NO_ADAPTER."""
    return START + 1 + adapter


def extend(state: int, token_id: int) -> int:
    """The hash after one more token."""
    return (state * 31 + token_id + 1) % _MODULUS


def chain(token_ids: Sequence[int], state: int = START) -> list[int]:
    """The hash at each position. state: before the first."""
    states = []
    for token_id in token_ids:
        state = extend(state, token_id)
        states.append(state)
    return states


def draw(state: int, token_idx: int, seed: int, mask: np.ndarray | None = None) -> int:
    """The token after `state`: a function of seed, token index, logits and the allowed tokens."""
    breaks_at, own = divmod(seed, SEEDS)
    if breaks_at == token_idx + 1:
        return NOT_A_TOKEN
    span = VOCAB - FIRST_ID
    best = (state * 7 + token_idx * 131 + own * 7919) % span
    order = (FIRST_ID + (best + step) % span for step in range(span))
    return next(t for t in order if mask is None or mask[t // 32] >> np.uint32(t % 32) & 1)


def breaking(seed: int, token_idx: int) -> int:
    """The seed that draws the same, but finds no finite logits at this token."""
    return seed + SEEDS * (token_idx + 1)


def may_follow(grammar: str, token_ids: Sequence[int]) -> np.ndarray:
    """u32[2]: a third of the vocabulary, chosen by the tokens so far and the grammar's number."""
    rest = (sum(token_ids) + int(grammar)) % 3
    bits = np.arange(mask_words(VOCAB) * 32) % 3 == rest
    return np.packbits(bits, bitorder="little").view(np.uint32)


def expected_tokens(
    prompt_ids: Sequence[int], params: SamplingParams, adapter: str = ""
) -> list[int]:
    """What an undisturbed request generates, to its stop id or length, or until it breaks."""
    place = ADAPTERS.index(adapter) if adapter else NO_ADAPTER
    state = chain(prompt_ids, start_of(place))[-1]
    tokens: list[int] = []
    grammar = params.grammar if params.grammar.isdigit() else ""
    while not tokens or not finish_of(tokens[-1], len(tokens) - 1, params):
        mask = may_follow(grammar, tokens) if grammar else None
        token_id = draw(state, len(tokens), params.seed, mask)
        if token_id == NOT_A_TOKEN:
            break
        tokens.append(token_id)
        state = extend(state, token_id)
    return tokens


def kv_of(
    states: Sequence[int], start: int, num_logical: int, num_stored: int, group: int = 0
) -> np.ndarray:
    """The kv of consecutive positions: f32[2, tokens, stored heads].

    Keys hold the hash, values the position, the logical head and the group of layers, so that each
    axis can be checked.
    """
    logical = np.arange(num_stored) * num_logical // num_stored
    positions = np.arange(start, start + len(states))
    keys = np.repeat(np.array(states, np.float32)[:, None], num_stored, axis=1)
    values = (positions[:, None] * num_logical + logical).astype(np.float32) + group / 2
    return np.stack([keys, values])
