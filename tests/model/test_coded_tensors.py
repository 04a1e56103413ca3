"""Slices of tensors as codes and scales, from every quantised form and from none."""

from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from safetensors.numpy import save_file

from model.checkpoint import Checkpoint
from model.coded_tensors import shown
from model.errors import ModelError
from model.params import Holds, Leaf
from model.quantised import open_checkpoint
from tests.model.quantised_checkpoints import (
    Tensors,
    as_fp8,
    as_integers,
    as_mxfp4,
    in_words,
)

NAME = "model.experts"
OUT, IN = 70, 160
# Unquantised tensors and int4 become either kind of codes.
KINDS = {
    "": ("", (128, 128), np.uint8),
    "to int8": ("", (128, 128), np.int8),
    "mxfp4": ("mxfp4", (1, 32), np.uint8),
    "int4": ("int4", (1, 32), np.uint8),
    "int4 to int8": ("int4", (1, 32), np.int8),
    "int8": ("int8", (1, 32), np.int8),
    "int8 by rows": ("int8", (1, 0), np.int8),
    "int8-packed": ("int8-packed", (1, 32), np.int8),
    "int8-packed by rows": ("int8-packed", (1, 0), np.int8),
    "fp8": ("fp8", (24, 16), np.uint8),
}


def _tensors(kind: str) -> Tensors:
    kind, block, _ = KINDS[kind]
    values = np.random.default_rng(1).standard_normal((OUT, IN)).astype(np.float32)
    match kind:
        case "mxfp4":
            blocks, scales, _ = as_mxfp4(values.T[None])
            return {f"{NAME}_blocks": blocks, f"{NAME}_scales": scales}
        case "int4":
            steps, scales, _ = as_integers(values, 4, 32)
            shape = np.array(values.shape, np.int32)
            stored = {f"{NAME}_packed": in_words(steps, 4), f"{NAME}_scale": scales}
            return stored | {f"{NAME}_shape": shape}
        case "int8":
            steps, scales, _ = as_integers(values, 8, block[1])
            return {NAME: steps, f"{NAME}_scale": scales}
        case "int8-packed":
            steps, scales, _ = as_integers(values, 8, block[1])
            shape = np.array(values.shape, np.int64)
            stored = {f"{NAME}_packed": in_words(steps, 8), f"{NAME}_scale": scales}
            return stored | {f"{NAME}_shape": shape}
        case "fp8":
            codes, scales, _ = as_fp8(values, block)
            return {NAME: codes, f"{NAME}_scale_inv": scales}
        case _:
            values[3, 32:64] = 0  # zeros, for which the other forms have no scale
            return {NAME: values}


def _opened(folder: Path, kind: str, change: Callable[[Tensors], None]) -> Checkpoint:
    tensors = _tensors(kind)
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return open_checkpoint(folder, *KINDS[kind][:2])


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    return {kind: _opened(tmp_path_factory.mktemp("kind"), kind, lambda _: None) for kind in KINDS}


def _read(
    files: Checkpoint, holds: Holds, index: tuple[slice, ...], codes: type = np.uint8
) -> np.ndarray:
    dtype = np.dtype(codes)
    leaf = Leaf((1,), (1,), P(), dtype, 1.0, holds=holds, group=8)
    if len(files.shape(NAME)) == 3:
        index = (slice(0, 1), index[1], index[0])
        return shown(files, leaf, dtype).read(NAME, index)[0].T
    return shown(files, leaf, dtype).read(NAME, index)


def _numbers(codes: np.ndarray) -> np.ndarray:
    wide = codes if codes.dtype == np.int8 else codes.view(ml_dtypes.float8_e4m3fn)
    return wide.astype(np.float32)


@pytest.mark.parametrize("kind", KINDS)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.tuples(st.integers(0, OUT - 1), st.integers(1, OUT)),
    groups=st.tuples(st.integers(0, IN // 8 - 1), st.integers(1, IN // 8)),
)
def test_codes_times_scales_are_what_a_slice_stands_for(
    opened: dict[str, Checkpoint], kind: str, rows: tuple[int, int], groups: tuple[int, int]
) -> None:
    files, dtype = opened[kind], KINDS[kind][2]
    out = slice(rows[0], min(rows[0] + rows[1], OUT))
    of_groups = slice(groups[0], min(groups[0] + groups[1], IN // 8))
    inputs = slice(8 * of_groups.start, 8 * of_groups.stop)
    codes = _read(files, Holds.CODES, (out, inputs), dtype)
    scales = _read(files, Holds.SCALES, (out, of_groups), dtype)
    assert codes.dtype == dtype
    assert scales.dtype == np.float32
    values = _numbers(codes) * np.repeat(scales, 8, axis=1)
    exact = _read(files, Holds.VALUES, (out, inputs)).astype(np.float32)
    if KINDS[kind][0]:
        assert (values == exact).all()
        return
    # Half a step: of integers, of three bits after the leading one, or of the least number.
    # 32 inputs, gcd(160, 128), share a scale.
    each = np.repeat(scales, 8, axis=1)
    steps = each / 2 if dtype == np.int8 else np.maximum(np.abs(exact) / 16, each / 1024)
    assert (np.abs(values - exact) <= steps * 1.00001).all()
    largest = np.float32(127 if dtype == np.int8 else 448)
    whole = np.abs(files.read(NAME, (out, slice(0, IN)))).reshape(-1, IN // 32, 32).max(axis=2)
    expected = np.repeat(np.where(whole > 0, whole / largest, 1), 4, axis=1)[:, of_groups]
    np.testing.assert_allclose(scales, expected, rtol=1e-6)


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_a_code_that_is_no_number_is_refused(code: int, tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        tensors[NAME].view(np.uint8)[5, 7] = code

    files = _opened(tmp_path, "fp8", change)
    _read(files, Holds.CODES, (slice(0, 5), slice(0, IN)))
    with pytest.raises(ModelError, match=f"tensor {NAME}: has a weight that is no number"):
        _read(files, Holds.CODES, (slice(0, 6), slice(0, IN)))


@pytest.mark.parametrize("weight", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("holds", [Holds.CODES, Holds.SCALES])
def test_a_weight_that_is_not_finite_is_not_rounded(
    weight: float, holds: Holds, tmp_path: Path
) -> None:
    def change(tensors: Tensors) -> None:
        tensors[NAME][5, 7] = weight

    with pytest.raises(ModelError, match=f"tensor {NAME}: has a number that is not finite"):
        _read(_opened(tmp_path, "", change), holds, (slice(5, 6), slice(0, 8)))


def test_weights_too_small_for_a_scale_are_nothing(tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        tensors[NAME][5, :32] = 1e-44

    files = _opened(tmp_path, "", change)
    with np.errstate(all="raise", under="ignore"):
        assert not _read(files, Holds.CODES, (slice(5, 6), slice(0, 32))).any()
    assert (_read(files, Holds.SCALES, (slice(5, 6), slice(0, 4))) == 1).all()


@pytest.mark.parametrize(
    ("kind", "dtype", "size", "largest", "least"),
    [("to int8", np.int8, 190, 127, -127), ("", np.uint8, 671, 0x7E, 0xFE)],
)
def test_codes_of_weights_that_have_a_coarse_scale_are_no_larger_than_the_largest(
    kind: str, dtype: type, size: int, largest: int, least: int, tmp_path: Path
) -> None:
    """The scale is the smallest float.

    Such a weight is one and a half times what the largest code represents at that scale.
    """
    weight = np.float32(size) * np.float32(1e-45)

    def change(tensors: Tensors) -> None:
        tensors[NAME][5, :32] = weight
        tensors[NAME][5, 1] = -weight

    files = _opened(tmp_path, kind, change)
    (codes,) = _read(files, Holds.CODES, (slice(5, 6), slice(0, 8)), dtype)
    assert codes.tolist() == [largest, least, *(largest,) * 6]


def test_parts_that_do_not_fit_are_refused_for_codes_too(tmp_path: Path) -> None:
    def scale(tensors: Tensors) -> None:
        tensors[f"{NAME}_scales"][0, 5, 0] = 253

    def shape(tensors: Tensors) -> None:
        tensors[f"{NAME}_shape"][0] = 8

    for kind, change, holds, message in (
        ("mxfp4", scale, Holds.SCALES, "a scale of 253; accepted"),
        ("int4", shape, Holds.CODES, r"says \[8, 160\], expected"),
    ):
        folder = tmp_path / kind
        folder.mkdir()
        with pytest.raises(ModelError, match=message):
            _read(_opened(folder, kind, change), holds, (slice(5, 6), slice(0, 8)))
