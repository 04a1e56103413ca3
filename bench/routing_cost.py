"""What `kvferry bench routing` assumes: the prompts, when they come, and what a chunk costs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np

from model.buckets import PrefillBuckets, bucket_for, prefill_buckets

Lengths = Literal["skewed", "constant", "shared"]
LENGTHS: tuple[Lengths, ...] = get_args(Lengths)

RANKS = 4
PAGE_SIZE = 64
CONTEXT = 16384
CHUNK_TOKENS = 2048  # of one rank
MAX_SEQS = 8
MEAN_TOKENS = 3500
OUTPUT_TOKENS = 50
SKEW = 1.0  # standard deviation of the logarithm of a skewed length
NUM_PREFIXES = 16  # of shared prompts ...
PREFIX_TOKENS = 2048  # ... each as long as this
BUCKETS: PrefillBuckets = prefill_buckets(CHUNK_TOKENS, MAX_SEQS, CONTEXT, PAGE_SIZE)


@dataclass(frozen=True)
class ChunkCost:
    """Seconds of one call of the chunk program, which takes as long as its busiest rank needs.

    All ranks of a group run one program over one padded shape, so a rank with few tokens, or none,
    costs as much as the rank with the most. The figures are about those of Qwen3-30B-A3B on an
    H100.
    """

    call_s: float = 5e-3
    token_s: float = 50e-6  # of the padded length
    pair_s: float = 2e-9  # one token that attends to one other, in all layers

    def of(self, ranks: Sequence[tuple[int, int]]) -> float:
        """ranks: tokens and pairs of each; at least one has tokens."""
        padded = bucket_for(max(tokens for tokens, _ in ranks), BUCKETS.tokens)
        return self.call_s + self.token_s * padded + self.pair_s * max(pairs for _, pairs in ranks)


def pairs_of(start: int, num_tokens: int) -> int:
    """Pairs of tokens that attention weighs for `num_tokens` tokens of a prompt from `start` on."""
    return num_tokens * start + num_tokens * (num_tokens + 1) // 2


@dataclass(frozen=True)
class Arrival:
    """One prompt; apart from a shared prefix, its ids are its own."""

    at_s: float
    token_ids: np.ndarray  # i32[n]
    prefix_tokens: int  # shared with others


def plan_arrivals(lengths: Lengths, num: int, seed: int) -> list[Arrival]:
    """Poisson arrivals, one a second. The same seed gives the same prompts."""
    rng = np.random.default_rng(seed)
    at_s = np.cumsum(rng.exponential(1.0, num))
    shared = PREFIX_TOKENS if lengths == "shared" else 0
    prefixes = rng.integers(0, 1 << 30, (NUM_PREFIXES, shared), dtype=np.int32)
    arrivals = []
    for number, size in enumerate(_sizes(rng, lengths, num)):
        # Ids of its own, so that no page after a shared prefix equals another prompt's.
        own = np.full(size - shared, number, np.int32)
        ids = np.concatenate([prefixes[rng.integers(NUM_PREFIXES)], own])
        arrivals.append(Arrival(float(at_s[number]), ids, shared))
    return arrivals


def at_rate(arrivals: Sequence[Arrival], per_s: float) -> list[Arrival]:
    """The same prompts in the same order, at another rate; inf: all at once."""
    return [replace(arrival, at_s=arrival.at_s / per_s) for arrival in arrivals]


def _sizes(rng: np.random.Generator, lengths: Lengths, num: int) -> np.ndarray:
    """i64[num] tokens of the prompts, with a mean of MEAN_TOKENS."""
    if lengths == "constant":
        return np.full(num, MEAN_TOKENS)
    if lengths == "shared":
        return rng.integers(PREFIX_TOKENS + 1, 2 * MEAN_TOKENS - PREFIX_TOKENS, num)
    drawn = np.exp(SKEW * rng.standard_normal(num))
    for _ in range(8):  # each turn spreads what was cut off above over the other lengths
        drawn = np.clip(drawn * (MEAN_TOKENS / drawn.mean()), 16, CONTEXT - OUTPUT_TOKENS)
    return np.round(drawn).astype(np.int64)
