"""Drafts of a slot's next tokens, and how many of them are accepted.

A draft is what followed the last few tokens where they occurred before, in prompt or answer: prompt
lookup (Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding). It needs no second network.
What a request draws is a function of its seed, the token's index and the logits, so a draft is
accepted exactly when it is the token drawn at its place: the tokens are the same as without drafts.
"""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Int32

from model.buckets import Drafting
from model.sampling import NOTHING_LEFT

# In place of tokens, behind those that a step drew for a slot.
REJECTED = NOTHING_LEFT - 1  # there was a draft, but it or one before it was not what was drawn
NO_DRAFT = NOTHING_LEFT - 2


def propose(
    how: Drafting, history: Int32[Array, "B C"], length: Int32[Array, " B"]
) -> tuple[Int32[Array, "B K"], Bool[Array, " B"]]:
    """What may follow the first `length` tokens of each row, and which rows have drafts at all.

    Where a match is so close to the end that fewer than K tokens follow it, these are repeated.
    """
    capacity, most = history.shape[1], how.max_match
    position = jnp.arange(capacity, dtype=jnp.int32)[None, :]
    back = jnp.arange(most, dtype=jnp.int32)[None, :]
    last = (length - 1)[:, None]
    # With padding in front, the tokens `at` places before each position are a slice: XLA on CPU
    # takes twice as long for a roll.
    padded = jnp.pad(history, ((0, 0), (most, 0)))
    tail = jnp.take_along_axis(padded, most + last - back, axis=1)  # last token first
    goes_on = position < last
    matched = jnp.zeros(history.shape, jnp.int32)
    for at in range(most):
        there = padded[:, most - at : most - at + capacity]
        goes_on &= (there == tail[:, at : at + 1]) & (position >= at)
        matched += goes_on.astype(jnp.int32)
    score = jnp.where(matched >= how.min_match, matched * capacity + position, -1)
    best = jnp.max(score, axis=1)
    found = (jnp.maximum(best, 0) % capacity)[:, None]
    ahead = jnp.arange(how.num_tokens, dtype=jnp.int32)[None, :]
    period = jnp.maximum(last - found, 1)
    return jnp.take_along_axis(history, found + 1 + ahead % period, axis=1), best >= 0


def num_drawn(
    drafts: Int32[Array, "B K"], made: Bool[Array, "B K"], drawn: Int32[Array, "B K+1"]
) -> Int32[Array, " B"]:
    """How many tokens count, of those drawn behind the last token and behind each draft.

    made: which drafts there are. Each accepted draft lets one more token count.
    """
    accepted = made & (drafts == drawn[:, :-1])
    return 1 + jnp.sum(jnp.cumprod(accepted.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)
