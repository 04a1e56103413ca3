"""Weights of eight bits read as if unquantised, against a decoder of a single value."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from model.checkpoint import Checkpoint
from model.errors import ModelError
from model.quantised import open_checkpoint

WEIGHT = "model.layers.0.self_attn.q_proj.weight"
OUT, IN, GROUP = 70, 96, 32
KINDS = ("int8", "int8-packed")
Tensors = dict[str, np.ndarray]


def _tensors(kind: str, group: int, scales: type = ml_dtypes.bfloat16) -> Tensors:
    draw = np.random.default_rng(0)
    per_row = IN // group if group else 1
    shared: Tensors = {f"{WEIGHT}_scale": draw.uniform(0.001, 0.1, (OUT, per_row)).astype(scales)}
    if kind == "int8":
        return shared | {WEIGHT: draw.integers(-128, 127, (OUT, IN), np.int8, endpoint=True)}
    words = draw.integers(-(2**31), 2**31, (OUT, IN // 4), dtype=np.int32)
    return shared | {f"{WEIGHT}_packed": words, f"{WEIGHT}_shape": np.array([OUT, IN], np.int64)}


def _whole(tensors: Tensors) -> np.ndarray:
    scales, whole = tensors[f"{WEIGHT}_scale"], np.empty((OUT, IN), np.float32)
    for row, column in np.ndindex(OUT, IN):
        if WEIGHT in tensors:
            value = int(tensors[WEIGHT][row, column])
        else:
            word = int(tensors[f"{WEIGHT}_packed"][row, column // 4]) % 2**32
            value = word // 256 ** (column % 4) % 256 - 128
        scale = scales[row, column * scales.shape[1] // IN]
        whole[row, column] = np.float32(value) * np.float32(scale)
    return whole


def _opened(folder: Path, tensors: Tensors, kind: str, group: int) -> Checkpoint:
    save_file(tensors, folder / "model.safetensors")
    return open_checkpoint(folder, kind, (1, group))


@pytest.fixture(scope="module", params=KINDS)
def opened(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[tuple[Checkpoint, np.ndarray]]:
    """With scales by groups and by rows: a checkpoint and the whole of its tensor."""
    found = []
    for group in (GROUP, 0):
        tensors = _tensors(request.param, group)
        files = _opened(tmp_path_factory.mktemp("int8"), tensors, request.param, group)
        found.append((files, _whole(tensors)))
    return found


def test_a_weight_is_shown_without_what_is_beside_it(
    opened: list[tuple[Checkpoint, np.ndarray]],
) -> None:
    for files, _ in opened:
        assert files.names == [WEIGHT]
        assert files.dtype(WEIGHT) == "F32"
        files.check(WEIGHT, (OUT, IN))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("group", [4, IN, 0])
@pytest.mark.parametrize("scales", [np.float16, np.float32])
def test_every_value_is_the_product_in_float32(
    kind: str, group: int, scales: type, tmp_path: Path
) -> None:
    tensors = _tensors(kind, group, scales)
    read = _opened(tmp_path, tensors, kind, group).read(WEIGHT, ())
    assert read.dtype == np.float32
    assert (read == _whole(tensors)).all()


@settings(derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.tuples(st.integers(0, OUT - 1), st.integers(1, OUT), st.integers(1, 3)),
    columns=st.tuples(st.integers(0, IN - 1), st.integers(1, IN), st.integers(1, 3)),
)
def test_a_slice_is_the_slice_of_the_whole(
    opened: list[tuple[Checkpoint, np.ndarray]],
    rows: tuple[int, int, int],
    columns: tuple[int, int, int],
) -> None:
    index = tuple(
        slice(first, min(first + count, size), step)
        for (first, count, step), size in ((rows, OUT), (columns, IN))
    )
    for files, whole in opened:
        assert (files.read(WEIGHT, index) == whole[index]).all()


@pytest.mark.parametrize(
    ("kind", "name", "value", "message"),
    [
        ("int8", "_scale", None, f"tensor {WEIGHT}: no tensor {WEIGHT}_scale in "),
        ("int8", "", None, f"tensor {WEIGHT}_scale: no tensor {WEIGHT} in "),
        ("int8", "", np.zeros((OUT, IN), np.uint8), "dtype U8; accepted: I8"),
        ("int8", "", np.zeros((OUT, 40), np.int8), "shape [70, 40], expected [out, in] with whole"),
        ("int8", "", np.zeros((), np.int8), "shape [], expected [out, in] with whole groups"),
        ("int8", "_scale", np.zeros((OUT, 1), np.float32), "shape [70, 1], expected [70, 3]"),
        ("int8", "_zero_point", np.zeros((OUT, 3), np.int8), "accepted: symmetric weights"),
        ("int8-packed", "_shape", None, f"no tensor {WEIGHT}_shape in "),
        ("int8-packed", "_packed", np.zeros((OUT, 12), np.int32), "shape [70, 12], expected [out"),
        ("int8-packed", "_g_idx", np.zeros(IN, np.int32), "accepted: groups of columns in their"),
        ("int8-packed", "_scale", np.zeros((OUT, 3), np.float64), "F64; accepted: BF16, F16, F32"),
    ],
)
def test_parts_that_do_not_fit_are_refused(
    kind: str, name: str, value: np.ndarray | None, message: str, tmp_path: Path
) -> None:
    tensors = _tensors(kind, GROUP)
    if value is None:
        del tensors[WEIGHT + name]
    else:
        tensors[WEIGHT + name] = value
    with pytest.raises(ModelError) as caught:
        _opened(tmp_path, tensors, kind, GROUP)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_row_that_ends_within_a_word_is_refused_when_it_is_read(tmp_path: Path) -> None:
    tensors = _tensors("int8-packed", 0) | {f"{WEIGHT}_shape": np.array([OUT, IN - 1], np.int64)}
    files = _opened(tmp_path, tensors, "int8-packed", 0)
    with pytest.raises(ModelError, match=rf"says \[{OUT}, {IN - 1}\], expected \[{OUT}, {IN}\]"):
        files.read(WEIGHT, ())


@pytest.mark.parametrize(("kind", "block"), [("int8-packed", (1, 6)), ("int8", (2, 32))])
def test_blocks_of_several_rows_or_parts_of_words_are_refused(
    kind: str, block: tuple[int, int], tmp_path: Path
) -> None:
    save_file(_tensors(kind, 0), tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"accepted: a multiple of \d columns of one row"):
        open_checkpoint(tmp_path, kind, block)
