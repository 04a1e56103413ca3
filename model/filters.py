"""Top-k, top-p and min-p: of each row's scaled logits, the least that a draw may still take.

It is found without a sort, which takes XLA several times as long, and without making the host wait:
by a bisection over the bits of a float, in which each turn reads all values once and tests several
pivots.
"""

from collections.abc import Callable, Sequence
from functools import partial

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

# On a CPU one pivot a turn is the least to compute. On a GPU launches and reads count: for seven
# pivots XLA still makes one kernel, which reads the values once; for fifteen it makes two.
BITS_ON_CPU = 1
BITS = 3

# On a GPU a row is summed in pieces, and then the sums of pieces are added, so that many threads
# share a row. The longer the pieces, the less threads exchange; but with fewer than about a
# thousand pieces in all, XLA writes the comparisons of each pivot to memory, by a kernel with more
# threads. So the masses of a row may be rounded differently in a batch of another size, as its
# logits are anyway.
PIECE, SHORT_PIECE = 512, 128
MANY_VALUES = 1 << 19

SIGN = np.uint32(1 << 31)
NAN = np.uint32(0xFFFFFFFF)
LOWEST = np.uint32(0x007FFFFF)  # the key of -inf; below it are those of negative NaNs

Pivots = Sequence[Float[Array, " B"]]
Enough = Callable[[Pivots], Sequence[Bool[Array, " B"]]]


def least_kept(
    scaled: Float[Array, "B V"],
    top_k: Int[Array, " B"],
    top_p: Float[Array, " B"],
    min_p: Float[Array, " B"],
    tests: bool,
    on_cpu: bool,
) -> Float[Array, " B"]:
    """What entries must reach to be within top-k, then top-p of what is left, then min-p.

    top_k, top_p, min_p: see SamplingRows. tests: whether to test first if any row asks for each.
    on_cpu: whether to use the form for a CPU.
    """
    best = jnp.max(scaled, axis=-1)  # no filter removes it
    bits = BITS_ON_CPU if on_cpu else BITS
    values = scaled if on_cpu else _in_pieces(scaled)
    least = jnp.full_like(best, -jnp.inf)
    for asked, kept in (
        (top_k > 0, partial(_top_k, values, top_k, bits)),
        (top_p < 1.0, partial(_top_p, values, top_p, bits, best)),
    ):
        narrowed = partial(kept, least)
        least = lax.cond(jnp.any(asked), narrowed, lambda x=least: x) if tests else narrowed()
    return jnp.maximum(least, best + jnp.log(min_p))  # log 0 = -inf keeps all


def _top_k(values: Array, top_k: Array, bits: int, least: Array) -> Array:
    def enough(pivots: Pivots) -> list[Array]:
        above = [(values >= _beside(pivot, values)).astype(jnp.int32) for pivot in pivots]
        return [count >= top_k for count in _sums(above)]

    return jnp.where(top_k > 0, threshold(enough, len(top_k), bits), least)


def _top_p(values: Array, top_p: Array, bits: int, best: Array, least: Array) -> Array:
    def weigh() -> Array:
        return jnp.exp(values - _beside(best, values))

    # With one pivot a turn there are 32 turns, so weights are worth their memory. Otherwise each
    # turn computes them again, which costs less than reading them beside the values.
    weights = weigh() if bits == 1 else None

    def masses(pivots: Pivots) -> Sequence[Array]:
        known = weigh() if weights is None else weights
        floors = [_beside(jnp.maximum(pivot, least), values) for pivot in pivots]
        return _sums([jnp.where(values >= floor, known, 0.0) for floor in floors])

    # The best entry weighs 1, so a target between 0 and 1 keeps it even when top_p is 0.
    wanted = jnp.maximum(top_p * masses([least])[0], 0.5)
    found = threshold(lambda pivots: [mass >= wanted for mass in masses(pivots)], len(top_p), bits)
    return jnp.where(top_p < 1.0, jnp.maximum(found, least), least)


def threshold(enough: Enough, num_rows: int, bits: int) -> Float[Array, " B"]:
    """The largest t of each row for which entries >= t are enough, found `bits` bits at a time.

    enough: for each pivot, whether entries >= it are enough; the pivots of a row rise. Where one is
    enough, all before it must be, too. Returns -inf where none is found to be enough.
    """
    turns = -(-32 // bits)

    def narrow(turn: Array, found: Array) -> Array:
        shift = jnp.uint32(bits) * (jnp.uint32(turns - 1) - turn.astype(jnp.uint32))
        # Where 32 is no multiple of `bits`, the first turn has no room for the largest digits: they
        # become a NaN, which nothing reaches.
        has_room = lax.shift_right_logical(jnp.uint32(NAN), shift)
        pivots = [
            jnp.where(digit <= has_room, found | lax.shift_left(jnp.uint32(digit), shift), NAN)
            for digit in range(1, 1 << bits)
        ]
        # Take the largest pivot that is enough. If the float sums of a turn add their terms in the
        # same order, they are monotonic, and all pivots before it are enough. Should a compiler add
        # the terms of two pivots in different orders, what is kept still has the mass that is
        # wanted; counting how many pivots are enough could end at one that has not.
        for pivot, is_enough in zip(pivots, enough([_unordered(p) for p in pivots]), strict=True):
            found = jnp.where(is_enough, pivot, found)
        return found

    return _unordered(lax.fori_loop(0, turns, narrow, jnp.zeros(num_rows, jnp.uint32)))


def _unordered(keys: UInt32[Array, " B"]) -> Float[Array, " B"]:
    """The f32 values of keys, which are u32 that compare as the f32 do.

    Keys above infinity's give NaN, which no value reaches; those below -inf's give -inf, which all
    values reach.
    """
    keys = jnp.maximum(keys, LOWEST)
    bits = jnp.where(keys & SIGN != 0, keys ^ SIGN, ~keys)
    return lax.bitcast_convert_type(bits, jnp.float32)


def _in_pieces(scaled: Float[Array, "B V"]) -> Float[Array, "B N P"]:
    """Rows in pieces, padded with -inf, which weighs nothing and counts only where all do."""
    num_rows, vocab = scaled.shape
    piece = PIECE if num_rows * vocab >= MANY_VALUES else SHORT_PIECE
    filled = jnp.pad(scaled, ((0, 0), (0, -vocab % piece)), constant_values=-jnp.inf)
    return filled.reshape(num_rows, -1, piece)


def _beside(of_rows: Array, values: Array) -> Array:
    return of_rows.reshape(-1, *(1,) * (values.ndim - 1))


def _sums(terms: Sequence[Array]) -> Sequence[Array]:
    """The sum of each row of each array.

    Entries of a piece are summed array by array, which XLA fuses into one kernel; the sums of
    pieces in one reduction, since XLA would make a kernel for each array.
    """
    sums = [jnp.sum(each, axis=-1) for each in terms]
    if sums[0].ndim == 1:
        return sums

    def add(some: Sequence[Array], others: Sequence[Array]) -> tuple[Array, ...]:
        return tuple(one + other for one, other in zip(some, others, strict=True))

    zero = np.zeros((), sums[0].dtype)
    totals: Sequence[Array] = lax.reduce(tuple(sums), (zero,) * len(sums), add, (1,))
    return totals
