"""A model saved in Orbax form is the same model, on every mesh."""

import errno
import fcntl
import json
import math
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from bench.shapes import DEEPSEEK_V2_LITE, GPT_OSS_20B, QWEN3_8B, QWEN3_30B_A3B, Shape
from model import orbax
from model.config import ModelConfig
from model.errors import ModelError
from model.orbax import is_orbax, save_orbax
from model.params import param_leaves
from model.sharding import Dims, Stacks, make_mesh
from model.transformer import Model
from model.weights import load_params, model_digest
from tests.model.checkpoints import QWEN2, write_checkpoint
from tests.model.harness import GOLDENS

LLAMA = GOLDENS / "llama" / "model"


def _model(
    folder: Path, tp: int = 1, ep: int = 1, stacks: Stacks | None = None, dtype: str = "float32"
) -> Model:
    cfg = ModelConfig.from_dir(folder)
    return Model.create(cfg, make_mesh(tp, ep), dtype, 16, stacks=stacks)


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
        config = replace(ModelConfig.from_dir(source), torch_dtype="float32")
        assert ModelConfig.from_dir(out) == config
        for tp, ep in meshes:
            # Several devices need padding; giving layers their own arrays there covers both forms.
            stacks = Stacks.ALL if tp == 1 else Stacks.NONE
            direct = load_params(source, _model(source, tp, ep, stacks))
            restored = load_params(out, _model(out, tp, ep, stacks))
            assert str(jax.tree.structure(direct)) == str(jax.tree.structure(restored))
            for a, b in zip(jax.tree.leaves(direct), jax.tree.leaves(restored), strict=True):
                assert a.sharding == b.sharding
                assert a.dtype == b.dtype
                assert (np.asarray(a) == np.asarray(b)).all()


def test_parameters_are_read_and_written_in_chunks_that_every_mesh_restores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orbax, "_CHUNK_BYTES", 40_000)
    source, out, done = GOLDENS / "gpt_oss" / "model", tmp_path / "out", [0]
    save_orbax(source, out, _model(source), lambda *got: done.append(got[0]))
    assert max(after - before for before, after in pairwise(done)) <= 40_000
    direct, restored = (load_params(path, _model(source, 2, 2)) for path in (source, out))
    for a, b in zip(*map(jax.tree.leaves, (direct, restored)), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize("shape", [QWEN3_8B, QWEN3_30B_A3B, GPT_OSS_20B, DEEPSEEK_V2_LITE])
def test_a_chunk_of_a_large_parameter_has_some_megabytes(shape: Shape) -> None:
    leaves = orbax._flat(orbax._named(param_leaves(Dims(shape.cfg, 1, 1), jnp.dtype("bfloat16"))))
    for name, leaf in leaves.items():
        chunk = orbax._chunk_shape(leaf, is_stack=name[0] == "layers")
        assert math.prod(chunk) * leaf.dtype.itemsize <= 64 << 20
        assert math.prod(chunk) * leaf.dtype.itemsize >= 24 << 20 or chunk == leaf.canonical
    if shape is QWEN3_8B:  # a device of eight needs no chunk of another's
        for matrix, axis in (("qkv", 2), ("o", 1), ("gate_up", 3), ("down", 1)):
            leaf = leaves["layers", "0", matrix]
            assert leaf.canonical[axis] % (8 * orbax._chunk_shape(leaf, is_stack=True)[axis]) == 0


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


@pytest.mark.parametrize("name", ["torch_dtype", "dtype"])
@pytest.mark.parametrize("said", ["float32", None])
def test_the_config_of_a_conversion_says_the_dtype_that_it_wrote(
    name: str, said: str | None, tmp_path: Path
) -> None:
    source, out = shutil.copytree(LLAMA, tmp_path / "source"), tmp_path / "out"
    config = json.loads((source / "config.json").read_text())
    del config["torch_dtype"]
    expected = config | {(name if said else "torch_dtype"): "bfloat16"}
    config |= {name: said} if said else {}
    (source / "config.json").write_text(json.dumps(config))
    for _ in range(2):  # the second time in the same folder, as after a conversion that was cut off
        save_orbax(source, out, _model(source, dtype="bfloat16"))
        assert json.loads((out / "config.json").read_text()) == expected
        shutil.rmtree(out / "params")
    save_orbax(source, tmp_path / "as it was", _model(source))
    assert (tmp_path / "as it was" / "config.json").read_text() == json.dumps(config)


def test_the_template_for_chats_with_tools_comes_along_and_folders_do_not(tmp_path: Path) -> None:
    source, out = shutil.copytree(LLAMA, tmp_path / "source"), tmp_path / "out"
    template = source / "additional_chat_templates" / "tool_use.jinja"
    for folder in (template.parent, source / "README_files", source / "backup.json"):
        folder.mkdir()
    template.write_text("{{ tools }}")
    save_orbax(source, out, _model(source))
    assert (out / "additional_chat_templates" / "tool_use.jinja").read_text() == "{{ tools }}"
    assert not {"README_files", "backup.json"} & {path.name for path in out.iterdir()}


def test_a_file_that_cannot_be_copied_is_named_as_one_of_the_source(tmp_path: Path) -> None:
    source = shutil.copytree(LLAMA, tmp_path / "source")
    (source / "added_tokens.json").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"source/added_tokens.json: cannot be read: No such file"):
        save_orbax(source, tmp_path / "out", _model(source))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kept", ["config.json", "model.safetensors"])
def test_a_folder_with_another_model_is_left_as_it_was(kept: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    shutil.copy(GOLDENS / "qwen3" / "model" / kept, out)
    before = (out / kept).read_bytes()
    with pytest.raises(ModelError, match=rf"out/{kept}: exists.*; expected a new folder"):
        save_orbax(LLAMA, out, _model(LLAMA))
    assert [path.name for path in out.iterdir()] == [kept]
    assert (out / kept).read_bytes() == before


def test_a_folder_that_another_conversion_writes_to_is_left_to_it(tmp_path: Path) -> None:
    out = tmp_path / "out"
    unfinished = out / "params.orbax-checkpoint-tmp"
    unfinished.mkdir(parents=True)
    held = os.open(out, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(ModelError, match=r"out: another conversion writes there; expected a"):
            save_orbax(LLAMA, out, _model(LLAMA))
    finally:
        os.close(held)
    assert [*out.iterdir()] == [unfinished]


def test_what_a_conversion_that_was_cut_off_has_left_is_told_and_replaced(tmp_path: Path) -> None:
    out = tmp_path / "out"
    save_orbax(LLAMA, out, _model(LLAMA))
    (out / "params").rename(out / "params.orbax-checkpoint-tmp")
    with pytest.raises(ModelError, match=r"out: its conversion was cut off; run `kvferry convert`"):
        load_params(out, _model(LLAMA))
    save_orbax(LLAMA, out, _model(LLAMA))
    assert not list(out.glob("params.*"))
    load_params(out, _model(LLAMA))


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


@pytest.mark.parametrize("there", [True, False])
def test_a_folder_that_cannot_be_written_is_told_before_parameters_are_read(
    there: bool, tmp_path: Path
) -> None:
    out, read = tmp_path / "file" / "out", []
    if there:
        (out / "config.json").mkdir(parents=True)
    else:
        out.parent.touch()
    with pytest.raises(OSError, match="config.json" if there else "Not a directory"):
        save_orbax(LLAMA, out, _model(LLAMA), lambda *told: read.append(told))
    assert not read


@pytest.mark.parametrize("is_new", [True, False])
@pytest.mark.parametrize("failing", ["write_bytes", "save"])
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
        monkeypatch.setattr(Path, "write_bytes", fail)
    with pytest.raises(OSError, match="No space left"):
        save_orbax(source, out, _model(source))
    assert out.exists() != is_new
    assert is_new or [*out.iterdir()] == [out / "theirs"]


def test_a_folder_that_takes_no_more_is_told_in_one_line_and_left_as_it_was(tmp_path: Path) -> None:
    source, out = shutil.copytree(LLAMA, tmp_path / "source"), tmp_path / "out"
    (source / "tokenizer.json").unlink()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            save_orbax(source, out, _model(source))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "\n" not in str(caught.value)
    assert not out.exists()


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
    for file in _data(out):
        file.write_bytes(file.read_bytes()[:50])
    (line,) = _refusals(out)
    assert "not a readable Orbax checkpoint" in line
    (out / "params" / "_METADATA").write_text("{}")
    (line,) = _refusals(out)
    assert "not a readable Orbax checkpoint" in line
    (out / "params" / "_METADATA").unlink()
    (line,) = _refusals(out)
    assert "not a readable Orbax checkpoint" in line


def test_a_damaged_data_file_is_refused_in_one_line_that_names_the_parameter(
    tmp_path: Path,
) -> None:
    damages: dict[str, Callable[[Path], Any]] = {
        "truncated": lambda file: file.write_bytes(file.read_bytes()[:5000]),
        "emptied": lambda file: file.write_bytes(b""),
        "garbage": lambda file: file.write_bytes(bytes(file.stat().st_size)),
        "deleted": Path.unlink,
    }
    save_orbax(LLAMA, tmp_path / "whole", _model(LLAMA))
    for name, damage in damages.items():
        copy = shutil.copytree(tmp_path / "whole", tmp_path / name)
        damage(_data(copy)[-1])
    for name, line in zip(damages, _refusals(*map(tmp_path.joinpath, damages)), strict=True):
        assert line.startswith(f"{tmp_path / name / 'params'}: parameter ")
        assert "is not readable: " in line
        assert len(line) < 1000


@pytest.mark.parametrize("tp", [1, 4])
def test_a_changed_bit_is_refused_on_every_mesh(tp: int, tmp_path: Path) -> None:
    save_orbax(LLAMA, tmp_path / "whole", _model(LLAMA))
    copies = [tmp_path / str(i) for i in range(8)]
    for i, copy in enumerate(copies):
        shutil.copytree(tmp_path / "whole", copy)
        file = _data(copy)[-1]
        content = bytearray(file.read_bytes())
        # Unreferenced bytes may lie between chunks, so the bit to change is in the longest chunk.
        starts = [found.start() for found in re.finditer(rb"\x28\xb5\x2f\xfd", content)]
        size, start = max((b - a, a) for a, b in pairwise([*starts, len(content)]))
        content[start + size * (i + 1) // 10] ^= 1 << i
        file.write_bytes(content)
    for copy, line in zip(copies, _refusals(*copies, tp=tp), strict=True):
        assert line.startswith(f"{copy / 'params'}: parameter ")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_folders_with_and_without_checksums_load_alike(dtype: str, tmp_path: Path) -> None:
    model = _model(LLAMA, dtype=dtype)
    save_orbax(LLAMA, tmp_path / "with", model)
    # As Orbax writes without our codecs: an older form of arrays, each in one chunk.
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        tree = checkpointer.restore(tmp_path / "with" / "params")
        checkpointer.save(tmp_path / "without" / "params", args=ocp.args.PyTreeSave(tree))
    loaded = [load_params(path, model) for path in (tmp_path / "with", tmp_path / "without", LLAMA)]
    for values in zip(*map(jax.tree.leaves, loaded), strict=True):
        assert {value.dtype.name for value in values} == {dtype}
        assert len({np.asarray(value).tobytes() for value in values}) == 1


def _data(folder: Path) -> list[Path]:
    """Files of parameters, and of the tree that leads to them; the largest is last."""
    files = [path for path in (folder / "params").rglob("d/*") if path.is_file()]
    return sorted(files, key=lambda path: path.stat().st_size)


def _refusals(*paths: Path, tp: int = 1) -> list[str]:
    """What loading says, in a separate process: Orbax leaves reads behind that fail later."""
    script = """
import sys
from bench.shapes import DEEPSEEK_V2_LITE, GPT_OSS_20B, QWEN3_8B, QWEN3_30B_A3B, Shape
from model import orbax
from model.config import ModelConfig
from model.errors import ModelError
from model.sharding import make_mesh
from model.transformer import Model
from model.weights import load_params
import jax.numpy as jnp
tp, *paths = sys.argv[1:]
for path in paths:
    mesh = make_mesh(int(tp), 1)
    model = Model.create(ModelConfig.from_dir(path), mesh, jnp.dtype("float32"), 16)
    try:
        load_params(path, model)
        print("loaded")
    except ModelError as error:
        print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tp), *map(str, paths)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    lines = done.stdout.splitlines()
    assert len(lines) == len(paths)
    return lines
