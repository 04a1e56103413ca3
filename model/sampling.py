"""Logits -> token ids: penalties, filters and the draw, as a pure function of its arguments.

What a row draws depends on (seed, token index, its own logits) alone, so a request continues
with the same tokens in any slot, batch, rank or worker. (On a GPU the rounding of top-p's sums
depends on the size of the batch, as that of logits does.) Two rules keep it so:

    1. A row that does not ask for a feature passes through it bit for bit unchanged (x / 1,
       x + 0, a mask that keeps all), because whether its branch runs at all is decided by the
       other rows of the batch.
    2. The noise of vocabulary entry v is a function of (seed, token index, v).

Costly features are behind `lax.cond` on "any row asks", so one compiled program serves all. On a
GPU the host waits for each predicate, and cannot launch what comes next meanwhile: there it picks,
by what it knows of the rows (`asks_of`), a program with no more features than they need.
"""

import enum
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, UInt32

from model.filters import least_kept

NUM_TOP = 20  # alternatives returned with a token
NUM_BIAS = 300  # logit biases a request may set
NUM_STOP = 16  # ids that end a request
NUM_BAD_WORDS = 128  # sequences of tokens that must not be drawn
BAD_WORD_TOKENS = 16  # of each
# In place of a token:
NOT_A_TOKEN = -1  # the logits are no distribution: NaN, or infinite
NOTHING_LEFT = -2  # the request's own limits, taken together, forbid every token

# Below this a temperature cannot be told from greedy, and 1 / temperature overflows.
MIN_TEMPERATURE = 1e-5

History = Callable[[], tuple[Int[Array, "B C"], Int[Array, " B"], Int[Array, " B"]]]
Masks = Callable[[], UInt32[Array, "B W"]]
BadWords = Callable[[], Int[Array, "B N L"]]


class SamplingRows(NamedTuple):
    """How each row of a batch is sampled: numpy on the host, traced arrays in a program.

    The leading axis of every field is the row. `empty_rows` has the values that mean "off".
    """

    temperature: Any  # f32[B], 0 = greedy
    top_k: Any  # i32[B], 0 = off
    top_p: Any  # f32[B], 1 = off
    min_p: Any  # f32[B], 0 = off
    frequency_penalty: Any  # f32[B], 0 = off
    presence_penalty: Any  # f32[B], 0 = off
    repetition_penalty: Any  # f32[B], 1 = off
    seed: Any  # u32[B, 2], high word first
    bias_ids: Any  # i32[B, NUM_BIAS], out of range = unused
    bias_values: Any  # f32[B, NUM_BIAS]
    stop_ids: Any  # i32[B, NUM_STOP], out of range = unused
    min_tokens: Any  # i32[B], no stop id is drawn before this token index
    num_top_logprobs: Any  # i32[B], -1 none, 0 the chosen token's only, up to NUM_TOP
    has_mask: Any  # bool[B], only tokens of the row's mask are drawn
    has_bad_words: Any  # bool[B], none of the row's sequences is completed


class SampleOut(NamedTuple):
    """What one step draws, B rows."""

    ids: Any  # i32[B]; NOT_A_TOKEN from logits that are not finite, or NOTHING_LEFT
    logprobs: Any  # f32[B], log-softmax of the logits as given, at ids
    top_ids: Any  # i32[B, NUM_TOP], best first; zeros when no row asks
    top_logprobs: Any  # f32[B, NUM_TOP]; zeros when no row asks


class Asks(enum.IntEnum):
    """What rows may ask for; each level includes those before it."""

    GREEDY = 0
    DRAWN = 1  # by temperature
    FILTERED = 2  # with top-k, top-p or min-p
    ANYTHING = 3  # the device tests what rows ask for


@runtime_checkable
class SamplingLike(Protocol):
    """The fields of transfer.wire.SamplingParams that are read here."""

    @property
    def temperature(self) -> float: ...
    @property
    def top_k(self) -> int: ...
    @property
    def top_p(self) -> float: ...
    @property
    def min_p(self) -> float: ...
    @property
    def frequency_penalty(self) -> float: ...
    @property
    def presence_penalty(self) -> float: ...
    @property
    def repetition_penalty(self) -> float: ...
    @property
    def logit_bias(self) -> Sequence[tuple[int, float]]: ...
    @property
    def seed(self) -> int: ...
    @property
    def stop_token_ids(self) -> Sequence[int]: ...
    @property
    def min_tokens(self) -> int: ...
    @property
    def num_top_logprobs(self) -> int: ...
    @property
    def grammar(self) -> str: ...
    @property
    def allowed(self) -> bytes: ...
    @property
    def bad_words(self) -> Sequence[Sequence[int]]: ...


# --- packing, on the host ---------------------------------------------------------------------


def empty_rows(num_rows: int) -> SamplingRows:
    """Numpy rows with every feature off: greedy, and no branch of `sample` runs for them."""
    return SamplingRows(
        temperature=np.zeros(num_rows, np.float32),
        top_k=np.zeros(num_rows, np.int32),
        top_p=np.ones(num_rows, np.float32),
        min_p=np.zeros(num_rows, np.float32),
        frequency_penalty=np.zeros(num_rows, np.float32),
        presence_penalty=np.zeros(num_rows, np.float32),
        repetition_penalty=np.ones(num_rows, np.float32),
        seed=np.zeros((num_rows, 2), np.uint32),
        bias_ids=np.full((num_rows, NUM_BIAS), -1, np.int32),
        bias_values=np.zeros((num_rows, NUM_BIAS), np.float32),
        stop_ids=np.full((num_rows, NUM_STOP), -1, np.int32),
        min_tokens=np.zeros(num_rows, np.int32),
        num_top_logprobs=np.full(num_rows, -1, np.int32),
        has_mask=np.zeros(num_rows, np.bool_),
        has_bad_words=np.zeros(num_rows, np.bool_),
    )


def no_bad_words(num_rows: int, num_words: int = NUM_BAD_WORDS) -> np.ndarray:
    """i32[num_rows, num_words, BAD_WORD_TOKENS]: the tables of rows without bad words."""
    return np.full((num_rows, num_words, BAD_WORD_TOKENS), -1, np.int32)


def set_row(rows: SamplingRows, row: int, params: SamplingLike) -> None:
    """Write one request into numpy rows, in place.

    Raises ValueError when it has more biases or stop ids than a row holds, OverflowError when an
    integer does not fit in 32 bits.
    """
    num_bias, num_stop = len(params.logit_bias), len(params.stop_token_ids)
    if num_bias > NUM_BIAS:
        raise ValueError(f"expected at most {NUM_BIAS} logit biases, got {num_bias}")
    if num_stop > NUM_STOP:
        raise ValueError(f"expected at most {NUM_STOP} stop ids, got {num_stop}")
    rows.temperature[row] = params.temperature
    rows.top_k[row] = params.top_k
    rows.top_p[row] = params.top_p
    rows.min_p[row] = params.min_p
    rows.frequency_penalty[row] = params.frequency_penalty
    rows.presence_penalty[row] = params.presence_penalty
    rows.repetition_penalty[row] = params.repetition_penalty
    rows.seed[row] = (params.seed >> 32) & 0xFFFFFFFF, params.seed & 0xFFFFFFFF
    rows.bias_ids[row] = -1
    rows.bias_values[row] = 0.0
    for place, (token_id, value) in enumerate(params.logit_bias):
        rows.bias_ids[row, place] = token_id
        rows.bias_values[row, place] = value
    rows.stop_ids[row] = -1
    rows.stop_ids[row, :num_stop] = params.stop_token_ids
    rows.min_tokens[row] = params.min_tokens
    rows.num_top_logprobs[row] = params.num_top_logprobs
    rows.has_mask[row] = bool(params.grammar or params.allowed)
    rows.has_bad_words[row] = bool(params.bad_words)


def set_bad_words(table: np.ndarray, params: SamplingLike) -> None:
    """Write a request's sequences into a row's table, in place; a sequence ends where its row does.

    table: of no_bad_words. Raises ValueError when a table does not hold them.
    """
    longest = max(map(len, params.bad_words), default=0)
    if len(params.bad_words) > NUM_BAD_WORDS or longest > BAD_WORD_TOKENS:
        most = f"expected at most {NUM_BAD_WORDS} bad words of {BAD_WORD_TOKENS} tokens"
        raise ValueError(f"{most}, got {len(params.bad_words)} of up to {longest}")
    for place, word in enumerate(params.bad_words):
        table[place, BAD_WORD_TOKENS - len(word) :] = word


def looks_back(params: SamplingLike) -> bool:
    """Whether the draw looks at tokens so far, or at a mask."""
    return bool(
        params.repetition_penalty != 1.0
        or params.frequency_penalty
        or params.presence_penalty
        or params.grammar
        or params.allowed
        or params.bad_words
    )


def allowed_mask(params: SamplingLike, num_words: int) -> np.ndarray | None:
    """u32[num_words]: the mask of a request that names the ids it may draw; None for any other.

    Bits that its bytes do not have are 0.
    """
    if not params.allowed:
        return None
    given = np.frombuffer(params.allowed, np.uint8)[: 4 * num_words]
    return np.pad(given, (0, 4 * num_words - len(given))).view(np.uint32)


def asks_of(params: SamplingLike) -> Asks:
    """The lowest level with which a request may be sampled."""
    is_edited = looks_back(params) or params.logit_bias or params.min_tokens
    if is_edited or params.num_top_logprobs > 0:
        return Asks.ANYTHING
    if not params.temperature > 0:
        return Asks.GREEDY
    is_filtered = params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0
    return Asks.FILTERED if is_filtered else Asks.DRAWN


# --- sampling, on the device ------------------------------------------------------------------


def sample(
    logits: Float[Array, "B V"],
    rows: SamplingRows,
    history: History,
    token_idx: Int[Array, " B"],
    masks: Masks | None = None,
    bad_words: BadWords | None = None,
    asks: Asks = Asks.ANYTHING,
    on_cpu: bool = True,
) -> SampleOut:
    """Draw one token a row.

    logits: f32[B, V]. token_idx: i32[B], index of the token to draw, 0 = first generated.
    history: called while tracing, used only when a row has a penalty or bad words; gives ids
        i32[B, C], prompt_len i32[B] and length i32[B]: positions < prompt_len are the prompt,
        prompt_len <= positions < length were generated, the rest is ignored.
    masks: called while tracing, used only when a row has a mask; gives u32[B, W], see
        model.buckets.mask_words. None: no row has one.
    bad_words: called while tracing, used only when a row has some; gives i32[B, N, L], see
        set_bad_words. None: no row has any.
    asks: no row may ask for more. Below ANYTHING, what rows may ask for is computed whether or not
        one does.
    on_cpu: whether to use the forms of operations for a CPU.
    Order: repetition, frequency and presence penalties, bias, stop ids before min_tokens, mask,
    bad words, temperature, top-k, top-p, min-p, draw. A temperature of 0 takes the best logit
    after the bad words. Entries that tie with the last one kept by top-k or top-p are kept too.
    """
    rows = jax.tree.map(jnp.asarray, rows)
    with jax.named_scope("sample"):
        tests = asks is Asks.ANYTHING
        edited = logits
        if tests:
            edited = _edit(logits, rows, history, token_idx, masks, bad_words)
        greedy = _first_best(edited, on_cpu)

        def drawn() -> Array:
            ids = _draw(edited, rows, token_idx, asks, on_cpu)
            return jnp.where(rows.temperature > 0, ids, greedy)

        ids = greedy
        if tests:
            ids = lax.cond(jnp.any(rows.temperature > 0), drawn, lambda: greedy)
        elif asks is not Asks.GREEDY:
            ids = drawn()
        if tests:
            found = jnp.take_along_axis(edited, ids[:, None], axis=-1)[:, 0]
            ids = jnp.where(found == -jnp.inf, NOTHING_LEFT, ids)
        log_total = jax.nn.logsumexp(logits, axis=-1)
        # A NaN anywhere in the row is in its sum; a draw from it would be an arbitrary token.
        ids = jnp.where(jnp.isfinite(log_total), ids, NOT_A_TOKEN)
        chosen = jnp.take_along_axis(logits, ids[:, None], axis=-1)[:, 0]
        blank = (
            jnp.zeros((logits.shape[0], NUM_TOP), jnp.int32),
            jnp.zeros((logits.shape[0], NUM_TOP), jnp.float32),
        )
        best = blank
        if tests:
            has_top = jnp.any(rows.num_top_logprobs > 0)
            best = lax.cond(has_top, lambda: _best(logits, log_total), lambda: blank)
    return SampleOut(ids, chosen - log_total, *best)


def prompt_logprobs(
    logits_fn: Callable[[Array], Array],
    hidden: Float[Array, "T D"],
    targets: Int[Array, " T"],
    block: int,
) -> tuple[Float[Array, " T"], Int[Array, "T K"], Float[Array, "T K"]]:
    """Log-probabilities of the tokens that follow each position.

    logits_fn: hidden states [block, D] -> f32[block, V]. hidden: [T, D].
    targets: i32[T], the token after each position. block: rows at a time, so that temporary
    memory is block x V. Returns logprobs f32[T], then ids i32[T, NUM_TOP] and logprobs
    f32[T, NUM_TOP] of the best entries, best first.
    """
    num_rows = targets.shape[0]
    num_blocks = -(-num_rows // block)
    padding = num_blocks * block - num_rows
    hidden = jnp.pad(hidden, ((0, padding), (0, 0)))
    targets = jnp.pad(targets, (0, padding))

    def one_block(args: tuple[Array, Array]) -> tuple[Array, Array, Array]:
        states, wanted = args
        logits = logits_fn(states)
        log_total = jax.nn.logsumexp(logits, axis=-1)
        found = jnp.take_along_axis(logits, wanted[:, None], axis=-1)[:, 0]
        return found - log_total, *_best(logits, log_total)

    with jax.named_scope("prompt_logprobs"):
        logprobs, top_ids, top_logprobs = lax.map(
            one_block,
            (hidden.reshape(num_blocks, block, -1), targets.reshape(num_blocks, block)),
        )
    return (
        logprobs.reshape(-1)[:num_rows],
        top_ids.reshape(-1, NUM_TOP)[:num_rows],
        top_logprobs.reshape(-1, NUM_TOP)[:num_rows],
    )


# --- editing logits ---------------------------------------------------------------------------


def _edit(
    logits: Array,
    rows: SamplingRows,
    history: History,
    token_idx: Array,
    masks: Masks | None,
    bad_words: BadWords | None,
) -> Array:
    """Penalties, bias, the wait for min_tokens, masks and bad words, each only when a row asks."""
    has_penalty = jnp.any(
        (rows.repetition_penalty != 1.0)
        | (rows.frequency_penalty != 0.0)
        | (rows.presence_penalty != 0.0)
    )
    waits = token_idx < rows.min_tokens
    has_bias = jnp.any(rows.bias_values != 0.0) | jnp.any(waits)
    has_mask = jnp.any(rows.has_mask) & (masks is not None)
    has_bad_words = jnp.any(rows.has_bad_words) & (bad_words is not None)

    def apply() -> Array:
        edited = lax.cond(has_penalty, lambda: _penalise(logits, rows, history), lambda: logits)
        edited = lax.cond(has_bias, lambda: _bias(edited, rows, waits), lambda: edited)
        if masks is not None:
            masked = partial(_masked, edited, rows)
            edited = lax.cond(has_mask, lambda: masked(masks()), lambda: edited)
        if bad_words is not None:
            without = partial(_without, edited, history)
            edited = lax.cond(has_bad_words, lambda: without(bad_words()), lambda: edited)
        return edited

    # One test in the common case; on a GPU each costs a round trip of its predicate.
    asks = has_penalty | has_bias | has_mask | has_bad_words
    return lax.cond(asks, apply, lambda: logits)


def _penalise(logits: Array, rows: SamplingRows, history: History) -> Array:
    """Repetition over prompt and output as in CTRL (arXiv:1909.05858, section 4.1), then
    frequency and presence over the output, as the OpenAI API defines them."""
    ids, prompt_len, length = history()
    num_rows, vocab = logits.shape
    row = jnp.arange(num_rows, dtype=jnp.int32)[:, None]
    position = jnp.arange(ids.shape[1], dtype=jnp.int32)[None, :]
    exists = position < length[:, None]
    generated = exists & (position >= prompt_len[:, None])
    counts = jnp.zeros((num_rows, vocab), jnp.int32)
    counts = counts.at[row, jnp.where(generated, ids, vocab)].add(1, mode="drop")
    seen = jnp.zeros((num_rows, vocab), jnp.bool_)
    seen = seen.at[row, jnp.where(exists, ids, vocab)].set(True, mode="drop")

    repetition = jnp.where(seen, rows.repetition_penalty[:, None], 1.0)
    logits = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = logits - rows.frequency_penalty[:, None] * counts.astype(jnp.float32)
    return logits - rows.presence_penalty[:, None] * (counts > 0).astype(jnp.float32)


def _bias(logits: Array, rows: SamplingRows, waits: Array) -> Array:
    """Add the logit biases; forbid stop ids in rows that wait for min_tokens."""
    num_rows, vocab = logits.shape
    row = jnp.arange(num_rows, dtype=jnp.int32)[:, None]
    # Scatter counts a negative index from the end; past the end it drops it.
    bias_ids = jnp.where(rows.bias_ids < 0, vocab, rows.bias_ids)
    logits = logits.at[row, bias_ids].add(rows.bias_values, mode="drop")
    forbidden = waits[:, None] & (rows.stop_ids >= 0)
    stop_ids = jnp.where(forbidden, rows.stop_ids, vocab)
    return logits.at[row, stop_ids].set(-jnp.inf, mode="drop")


def _masked(logits: Array, rows: SamplingRows, masks: Array) -> Array:
    """-inf for the tokens that a row's mask leaves out, in rows that have a mask."""
    bits = (masks[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & jnp.uint32(1)
    allowed = bits.reshape(logits.shape[0], -1)[:, : logits.shape[1]] != 0
    return jnp.where(allowed | ~rows.has_mask[:, None], logits, -jnp.inf)


def _without(logits: Array, history: History, bad_words: Array) -> Array:
    """-inf for the last token of each sequence whose others the output ends with.

    A row without sequences has -1 alone in its table and stays as it is.
    """
    ids, prompt_len, length = history()
    num_rows, vocab = logits.shape
    begins, last = bad_words[:, :, :-1], bad_words[:, :, -1]
    back = jnp.arange(-begins.shape[2], 0, dtype=jnp.int32)
    position = length[:, None] + back
    ends = jnp.take_along_axis(ids, jnp.maximum(position, 0), axis=1)
    ends = jnp.where(position >= prompt_len[:, None], ends, -1)  # only the output counts
    begun = jnp.all((begins == ends[:, None, :]) | (begins < 0), axis=2)
    row = jnp.arange(num_rows, dtype=jnp.int32)[:, None]
    # Scatter counts a negative index from the end; past the end it drops it.
    forbidden = jnp.where(begun & (last >= 0), last, vocab)
    return logits.at[row, forbidden].set(-jnp.inf, mode="drop")


# --- filters and the draw ---------------------------------------------------------------------


def _draw(logits: Array, rows: SamplingRows, token_idx: Array, asks: Asks, on_cpu: bool) -> Array:
    """i32[B]: one draw a row by the Gumbel-max trick. Rows with temperature 0 mean nothing."""
    scaled = logits / jnp.maximum(rows.temperature, MIN_TEMPERATURE)[:, None]
    tests = asks is Asks.ANYTHING

    def filtered() -> Array:
        least = least_kept(scaled, rows.top_k, rows.top_p, rows.min_p, tests, on_cpu)
        return jnp.where(scaled >= least[:, None], scaled, -jnp.inf)

    kept = scaled
    if tests:
        is_filtered = (rows.top_k > 0) | (rows.top_p < 1.0) | (rows.min_p > 0.0)
        has_filter = jnp.any(is_filtered & (rows.temperature > 0))
        kept = lax.cond(has_filter, filtered, lambda: scaled)
    elif asks is Asks.FILTERED:
        kept = filtered()
    noise = jax.vmap(lambda s, i: _gumbel(s, i, logits.shape[1]))(rows.seed, token_idx)
    return _first_best(kept + noise, on_cpu)


def _first_best(values: Float[Array, "B V"], on_cpu: bool) -> Int[Array, " B"]:
    """The place of each row's largest value, the first of several; of a row with NaN any place.

    XLA's argmax on a CPU takes value by value: this takes a sixth of the time.
    """
    if not on_cpu:
        return jnp.argmax(values, axis=-1).astype(jnp.int32)
    values = lax.optimization_barrier(values)  # computed once, or the two passes might differ
    best = jnp.max(values, axis=-1, keepdims=True)
    places = lax.broadcasted_iota(jnp.int32, values.shape, 1)
    return jnp.min(jnp.where(values == best, places, np.int32(values.shape[1] - 1)), axis=-1)


def _gumbel(seed: UInt32[Array, "2"], token_idx: Int[Array, ""], vocab: int) -> Array:
    """f32[vocab] standard Gumbel noise for one token of one request.

    Large values come from small u, where f32 resolves all 32 bits drawn: among 2^17 entries
    two of them hardly ever tie for the largest.
    """
    key = jax.random.wrap_key_data(seed, impl="threefry2x32")
    bits = jax.random.bits(jax.random.fold_in(key, token_idx), (vocab,), jnp.uint32)
    u = (bits.astype(jnp.float32) + 0.5) * 2.0**-32
    # Never 1: noise of -inf could not be told from a filtered entry.
    return -jnp.log(-jnp.log1p(-jnp.minimum(u, 1.0 - 2.0**-24)))


def _best(logits: Array, log_total: Array) -> tuple[Array, Array]:
    """Ids i32[B, NUM_TOP] and logprobs f32[B, NUM_TOP] of the best entries, best first.

    A vocabulary smaller than NUM_TOP is filled up with id 0 at -inf.
    """
    count = min(NUM_TOP, logits.shape[1])
    values, ids = lax.top_k(logits, count)
    missing = ((0, 0), (0, NUM_TOP - count))
    logprobs = jnp.pad(values - log_total[:, None], missing, constant_values=-jnp.inf)
    return jnp.pad(ids.astype(jnp.int32), missing), logprobs
