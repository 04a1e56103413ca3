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
    capacity, most = history.shape[1], how.max_match
    position = jnp.arange(capacity, dtype=jnp.int32)[None, :]
    back = jnp.arange(most, dtype=jnp.int32)[None, :]
    last = (length - 1)[:, None]
    # With room in front, what stands so many tokens before each position is a slice: XLA on CPU
    # takes twice as long to roll it.
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
    """How many count of the tokens drawn behind the last one and behind each draft.

    made: which drafts there are. Behind an accepted draft one more token is drawn.
    """
    accepted = made & (drafts == drawn[:, :-1])
    return 1 + jnp.sum(jnp.cumprod(accepted.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)
