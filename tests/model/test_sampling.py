"""model/sampling against a plain numpy model, and what a draw may depend on."""

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model import sampling
from model.buckets import mask_words
from model.sampling import BAD_WORD_TOKENS, NUM_BAD_WORDS, NUM_BIAS, NUM_STOP, NUM_TOP, Asks
from transfer import wire

VOCAB = 40
HISTORY = 12
BATCH = 4


@dataclass(frozen=True)
class Request:
    """One row's parameters and history, as the numpy model reads them."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    num_top_logprobs: int = -1
    grammar: str = ""
    allowed: bytes = b""
    bad_words: tuple[tuple[int, ...], ...] = ()
    mask: tuple[int, ...] = ()  # ids that the grammar allows
    prompt: tuple[int, ...] = ()
    output: tuple[int, ...] = ()
    token_idx: int = 0


@jax.jit
def _sample(logits, rows, ids, prompt_len, length, token_idx, masks):
    history = (ids, prompt_len, length)
    return sampling.sample(logits, rows, lambda: history, token_idx, lambda: masks)


def packed(requests, num_rows):
    """Rows of the requests, then empty ones."""
    rows = sampling.empty_rows(num_rows)
    for row, params in enumerate(requests):
        sampling.set_row(rows, row, params)
    return rows


def run(logits, requests):
    """Sample one step for the requests, as numpy."""
    ids = np.full((len(requests), HISTORY), 7, np.int32)  # 7: garbage that must not count
    for row, request in enumerate(requests):
        tokens = request.prompt + request.output
        ids[row, : len(tokens)] = tokens
    out = _sample(
        jnp.asarray(logits, jnp.float32),
        packed(requests, len(requests)),
        ids,
        np.array([len(r.prompt) for r in requests], np.int32),
        np.array([len(r.prompt) + len(r.output) for r in requests], np.int32),
        np.array([r.token_idx for r in requests], np.int32),
        masks_of(requests, logits.shape[1]),
    )
    return jax.tree.map(np.asarray, out)


def masks_of(requests, vocab):
    """u32[B, W]; garbage where a row has no grammar."""
    masks = np.full((len(requests), mask_words(vocab)), 0x5A5A5A5A, np.uint32)
    for row, request in enumerate(requests):
        if request.grammar:
            bits = np.isin(np.arange(masks.shape[1] * 32), request.mask)
            masks[row] = np.packbits(bits, bitorder="little").view(np.uint32)
    return masks


def logits_of(seed, rows=BATCH, vocab=VOCAB):
    return np.random.default_rng(seed).normal(0, 2, (rows, vocab)).astype(np.float32)


def edited(logits, request):
    """The numpy model of everything before the temperature."""
    logits = logits.astype(np.float64).copy()
    for token in set(request.prompt + request.output):
        value = logits[token]
        penalty = request.repetition_penalty
        logits[token] = value / penalty if value > 0 else value * penalty
    for token in set(request.output):
        logits[token] -= request.frequency_penalty * request.output.count(token)
        logits[token] -= request.presence_penalty
    for token, value in request.logit_bias:
        logits[token] += value
    if request.token_idx < request.min_tokens:
        logits[list(request.stop_token_ids)] = -np.inf
    return logits


def allowed(logits, request):
    """The numpy model: the set of ids a draw may give."""
    scaled = edited(logits, request) / request.temperature
    if request.top_k:
        least = np.sort(scaled)[-min(request.top_k, len(scaled))]
        scaled = np.where(scaled >= least, scaled, -np.inf)
    weights = np.exp(scaled - scaled.max())
    probabilities = weights / weights.sum()
    if request.top_p < 1:
        heavier = np.array([probabilities[probabilities > p].sum() for p in probabilities])
        probabilities = np.where(heavier < request.top_p, probabilities, 0)
    probabilities = np.where(probabilities >= request.min_p * probabilities.max(), probabilities, 0)
    return set(np.flatnonzero(probabilities).tolist())


tokens = st.integers(0, VOCAB - 1)
penalties = st.floats(-2, 2, width=32)
requests_strategy = st.builds(
    Request,
    frequency_penalty=penalties,
    presence_penalty=penalties,
    repetition_penalty=st.floats(0.5, 2, width=32),
    logit_bias=st.dictionaries(tokens, st.floats(-100, 100, width=32), max_size=5).map(
        lambda d: tuple(d.items())
    ),
    stop_token_ids=st.lists(tokens, max_size=3).map(tuple),
    min_tokens=st.integers(0, 3),
    prompt=st.lists(tokens, min_size=1, max_size=6).map(tuple),
    output=st.lists(tokens, max_size=6).map(tuple),
    token_idx=st.integers(0, 3),
)


@settings(max_examples=60)
@given(seed=st.integers(0, 2**31), requests=st.lists(requests_strategy, min_size=4, max_size=4))
def test_greedy_takes_the_best_edited_logit_as_the_numpy_model_does(seed, requests):
    logits = logits_of(seed)
    out = run(logits, requests)
    for row, request in enumerate(requests):
        want = edited(logits[row], request)
        assert want[out.ids[row]] >= want.max() - 1e-4


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**31),
    filters=st.lists(
        st.tuples(
            st.integers(0, VOCAB + 5),
            st.floats(0.0625, 1.0, width=32),
            st.floats(0, 0.75, width=32),
            st.floats(0.5, 4, width=32),
        ),
        min_size=BATCH,
        max_size=BATCH,
    ),
)
def test_a_draw_stays_within_top_k_top_p_and_min_p(seed, filters):
    logits = logits_of(seed)
    requests = [
        Request(temperature=t, top_k=k, top_p=p, min_p=m, seed=seed + i)
        for i, (k, p, m, t) in enumerate(filters)
    ]
    for token_idx in range(4):
        ids = run(logits, [replace(r, token_idx=token_idx) for r in requests]).ids
        for row, request in enumerate(requests):
            # A sum in f32 may fall on the other side of top_p.
            wide = allowed(logits[row], replace(request, top_p=min(1, request.top_p + 1e-5)))
            assert int(ids[row]) in wide


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**31),
    requests=st.lists(requests_strategy, min_size=4, max_size=4),
    masks=st.lists(st.lists(tokens, min_size=1, max_size=9).map(tuple), min_size=2, max_size=2),
    temperature=st.sampled_from([0.0, 1.0]),
)
def test_a_mask_leaves_what_it_names_and_changes_no_row_beside_it(
    seed, requests, masks, temperature
):
    logits = logits_of(seed)
    # A mask may allow only stop ids; whoever makes masks rules that out (serving/grammar.py).
    plain = [replace(r, min_tokens=0, temperature=temperature, seed=seed) for r in requests]
    masked = [replace(r, grammar="g", mask=m) for r, m in zip(plain, masks, strict=False)]
    alone, beside = run(logits, plain), run(logits, [*masked, *plain[2:]])
    assert beside.ids[2:].tolist() == alone.ids[2:].tolist()
    assert beside.logprobs[2:].tolist() == alone.logprobs[2:].tolist()
    for row, request in enumerate(masked):
        assert int(beside.ids[row]) in request.mask
        if not temperature:
            want = edited(logits[row], request)
            best = max(want[token_id] for token_id in request.mask)
            assert want[beside.ids[row]] >= best - 1e-4


def test_a_filter_sees_what_the_mask_leaves():
    logits = np.array([[9.0, 8.0, 1.0, 0.9, *[-5.0] * (VOCAB - 4)]], np.float32)
    drawn = {
        int(run(logits, [Request(1.0, top_k=2, grammar="g", mask=(2, 3, 4), seed=seed)]).ids[0])
        for seed in range(40)
    }
    assert drawn == {2, 3}


def test_every_id_within_the_filters_is_drawn_at_some_time_and_no_other():
    logits = logits_of(3, rows=1)
    for request in (
        Request(temperature=1.5, top_k=5),
        Request(temperature=1.0, top_p=0.6),
        Request(temperature=2.0, min_p=0.2),
        Request(temperature=2.0, top_k=9, top_p=0.8, min_p=0.1),
    ):
        draws = draw_many(logits, request, 512)
        assert set(draws.tolist()) == allowed(logits[0], request)


def test_a_row_that_is_no_distribution_draws_no_token_and_leaves_the_others_alone():
    logits = logits_of(4, rows=5)
    requests = [Request(temperature=float(row % 2)) for row in range(5)]
    whole = run(logits, requests)
    logits[0, 3], logits[1, 5], logits[2, 7], logits[3] = np.nan, np.nan, np.inf, -np.inf
    out = run(logits, requests)
    assert out.ids[:4].tolist() == [sampling.NOT_A_TOKEN] * 4
    assert out.ids[4] == whole.ids[4]
    assert out.logprobs[4] == whole.logprobs[4]


def draw_many(logits, request, count):
    """The draws of token 0 .. count-1 of one request whose logits never change."""
    requests = [replace(request, token_idx=i) for i in range(count)]
    return run(np.repeat(logits, count, axis=0), requests).ids


def test_draws_follow_the_softmax():
    """Chi-squared over 8192 draws; the seed is fixed, so this passes or fails for good."""
    logits = logits_of(5, rows=1, vocab=VOCAB) / 2
    draws = np.concatenate(
        [draw_many(logits, Request(temperature=1.25, seed=seed), 512) for seed in range(16)]
    )
    want = np.exp(logits[0] / 1.25) / np.exp(logits[0] / 1.25).sum() * len(draws)
    counts = np.bincount(draws, minlength=VOCAB)
    chi_squared = ((counts - want) ** 2 / want).sum()
    # 39 degrees of freedom: mean 39, deviation 8.8; 1 in 1000 beyond 73.
    assert 15 < chi_squared < 73


def test_draws_of_following_tokens_are_not_correlated():
    draws = draw_many(np.zeros((1, 2), np.float32), Request(temperature=1.0, seed=11), 512)
    repeats = np.mean(draws[1:] == draws[:-1])
    assert 0.42 < repeats < 0.58


def test_a_row_draws_the_same_in_any_batch_slot_and_company():
    vocab = 1000
    logits = logits_of(8, rows=64, vocab=vocab)
    plain = [Request(temperature=1.0, seed=(i << 40) + i, token_idx=i) for i in range(64)]
    alone = np.array([run(logits[i : i + 1], [plain[i]]).ids[0] for i in range(64)])
    together = run(logits, plain).ids
    np.testing.assert_array_equal(alone, together)

    order = np.random.default_rng(0).permutation(64)
    shuffled = run(logits[order], [plain[i] for i in order]).ids
    np.testing.assert_array_equal(shuffled, together[order])

    # Every second row now has all features, so every branch runs.
    greedy = run(logits, [replace(r, temperature=0.0) for r in plain]).ids
    busy = Request(
        temperature=0.7, top_k=5, top_p=0.5, min_p=0.1, frequency_penalty=1.0,
        presence_penalty=1.0, repetition_penalty=1.5, logit_bias=((3, 5.0),), min_tokens=99,
        stop_token_ids=(4,), num_top_logprobs=5, prompt=(1, 2), output=(3, 4),
    )  # fmt: skip
    mixed = run(logits, [busy if i % 2 else plain[i] for i in range(64)]).ids
    np.testing.assert_array_equal(mixed[::2], together[::2])
    mixed = run(logits, [busy if i % 2 else replace(plain[i], temperature=0.0) for i in range(64)])
    np.testing.assert_array_equal(mixed.ids[::2], greedy[::2])
    np.testing.assert_array_equal(greedy, logits.argmax(-1))


def test_both_words_of_the_seed_and_the_token_index_change_the_draw():
    logits = np.zeros((1, 4096), np.float32)
    base = Request(temperature=1.0, seed=1)
    draws = [
        int(run(logits, [request]).ids[0])
        for request in (
            base,
            replace(base, seed=2),
            replace(base, seed=1 + (1 << 32)),
            replace(base, seed=1 + (1 << 62)),
            replace(base, token_idx=1),
        )
    ]
    assert len(set(draws)) == len(draws)
    assert draws[0] == int(run(logits, [base]).ids[0])


def test_a_draw_never_changes_between_versions():
    """Recorded once: another answer would change texts under running requests on an upgrade."""
    logits = logits_of(21, rows=4)
    requests = [Request(temperature=1.0, seed=i * 12345678901, token_idx=i) for i in range(4)]
    assert run(logits, requests).ids.tolist() == RECORDED


RECORDED = [3, 33, 4, 5]


def test_temperature_near_zero_is_greedy_and_finite():
    logits = logits_of(2) * 50
    out = run(logits, [Request(temperature=1e-30, seed=i) for i in range(BATCH)])
    np.testing.assert_array_equal(out.ids, logits.argmax(-1))


def test_top_p_of_zero_and_top_k_of_one_keep_the_best():
    logits = logits_of(2)
    for request in (
        Request(temperature=5.0, top_p=0.0),
        Request(temperature=5.0, top_k=1),
        Request(temperature=5.0, min_p=1.0),
    ):
        for token_idx in range(8):
            rows = [replace(request, seed=i, token_idx=token_idx) for i in range(BATCH)]
            np.testing.assert_array_equal(run(logits, rows).ids, logits.argmax(-1))


def test_stop_ids_wait_for_min_tokens():
    logits = np.zeros((1, VOCAB), np.float32)
    logits[0, 9], logits[0, 4] = 5.0, 3.0
    request = Request(stop_token_ids=(9,), min_tokens=2)
    ids = [run(logits, [replace(request, token_idx=i)]).ids[0] for i in range(4)]
    assert ids == [4, 4, 9, 9]


def test_logprobs_are_those_of_the_logits_as_given():
    logits = logits_of(6)
    requests = [
        Request(num_top_logprobs=20),
        Request(num_top_logprobs=0, logit_bias=((11, 90.0),)),
        Request(temperature=0.5, top_k=3, seed=9),
        Request(),
    ]
    out = run(logits, requests)
    wide = logits.astype(np.float64)
    want = wide - np.log(np.exp(wide).sum(-1, keepdims=True))
    assert out.ids[1] == 11
    np.testing.assert_allclose(out.logprobs, want[np.arange(4), out.ids], atol=1e-5)
    order = np.argsort(-want, axis=-1)[:, :NUM_TOP]
    np.testing.assert_array_equal(out.top_ids, order)
    np.testing.assert_allclose(out.top_logprobs, np.take_along_axis(want, order, 1), atol=1e-5)


def test_top_logprobs_are_zeros_when_nobody_asks():
    out = run(logits_of(6), [Request(num_top_logprobs=0), Request(), Request(), Request()])
    assert not out.top_ids.any()
    assert not out.top_logprobs.any()


def test_a_vocabulary_smaller_than_the_alternatives_is_filled_up():
    out = run(logits_of(1, rows=1, vocab=6), [Request(num_top_logprobs=20)])
    assert sorted(out.top_ids[0, :6].tolist()) == list(range(6))
    assert np.isneginf(out.top_logprobs[0, 6:]).all()


def test_prompt_logprobs_in_blocks_are_those_of_the_whole():
    rng = np.random.default_rng(0)
    hidden = rng.normal(size=(23, 8)).astype(np.float32)
    head = rng.normal(size=(8, VOCAB)).astype(np.float32)
    targets = rng.integers(0, VOCAB, 23).astype(np.int32)
    function = jax.jit(
        lambda h, t: sampling.prompt_logprobs(lambda rows: rows @ head, h, t, block=5)
    )
    logprobs, top_ids, top_logprobs = jax.tree.map(np.asarray, function(hidden, targets))
    logits = hidden.astype(np.float64) @ head
    want = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    order = np.argsort(-want, axis=-1)[:, :NUM_TOP]
    np.testing.assert_allclose(logprobs, want[np.arange(23), targets], atol=1e-4)
    np.testing.assert_array_equal(top_ids, order)
    np.testing.assert_allclose(top_logprobs, np.take_along_axis(want, order, 1), atol=1e-4)


def test_the_history_is_not_touched_when_no_row_has_a_penalty():
    """The gather of the whole history is inside the branch, not before it."""
    jaxpr = jax.make_jaxpr(
        lambda logits, rows, pool: sampling.sample(
            logits, rows, lambda: (jnp.sort(pool), rows.top_k, rows.top_k), rows.top_k
        )
    )(logits_of(0), sampling.empty_rows(BATCH), np.zeros((BATCH, HISTORY), np.int32))
    outer = [equation.primitive.name for equation in jaxpr.jaxpr.eqns]
    assert "sort" not in outer
    assert "cond" in outer
    assert "sort" in str(jaxpr)


KINDS = (
    (Asks.GREEDY, Request(logit_bias=(), num_top_logprobs=0)),
    (Asks.DRAWN, Request(temperature=0.7, seed=3)),
    (Asks.FILTERED, Request(temperature=0.7, seed=3, top_k=5)),
    (Asks.FILTERED, Request(temperature=0.7, seed=3, top_p=0.8)),
    (Asks.FILTERED, Request(temperature=0.7, seed=3, min_p=0.1)),
    (Asks.ANYTHING, Request(num_top_logprobs=1)),
    (Asks.ANYTHING, Request(frequency_penalty=0.5)),
    (Asks.ANYTHING, Request(presence_penalty=0.5)),
    (Asks.ANYTHING, Request(repetition_penalty=1.1)),
    (Asks.ANYTHING, Request(logit_bias=((3, 1.0),))),
    (Asks.ANYTHING, Request(min_tokens=2, stop_token_ids=(3,))),
    (Asks.ANYTHING, Request(grammar="any", mask=(3,))),
    (Asks.ANYTHING, Request(allowed=b"\x08")),
    (Asks.ANYTHING, Request(bad_words=((3,),))),
)


@pytest.mark.parametrize(("asks", "request_"), KINDS)
def test_a_program_that_has_what_rows_ask_for_draws_what_one_that_has_everything_does(
    asks, request_
):
    assert sampling.asks_of(request_) is asks
    rows = packed([Request(), request_, Request(temperature=0.0, top_k=3)], BATCH)
    draw = np.random.default_rng(5)
    logits = jnp.asarray(draw.standard_normal((BATCH, VOCAB)), jnp.float32)
    logits = logits.at[3].set(jnp.nan)
    none = jnp.zeros((BATCH, HISTORY), jnp.int32), *(jnp.zeros(BATCH, jnp.int32),) * 2
    token_idx = jnp.arange(BATCH, dtype=jnp.int32)
    masks = jnp.full((BATCH, mask_words(VOCAB)), 8, jnp.uint32)
    bad_words = sampling.no_bad_words(BATCH)
    sampling.set_bad_words(bad_words[1], request_)
    found = []
    for kind in (asks, Asks.ANYTHING):
        run = partial(sampling.sample, asks=kind)
        limits = (lambda: masks), (lambda: jnp.asarray(bad_words))
        args = rows, lambda: none, token_idx, *limits
        out = jax.jit(lambda x, run=run, args=args: run(x, *args))
        found.append(out(logits))
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("asks", [Asks.FILTERED, Asks.ANYTHING])
def test_forms_for_a_processor_and_others_draw_the_same(asks):
    logits = logits_of(9, rows=5)
    requests = [Request(1.0, k, p, m, seed=9) for k, p, m in ((0, 1.0, 0.0), (5, 1.0, 0.0))]
    requests += [Request(1.0, k, p, m, seed=9) for k, p, m in ((0, 0.7, 0.0), (9, 0.6, 0.1))]
    rows = packed([*requests, Request()], 5)
    none = jnp.zeros((5, HISTORY), jnp.int32), *(jnp.zeros(5, jnp.int32),) * 2
    found = []
    for on_cpu in (True, False):
        run = partial(sampling.sample, asks=asks, on_cpu=on_cpu)
        draw = jax.jit(lambda x, i, run=run: run(x, rows, lambda: none, i).ids)
        found.append([draw(logits, jnp.full(5, i, jnp.int32)) for i in range(32)])
    np.testing.assert_array_equal(found[0], found[1])


def test_packing_fills_fields_from_the_wire_and_leaves_the_other_rows_off():
    params = wire.SamplingParams(
        max_new_tokens=5, temperature=0.5, top_k=7, logit_bias=((3, -1.5), (9, 2.0)),
        seed=(5 << 32) | 6, stop_token_ids=(1, 2), min_tokens=4, num_top_logprobs=3,
    )  # fmt: skip
    rows = packed([params], 3)
    blank = sampling.empty_rows(3)
    for name, field, other in zip(rows._fields, rows, blank, strict=True):
        assert field.dtype == other.dtype, name
        assert field.shape == other.shape, name
        np.testing.assert_array_equal(field[1:], other[1:])
    assert rows.seed[0].tolist() == [5, 6]
    assert rows.bias_ids[0, :3].tolist() == [3, 9, -1]
    assert rows.bias_values[0, :3].tolist() == [-1.5, 2.0, 0.0]
    assert rows.stop_ids[0, :3].tolist() == [1, 2, -1]


def test_a_row_set_again_forgets_what_it_held():
    rows = packed([Request(logit_bias=((1, 1.0), (2, 2.0)), stop_token_ids=(3, 4))], 1)
    sampling.set_row(rows, 0, Request(logit_bias=((5, 5.0),), stop_token_ids=(6,)))
    fresh = packed([Request(logit_bias=((5, 5.0),), stop_token_ids=(6,))], 1)
    for field, other in zip(rows, fresh, strict=True):
        np.testing.assert_array_equal(field, other)


def test_more_than_a_row_holds_is_refused():
    with pytest.raises(ValueError, match=f"at most {NUM_BIAS} logit biases, got 301"):
        packed([Request(logit_bias=tuple((i, 1.0) for i in range(301)))], 1)
    with pytest.raises(ValueError, match=f"at most {NUM_STOP} stop ids, got 17"):
        packed([Request(stop_token_ids=tuple(range(17)))], 1)


def test_the_limits_are_those_of_the_wire():
    assert NUM_TOP == wire.NUM_TOP_LOGPROBS
    assert NUM_BIAS == wire.MAX_LOGIT_BIAS
    assert NUM_STOP == wire.MAX_STOP_IDS
    assert NUM_BAD_WORDS == wire.MAX_BAD_WORDS
    assert BAD_WORD_TOKENS == wire.MAX_BAD_WORD_TOKENS
