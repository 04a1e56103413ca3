"""Weights kept as codes of one byte give the same numbers as expanded ones; what is refused."""

import logging
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
from model.coded import CODE_DTYPES, ExpertStacks, decoded
from model.config import ModelConfig
from model.config_quantised import codes_of
from model.eplb import AS_TRAINED, ExpertPolicy
from model.errors import ModelError
from model.opening import ROUNDED, OpenedModel
from model.orbax import save_orbax
from model.programs import abstract_like, compile_all
from model.sharding import Dims, make_mesh
from model.transformer import Model
from model.weights import coded_parameters, load_params, stored_bytes
from tests.model.checkpoints import QWEN2, write_checkpoint
from tests.model.harness import GOLDENS, Golden, Harness, open_plainly, sizes_of_products
from tests.model.quantised_checkpoints import fp8_pair, int4_pair, int8_pair, mxfp4_pair

PAIRS: dict[str, Callable[[Path, Path], tuple[Path, Path]]] = {
    "mxfp4": mxfp4_pair,
    "int4": int4_pair,
    "fp8": partial(fp8_pair, "deepseek_v3", block=(24, 16)),
    "int8": int8_pair,
}
DENSE_PAIRS: dict[str, Callable[[Path, Path], tuple[Path, Path]]] = {
    "int4": partial(int4_pair, golden="qwen3"),
    "fp8": partial(fp8_pair, "qwen3", block=(24, 16)),
    "int8": partial(int8_pair, golden="qwen3", group=16, packed=False),
}
# Tolerance of correct float32 runs, and how large their logits are: tests/goldens/README.md.
RECORDED_ATOL, RECORDED_REACH = 2e-4, 13
# tp, ep, dp: whole experts, experts that devices share, experts that ranks share.
MESHES = [(1, 1, 1), (2, 1, 1), (4, 2, 1), (2, 4, 2)]


@pytest.fixture(scope="module", params=PAIRS)
def folders(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """A quantised checkpoint, and its plain twin."""
    return PAIRS[request.param](
        tmp_path_factory.mktemp(request.param), tmp_path_factory.mktemp("plain")
    )


def _model(folder: Path, mesh: tuple[int, int, int], dtype: str, how: str) -> Model:
    tp, ep, dp = mesh
    cfg, devices = ModelConfig.from_dir(folder), make_mesh(tp, ep, dp_size=dp)
    again = ep if ep > 1 else 0  # copies of experts
    codes = codes_of(cfg.quantization, how)
    dims = Dims.of(cfg, devices, ep > tp, again, codes=codes)
    names = coded_parameters(folder, dims, how, True)
    sizes = cfg, devices, dtype, 16, ep > tp
    return Model.create(*sizes, redundant_experts=again, coded=names, codes=codes)


def _axis(name: str) -> int:
    """The axis of inputs."""
    return {"experts_gate_up": 2, "experts_down": 2, "o": 3}.get(name, 1)


def _open(
    folder: Path,
    quantization: str,
    policy: ExpertPolicy = AS_TRAINED,
    tp: int = 1,
    ep: int = 1,
) -> OpenedModel:
    how = {"dtype": "auto", "quantization": quantization, "placing": policy}
    return open_plainly(folder, 16, 128, tp_size=tp, ep_size=ep, **how)


def _values(
    codes: np.ndarray, scales: np.ndarray, axis: int, dtype: str, native: bool = False
) -> np.ndarray:
    made = jax.jit(decoded, static_argnums=(2, 3, 4))(codes, scales, axis, dtype, native)
    return np.asarray(made)


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("kind", [ml_dtypes.float8_e4m3fn, np.int8])
def test_every_code_is_its_number(kind: type, native: bool) -> None:
    numbers: np.ndarray = np.arange(256, dtype=np.uint8).view(kind)
    numbers = numbers[np.isfinite(numbers.astype(np.float32))]
    codes = numbers.view(np.int8 if kind is np.int8 else np.uint8)
    found = _values(codes, np.full((1,), 0.75, np.float32), 0, "float32", native)
    expected = numbers.astype(np.float32) * np.float32(0.75)
    assert (found.view(np.uint32) == expected.view(np.uint32)).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mesh", MESHES)
def test_kept_codes_stand_for_what_is_expanded_otherwise(
    folders: tuple[Path, Path], mesh: tuple[int, int, int], dtype: str
) -> None:
    quantised, plain = folders
    kept, whole = _model(quantised, mesh, dtype, "auto"), _model(plain, mesh, dtype, "auto")
    assert {"experts_gate_up", "experts_down"} <= set(kept.dims.coded)
    # In these two all is quantised, but for the parts of latent attention multiplied by heads.
    every = ModelConfig.from_dir(quantised).quantization in ("fp8", "int8-packed")
    assert every == ("o" in kept.dims.coded) == ("shared_down" in kept.dims.coded)
    seen = set()
    for run, stacks in zip(
        load_params(quantised, kept)["layers"], load_params(plain, whole)["layers"], strict=True
    ):
        for name in (name for name in kept.dims.coded if name in run):
            codes, scales = run[name], run[f"{name}_scale"]
            assert (codes.dtype, scales.dtype) == (CODE_DTYPES[kept.dims.codes], jnp.float32)
            assert codes.shape == stacks[name].shape
            assert codes.sharding == stacks[name].sharding
            values = _values(np.asarray(codes), np.asarray(scales), _axis(name), dtype)
            expected = np.asarray(stacks[name])
            assert (values.view(np.uint8) == expected.view(np.uint8)).all(), name
            seen.add(name)
    assert seen == set(kept.dims.coded)
    assert stored_bytes(kept) < stored_bytes(whole)


def _adds_up_alike() -> bool:
    """Whether half of a product's outputs come out the same when computed without the other half.

    A lane of codes has half as many outputs; where a processor's vectors are wider than a lane, it
    is added up in another order.
    """
    draw = np.random.default_rng(0)
    x, w = (jnp.asarray(draw.standard_normal(size, np.float32)) for size in ((16, 64), (64, 32)))
    product = jax.jit(lambda x, w: jnp.dot(x, w, precision="highest"))
    return bool(jnp.array_equal(product(x, w)[:, ::2], product(x, w[:, ::2])))


# Each kind of codes in each form of products, with whole experts, parts of experts, and parts that
# ranks share. int4 becomes the same codes as mxfp4, and also leaves all but experts as they are.
@pytest.mark.parametrize(
    ("folders", "platform", "dtype", "mesh"),
    [
        ("mxfp4", "cpu", "bfloat16", MESHES[0]),
        ("mxfp4", "cuda", "float32", MESHES[3]),
        ("int4", "cpu", "float32", MESHES[2]),
        ("fp8", "cpu", "float32", MESHES[3]),
        ("fp8", "cuda", "bfloat16", MESHES[1]),
        ("int8", "cpu", "bfloat16", MESHES[1]),
        ("int8", "cuda", "bfloat16", MESHES[0]),
    ],
    indirect=["folders"],
)
def test_a_network_of_codes_generates_what_its_weights_do(
    folders: tuple[Path, Path], platform: str, dtype: str, mesh: tuple[int, int, int]
) -> None:
    cfg = ModelConfig.from_dir(folders[0])
    prompts = [[i % cfg.vocab_size for i in range(1, n)] for n in (5, 40, 23)]
    tp, ep, dp = mesh
    kept, expanded = (
        Harness(folders[0], tp, ep, dtype, dp=dp, platform=platform, coded=coded).run(prompts, 8)
        for coded in (True, False)
    )
    interpreted = (platform, dtype) == ("cuda", "float32")
    if not interpreted or _adds_up_alike():
        atol = 1e-5
    else:  # rounding errors are proportional to what is rounded
        reach = max(np.abs(other.step_logits).max() for other in expanded)
        atol = RECORDED_ATOL * reach / RECORDED_REACH
    for one, other in zip(kept, expanded, strict=True):
        assert one.ids == other.ids
        np.testing.assert_allclose(one.logits, other.logits, rtol=0, atol=atol)
        np.testing.assert_allclose(one.step_logits, other.step_logits, rtol=0, atol=atol)


@pytest.mark.parametrize("backend", kernels.EXPERTS, ids=lambda backend: backend.name)
@pytest.mark.parametrize("rows", [1, 20, 300])
@pytest.mark.parametrize(("dtype", "largest"), [(np.uint8, 126), (np.int8, 127)])
def test_products_of_codes_are_those_of_the_weights_bit_for_bit(
    backend: kernels.Backend, rows: int, dtype: type, largest: int
) -> None:
    """1 row takes the experts that it chose, 20 take all experts, 300 go by rounds of many rows."""
    experts = backend.build(
        kernels.ExpertsShape("cuda", "bfloat16", 64, 32, 16, 4, interpreted=True)
    )
    draw = np.random.default_rng(3)
    codes = [
        draw.integers(np.iinfo(dtype).min, largest, size, dtype, endpoint=True)
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
    # Optimized even if tests are not: otherwise XLA adds up the two in different orders.
    program = jax.jit(experts, compiler_options={"xla_backend_optimization_level": 3})
    expected, found = (np.asarray(program(*args, given, jnp.int32(0))) for given in (stacks, kept))
    assert np.abs(expected).max() > 0
    assert (found == expected).all()


@pytest.mark.parametrize(
    ("golden", "how"),
    [("qwen3", "fp8"), ("qwen3_moe", "fp8"), ("deepseek_v3", "fp8"), ("qwen3_moe", "int8")],
)
def test_weights_without_codes_are_the_same_codes_on_every_mesh(golden: str, how: str) -> None:
    folder = GOLDENS / golden / "model"
    whole, parts = _open(folder, how), _open(folder, how, tp=2)
    assert whole.model.dims.coded == parts.model.dims.coded == tuple(whole.model.dims.coded_inputs)
    assert whole.model.dims.coded_inputs != parts.model.dims.coded_inputs
    assert whole.digest == parts.digest == _open(folder, "none").digest + ROUNDED[how]
    for run, stacks in zip(whole.params["layers"], parts.params["layers"], strict=True):
        for name in (name for name in whole.model.dims.coded if name in run):
            one, other = (
                _values(np.asarray(codes), np.asarray(scales), _axis(name), "float32")
                for codes, scales in ((of[name], of[f"{name}_scale"]) for of in (run, stacks))
            )
            # Heads that are spread over copies of a kv head keep their order.
            other = other.reshape(one.shape)
            assert (one == other).all(), name


@pytest.mark.parametrize(
    ("golden", "codes", "most"),
    [("qwen3", "fp8", 0.5), ("qwen3_moe", "fp8", 0.5), ("qwen3", "int8", 0.1)],
)
def test_answers_of_rounded_weights_are_near_the_recorded(
    golden: str, codes: str, most: float
) -> None:
    recorded = Golden(golden)
    prompts = list(recorded.prompts.values())[:3]
    sizes = (2, 1 if golden == "qwen3" else 2)
    ran = Harness(GOLDENS / golden / "model", *sizes, coded=codes).run(prompts, 2)
    exact = Harness(GOLDENS / golden / "model", *sizes).run(prompts, 2)
    for one, other in zip(ran, exact, strict=True):
        assert 0 < np.abs(one.logits - other.logits).max() < most * np.abs(other.logits).max()


def test_codes_and_their_scales_move_together() -> None:
    """After experts move by the rows that chose them, they still stand for the same weights."""
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
    kept = _open(folders[0], "auto")
    asked, expanded = (_open(folders[0], how) for how in (kept.model.dims.codes, "none"))
    assert kept.model.dims.coded == asked.model.dims.coded
    assert "experts_down" in kept.model.dims.coded
    assert expanded.model.dims.coded == ()
    # The numbers are the same, so workers that differ in this may serve one request.
    assert kept.digest == asked.digest == expanded.digest
    assert _open(folders[1], "auto").model.dims.coded == ()


@given(
    hidden=st.integers(1, 64).map(lambda n: 4 * n),
    width=st.integers(1, 64).map(lambda n: 4 * n),
    head_dim=st.integers(1, 32).map(lambda n: 4 * n),
    tp=st.sampled_from((1, 2, 4)),
    quantised=st.sampled_from((("", (128, 128)), ("fp8", (128, 128)), ("int4", (1, 32)))),
    experts=st.sampled_from((0, 8)),
)
def test_no_two_devices_share_a_scale_and_few_inputs_are_refused_one(
    hidden: int,
    width: int,
    head_dim: int,
    tp: int,
    quantised: tuple[str, tuple[int, int]],
    experts: int,
) -> None:
    cfg = replace(
        ModelConfig.from_dir(GOLDENS / "qwen3_moe" / "model"),
        hidden_size=hidden,
        head_dim=head_dim,
        intermediate_size=width,
        moe_intermediate_size=width if experts else 0,
        num_experts=experts,
        moe_layers=(experts > 0,) * 2,
        num_layers=2,
        quantization=quantised[0],
        quantized_block=quantised[1],
    )
    dims = Dims(cfg, tp, 1)
    first, last = ("experts_gate_up", "experts_down") if experts else ("gate_up", "down")
    sizes = {"qkv": hidden, "o": head_dim, first: hidden, last: -(-width // tp)}
    assert {name: found.inputs for name, found in dims.coded_inputs.items()} == sizes
    on_one = Dims(cfg, 1, 1).coded_inputs
    for name, (inputs, group, on_any) in dims.coded_inputs.items():
        assert inputs % group == quantised[1][1] % group == 0
        assert on_any == on_one[name].group
        assert (name in dims.codable) == ((group if quantised[0] else on_any) >= 8)
        if group < 8:
            with pytest.raises(ModelError, match=f"{name}, with {inputs} .*: only {group} of them"):
                replace(dims, coded=(name,))
        else:
            assert replace(dims, coded=(name,)).coded == (name,)
    assert dims.coded_as_published("none") == dims.coded_as_published("auto") == ()


def test_integers_of_four_bits_are_either_code_and_the_same_numbers(tmp_path: Path) -> None:
    folder, plain = int4_pair(tmp_path / "int4", tmp_path / "plain")
    kept, other = _open(folder, "fp8"), _open(folder, "int8")
    assert (kept.model.dims.codes, other.model.dims.codes) == ("fp8", "int8")
    assert kept.model.dims.coded == other.model.dims.coded
    assert kept.digest == other.digest
    (run,) = (run for run in other.params["layers"] if "experts_down" in run)
    codes, scales = (np.asarray(run[f"experts_down{end}"]) for end in ("", "_scale"))
    assert codes.dtype == np.int8
    found = _values(codes, scales, 2, "float32")
    (run,) = (x for x in _open(plain, "auto").params["layers"] if "experts_down" in x)
    assert run["experts_down"].shape == found.shape
    assert (found == np.asarray(run["experts_down"])).all()


def test_codes_that_cannot_say_what_is_published_are_refused(
    folders: tuple[Path, Path],
) -> None:
    codes = _open(folders[0], "auto").model.dims.codes
    published = ModelConfig.from_dir(folders[0]).quantization
    if published == "int4":
        return
    (other,) = set(CODE_DTYPES) - {codes}
    with pytest.raises(ModelError, match=f"--quantization {other}: .* weights are {published}, "):
        _open(folders[0], other)


@pytest.mark.parametrize("kind", DENSE_PAIRS)
def test_a_quantised_network_without_experts_keeps_its_codes(kind: str, tmp_path: Path) -> None:
    folder, plain = DENSE_PAIRS[kind](tmp_path / kind, tmp_path / "plain")
    kept, whole = _open(folder, "auto"), _open(plain, "auto")
    assert kept.model.dims.coded == ("qkv", "o", "gate_up", "down")
    assert stored_bytes(kept.model) < stored_bytes(whole.model)
    prompts = [[i % 64 for i in range(1, n)] for n in (5, 40, 23)]
    one, other = (Harness(at, 2, coded=at is folder).run(prompts, 8) for at in (folder, plain))
    for mine, theirs in zip(one, other, strict=True):
        assert mine.ids == theirs.ids
        np.testing.assert_allclose(mine.step_logits, theirs.step_logits, rtol=0, atol=1e-5)


def _expanded(name: str) -> Callable[[dict[str, np.ndarray]], None]:
    """A change to a checkpoint's tensors that makes one of them unquantised."""

    def change(tensors: dict[str, np.ndarray]) -> None:
        tensors[name] = tensors[name].astype(np.float32)
        del tensors[f"{name}_scale_inv"]

    return change


def test_what_is_quantised_in_some_layers_alone_is_expanded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    name = "model.layers.1.self_attn.o_proj.weight"

    folder, _ = fp8_pair("qwen3", tmp_path / "fp8", tmp_path / "plain", (24, 16), _expanded(name))
    with caplog.at_level(logging.WARNING):
        assert _open(folder, "fp8").model.dims.coded == ("qkv", "gate_up", "down")
    assert f"o: expanded, since tensor {name} is not quantised" in caplog.text


def test_an_orbax_folder_has_no_codes(tmp_path: Path) -> None:
    quantised, _ = int4_pair(tmp_path / "int4", tmp_path / "plain")
    cfg = ModelConfig.from_dir(quantised)
    save_orbax(quantised, tmp_path / "orbax", Model.create(cfg, make_mesh(1, 1), "float32", 16))
    assert _open(tmp_path / "orbax", "auto").model.dims.coded == ()
    with pytest.raises(ModelError, match="in Orbax form; accepted with --quantization fp8"):
        _open(tmp_path / "orbax", "fp8")


def test_experts_that_are_quantised_in_part_are_expanded_unless_asked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    name = "model.layers.1.mlp.experts.1.down_proj.weight"

    folders = tmp_path / "fp8", tmp_path / "plain"
    broken, _ = fp8_pair("deepseek_v3", *folders, (24, 16), _expanded(name))
    with pytest.raises(ModelError, match=f"{name} is not quantised, though config.json says"):
        _open(broken, "fp8")
    with caplog.at_level(logging.WARNING):
        coded = _open(broken, "auto").model.dims.coded
    assert "experts_gate_up" in coded
    assert "experts_down" not in coded
    assert f"experts_down: expanded, since tensor {name} is not quantised" in caplog.text


def test_weights_of_few_inputs_to_a_scale_are_not_rounded(tmp_path: Path) -> None:
    """On every mesh, the head's 10 inputs and the width of 30 allow only two inputs to a scale."""
    write_checkpoint(tmp_path, QWEN2)
    assert _open(tmp_path, "fp8").model.dims.coded == ("qkv", "gate_up")


def test_rounding_is_refused_where_devices_are_too_many(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, QWEN2 | {"intermediate_size": 24})
    assert "down" in _open(tmp_path, "fp8").model.dims.coded
    with pytest.raises(
        ModelError, match=r"down, with 12 inputs .*: only 4 of them .*\(--tp-size\)"
    ):
        _open(tmp_path, "fp8", tp=2)


def test_a_quantised_parameter_of_few_inputs_to_a_scale_is_expanded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, _ = fp8_pair("qwen3", tmp_path / "fp8", tmp_path / "plain", (24, 4))
    with caplog.at_level(logging.WARNING):
        assert _open(folder, "fp8").model.dims.coded == ()
    assert "qkv: expanded, since only 4 inputs could share a scale" in caplog.text


def test_a_missing_tensor_is_told_as_such(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.experts.1.down_proj.weight"

    def change(tensors: dict[str, np.ndarray]) -> None:
        del tensors[name], tensors[f"{name}_scale_inv"]

    folder, _ = fp8_pair("deepseek_v3", tmp_path / "fp8", tmp_path / "plain", (24, 16), change)
    with pytest.raises(ModelError, match=f"tensor {name} is missing"):
        _open(folder, "fp8")


@pytest.mark.parametrize("how", [False, True], ids=["numbers", "codes"])
def test_a_network_in_tiles_generates_what_whole_products_do(how: bool, tmp_path: Path) -> None:
    """Experts, stacked layers, strips of the head: in tiles made small for a small network."""
    folder, _ = fp8_pair("deepseek_v3", tmp_path / "fp8", tmp_path / "plain", (24, 16))
    prompts = [list(range(1, n)) for n in (5, 40, 23)]
    whole = Harness(folder, coded=how).run(prompts, 8)
    tiny = {"_INPUTS": 16, "_OUTPUTS": 48, "_WIDEST": 64, "_STRIP": 32, "_SMALL": 64, "_LEAST": 8}
    with sizes_of_products(tiny | {"_LARGE": 64}):
        tiles = Harness(folder, coded=how).run(prompts, 8)
    for one, other in zip(tiles, whole, strict=True):
        assert one.ids == other.ids
        np.testing.assert_allclose(one.logits, other.logits, rtol=0, atol=1e-4)
        assert (one.logits != other.logits).any(), "nothing went by tiles"
