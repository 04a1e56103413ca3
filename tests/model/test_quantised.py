"""Quantised checkpoints read as if unquantised, against decoders of a single value."""

import json
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from model.checkpoint import Checkpoint
from model.errors import ModelError
from model.quantised import open_checkpoint
from model.quantised_pairs import Quantised

Tensors = dict[str, np.ndarray]
Slices = tuple[slice, ...]

EXPERTS = "model.layers.0.mlp.experts.gate_up_proj"
BLOCKS, SCALES = f"{EXPERTS}_blocks", f"{EXPERTS}_scales"
NUM_EXPERTS, ROWS, COLS = 3, 70, 96
WEIGHT = "model.layers.0.self_attn.q_proj.weight"
SCALE_INV = f"{WEIGHT}_scale_inv"
OUT, IN = 150, 37
BLOCK = (64, 16)
PACKED, SCALE, SHAPE = f"{WEIGHT}_packed", f"{WEIGHT}_scale", f"{WEIGHT}_shape"
OUT4, IN4, GROUP = 70, 96, 32
BLOCKS_OF = {"mxfp4": BLOCK, "fp8": BLOCK, "int4": (1, GROUP)}
NORM = "model.norm.weight"


def _mxfp4_tensors() -> Tensors:
    draw = np.random.default_rng(0)
    scales = draw.integers(100, 150, (NUM_EXPERTS, ROWS, COLS // 32), dtype=np.uint8)
    scales[0, 0] = 0, 1, 252  # the smallest make subnormal values, the last the largest value
    return {
        BLOCKS: draw.integers(0, 256, (NUM_EXPERTS, ROWS, COLS // 32, 16), dtype=np.uint8),
        SCALES: scales,
        NORM: np.ones(5, ml_dtypes.bfloat16),
    }


def _fp8_tensors() -> Tensors:
    draw = np.random.default_rng(0)
    stored = draw.integers(0, 256, (OUT, IN), dtype=np.uint8)
    stored[:16, :16] = np.arange(256, dtype=np.uint8).reshape(16, 16)
    stored[(stored & 127) == 127] = 0  # removes NaN
    return {
        WEIGHT: stored.view(ml_dtypes.float8_e4m3fn),
        SCALE_INV: draw.uniform(0.001, 0.1, (3, 3)).astype(np.float32),
        NORM: np.ones(5, ml_dtypes.bfloat16),
    }


def _int4_tensors(group: int = GROUP, scales: type = ml_dtypes.bfloat16) -> Tensors:
    draw = np.random.default_rng(0)
    return {
        PACKED: draw.integers(-(2**31), 2**31, (OUT4, IN4 // 8), dtype=np.int32),
        SCALE: draw.uniform(0.001, 0.1, (OUT4, IN4 // group)).astype(scales),
        SHAPE: np.array([OUT4, IN4], np.int32),
        NORM: np.ones(5, ml_dtypes.bfloat16),
    }


def _int4_whole(tensors: Tensors) -> np.ndarray:
    group, whole = IN4 // tensors[SCALE].shape[1], np.empty((OUT4, IN4), np.float32)
    for row, column in np.ndindex(OUT4, IN4):
        word = int(tensors[PACKED][row, column // 8]) % 2**32
        value = word // 16 ** (column % 8) % 16 - 8
        whole[row, column] = np.float32(value) * np.float32(tensors[SCALE][row, column // group])
    return whole


def _write(folder: Path, tensors: Tensors) -> Path:
    save_file(tensors, folder / "model.safetensors")
    return folder


def _float(bits: int, exponent_bits: int, mantissa_bits: int, bias: int) -> float:
    """The value of a small float with subnormals, by definition; NaN is not handled."""
    sign = -1.0 if bits >> (exponent_bits + mantissa_bits) else 1.0
    exponent = (bits >> mantissa_bits) % (1 << exponent_bits)
    fraction = bits % (1 << mantissa_bits) / (1 << mantissa_bits)
    if exponent == 0:
        return sign * fraction * 2.0 ** (1 - bias)
    return sign * (1 + fraction) * 2.0 ** (exponent - bias)


def _mxfp4_value(tensors: Tensors, expert: int, column: int, row: int) -> float:
    byte = int(tensors[BLOCKS][expert, row, column // 32, column % 32 // 2])
    bits = byte >> 4 if column % 2 else byte & 15
    return _float(bits, 2, 1, 1) * 2.0 ** (int(tensors[SCALES][expert, row, column // 32]) - 127)


def _mxfp4_whole(tensors: Tensors) -> np.ndarray:
    whole = np.empty((NUM_EXPERTS, COLS, ROWS), np.float64)
    for at in np.ndindex(whole.shape):
        whole[at] = _mxfp4_value(tensors, *at)
    return whole


def _fp8_whole(tensors: Tensors, block: tuple[int, int]) -> np.ndarray:
    stored, whole = tensors[WEIGHT].view(np.uint8), np.empty((OUT, IN), np.float32)
    for row, column in np.ndindex(OUT, IN):
        bits = int(stored[row, column])
        scale = tensors[SCALE_INV][row // block[0], column // block[1]].astype(np.float32)
        whole[row, column] = np.float32(_float(bits, 4, 3, 7)) * scale
    return whole


def _same(got: np.ndarray, expected: np.ndarray) -> bool:
    """Equal values, with equal signs of zeros."""
    return np.array_equal(got, expected) and bool((np.signbit(got) == np.signbit(expected)).all())


def _slices(*sizes: int) -> st.SearchStrategy[Slices]:
    def one(size: int) -> st.SearchStrategy[slice]:
        ends = st.lists(st.integers(0, size), min_size=2, max_size=2, unique=True).map(sorted)
        return st.builds(lambda e, step: slice(e[0], e[1], step), ends, st.integers(1, 3))

    return st.tuples(*map(one, sizes))


def test_no_quantization_is_a_plain_checkpoint(tmp_path: Path) -> None:
    files = open_checkpoint(_write(tmp_path, _mxfp4_tensors()), "")
    assert type(files) is Checkpoint
    assert files.names == sorted([BLOCKS, SCALES, NORM])


def test_an_unknown_quantization_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ModelError, match=r"quantization 'nf4', accepted: '', 'mxfp4', 'fp8', 'int4'"
    ):
        open_checkpoint(_write(tmp_path, _mxfp4_tensors()), "nf4")


def test_blocks_of_no_rows_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"blocks of \[0, 128\], accepted: 1 and more"):
        open_checkpoint(_write(tmp_path, _fp8_tensors()), "fp8", (0, 128))


def test_the_whole_is_shown_and_its_parts_are_not(tmp_path: Path) -> None:
    files = open_checkpoint(_write(tmp_path, _mxfp4_tensors()), "mxfp4")
    assert files.names == [EXPERTS, NORM]
    assert (files.shape(EXPERTS), files.dtype(EXPERTS)) == ((NUM_EXPERTS, COLS, ROWS), "BF16")
    files.check(EXPERTS, (NUM_EXPERTS, COLS, ROWS))
    with pytest.raises(ModelError, match=rf"model.safetensors: tensor {EXPERTS}: shape"):
        files.check(EXPERTS, (NUM_EXPERTS, ROWS, COLS))


def test_an_fp8_weight_is_shown_without_its_scales(tmp_path: Path) -> None:
    files = open_checkpoint(_write(tmp_path, _fp8_tensors()), "fp8", BLOCK)
    assert files.names == [WEIGHT, NORM]
    assert (files.shape(WEIGHT), files.dtype(WEIGHT)) == ((OUT, IN), "F32")
    files.check(WEIGHT, (OUT, IN))
    with pytest.raises(ModelError, match=rf"model.safetensors: tensor {WEIGHT}: shape"):
        files.check(WEIGHT, (IN, OUT))


def test_an_int4_weight_is_shown_without_its_scales_and_its_shape(tmp_path: Path) -> None:
    files = open_checkpoint(_write(tmp_path, _int4_tensors()), "int4", (1, GROUP))
    assert files.names == [WEIGHT, NORM]
    assert (files.shape(WEIGHT), files.dtype(WEIGHT)) == ((OUT4, IN4), "F32")
    files.check(WEIGHT, (OUT4, IN4))


@pytest.mark.parametrize("block", [(2, 32), (1, 12)])
def test_int4_of_several_rows_or_parts_of_words_is_refused(
    block: tuple[int, int], tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=r"accepted: a multiple of 8 columns of one row"):
        open_checkpoint(_write(tmp_path, _int4_tensors()), "int4", block)


@pytest.mark.parametrize(
    ("tensors", "kind"),
    [(_mxfp4_tensors(), "mxfp4"), (_fp8_tensors(), "fp8"), (_int4_tensors(), "int4")],
)
def test_tensors_that_are_not_quantised_pass_through(
    tensors: Tensors, kind: str, tmp_path: Path
) -> None:
    files = open_checkpoint(_write(tmp_path, tensors), kind, BLOCKS_OF[kind])
    assert (files.shape(NORM), files.dtype(NORM)) == ((5,), "BF16")
    assert _same(files.read(NORM, (slice(1, 3),)), np.ones(2, ml_dtypes.bfloat16))
    with pytest.raises(ModelError, match=r"tensor model.other is missing"):
        files.check("model.other", (1,))


def test_every_mxfp4_value_is_exact(tmp_path: Path) -> None:
    tensors = _mxfp4_tensors()
    read = open_checkpoint(_write(tmp_path, tensors), "mxfp4").read(EXPERTS, ())
    assert read.dtype == ml_dtypes.bfloat16
    assert read.flags.c_contiguous
    assert _same(read.astype(np.float64), _mxfp4_whole(tensors))


def test_every_scale_under_every_byte_is_exact(tmp_path: Path) -> None:
    # Row s has scale s; its 16 groups of 32 values hold all 256 bytes.
    blocks = np.arange(256, dtype=np.uint8).reshape(1, 1, 16, 16).repeat(253, axis=1)
    scales = np.arange(253, dtype=np.uint8).reshape(1, 253, 1).repeat(16, axis=2)
    tensors = {BLOCKS: blocks, SCALES: scales}
    read = open_checkpoint(_write(tmp_path, tensors), "mxfp4").read(EXPERTS, ())
    assert np.isfinite(read).all()
    for byte in range(256):
        for half in range(2):
            value = _float(byte >> 4 if half else byte & 15, 2, 1, 1)
            expected = value * 2.0 ** (np.arange(253) - 127.0)
            assert _same(read[0, 2 * byte + half].astype(np.float64), expected)


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_an_fp8_code_that_is_no_number_is_refused(code: int, tmp_path: Path) -> None:
    tensors = _fp8_tensors()
    tensors[WEIGHT].view(np.uint8)[70, 5] = code
    files = open_checkpoint(_write(tmp_path, tensors), "fp8", BLOCK)
    files.read(WEIGHT, (slice(0, 70),))
    with pytest.raises(ModelError, match=f"tensor {WEIGHT}: has a weight that is no number"):
        files.read(WEIGHT, (slice(0, 71),))


@pytest.mark.parametrize("scale", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("scale_dtype", [np.float32, ml_dtypes.bfloat16])
def test_an_fp8_scale_that_is_not_finite_is_refused(
    scale_dtype: type, scale: float, tmp_path: Path
) -> None:
    tensors = _fp8_tensors()
    tensors[SCALE_INV] = tensors[SCALE_INV].astype(scale_dtype)
    tensors[SCALE_INV][1, 2] = scale
    files = open_checkpoint(_write(tmp_path, tensors), "fp8", BLOCK)
    assert isinstance(files, Quantised)
    all_of_it = slice(0, OUT), slice(0, IN)
    message = f"tensor {SCALE_INV}: has a number that is not finite"
    with pytest.raises(ModelError, match=message):
        files.read(WEIGHT, all_of_it)
    with pytest.raises(ModelError, match=message):
        files.read_scales(WEIGHT, all_of_it, 1)


@pytest.mark.parametrize("block", [BLOCK, (128, 128), (1, IN), (50, 13)])
@pytest.mark.parametrize("scale_dtype", [np.float32, ml_dtypes.bfloat16])
def test_every_fp8_value_is_the_product_in_float32(
    block: tuple[int, int], scale_dtype: type, tmp_path: Path
) -> None:
    tensors = _fp8_tensors()
    sizes = -(-OUT // block[0]), -(-IN // block[1])
    scales = np.random.default_rng(1).uniform(0.001, 0.1, sizes)
    tensors[SCALE_INV] = scales.astype(scale_dtype)
    read = open_checkpoint(_write(tmp_path, tensors), "fp8", block).read(WEIGHT, ())
    assert read.dtype == np.float32
    assert _same(read, _fp8_whole(tensors, block))


@pytest.mark.parametrize("group", [8, GROUP, IN4])
@pytest.mark.parametrize("scales", [ml_dtypes.bfloat16, np.float16, np.float32])
def test_every_int4_value_is_the_product_in_float32(
    group: int, scales: type, tmp_path: Path
) -> None:
    tensors = _int4_tensors(group, scales)
    tensors[SHAPE] = tensors[SHAPE].astype(np.int64)
    read = open_checkpoint(_write(tmp_path, tensors), "int4", (1, group)).read(WEIGHT, ())
    assert read.dtype == np.float32
    assert _same(read, _int4_whole(tensors))


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Checkpoint, np.ndarray]]:
    """For each kind, a checkpoint and the whole of its quantised tensor."""
    mxfp4, fp8, int4 = map(tmp_path_factory.mktemp, ("mxfp4", "fp8", "int4"))
    return {
        EXPERTS: (
            open_checkpoint(_write(mxfp4, _mxfp4_tensors()), "mxfp4"),
            _mxfp4_whole(_mxfp4_tensors()),
        ),
        WEIGHT: (
            open_checkpoint(_write(fp8, _fp8_tensors()), "fp8", BLOCK),
            _fp8_whole(_fp8_tensors(), BLOCK),
        ),
        "int4": (
            open_checkpoint(_write(int4, _int4_tensors()), "int4", (1, GROUP)),
            _int4_whole(_int4_tensors()),
        ),
    }


@settings(max_examples=150, derandomize=True)
@given(index=_slices(NUM_EXPERTS, COLS, ROWS))
def test_a_slice_of_mxfp4_is_the_slice_of_the_whole(opened, index: Slices) -> None:
    files, whole = opened[EXPERTS]
    assert _same(files.read(EXPERTS, index).astype(np.float64), whole[index])
    assert _same(files.read(EXPERTS, index[:2]).astype(np.float64), whole[index[:2]])


@settings(max_examples=150, derandomize=True)
@given(index=_slices(OUT, IN))
def test_a_slice_of_fp8_is_the_slice_of_the_whole(opened, index: Slices) -> None:
    files, whole = opened[WEIGHT]
    assert _same(files.read(WEIGHT, index), whole[index])
    assert _same(files.read(WEIGHT, index[:1]), whole[index[:1]])


@settings(max_examples=150, derandomize=True)
@given(index=_slices(OUT4, IN4))
def test_a_slice_of_int4_is_the_slice_of_the_whole(opened, index: Slices) -> None:
    files, whole = opened["int4"]
    assert _same(files.read(WEIGHT, index), whole[index])
    assert _same(files.read(WEIGHT, index[:1]), whole[index[:1]])


def test_a_slice_beyond_the_end_is_not_cut_short(opened) -> None:
    files, _ = opened[EXPERTS]
    with pytest.raises(AssertionError):
        files.read(EXPERTS, (slice(0, NUM_EXPERTS + 1),))


def test_a_slice_of_mxfp4_asks_for_its_own_bytes_only(opened, monkeypatch) -> None:
    files, _ = opened[EXPERTS]
    asked: list[tuple[int, ...]] = []
    plain = files.read_bytes

    def spied(name: str, index: Slices) -> np.ndarray:
        asked.append(plain(name, index).shape)
        return plain(name, index)

    monkeypatch.setattr(files, "read_bytes", spied)
    files.read(EXPERTS, (slice(1, 2), slice(40, 60), slice(3, 10)))
    assert asked == [(1, 7, 1, 16), (1, 7, 1)]


def test_parts_may_lie_in_different_files(tmp_path: Path) -> None:
    tensors = _mxfp4_tensors()
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    weight_map = {BLOCKS: first, SCALES: second, NORM: second}
    for file in (first, second):
        kept = {name: tensors[name] for name, at in weight_map.items() if at == file}
        save_file(kept, tmp_path / file, metadata={"format": "pt"})
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    read = open_checkpoint(tmp_path, "mxfp4").read(EXPERTS, ())
    assert _same(read.astype(np.float64), _mxfp4_whole(tensors))


def _cut(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: tensors[name][1:].copy()})


def _retype(name: str, dtype: type) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: tensors[name].astype(np.float32).astype(dtype)})


def _add(name: str, shape: tuple[int, ...], dtype: type) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: np.zeros(shape, dtype)})


def _drop(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(name)


def _refused(folder: Path, tensors: Tensors, kind: str) -> str:
    with pytest.raises(ModelError) as caught:
        open_checkpoint(_write(folder, tensors), kind, BLOCKS_OF[kind])
    assert f"{folder / 'model.safetensors'}: tensor " in str(caught.value)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_drop(SCALES), f"tensor {BLOCKS}: no tensor {SCALES} in "),
        (_drop(BLOCKS), f"tensor {SCALES}: no tensor {BLOCKS} in "),
        (_add(EXPERTS, (3, COLS, ROWS), np.float32), f"tensor {EXPERTS}: is there beside {BLOCKS}"),
        (_retype(BLOCKS, np.int8), f"tensor {BLOCKS}: dtype I8; accepted: U8"),
        (_retype(SCALES, np.float32), f"tensor {SCALES}: dtype F32; accepted: U8"),
        (_cut(SCALES), f"tensor {SCALES}: shape [2, 70, 3], expected [3, 70, 3]"),
        (
            _add(BLOCKS, (3, 70, 48), np.uint8),
            f"tensor {BLOCKS}: shape [3, 70, 48], expected [experts, rows, cols / 32, 16]",
        ),
        (
            _add(BLOCKS, (3, 70, 6, 8), np.uint8),
            f"tensor {BLOCKS}: shape [3, 70, 6, 8], expected [experts, rows, cols / 32, 16]",
        ),
    ],
)
def test_mxfp4_parts_that_do_not_fit_are_refused(
    damage: Callable[[Tensors], object], message: str, tmp_path: Path
) -> None:
    tensors = _mxfp4_tensors()
    damage(tensors)
    assert message in _refused(tmp_path, tensors, "mxfp4")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_drop(SCALE_INV), f"tensor {WEIGHT}: no tensor {SCALE_INV} in "),
        (_drop(WEIGHT), f"tensor {SCALE_INV}: no tensor {WEIGHT} in "),
        (_retype(WEIGHT, np.float16), f"tensor {WEIGHT}: dtype F16; accepted: F8_E4M3"),
        (
            _retype(WEIGHT, ml_dtypes.float8_e5m2),
            f"tensor {WEIGHT}: dtype F8_E5M2; accepted: F8_E4M3",
        ),
        (
            _retype(SCALE_INV, np.float16),
            f"tensor {SCALE_INV}: dtype F16; accepted: F32, BF16",
        ),
        (_cut(SCALE_INV), f"tensor {SCALE_INV}: shape [2, 3], expected [3, 3]"),
        (
            _add(WEIGHT, (2, OUT, IN), ml_dtypes.float8_e4m3fn),
            f"tensor {WEIGHT}: shape [2, 150, 37], expected [out, in]",
        ),
    ],
)
def test_fp8_parts_that_do_not_fit_are_refused(
    damage: Callable[[Tensors], object], message: str, tmp_path: Path
) -> None:
    tensors = _fp8_tensors()
    damage(tensors)
    assert message in _refused(tmp_path, tensors, "fp8")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_drop(SCALE), f"tensor {PACKED}: no tensor {SCALE} in "),
        (_drop(PACKED), f"tensor {SCALE}: no tensor {PACKED} in "),
        (_drop(SHAPE), f"tensor {PACKED}: no tensor {SHAPE} in "),
        (_add(WEIGHT, (OUT4, IN4), np.float32), f"tensor {WEIGHT}: is there beside {PACKED} and"),
        (_retype(PACKED, np.uint32), f"tensor {PACKED}: dtype U32; accepted: I32"),
        (_retype(SCALE, np.float64), f"tensor {SCALE}: dtype F64; accepted: BF16, F16, F32"),
        (_cut(SCALE), f"tensor {SCALE}: shape [69, 3], expected [70, 3]"),
        (
            _add(PACKED, (OUT4, 13), np.int32),
            f"tensor {PACKED}: shape [70, 13], expected [out, in / 8] with whole groups of 32",
        ),
        (_add(PACKED, (2, OUT4, 12), np.int32), f"tensor {PACKED}: shape [2, 70, 12], expected [o"),
        (_cut(SHAPE), f"tensor {SHAPE}: I32 [1]; accepted: I32 or I64 [2]"),
        (_retype(SHAPE, np.float32), f"tensor {SHAPE}: F32 [2]; accepted: I32 or I64 [2]"),
        (
            _add(f"{WEIGHT}_zero_point", (9, 3), np.int32),
            f"tensor {WEIGHT}_zero_point: is there; accepted: symmetric weights",
        ),
        (
            _add(f"{WEIGHT}_g_idx", (IN4,), np.int32),
            f"tensor {WEIGHT}_g_idx: is there; accepted: groups of columns in their order",
        ),
    ],
)
def test_int4_parts_that_do_not_fit_are_refused(
    damage: Callable[[Tensors], object], message: str, tmp_path: Path
) -> None:
    tensors = _int4_tensors()
    damage(tensors)
    assert message in _refused(tmp_path, tensors, "int4")


@pytest.mark.parametrize("shape", [[OUT4, IN4 - 1], [IN4, OUT4]])
def test_a_shape_that_is_not_the_tensors_is_refused_when_it_is_read(
    shape: list[int], tmp_path: Path
) -> None:
    tensors = _int4_tensors() | {SHAPE: np.array(shape, np.int32)}
    files = open_checkpoint(_write(tmp_path, tensors), "int4", (1, GROUP))
    with pytest.raises(ModelError) as caught:
        files.read(WEIGHT, (slice(0, 1),))
    expected = f"model.safetensors: tensor {SHAPE}: says {shape}, expected [{OUT4}, {IN4}]"
    assert expected in str(caught.value)


@pytest.mark.parametrize("scale", [253, 255])
def test_a_scale_beyond_bfloat16_or_nan_is_refused_when_read(scale: int, tmp_path: Path) -> None:
    tensors = _mxfp4_tensors()
    tensors[SCALES][1, 69, 2] = scale
    files = open_checkpoint(_write(tmp_path, tensors), "mxfp4")
    files.read(EXPERTS, (slice(0, 1),))
    with pytest.raises(ModelError) as caught:
        files.read(EXPERTS, (slice(0, 2),))
    assert f"model.safetensors: tensor {SCALES}: a scale of {scale}; accepted: 0 to 252" in str(
        caught.value
    )


@pytest.mark.parametrize(
    ("tensors", "kind", "name"),
    [(_mxfp4_tensors(), "mxfp4", BLOCKS), (_fp8_tensors(), "fp8", WEIGHT)],
)
def test_truncated_files_are_refused_at_opening_and_later(
    tensors: Tensors, kind: str, name: str, tmp_path: Path
) -> None:
    file = _write(tmp_path, tensors) / "model.safetensors"
    files = open_checkpoint(tmp_path, kind, BLOCK)
    file.write_bytes(file.read_bytes()[:400])
    with pytest.raises(ModelError, match=rf"tensor {name}: not readable"):
        files.read_bytes(name, ())
    with pytest.raises(ModelError, match=r"model.safetensors: not a whole safetensors file"):
        open_checkpoint(tmp_path, kind, BLOCK)
