"""The Orbax form holds the same model, for every mesh."""

import errno
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from model.config import ModelConfig
from model.errors import ModelError
from model.sharding import Stacks, make_mesh
from model.transformer import Model
from model.weights import is_orbax, load_params, model_digest, save_orbax
from tests.model.checkpoints import QWEN2, write_checkpoint
from tests.model.harness import GOLDENS


def _model(folder: Path, tp: int = 1, ep: int = 1, stacks: Stacks | None = None) -> Model:
    cfg = ModelConfig.from_dir(folder)
    return Model.create(cfg, make_mesh(tp, ep), "float32", 16, stacks=stacks)


def test_what_was_saved_is_restored_into_every_mesh_padded_where_needed(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "odd", QWEN2)
    cases = [
        (tmp_path / "odd", [(1, 1), (4, 1)]),
        (GOLDENS / "llama" / "model", [(4, 1)]),
        (GOLDENS / "qwen3_moe" / "model", [(2, 2)]),
        (GOLDENS / "gpt_oss" / "model", [(4, 2)]),
        (GOLDENS / "deepseek_v3" / "model", [(4, 1)]),
    ]
    for i, (source, meshes) in enumerate(cases):
        out = tmp_path / f"out{i}"
        counts: list[tuple[int, int]] = []
        save_orbax(source, out, _model(source), lambda *got, to=counts: to.append(got))
        assert counts[-1][0] == counts[-1][1] > 0
        assert is_orbax(out)
        assert not is_orbax(source)
        assert ModelConfig.from_dir(out) == ModelConfig.from_dir(source)
        for tp, ep in meshes:
            # Padded on several devices: layers with arrays of their own cover both there.
            stacks = Stacks.ALL if tp == 1 else Stacks.NONE
            direct = load_params(source, _model(source, tp, ep, stacks))
            restored = load_params(out, _model(out, tp, ep, stacks))
            assert str(jax.tree.structure(direct)) == str(jax.tree.structure(restored))
            for a, b in zip(jax.tree.leaves(direct), jax.tree.leaves(restored), strict=True):
                assert a.sharding == b.sharding
                assert a.dtype == b.dtype
                assert (np.asarray(a) == np.asarray(b)).all()


def test_tokenizer_and_generation_files_come_along_but_no_safetensors_index(
    tmp_path: Path,
) -> None:
    source, out = GOLDENS / "mixtral" / "model", tmp_path / "out"
    save_orbax(source, out, _model(source))
    names = {file.name for file in out.iterdir()}
    assert names == {
        "config.json",
        "generation_config.json",
        "params",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    shutil.copytree(out, tmp_path / "copy")
    assert model_digest(out) == model_digest(tmp_path / "copy")


@pytest.mark.parametrize("link", [False, True])
def test_the_source_is_no_place_to_write_to(link: bool, tmp_path: Path) -> None:
    source = shutil.copytree(GOLDENS / "llama" / "model", tmp_path / "source")
    before = sorted(source.iterdir())
    out = source / "." / ".." / "source"
    if link:
        out = tmp_path / "link"
        out.symlink_to(source)
    with pytest.raises(ModelError, match=r"is the folder of the source; expected a new folder"):
        save_orbax(source, out, _model(source))
    assert sorted(source.iterdir()) == before


@pytest.mark.parametrize("is_new", [True, False])
@pytest.mark.parametrize("failing", ["copyfile", "save"])
def test_what_was_begun_goes_when_it_fails(
    is_new: bool, failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **more: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def save_part(checkpointer: Any, path: Path, args: Any) -> None:
        (path.parent / f"{path.name}.orbax-checkpoint-tmp").mkdir()
        fail()

    source, out = GOLDENS / "llama" / "model", tmp_path / "out"
    if not is_new:
        out.mkdir()
        (out / "theirs").touch()
    if failing == "save":
        monkeypatch.setattr(ocp.Checkpointer, "save", save_part)
    else:
        monkeypatch.setattr(shutil, "copyfile", fail)
    with pytest.raises(OSError, match="No space left"):
        save_orbax(source, out, _model(source))
    assert out.exists() != is_new
    assert not list(out.glob("params*"))
    assert is_new or (out / "theirs").exists()


def test_bad_orbax_folders_are_refused_in_one_line(tmp_path: Path) -> None:
    source, out = GOLDENS / "llama" / "model", tmp_path / "out"
    save_orbax(source, out, _model(source))
    with pytest.raises(ModelError, match=r"params: exists; expected a new folder"):
        save_orbax(source, out, _model(source))
    with pytest.raises(ModelError, match=r"is in Orbax form already; expected safetensors"):
        save_orbax(out, tmp_path / "again", _model(source))
    other = GOLDENS / "qwen3" / "model"
    with pytest.raises(ModelError, match=r"parameter embed: shape \[1024, 96\], expected \[1024"):
        load_params(out, _model(other))


def test_damaged_orbax_files_are_refused_in_one_line(tmp_path: Path) -> None:
    source, out = GOLDENS / "llama" / "model", tmp_path / "out"
    save_orbax(source, out, _model(source))
    for file in (out / "params").rglob("*"):
        if file.is_file() and file.parent.name == "d":
            file.write_bytes(file.read_bytes()[:50])
    assert "not a readable Orbax checkpoint" in _refusal(out)
    (out / "params" / "_METADATA").write_text("{}")
    assert "not a readable Orbax checkpoint" in _refusal(out)


def _refusal(path: Path) -> str:
    """What loading says, in a process of its own: Orbax leaves reads behind that fail later."""
    script = """
import sys
from model.config import ModelConfig
from model.errors import ModelError
from model.sharding import make_mesh
from model.transformer import Model
from model.weights import load_params
import jax.numpy as jnp
path = sys.argv[1]
model = Model.create(ModelConfig.from_dir(path), make_mesh(1, 1), jnp.dtype("float32"), 16)
try:
    load_params(path, model)
except ModelError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    (line,) = done.stdout.splitlines()
    return line
