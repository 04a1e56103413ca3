"""Drafts of a slot's next tokens, and how many of them are accepted.

A draft is what followed when the last few tokens were there before, in prompt or answer: prompt
lookup (Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding). It costs no second network.
What a request draws is a function of its seed, the token's index and the logits, so a draft is
accepted exactly when it is the token that is drawn there: the same tokens come as without drafts.
"""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Int32

from model.buckets import Drafting
from model.sampling import NOT_A_TOKEN

# In place of a token, behind those that a step drew for a slot.
REJECTED = NOT_A_TOKEN - 1  # there was a draft, and another token was drawn before it
NO_DRAFT = NOT_A_TOKEN - 2


def propose(
    how: Drafting, history: Int32[Array, "B C"], length: Int32[Array, " B"]
) -> tuple[Int32[Array, "B K"], Bool[Array, " B"]]:
    """What may follow the first `length` tokens of each row, and which rows have drafts at all.

    A match so close to the end that fewer than K tokens follow is taken to go on as it repeats.
    """
    capacity = history.shape[1]
    position = jnp.arange(capacity, dtype=jnp.int32)[None, :]
    last = (length - 1)[:, None]
    goes_on = position < last
    matched = jnp.zeros(history.shape, jnp.int32)
    for back in range(how.max_match):
        here = jnp.take_along_axis(history, jnp.maximum(last - back, 0), axis=1)
        there = jnp.roll(history, back, axis=1)  # at a position, the token that many before it
        goes_on &= (there == here) & (position >= back)
        matched += goes_on.astype(jnp.int32)
    score = jnp.where(matched >= how.min_match, matched * capacity + position, -1)
    found = jnp.argmax(score, axis=1).astype(jnp.int32)[:, None]
    ahead = jnp.arange(how.num_tokens, dtype=jnp.int32)[None, :]
    period = jnp.maximum(last - found, 1)
    drafts = jnp.take_along_axis(history, found + 1 + ahead % period, axis=1)
    return drafts, jnp.max(score, axis=1) >= 0


def num_drawn(
    drafts: Int32[Array, "B K"], made: Bool[Array, "B K"], drawn: Int32[Array, "B K+1"]
) -> Int32[Array, " B"]:
    """How many count of the tokens drawn behind the last one and behind each draft.

    made: which drafts there are. Behind an accepted draft one more token is drawn.
    """
    accepted = made & (drafts == drawn[:, :-1])
    return 1 + jnp.sum(jnp.cumprod(accepted.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)
