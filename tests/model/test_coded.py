"""Experts kept as codes of a byte: the same numbers as expanded ones, and what is refused."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.coded import decoded, kept_codes
from model.config import ModelConfig
from model.eplb import ExpertPolicy
from model.errors import ModelError
from model.opening import ROUNDED, OpenedModel, open_model
from model.programs import abstract_like, compile_all
from model.sharding import make_mesh
from model.transformer import Model
from model.weights import load_params, stored_bytes
from tests.model.checkpoints import write_config
from tests.model.harness import GOLDENS, Golden, Harness
from tests.model.quantised_checkpoints import fp8_pair, int4_pair, mxfp4_pair

PAIRS: dict[str, Callable[[Path, Path], tuple[Path, Path]]] = {
    "mxfp4": mxfp4_pair,
    "int4": int4_pair,
    "fp8": partial(fp8_pair, "deepseek_v3", block=(24, 16)),
}
# tp, ep, dp: whole experts, experts that devices share, that ranks share.
MESHES = [(1, 1, 1), (2, 1, 1), (4, 2, 1), (2, 4, 2)]


@pytest.fixture(scope="module", params=PAIRS)
def folders(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """A quantised checkpoint, and what it stands for."""
    return PAIRS[request.param](
        tmp_path_factory.mktemp(request.param), tmp_path_factory.mktemp("plain")
    )


def _model(folder: Path, mesh: tuple[int, int, int], dtype: str, coded: int) -> Model:
    tp, ep, dp = mesh
    cfg, devices = ModelConfig.from_dir(folder), make_mesh(tp, ep, dp_size=dp)
    again = ep if ep > 1 else 0  # copies of experts
    return Model.create(cfg, devices, dtype, 16, ep > tp, redundant_experts=again, coded=coded)


def _open(folder: Path, quantization: str, policy: ExpertPolicy | None = None) -> OpenedModel:
    more: dict[str, Any] = {} if policy is None else {"placing": policy}
    tp = 2 if policy else 1
    return open_model(folder, "auto", "auto", tp, tp, 16, 128, quantization=quantization, **more)


def _values(
    codes: np.ndarray, scales: np.ndarray, axis: int, dtype: str, native: bool = False
) -> np.ndarray:
    made = jax.jit(decoded, static_argnums=(2, 3, 4))(codes, scales, axis, dtype, native)
    return np.asarray(made)


@pytest.mark.parametrize("native", [False, True])
def test_every_code_is_its_number(native: bool) -> None:
    codes = np.delete(np.arange(256, dtype=np.uint8), [0x7F, 0xFF])
    found = _values(codes, np.full((1,), 0.75, np.float32), 0, "float32", native)
    expected = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * np.float32(0.75)
    assert (found.view(np.uint32) == expected.view(np.uint32)).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mesh", MESHES)
def test_kept_codes_stand_for_what_is_expanded_otherwise(
    folders: tuple[Path, Path], mesh: tuple[int, int, int], dtype: str
) -> None:
    quantised, plain = folders
    share = ModelConfig.from_dir(quantised).scale_inputs
    kept, whole = _model(quantised, mesh, dtype, share), _model(plain, mesh, dtype, 0)
    for run, stacks in zip(
        load_params(quantised, kept)["layers"], load_params(plain, whole)["layers"], strict=True
    ):
        for name in ("experts_gate_up", "experts_down") if "experts_down" in run else ():
            codes, scales = run[name], run[f"{name}_scale"]
            assert (codes.dtype, scales.dtype) == (jnp.uint8, jnp.float32)
            assert codes.shape == stacks[name].shape
            assert codes.sharding == stacks[name].sharding
            values = _values(np.asarray(codes), np.asarray(scales), 2, dtype)
            expected = np.asarray(stacks[name])
            assert (values.view(np.uint8) == expected.view(np.uint8)).all(), name
    assert stored_bytes(kept) < stored_bytes(whole)


# Each form of products with whole experts, and with parts of them or parts that ranks share.
@pytest.mark.parametrize(
    ("platform", "mesh"),
    [("cpu", MESHES[0]), ("cpu", MESHES[2]), ("cuda", MESHES[0]), ("cuda", MESHES[3])],
)
def test_a_network_of_codes_generates_what_its_weights_do(
    folders: tuple[Path, Path], platform: str, mesh: tuple[int, int, int]
) -> None:
    cfg = ModelConfig.from_dir(folders[0])
    prompts = [[i % cfg.vocab_size for i in range(1, n)] for n in (5, 40, 23)]
    kept, expanded = (
        Harness(folders[0], *mesh[:2], dp=mesh[2], platform=platform, coded=coded).run(prompts, 8)
        for coded in (cfg.scale_inputs, 0)
    )
    for one, other in zip(kept, expanded, strict=True):
        assert one.ids == other.ids
        np.testing.assert_allclose(one.logits, other.logits, rtol=0, atol=1e-5)
        np.testing.assert_allclose(one.step_logits, other.step_logits, rtol=0, atol=1e-5)


def test_weights_without_codes_are_rounded_to_the_nearest() -> None:
    folder = GOLDENS / "qwen3_moe" / "model"
    opened = _open(folder, "fp8")
    whole = _open(folder, "none")
    for run, stacks in zip(opened.params["layers"], whole.params["layers"], strict=True):
        for name in ("experts_gate_up", "experts_down") if "experts_down" in run else ():
            codes, scales = np.asarray(run[name]), np.asarray(run[f"{name}_scale"])
            values = _values(codes, scales, 2, "float32")
            exact = np.asarray(stacks[name])
            size = exact.shape[2] // scales.shape[2]
            largest = np.abs(exact).reshape(*scales.shape[:3], size, *exact.shape[3:]).max(axis=3)
            np.testing.assert_allclose(scales, largest / 448, rtol=1e-6)
            # Half of a step: of three bits behind the leading one, or of the smallest number.
            each = np.repeat(scales, size, axis=2)
            bound = np.maximum(np.abs(exact) / 16, each * 2.0**-10) * (1 + 1e-5)
            assert (np.abs(values - exact) <= bound).all()
    assert opened.digest == whole.digest + ROUNDED


def test_answers_of_rounded_weights_are_near_the_recorded() -> None:
    recorded = Golden("qwen3_moe")
    prompts = list(recorded.prompts.values())[:3]
    ran = Harness(GOLDENS / "qwen3_moe" / "model", 2, 2, coded=128).run(prompts, 2)
    exact = Harness(GOLDENS / "qwen3_moe" / "model", 2, 2).run(prompts, 2)
    for one, other in zip(ran, exact, strict=True):
        assert 0 < np.abs(one.logits - other.logits).max() < 0.5 * np.abs(other.logits).max()


def test_codes_and_their_scales_move_together() -> None:
    """Placed anew by the rows that chose them, experts stand for what they stood for."""
    policy = ExpertPolicy(2, enable_eplb=True, eplb_rebalance_num_iterations=1)
    opened = _open(GOLDENS / "qwen3_moe" / "model", "fp8", policy)
    trained = _open(GOLDENS / "qwen3_moe" / "model", "fp8").params["layers"]
    experts, params = opened.experts, opened.params
    compile_all(experts.programs(abstract_like(params)))
    loads = experts.args.loads
    rows = (1000 * np.random.default_rng(0).random(loads.shape) ** 4).astype(np.int32)
    before = experts.placed
    experts.counted(jax.device_put(rows, loads.sharding))
    while not experts.counters["eplb_rebalances"]:
        params = experts.turn(params)
        experts.counted(experts.args.loads)
    placed = experts.placed
    assert (placed != before).any()
    layer = 0
    for run, stacks in zip(trained, params["layers"], strict=True):
        for name in (name for name in stacks if name.startswith("experts_")):
            for i, found in enumerate(np.asarray(stacks[name])):
                assert (found == np.asarray(run[name])[i][placed[layer + i]]).all()
        layer += len(stacks["attn_norm"])


def test_a_quantised_checkpoint_stays_so_unless_asked_otherwise(
    folders: tuple[Path, Path],
) -> None:
    kept, asked, expanded = (_open(folders[0], how) for how in ("auto", "fp8", "none"))
    assert kept.model.dims.coded == asked.model.dims.coded > 0
    assert expanded.model.dims.coded == 0
    # The numbers are the same, so workers that differ in it may serve one request.
    assert kept.digest == asked.digest == expanded.digest
    assert _open(folders[1], "auto").model.dims.coded == 0


@given(
    inputs=st.tuples(st.integers(1, 512), st.integers(1, 512)),
    share=st.sampled_from((0, 16, 32, 128)),
    by_default=st.booleans(),
)
def test_codes_are_kept_by_default_where_scales_are_few(
    inputs: tuple[int, int], share: int, by_default: bool
) -> None:
    kept = kept_codes("auto", inputs, share, by_default)
    fits = share and all(size % 8 == 0 for size in inputs)
    assert kept == (share if by_default and fits else 0)
    assert kept_codes("none", inputs, share, by_default) == 0
    assert kept_codes("fp8", inputs, share, by_default) == (share or 128)


NAME = "model.layers.1.mlp.experts.1.down_proj.weight"


def _changed(tmp_path: Path, change: Callable[[dict[str, np.ndarray]], None]) -> Path:
    folders = tmp_path / "fp8", tmp_path / "plain"
    return fp8_pair("deepseek_v3", *folders, (24, 16), change)[0]


def test_a_code_that_is_no_number_is_refused(tmp_path: Path) -> None:
    def change(tensors: dict[str, np.ndarray]) -> None:
        tensors[NAME].view(np.uint8)[5, 7] = 0xFF

    with pytest.raises(ModelError, match=f"tensor {NAME}: has a weight that is no number"):
        _open(_changed(tmp_path, change), "auto")


def test_experts_that_are_quantised_in_part_are_refused_by_name(tmp_path: Path) -> None:
    def change(tensors: dict[str, np.ndarray]) -> None:
        tensors[NAME] = tensors[NAME].astype(np.float32)
        del tensors[f"{NAME}_scale_inv"]

    broken = _changed(tmp_path, change)
    with pytest.raises(ModelError, match=f"{NAME} is not quantised, others are; .* none"):
        _open(broken, "auto")
    assert _open(broken, "none").model.dims.coded == 0


def test_what_has_no_experts_or_none_that_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="Qwen3ForCausalLM has none"):
        _open(GOLDENS / "qwen3" / "model", "fp8")
    config = json.loads((GOLDENS / "qwen3_moe" / "model" / "config.json").read_text())
    odd = write_config(tmp_path, config | {"moe_intermediate_size": 36})
    with pytest.raises(ModelError, match=r"64 and 36 inputs .* multiples of 8"):
        _open(odd, "fp8")
