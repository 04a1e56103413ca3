"""What sources write is what their layouts say, whatever the sizes are beside a tile's."""

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from model.sources import QKV, Heads, Index, OutOfLatent, Queries, Source, Turned

HIDDEN, HEAD_DIM, GROUP = 72, 66, 3  # a tile has 64 rows
HEADS = Heads(2, GROUP, HEAD_DIM, 1, GROUP)
ROWS = 2 * GROUP * HEAD_DIM
ORDER = (*range(0, HEAD_DIM, 2), *range(1, HEAD_DIM, 2))
RNG = np.random.default_rng(0)


def draw(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape, np.float32)


TENSORS = {"q": draw(ROWS, HIDDEN), "k": draw(132, HIDDEN), "v": draw(132, HIDDEN)}


@dataclass(frozen=True)
class Held:
    dtype: Any

    def read(self, name: str, index: Index) -> np.ndarray:
        values: np.ndarray = TENSORS[name][index].astype(self.dtype)
        return values


def of_heads(name: str, num: int) -> np.ndarray:
    """[hidden, 2 kv heads, num, head_dim]."""
    return TENSORS[name].reshape(2, num, HEAD_DIM, HIDDEN).transpose(3, 0, 1, 2)


def latent(part: slice, *axes: int) -> np.ndarray:
    return TENSORS["q"].reshape(2, GROUP, HEAD_DIM, HIDDEN)[:, :, part].transpose(axes)


PART = slice(1, 66)
CASES: dict[str, tuple[Source, np.ndarray]] = {
    "turned": (Turned("q", HIDDEN, ROWS), TENSORS["q"].T),
    "one row": (Turned("k", HIDDEN, 1), TENSORS["k"][:1].T),
    "qkv": (
        QKV(("q", "k", "v"), HEADS, HIDDEN),
        np.concatenate([of_heads("q", GROUP), of_heads("k", 1), of_heads("v", 1)], axis=2),
    ),
    "queries": (Queries("q", HEADS, HIDDEN, ORDER), of_heads("q", GROUP)[..., list(ORDER)]),
    "keys": (OutOfLatent("q", HEADS, HIDDEN, PART, turned=False), latent(PART, 0, 1, 2, 3)),
    "values": (OutOfLatent("q", HEADS, HIDDEN, PART, turned=True), latent(PART, 0, 1, 3, 2)),
}


@pytest.mark.parametrize("dtypes", [("float32", "bfloat16"), ("bfloat16", "bfloat16")])
@pytest.mark.parametrize("name", CASES)
def test_a_parameter_has_each_number_of_its_tensors_in_its_place(
    name: str, dtypes: tuple[str, str]
) -> None:
    source, expected = CASES[name]
    stored, wanted = map(np.dtype, dtypes)
    out = np.zeros(expected.shape, wanted)
    source.fill(Held(stored), tuple(slice(0, size) for size in expected.shape), out)
    np.testing.assert_array_equal(out, expected.astype(ml_dtypes.bfloat16))
