"""`--load-format dummy`: the same random network everywhere, from a folder without weights."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.errors import ModelError
from model.opening import OpenedModel
from model.sharding import Stacks, make_mesh
from model.transformer import Model, random_params
from tests.model.checkpoints import golden_config, write_config
from tests.model.harness import open_plainly
from tests.transfer.samples import a_worker
from transfer.errors import Incompatible
from transfer.layout import check_pair

GOLDENS = Path(__file__).resolve().parents[1] / "goldens"
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [32, 32]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_config(tmp_path / "bare", golden_config("qwen3_moe"))


def _open(folder: Path, load_format: str = "dummy", **more: Any) -> OpenedModel:
    return open_plainly(folder, 16, 64, dtype="auto", **more, load_format=load_format)


def _layers(params: Any) -> dict[str, np.ndarray]:
    """Each parameter of the layers, as one array over all layers."""
    found: dict[str, list[Any]] = {}
    for run in params["layers"]:
        for name, values in run.items():
            found.setdefault(name, []).append(values)
    return {name: np.concatenate(values) for name, values in found.items()}


def test_dummy_weights_are_the_same_however_many_layers_share_arrays(folder: Path) -> None:
    cfg, found = _open(folder).model.cfg, []
    for stacks in (Stacks.ALL, Stacks.NONE):
        model = Model.create(cfg, make_mesh(1, 1), "float32", 16, stacks=stacks)
        found.append(random_params(model, 5))
    assert len(found[0]["layers"]) < len(found[1]["layers"]) == cfg.num_layers
    jax.tree.map(np.testing.assert_array_equal, *map(_layers, found))
    assert (found[0]["embed"] == found[1]["embed"]).all()
    queries = _layers(found[0])["qkv"]
    assert not (queries[0] == queries[1]).all()


@pytest.mark.parametrize("quantization", ["none", "fp8"])
def test_dummy_weights_are_the_same_on_every_mesh(folder: Path, quantization: str) -> None:
    alone = _open(folder, quantization=quantization)
    spread = _open(folder, quantization=quantization, tp_size=2, ep_size=4, dp_size=2)
    assert alone.digest == spread.digest
    assert ("experts_down" in alone.model.dims.coded) == (quantization == "fp8")
    wholes, parts = _layers(alone.params), _layers(spread.params)
    for name in ("qkv", "experts_gate_up", "experts_down", "router"):
        assert (wholes[name] == parts[name]).all(), name
    assert jnp.isfinite(alone.params["embed"]).all()


def test_codes_of_a_quantised_config_need_no_weights_either(folder: Path) -> None:
    config = golden_config("qwen3_moe") | {"quantization_config": FP8}
    quantised = write_config(folder.parent / "fp8", config)
    kept, expanded = _open(quantised), _open(quantised, quantization="none")
    assert "experts_down" in kept.model.dims.coded
    assert kept.params["layers"][0]["experts_down"].dtype == jnp.uint8
    assert expanded.model.dims.coded == ()
    # Random codes are not the random numbers in another type, so these two are different networks.
    assert kept.digest != expanded.digest


def test_random_integers_are_spread_as_random_weights_are(folder: Path) -> None:
    """They also do not pair with workers that drew another kind of codes."""
    opened = [_open(folder, quantization=x) for x in ("int8", "fp8", "none")]
    assert len({of.digest for of in opened}) == 3
    of_int8, _, expanded = (_layers(of.params) for of in opened)
    codes, scales = of_int8["experts_down"], of_int8["experts_down_scale"]
    assert codes.dtype == np.int8
    assert 120 < codes.max() <= 127
    assert (scales == scales[0, 0, 0, 0]).all()
    found = codes.std() * scales[0, 0, 0, 0]
    np.testing.assert_allclose(found, expanded["experts_down"].std(), rtol=0.02)


def test_codes_that_few_inputs_could_share_a_scale_of_are_refused_as_of_a_checkpoint(
    folder: Path,
) -> None:
    with pytest.raises(ModelError, match=r"is not kept as codes: .* accepted: "):
        _open(folder, quantization="fp8", tp_size=4)


@pytest.mark.parametrize(
    "other",
    [
        lambda folder: _open(GOLDENS / "qwen3_moe" / "model", "auto"),
        lambda folder: _open(write_config(folder, golden_config("qwen3_moe") | {"rope_theta": 5})),
        lambda folder: _open(folder, quantization="fp8"),
    ],
    ids=["real weights", "another config", "codes"],
)
def test_a_dummy_pairs_only_with_a_dummy_of_its_config(
    other: Callable[[Path], OpenedModel], folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(folder, tmp_path / "copy")
    ours, copied, theirs = _open(folder), _open(tmp_path / "copy"), other(folder)
    prefill = a_worker("prefill", model_digest=ours.digest)
    check_pair(prefill, a_worker(model_digest=copied.digest))
    assert ours.digest.endswith("-dummy")
    with pytest.raises(Incompatible, match=f"model digest differs: prefill-0 has {ours.digest}"):
        check_pair(prefill, a_worker(model_digest=theirs.digest))


def test_weights_that_are_there_are_not_read(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "model.safetensors").write_bytes(b"no weights")
    _open(folder)
    (told,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "weights are random" in told.getMessage()
