"""fp8 as compressed-tensors stores it: a scale for each row, for each block, or for all."""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from model.errors import ModelError
from model.quantised import open_checkpoint
from model.quantised_pairs import Quantised
from tests.model.quantised_checkpoints import (
    Tensors,
    as_fp8,
    check_parameters,
    check_tokens,
    pair_of,
)

WEIGHT = "model.layers.0.self_attn.q_proj.weight"
SCALE, INPUT_SCALE = f"{WEIGHT}_scale", "model.layers.0.self_attn.q_proj.input_scale"
OUT, IN = 150, 37
FORMS = ["rows", "all", "scalar", "blocks"]


def _as(form: str, values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Bytes, scales and the values that they represent, of [out, in]."""
    rows, columns = values.shape
    whole = {"all": (rows, columns), "scalar": (rows, columns), "blocks": (24, 20)}
    stored, scales, represented = as_fp8(values, whole.get(form, (1, columns)))
    shape = {"all": (1,), "scalar": ()}.get(form, scales.shape)
    return stored, scales.reshape(shape), represented


def _open(folder: Path, form: str, tensors: Tensors) -> Quantised:
    save_file(tensors, folder / "model.safetensors")
    kind, block = ("fp8-blocks", (24, 20)) if form == "blocks" else ("fp8-rows", (1, 0))
    found = open_checkpoint(folder, kind, block)
    assert isinstance(found, Quantised)
    return found


def _said(form: str) -> dict[str, Any]:
    """As llm-compressor says it of weights and rows."""
    strategy = {"all": "tensor", "scalar": "tensor", "blocks": "block"}.get(form, "channel")
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True}
    if form == "blocks":
        weights["block_structure"] = [24, 20]
    rows = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": rows}
    groups = {"config_groups": {"group_0": group}, "format": "float-quantized"}
    return {"quantization_config": groups | {"quant_method": "compressed-tensors"}}


@pytest.mark.parametrize("form", FORMS)
def test_any_slice_is_that_of_the_values_represented(form: str, tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((OUT, IN)).astype(np.float32)
    stored, scales, expected = _as(form, values)
    files = _open(tmp_path, form, {WEIGHT: stored, SCALE: scales, INPUT_SCALE: np.ones((1,))})
    assert files.names == [WEIGHT], "rows are not rounded, so their scale is not used"
    assert (files.shape(WEIGHT), files.dtype(WEIGHT)) == ((OUT, IN), "F32")
    for rows in (slice(None), slice(3, 4), slice(70, 149, 3)):
        for columns in (slice(None), slice(36, 37), slice(5, 30, 2)):
            assert (files.read(WEIGHT, (rows, columns)) == expected[rows, columns]).all()
    index = slice(20, 90), slice(20, 36)
    codes = files.read_codes(WEIGHT, index, np.dtype(np.uint8))
    own = files.read_scales(WEIGHT, index, 4)
    assert own.shape == (70, 4)
    found = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * own.repeat(4, axis=1)
    assert (found == expected[index]).all()


@pytest.mark.parametrize("scales", [np.float16, ml_dtypes.bfloat16])
def test_scales_may_have_two_bytes(scales: type, tmp_path: Path) -> None:
    stored, own, _ = _as("rows", np.ones((OUT, IN), np.float32))
    files = _open(tmp_path, "rows", {WEIGHT: stored, SCALE: own.astype(scales)})
    assert files.read(WEIGHT, (slice(0, 1), slice(0, 1))) == pytest.approx(1.0, rel=0.01)


@pytest.mark.parametrize(
    ("scales", "message"),
    [
        (np.ones((OUT, 2), np.float32), rf"shape \[{OUT}, 2\], expected \[{OUT}, 1\]"),
        (np.ones((2,), np.float32), rf"shape \[2\], expected \[{OUT}, 1\]"),
        (np.ones((OUT, 1), np.float64), "dtype F64; accepted: F32, BF16, F16"),
        (np.full((OUT, 1), 1e37, np.float32), "a scale of 1e\\+37; accepted: up to"),
        (None, "no tensor .*weight_scale in"),
    ],
)
def test_scales_that_do_not_fit_are_refused_by_name(
    scales: np.ndarray | None, message: str, tmp_path: Path
) -> None:
    tensors = {WEIGHT: np.ones((OUT, IN), ml_dtypes.float8_e4m3fn)}
    tensors |= {} if scales is None else {SCALE: scales}

    def first() -> np.ndarray:
        return _open(tmp_path, "rows", tensors).read(WEIGHT, (slice(0, 1), slice(0, 1)))

    with pytest.raises(ModelError, match=f"q_proj.weight.*{message}"):
        first()


@pytest.fixture(scope="module", params=["rows", "all", "blocks"])
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """A network with every projection in fp8, and its plain twin."""

    def store(name: str, values: np.ndarray) -> tuple[Tensors, np.ndarray]:
        stored, scales, whole = _as(request.param, values)
        return {name: stored, f"{name}_scale": scales}, whole

    folders = tmp_path_factory.mktemp("fp8"), tmp_path_factory.mktemp("float32")
    return pair_of(store, _said(request.param), folders)


@pytest.mark.parametrize("mesh", [(1, 1), (4, 2)])
def test_parameters_are_the_products_stored_in_float32(
    pair: tuple[Path, Path], mesh: tuple[int, int]
) -> None:
    check_parameters(pair, mesh)


def test_a_network_of_codes_generates_what_their_products_do(pair: tuple[Path, Path]) -> None:
    check_tokens(pair, "fp8")
