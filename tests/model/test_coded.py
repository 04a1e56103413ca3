"""Experts kept as codes of a byte: the same numbers as expanded ones, and what is refused."""

import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from model import kernels
from model.coded import ExpertStacks, decoded
from model.config import ModelConfig
from model.eplb import AS_TRAINED, ExpertPolicy
from model.errors import ModelError
from model.opening import ROUNDED, OpenedModel, open_model
from model.programs import abstract_like, compile_all
from model.sharding import Dims, make_mesh
from model.transformer import Model
from model.weights import load_params, save_orbax, stored_bytes
from tests.model.checkpoints import write_config
from tests.model.harness import GOLDENS, Golden, Harness
from tests.model.quantised_checkpoints import INT4, fp8_pair, int4_pair, mxfp4_pair

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


def _open(
    folder: Path,
    quantization: str,
    policy: ExpertPolicy = AS_TRAINED,
    tp: int = 1,
    ep: int = 1,
) -> OpenedModel:
    sizes = tp, ep, 16, 128
    return open_model(folder, "auto", "auto", *sizes, placing=policy, quantization=quantization)


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


# Each kind in each form of products, with whole experts, parts of them or parts that ranks share.
@pytest.mark.parametrize(
    ("folders", "platform", "dtype", "mesh"),
    [
        ("mxfp4", "cpu", "bfloat16", MESHES[0]),
        ("mxfp4", "cuda", "float32", MESHES[3]),
        ("int4", "cpu", "float32", MESHES[2]),
        ("int4", "cuda", "bfloat16", MESHES[0]),
        ("fp8", "cpu", "float32", MESHES[3]),
        ("fp8", "cuda", "bfloat16", MESHES[1]),
    ],
    indirect=["folders"],
)
def test_a_network_of_codes_generates_what_its_weights_do(
    folders: tuple[Path, Path], platform: str, dtype: str, mesh: tuple[int, int, int]
) -> None:
    cfg = ModelConfig.from_dir(folders[0])
    prompts = [[i % cfg.vocab_size for i in range(1, n)] for n in (5, 40, 23)]
    (tp, ep, dp), sizes = mesh, (cfg.scale_inputs, 0)
    kept, expanded = (
        Harness(folders[0], tp, ep, dtype, dp=dp, platform=platform, coded=coded).run(prompts, 8)
        for coded in sizes
    )
    for one, other in zip(kept, expanded, strict=True):
        assert one.ids == other.ids
        np.testing.assert_allclose(one.logits, other.logits, rtol=0, atol=1e-5)
        np.testing.assert_allclose(one.step_logits, other.step_logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("backend", kernels.EXPERTS, ids=lambda backend: backend.name)
@pytest.mark.parametrize("rows", [1, 20, 300])
def test_products_of_codes_are_those_of_the_weights_bit_for_bit(
    backend: kernels.Backend, rows: int
) -> None:
    """One row by the experts that it chose, all rows by all, and rounds of many."""
    experts = backend.build(kernels.ExpertsShape("cuda", "bfloat16", 64, 32, 16, 4))
    draw = np.random.default_rng(3)
    codes = [
        draw.integers(0, 127, size, dtype=np.uint8)
        for size in ((1, 16, 64, 2, 32), (1, 16, 32, 64))
    ]
    scales = [
        draw.uniform(1e-4, 1e-3, (1, 16, of.shape[2] // 16, *of.shape[3:])).astype(np.float32)
        for of in codes
    ]
    weights = [
        jnp.asarray(_values(of, by, 2, "bfloat16")) for of, by in zip(codes, scales, strict=True)
    ]
    ids = np.array([draw.permutation(16)[:4] for _ in range(rows)], np.int32)
    x = jnp.asarray(draw.standard_normal((rows, 64)), jnp.bfloat16)
    args = x, jnp.asarray(ids), jnp.asarray(draw.random((rows, 4)), jnp.float32)
    stacks = ExpertStacks(*weights)
    gate_up, down, gate_up_scale, down_scale = map(jnp.asarray, (*codes, *scales))
    kept = ExpertStacks(gate_up, down, None, None, gate_up_scale, down_scale)
    expected, found = (
        np.asarray(jax.jit(experts)(*args, given, jnp.int32(0))) for given in (stacks, kept)
    )
    assert np.abs(expected).max() > 0
    assert (found == expected).all()


def test_weights_without_codes_are_the_same_codes_on_every_mesh() -> None:
    folder = GOLDENS / "qwen3_moe" / "model"
    whole, parts = _open(folder, "fp8"), _open(folder, "fp8", tp=2)
    assert whole.model.dims.coded_groups != parts.model.dims.coded_groups
    assert whole.digest == parts.digest == _open(folder, "none").digest + ROUNDED
    for run, stacks in zip(whole.params["layers"], parts.params["layers"], strict=True):
        for name in ("experts_gate_up", "experts_down") if "experts_down" in run else ():
            one, other = (
                _values(np.asarray(of[name]), np.asarray(of[f"{name}_scale"]), 2, "float32")
                for of in (run, stacks)
            )
            assert (one == other).all()


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
    opened = _open(GOLDENS / "qwen3_moe" / "model", "fp8", policy, 2, 2)
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
    hidden=st.integers(1, 64).map(lambda n: 4 * n),
    width=st.integers(1, 64).map(lambda n: 4 * n),
    tp=st.sampled_from((1, 2, 4)),
    quantised=st.sampled_from((("", (128, 128)), ("fp8", (128, 128)), ("int4", (1, 32)))),
    experts=st.sampled_from((0, 8)),
    by_default=st.booleans(),
)
def test_codes_are_kept_by_default_where_scales_are_few(
    hidden: int,
    width: int,
    tp: int,
    quantised: tuple[str, tuple[int, int]],
    experts: int,
    by_default: bool,
) -> None:
    cfg = replace(
        ModelConfig.from_dir(GOLDENS / "qwen3_moe" / "model"),
        hidden_size=hidden,
        moe_intermediate_size=width if experts else 0,
        num_experts=experts,
        quantization=quantised[0],
        quantized_block=quantised[1],
    )
    dims = Dims(cfg, tp, 1)
    fits = quantised[0] and experts and hidden % 8 == width % (8 * tp) == 0
    kept = dims.coded_by("auto", by_default)
    assert kept == (quantised[1][1] if by_default and fits else 0)
    assert replace(dims, coded=kept).coded == kept
    assert dims.coded_by("none", by_default) == 0
    assert dims.coded_by("fp8", by_default) == quantised[1][1]


@pytest.mark.parametrize("kind", ["fp8", "int4"])
def test_a_quantised_network_without_experts_is_expanded(kind: str, tmp_path: Path) -> None:
    folders = tmp_path / kind, tmp_path / "plain"
    folder, _ = fp8_pair("qwen3", *folders, (24, 16))
    if kind == "int4":
        shutil.copytree(GOLDENS / "qwen3" / "model", tmp_path / "dense")
        config = json.loads((GOLDENS / "qwen3" / "model" / "config.json").read_text())
        folder = write_config(tmp_path / "dense", config | INT4)
    assert _open(folder, "auto").model.dims.coded == 0
    with pytest.raises(ModelError, match="Qwen3ForCausalLM has none"):
        _open(folder, "fp8")


def test_an_orbax_folder_has_no_codes(tmp_path: Path) -> None:
    quantised, _ = int4_pair(tmp_path / "int4", tmp_path / "plain")
    cfg = ModelConfig.from_dir(quantised)
    save_orbax(quantised, tmp_path / "orbax", Model.create(cfg, make_mesh(1, 1), "float32", 16))
    assert _open(tmp_path / "orbax", "auto").model.dims.coded == 0
    with pytest.raises(ModelError, match="in Orbax form; accepted with --quantization fp8"):
        _open(tmp_path / "orbax", "fp8")


def test_experts_that_are_quantised_in_part_are_expanded_unless_asked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    name = "model.layers.1.mlp.experts.1.down_proj.weight"

    def change(tensors: dict[str, np.ndarray]) -> None:
        tensors[name] = tensors[name].astype(np.float32)
        del tensors[f"{name}_scale_inv"]

    folders = tmp_path / "fp8", tmp_path / "plain"
    broken, _ = fp8_pair("deepseek_v3", *folders, (24, 16), change)
    with pytest.raises(ModelError, match=f"{name} is not quantised, as experts are by config"):
        _open(broken, "fp8")
    with caplog.at_level(logging.WARNING):
        assert _open(broken, "auto").model.dims.coded == 0
    assert "all experts become float32" in caplog.text


def test_inputs_that_can_share_few_scales_are_refused(tmp_path: Path) -> None:
    config = json.loads((GOLDENS / "qwen3_moe" / "model" / "config.json").read_text())
    odd = write_config(tmp_path, config | {"moe_intermediate_size": 36})
    with pytest.raises(ModelError, match=r"64 and 36 inputs .* 128 share a scale: .* 4 could"):
        _open(odd, "fp8")
