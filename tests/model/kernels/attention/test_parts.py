"""How rows of a decode step are cut into parts, and which program takes which."""

import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from model.kernels.attention import paged_decode as decoding

CAPACITY = 1 << 14


@given(
    positions=st.lists(st.integers(-1, CAPACITY - 1), min_size=5, max_size=5),
    window=st.sampled_from([None, 1, 100, 5000]),
    splits=st.sampled_from([1, 3, 8]),
    times=st.sampled_from([1, 4]),
)
def test_parts_of_a_row_are_all_it_looks_at_once(
    positions: list[int], window: int | None, splits: int, times: int
) -> None:
    cut = decoding.Cut(positions=16, least=32, most=512)
    how = decoding._How(cut, splits, splits * times, 4, (False, window is not None))
    wide = None if window is None else jnp.int32(window)
    found = decoding._parts(jnp.array(positions, jnp.int32), wide, how)
    begins, rows, firsts, ends = (np.asarray(array) for array in found)
    assert begins[0] == 0
    for row, position in enumerate(positions):
        own = range(begins[row], begins[row + 1])
        assert 1 <= len(own) <= how.most
        assert (rows[own] == row).all()
        seen = [at for part in own for at in range(firsts[part], ends[part])]
        least = 0 if window is None else max(0, position + 1 - window)
        # The window begins within a block, whose earlier positions the program masks.
        assert seen == [*range(least - least % cut.positions, position + 1)]
        assert all(firsts[part] % cut.positions == 0 for part in own)


def test_where_all_rows_are_long_all_programs_have_as_many_parts() -> None:
    """Rows four times as long have four times as many parts, so each program takes four turns."""
    cut = decoding.cut_of(576, 16, 2)
    splits = decoding.splits_of(64, 1, CAPACITY, cut)
    how = decoding._How(cut, splits, 16 * splits, cut.programs, (False, False))
    for context, turns in ((4096, 1), (4 * 4096, 4)):
        found = decoding._parts(jnp.full(64, context - 1, jnp.int32), None, how)
        total = int(found.begins[-1])
        assert total == turns * 64 * splits
        assert 0.95 * turns * cut.programs < total <= turns * cut.programs
