"""AWQ and GPTQ: integers less zero points, against decoders of a single value."""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from model.errors import ModelError
from model.quantised import open_checkpoint
from model.quantised_pairs import Quantised
from tests.model.checkpoints import QWEN2, read_config, refusal
from tests.model.quantised_checkpoints import Tensors, check_parameters, check_tokens, pair_of

STEM = "model.layers.0.self_attn.q_proj."
WEIGHT, WORDS, ZEROS, SCALES, INDEX = (
    STEM + end for end in ("weight", "qweight", "qzeros", "scales", "g_idx")
)
OUT, IN, GROUP = 24, 64, 16
KINDS = ["awq", "gptq", "gptq_v2"]
# Of the outputs in a word of AWQ, in the order of its bits.
ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def _in_words(steps: np.ndarray, order: list[int]) -> np.ndarray:
    """Of 0 to 15, [..., n] in i32 [..., n / 8]: those named first are in the lowest bits."""
    each = steps.astype(np.uint32).reshape(*steps.shape[:-1], -1, 8)[..., order]
    return (each << np.arange(0, 32, 4, dtype=np.uint32)).sum(-1, dtype=np.uint32).view(np.int32)


def _stored(kind: str, values: np.ndarray, group: int) -> tuple[Tensors, np.ndarray]:
    """The tensors of a weight [out, in], without a stem, and the values that they represent."""
    rows, columns = values.shape
    groups = values.astype(np.float32).T.reshape(-1, group or columns, rows)
    low, high = groups.min(1, keepdims=True), groups.max(1, keepdims=True)
    scales = ((high - low) / 15).astype(np.float16)
    wide = scales.astype(np.float32)
    zeros = np.rint(-low / wide).clip(0 if kind == "awq" else 1, 15)
    steps = np.rint(groups / wide + zeros).clip(0, 15)
    whole = ((steps - zeros) * wide).reshape(columns, rows).T
    steps, zeros, plain = steps.reshape(columns, rows), zeros[:, 0], list(range(8))
    tensors = {"scales": scales[:, 0]}
    if kind == "awq":
        tensors |= {"qweight": _in_words(steps, ORDER), "qzeros": _in_words(zeros, ORDER)}
    else:
        tensors["qweight"] = _in_words(steps.T, plain).T
        tensors["qzeros"] = _in_words(zeros - (kind == "gptq"), plain)
        tensors["g_idx"] = (np.arange(columns) // (group or columns)).astype(np.int32)
    # Files would have the bytes of others in the order in which they lie.
    return {x: np.ascontiguousarray(own) for x, own in tensors.items()}, np.ascontiguousarray(whole)


def _said(kind: str, group: int) -> dict[str, Any]:
    awq = {"bits": 4, "quant_method": "awq", "version": "gemm", "zero_point": True}
    gptq = {"bits": 4, "quant_method": "gptq", "checkpoint_format": kind, "desc_act": False}
    own = (awq if kind == "awq" else gptq | {"sym": False}) | {"group_size": group or -1}
    return {"quantization_config": own}


def _tensors(kind: str) -> tuple[Tensors, np.ndarray]:
    values = np.random.default_rng(0).standard_normal((OUT, IN)).astype(np.float32)
    tensors, whole = _stored(kind, values, GROUP)
    return {STEM + name: tensor for name, tensor in tensors.items()}, whole


def _open(folder: Path, kind: str, tensors: Tensors, group: int = GROUP) -> Quantised:
    save_file(tensors, folder / "model.safetensors")
    found = open_checkpoint(folder, kind, (1, group))
    assert isinstance(found, Quantised)
    return found


def _value(kind: str, tensors: Tensors, row: int, column: int) -> float:
    """By the definition of each format."""
    group, bits = column // GROUP, [4 * ORDER.index(row % 8), 4 * (row % 8)][kind != "awq"]
    zero = int(tensors[ZEROS][group, row // 8]) >> bits & 15
    if kind == "awq":
        step = int(tensors[WORDS][column, row // 8]) >> bits & 15
    else:
        step = int(tensors[WORDS][column // 8, row]) >> 4 * (column % 8) & 15
    return float((step - zero - (kind == "gptq")) * np.float32(tensors[SCALES][group, row]))


@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_is_that_of_the_definition_and_has_the_name_of_one(
    kind: str, tmp_path: Path
) -> None:
    tensors, whole = _tensors(kind)
    draw = np.random.default_rng(1)
    for name in (WORDS, ZEROS):  # every value that words can have, not only those of rounded ones
        tensors[name] = draw.integers(-(2**31), 2**31, tensors[name].shape, dtype=np.int32)
    files = _open(tmp_path, kind, tensors)
    assert files.names == [WEIGHT]
    assert (files.shape(WEIGHT), files.dtype(WEIGHT)) == (whole.shape, "F32")
    read = files.read(WEIGHT, (slice(None), slice(None)))
    for row, column in np.ndindex(whole.shape):
        assert read[row, column] == _value(kind, tensors, row, column)


SLICE = st.tuples(st.integers(0, 63), st.integers(1, 64), st.integers(1, 3))


@pytest.mark.parametrize("kind", KINDS)
def test_any_slice_is_that_of_the_whole(kind: str, tmp_path: Path) -> None:
    tensors, whole = _tensors(kind)
    files = _open(tmp_path, kind, tensors)

    @given(SLICE, SLICE)
    @settings(max_examples=40)
    def check(rows: tuple[int, int, int], columns: tuple[int, int, int]) -> None:
        index = tuple(
            slice(first % size, min(size, first % size + count), step)
            for size, (first, count, step) in zip((OUT, IN), (rows, columns), strict=True)
        )
        assert (files.read(WEIGHT, index) == whole[index]).all()

    check()


@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
@pytest.mark.parametrize("kind", KINDS)
def test_codes_times_scales_are_the_values(kind: str, dtype: type, tmp_path: Path) -> None:
    tensors, whole = _tensors(kind)
    files = _open(tmp_path, kind, tensors)
    index = slice(3, 21), slice(16, 48)
    codes = files.read_codes(WEIGHT, index, np.dtype(dtype))
    if dtype is np.uint8:
        codes = codes.view(ml_dtypes.float8_e4m3fn)
    for group in (4, GROUP):
        scales = files.read_scales(WEIGHT, index, group)
        assert (codes.astype(np.float32) * scales.repeat(group, axis=1) == whole[index]).all()


def _without(name: str) -> Any:
    return lambda tensors: tensors.pop(name)


def _with(name: str, value: np.ndarray) -> Any:
    return lambda tensors: tensors.update({name: value})


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("awq", _without(SCALES), "no tensor .*scales in"),
        ("awq", _without(WORDS), "no tensor .*qweight in"),
        ("awq", _without(ZEROS), "no tensor .*qzeros in"),
        ("awq", _with(WEIGHT, np.ones((OUT, IN), np.float32)), "is there beside .*qweight"),
        ("awq", _with(WORDS, np.ones((IN, 3), np.int64)), "dtype I64; accepted: I32"),
        ("awq", _with(WORDS, np.ones((30, 3), np.int32)), "whole groups of 16 inputs"),
        ("gptq", _with(WORDS, np.ones((8, 20), np.int32)), "and of 8 outputs"),
        ("gptq", _with(WORDS, np.ones((8,), np.int32)), r"shape \[8\], expected words of"),
        ("gptq", _with(SCALES, np.ones((4, 8), np.float16)), r"shape \[4, 8\], expected \[4, 24"),
        ("gptq", _with(ZEROS, np.ones((4, 24), np.int32)), r"shape \[4, 24\], expected \[4, 3\]"),
        ("gptq", _with(ZEROS, np.ones((4, 3), np.int16)), "dtype I16; accepted: I32"),
        ("gptq", _with(INDEX, np.zeros(IN, np.int32)), "names others; accepted: groups of in"),
        ("gptq", _with(INDEX, np.zeros(8, np.int32)), "names others; accepted: groups of in"),
        ("gptq", _with(SCALES, np.full((4, 24), 1e38, np.float32)), "a scale of 1e.38; accepted"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    kind: str, change: Any, message: str, tmp_path: Path
) -> None:
    tensors, _ = _tensors(kind)
    change(tensors)

    def read() -> np.ndarray:
        return _open(tmp_path, kind, tensors).read(WEIGHT, (slice(None), slice(None)))

    with pytest.raises(ModelError, match=f"model.safetensors: tensor {STEM}.*{message}"):
        read()


@pytest.mark.parametrize("group", [GROUP, 0])
@pytest.mark.parametrize("kind", KINDS)
def test_config_says_which_and_how_many_inputs_share_a_scale(
    kind: str, group: int, tmp_path: Path
) -> None:
    cfg = read_config(tmp_path, QWEN2 | _said(kind, group))
    assert (cfg.quantization, cfg.quantized_block, cfg.scale_inputs) == (kind, (1, group), group)


def test_an_index_may_be_missing_and_all_inputs_may_be_one_group(tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((OUT, IN)).astype(np.float32)
    tensors, whole = _stored("gptq", values, 0)
    del tensors["g_idx"]
    files = _open(tmp_path, "gptq", {STEM + name: x for name, x in tensors.items()}, 0)
    assert (files.read(WEIGHT, (slice(2, 5), slice(7, 50))) == whole[2:5, 7:50]).all()


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("awq", {"bits": 8}, "bits is 8; accepted: 4"),
        ("awq", {"zero_point": False}, "zero_point is False; accepted: true"),
        ("awq", {"version": "gemv"}, "version is 'gemv'; accepted: gemm"),
        ("awq", {"group_size": 12}, "group_size is 12; accepted: a multiple of 8, or -1 for all"),
        ("gptq", {"bits": 3}, "bits is 3; accepted: 4"),
        ("gptq", {"desc_act": True}, "desc_act is True; accepted: false"),
        ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'; accepted: gptq"),
        ("gptq", {"dynamic": {"-:.*": {}}}, "dynamic is {'-:.*': {}}; accepted: {}"),
        ("gptq", {"group_size": 0}, "group_size is 0; accepted: a multiple of 8, or -1 for all"),
        ("gptq", {"group_size": "x"}, "group_size is 'x'; accepted: an integer of at least -1"),
    ],
)
def test_other_kinds_are_refused_by_name(
    kind: str, change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    said = _said(kind, GROUP)
    said["quantization_config"] |= change
    assert message in refusal(tmp_path, QWEN2 | said)


@pytest.fixture(scope="module", params=["awq", "gptq"])
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """A network with every projection in four bits, and its plain twin."""

    def store(name: str, values: np.ndarray) -> tuple[Tensors, np.ndarray]:
        own, whole = _stored(request.param, values, 8)
        return {name.removesuffix("weight") + end: tensor for end, tensor in own.items()}, whole

    folders = tmp_path_factory.mktemp("four"), tmp_path_factory.mktemp("float32")
    return pair_of(store, _said(request.param, 8), folders)


@pytest.mark.parametrize("mesh", [(1, 1), (4, 2)])
def test_parameters_are_the_values_stored_in_float32(
    pair: tuple[Path, Path], mesh: tuple[int, int]
) -> None:
    check_parameters(pair, mesh)


@pytest.mark.parametrize("codes", ["fp8", "int8"])
def test_a_network_of_codes_generates_what_its_values_do(
    pair: tuple[Path, Path], codes: str
) -> None:
    check_tokens(pair, codes)
