"""model/filters against sorted values, in the processor's form and in the GPU's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model import filters

VOCAB = 300  # three short pieces, the last not full
ROWS = 6
INF = np.inf

BY_FORM = {
    on_cpu: jax.jit(
        lambda values, k, p, m, on_cpu=on_cpu: filters.least_kept(values, k, p, m, False, on_cpu)
    )
    for on_cpu in (True, False)
}
both_forms = pytest.mark.parametrize("on_cpu", [True, False])


def kept(values, on_cpu, top_k=0, top_p=1.0, min_p=0.0):
    """bool[B, V]. Parameters for all rows, or a list with one per row."""
    rows = len(values)
    least = BY_FORM[on_cpu](
        np.asarray(values, np.float32),
        np.broadcast_to(np.int32(top_k), rows),
        np.broadcast_to(np.float32(top_p), rows),
        np.broadcast_to(np.float32(min_p), rows),
    )
    return np.asarray(values, np.float32) >= np.asarray(least)[:, None]


def sorted_top_k(values, k):
    """What a sort keeps of one row: the k best and what ties with the last of them."""
    return values >= np.sort(values)[::-1][min(k, len(values)) - 1]


def sorted_top_p(values, top_p):
    """The fewest of the best entries whose weights suffice together, and ties."""
    if top_p >= 1:
        return np.ones_like(values, bool)
    weights = np.exp(values.astype(np.float64) - values.max())
    order = np.argsort(-values, kind="stable")
    enough = np.cumsum(weights[order]) >= max(top_p * weights.sum(), 0.5)
    return values >= values[order[np.argmax(enough)]]


def draw(seed):
    """Rows of values of different kinds."""
    rng = np.random.default_rng(seed)
    values = rng.normal(0, 4, (ROWS, VOCAB))
    values[1] = rng.integers(-3, 4, VOCAB)  # ties, and zeros
    values[1, ::7] = -0.0
    values[2, rng.permutation(VOCAB)[:200]] = -INF
    values[3] = -np.abs(values[3]) * 1e3
    values[4] = rng.normal() * 1e20
    values[5] = values[5] * 10.0 ** rng.integers(-30, 30, VOCAB)
    return values.astype(np.float32)


@both_forms
@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    ks=st.lists(st.integers(1, VOCAB + 3), min_size=ROWS, max_size=ROWS),
)
def test_top_k_keeps_what_a_sort_does(on_cpu, seed, ks):
    values = draw(seed)
    for top_k in (ks, 1, VOCAB, 2**31 - 1):
        want = [
            sorted_top_k(row, k)
            for row, k in zip(values, np.broadcast_to(top_k, ROWS), strict=True)
        ]
        np.testing.assert_array_equal(kept(values, on_cpu, top_k), want)


@both_forms
@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    ps=st.lists(st.floats(0, 0.9375, width=32), min_size=ROWS, max_size=ROWS),
)
def test_top_p_keeps_what_a_sort_does_but_for_rounding(on_cpu, seed, ps):
    values = draw(seed)
    for top_p in (ps, 0.0, 1e-30, 0.999999):
        found = kept(values, on_cpu, top_p=top_p)
        for row, values_of_row, p in zip(found, values, np.broadcast_to(top_p, ROWS), strict=True):
            few, many = (sorted_top_p(values_of_row, p + at) for at in (-1e-5, 1e-5))
            assert (few <= row).all()
            assert (row <= many).all()


@both_forms
def test_top_p_of_almost_one_keeps_all_of_equal_values(on_cpu):
    values = np.full((2, VOCAB), -7.25, np.float32)
    assert kept(values, on_cpu, top_p=np.float32(1 - 2**-24)).all()
    assert kept(values, on_cpu, top_p=0.0).all()
    assert kept(values, on_cpu, top_k=1).all()


@both_forms
def test_a_row_without_filters_keeps_all_beside_one_that_has_some(on_cpu):
    values = draw(3)
    off = [True, False] * (ROWS // 2)
    found = kept(
        values,
        on_cpu,
        top_k=np.where(off, 0, 4),
        top_p=np.where(off, 1.0, 0.5),
        min_p=np.where(off, 0.0, 0.1),
    )
    assert found[::2].all()
    assert (found[1::2].sum(axis=1) < VOCAB).sum() >= 2  # all values of one row may tie


@both_forms
def test_top_p_is_of_what_top_k_leaves_and_min_p_of_the_best(on_cpu):
    values = np.log(np.array([[0.4, 0.3, 0.2, 0.06, 0.04]], np.float32))
    assert kept(values, on_cpu, top_k=3, top_p=0.75).tolist() == [[True, True, False, False, False]]
    assert kept(values, on_cpu, top_p=0.75).tolist() == [[True, True, True, False, False]]
    assert kept(values, on_cpu, top_k=3, min_p=0.6).tolist() == [[True, True, False, False, False]]


@pytest.mark.parametrize("bits", [1, 3, 4, 5])
def test_a_threshold_is_the_largest_value_that_is_enough_however_many_bits_a_turn_finds(bits):
    values = draw(8)
    wanted = np.array([1, 9, 90, VOCAB, 2, 77])

    def enough(pivots):
        return [jnp.sum(values >= pivot[:, None], axis=1) >= wanted for pivot in pivots]

    found = jax.jit(lambda: filters.threshold(enough, ROWS, bits))()
    want = [np.sort(row)[::-1][count - 1] for row, count in zip(values, wanted, strict=True)]
    np.testing.assert_array_equal(found, np.array(want))


def test_where_sums_do_not_rise_what_is_kept_is_enough_all_the_same():
    """A larger pivot is enough while a smaller one is not, as rounding may cause."""
    best = np.float32(2.0)

    def enough(pivots):
        return [(pivot == best) | (pivot <= -1.0) for pivot in pivots]

    assert jax.jit(lambda: filters.threshold(enough, 1, 3))() == best


@pytest.mark.parametrize(("rows", "piece"), [(1, filters.SHORT_PIECE), (4, filters.PIECE)])
def test_long_rows_are_summed_in_pieces_whose_length_changes_nothing(rows, piece):
    vocab = filters.MANY_VALUES // 4 + 5
    values = np.random.default_rng(rows).normal(0, 2, (rows, vocab)).astype(np.float32)
    shape = jax.eval_shape(filters._in_pieces, values).shape
    assert shape == (rows, -(-vocab // piece), piece)
    np.testing.assert_array_equal(kept(values, False, 50), kept(values, True, 50))
    some, others = (kept(values, form, top_p=0.5).sum(axis=1) for form in (True, False))
    np.testing.assert_allclose(some, others, rtol=1e-3)
