"""All features of a draw together, noise included, against a reference written in numpy alone."""

from dataclasses import dataclass, replace
from functools import partial

import jax
import ml_dtypes
import numpy as np
import pytest

from model import sampling
from model.buckets import mask_words
from model.sampling import NUM_TOP, Asks

VOCAB = 133  # fills neither the last word of a mask nor the last piece of a sum
CONTEXT = 24
BATCH = 8
NUM_BATCHES = 40
INF = np.inf
FORMS = [(asks, on_cpu) for asks in Asks for on_cpu in (True, False)]


@dataclass(frozen=True)
class Row:
    """One request and its tokens so far; sampling.SamplingLike."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    logit_bias: tuple[tuple[int, float], ...]
    seed: int
    stop_token_ids: tuple[int, ...]
    min_tokens: int
    num_top_logprobs: int
    grammar: str
    allowed: bytes
    bad_words: tuple[tuple[int, ...], ...]
    mask: tuple[int, ...]
    prompt: tuple[int, ...]
    output: tuple[int, ...]


PLAIN = Row(0.0, 0, 1.0, 0.0, 0.0, 0.0, 1.0, (), 0, (), 0, -1, "", b"", (), (), (1,), ())


# --- the reference ----------------------------------------------------------------------------


def threefry(key, high, low):
    """Two u32 for each pair of counters. Source: Random123, Threefry-2x32, 20 rounds."""
    rotations = (13, 15, 26, 6), (17, 29, 16, 24)
    keys = [*key, key[0] ^ key[1] ^ np.uint32(0x1BD11BDA)]
    x, y = high + keys[0], low + keys[1]
    for turn in range(5):
        for bits in rotations[turn % 2]:
            x = x + y
            y = ((y << np.uint32(bits)) | (y >> np.uint32(32 - bits))) ^ x
        x, y = x + keys[(turn + 1) % 3], y + keys[(turn + 2) % 3] + np.uint32(turn + 1)
    return x, y


def gumbel(row):
    """f64[V]: the noise of the row's next token."""
    word = np.array([row.seed >> 32, row.seed & 0xFFFFFFFF], np.uint32)[:, None]
    index = np.array([len(row.output)], np.uint32)
    key = threefry(word, np.zeros(1, np.uint32), index)
    x, y = threefry(key, np.zeros(VOCAB, np.uint32), np.arange(VOCAB, dtype=np.uint32))
    u = ((x ^ y).astype(np.float32) + np.float32(0.5)).astype(np.float64) / 2**32
    return -np.log(-np.log1p(-np.minimum(u, 1 - 2.0**-24)))


def edited(logits, row):
    """f64[V]: the logits that temperature and filters see."""
    logits = logits.astype(np.float64)
    seen = list({*row.prompt, *row.output})
    old = logits[seen]
    logits[seen] = np.where(old > 0, old / row.repetition_penalty, old * row.repetition_penalty)
    for token in set(row.output):
        logits[token] -= row.frequency_penalty * row.output.count(token) + row.presence_penalty
    for token, value in row.logit_bias:
        logits[token] += value
    if len(row.output) < row.min_tokens:
        logits[list(row.stop_token_ids)] = -INF
    if row.grammar:
        logits[~np.isin(np.arange(VOCAB), row.mask)] = -INF
    for *begin, last in row.bad_words:
        if list(row.output[len(row.output) - len(begin) :]) == begin:
            logits[last] = -INF
    return logits


def kept(values, row, slack):
    """bool[V]: what filters leave of scaled values; slack > 0 widens them, slack < 0 narrows."""
    keep = values > -INF
    near = slack * np.maximum(1, np.abs(np.where(keep, values, 0)))
    order = np.argsort(-values, kind="stable")
    if 0 < row.top_k < VOCAB:
        keep &= values >= values[order[row.top_k - 1]] - near
    if row.top_p < 1:
        weights = np.where(keep, np.exp(values - values.max()), 0)
        before = np.cumsum(weights[order]) - weights[order]
        least = values[order[np.flatnonzero(before < (row.top_p + slack) * weights.sum())]]
        keep &= values >= least.min(initial=values.max()) - near
    if row.min_p:
        keep &= values >= values.max() + np.log(row.min_p) - near
    return keep | (values == values.max())


def check_id(token, logits, row):
    """The token is the reference's, or one as good but for rounding to f32."""
    values = edited(logits, row)
    if values.max() == -INF:
        assert token == sampling.NOTHING_LEFT
        return
    assert values[token] > -INF, "forbidden"
    if row.temperature == 0:
        assert values[token] >= values.max() - 2e-5 * max(1, abs(values.max()))
        return
    values = values / max(row.temperature, sampling.MIN_TEMPERATURE)
    wide, narrow = kept(values, row, 2e-5), kept(values, row, -2e-5)
    assert wide[token], "filtered out"
    scores = values + gumbel(row)
    best = np.where(narrow, scores, -INF).max()
    assert scores[token] >= best - 2e-5 * max(1, abs(best)), "not the best"


def check_logprobs(out, at, logits, row):
    """Those of the logits as given, of whatever was drawn."""
    wide = logits.astype(np.float64)
    wide = wide - (np.log(np.exp(wide - wide.max()).sum()) + wide.max())
    near = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    near(out.logprobs[at], wide[out.ids[at]])
    if row.num_top_logprobs > 0:
        order = np.argsort(-logits, kind="stable")[:NUM_TOP]
        np.testing.assert_array_equal(out.top_ids[at], order)
        near(out.top_logprobs[at], wide[order])


# --- what is drawn ----------------------------------------------------------------------------


def draw_logits(rng):
    """f32[BATCH, V] of several kinds."""
    logits = rng.normal(0, 3, (BATCH, VOCAB)).astype(np.float32)
    logits[1] = logits[1].astype(ml_dtypes.bfloat16)  # equal values here and there
    logits[2] = rng.integers(-2, 3, VOCAB)  # many equal values
    logits[3, rng.permutation(VOCAB)[: VOCAB // 2]] = -INF
    logits[4] = -100 + logits[4] * 30
    logits[5] = rng.normal()
    logits[6, rng.integers(VOCAB)] = 80
    return logits


def draw_row(rng, logits):
    """A request with a few features, some at their limits, after which something is left."""

    def maybe(off, *on):
        return off if rng.random() < 0.55 else on[rng.integers(len(on))]

    def ids(most, least=0):
        return tuple(int(i) for i in rng.integers(0, VOCAB, rng.integers(least, most + 1)))

    finite = np.flatnonzero(logits > -INF).tolist()
    mask = tuple(rng.choice(finite, rng.integers(1, 12)).tolist())
    prompt, output = ids(CONTEXT // 2, least=1), ids(CONTEXT // 2)
    ends = [output[len(output) - n :] for n in rng.integers(0, 1 + min(len(output), 5), 40)]
    best = np.argsort(-logits)[:60].tolist()
    words = [*((*end, best[i]) for i, end in enumerate(ends)), (*prompt[-1:], *output, best[59])]
    is_masked = rng.random() < 0.3
    bias = {i: float(rng.choice([-100, 100, *rng.normal(0, 5, 3)])) for i in ids(9)}
    return Row(
        temperature=maybe(0.0, 1e-12, 0.1, 0.7, 1.0, 1.0, 3.0, 2.0**31 - 1),
        top_k=maybe(0, 1, 2, 7, VOCAB, VOCAB + 1, 2**31 - 1),
        top_p=maybe(1.0, 1e-30, 0.1, 0.9, 1 - 2.0**-24),
        min_p=maybe(0.0, 1e-6, 0.05, 0.5, 1.0),
        frequency_penalty=maybe(0.0, -2.0, 2.0, 0.3),
        presence_penalty=maybe(0.0, -2.0, 2.0, 0.3),
        repetition_penalty=maybe(1.0, 0.01, 1.1, 2.0, 2.0**31 - 1),
        logit_bias=maybe((), tuple(bias.items())),
        seed=int(rng.integers(0, 2**63)),
        stop_token_ids=ids(16),
        # Whoever makes masks rules out that nothing is left (serving/forms.py).
        min_tokens=0 if is_masked else maybe(0, 1, 5, 99),
        num_top_logprobs=maybe(-1, 0, 1, NUM_TOP),
        grammar="form" if is_masked else "",
        allowed=b"",
        bad_words=maybe((), tuple(words), (ids(5, least=1), ids(5, least=1))),
        mask=mask,
        prompt=prompt,
        output=output,
    )


def call(form):
    """A program that samples a batch."""
    asks, on_cpu = form

    @jax.jit
    def run(logits, rows, history, token_idx, masks, bad_words):
        limits = (lambda: masks), (lambda: bad_words)
        return sampling.sample(logits, rows, lambda: history, token_idx, *limits, asks, on_cpu)

    return run


RUNS = {form: call(form) for form in FORMS}


def sampled(logits, rows, form):
    """The rows' SampleOut, as numpy."""
    packed = sampling.empty_rows(BATCH)
    ids = np.full((BATCH, CONTEXT), 5, np.int32)
    masks = np.full((BATCH, mask_words(VOCAB)), 0x33333333, np.uint32)
    bad_words = sampling.no_bad_words(BATCH)
    for at, row in enumerate(rows):
        sampling.set_row(packed, at, row)
        sampling.set_bad_words(bad_words[at], row)
        ids[at, : len(row.prompt + row.output)] = row.prompt + row.output
        if row.grammar:
            bits = np.isin(np.arange(masks.shape[1] * 32), row.mask)
            masks[at] = np.packbits(bits, bitorder="little").view(np.uint32)
    outputs = np.array([len(row.output) for row in rows], np.int32)
    prompts = np.array([len(row.prompt) for row in rows], np.int32)
    history = ids, prompts, prompts + outputs
    limits = masks, bad_words
    return jax.tree.map(np.asarray, RUNS[form](logits, packed, history, outputs, *limits))


@pytest.mark.parametrize("batch", range(NUM_BATCHES))
def test_a_draw_with_any_features_is_the_reference_one_in_every_program(batch):
    rng = np.random.default_rng(batch)
    logits = draw_logits(rng)
    rows = [draw_row(rng, of_row) for of_row in logits]
    for asks, on_cpu in FORMS:
        fits = [sampling.asks_of(row) <= asks for row in rows]
        fitting = [row if fit else PLAIN for row, fit in zip(rows, fits, strict=True)]
        out = sampled(logits, fitting, (asks, on_cpu))
        for at in np.flatnonzero(fits):
            check_id(int(out.ids[at]), logits[at], rows[at])
            if out.ids[at] != sampling.NOTHING_LEFT:
                check_logprobs(out, at, logits[at], rows[at])


@pytest.mark.parametrize("length", range(12))
def test_the_ids_that_a_request_names_make_a_mask_however_many_bytes_have_them(length):
    assert sampling.allowed_mask(PLAIN, 2) is None
    given = np.full(length, 0x81, np.uint8)
    mask = sampling.allowed_mask(replace(PLAIN, allowed=given.tobytes()), 2)
    if mask is None:
        assert not length
        return
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    want = [8 * byte + bit for byte in range(min(length, 8)) for bit in (0, 7)]
    assert np.flatnonzero(bits).tolist() == want
