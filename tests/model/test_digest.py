"""A digest distinguishes checkpoints by a bounded part of each, and by how workers compute."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from model import weights
from model.weights import dummy_digest, model_digest
from tests.model.checkpoints import QWEN2, write_checkpoint
from tests.model.harness import GOLDENS

LLAMA = GOLDENS / "llama" / "model"


class _Files:
    """Tensors of one shape, whose entries count up; records what is read of them."""

    def __init__(self, num_tensors: int, shape: tuple[int, ...]) -> None:
        self.names = [f"t{i}" for i in range(num_tensors)]
        self.values = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
        self.read_of: dict[str, list[np.ndarray]] = {}

    def shape(self, name: str) -> tuple[int, ...]:
        return self.values.shape

    def dtype(self, name: str) -> str:
        return "F32"

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        for part, size in zip(index, self.values.shape, strict=True):
            assert 0 <= part.start < part.stop <= size
        self.read_of.setdefault(name, []).append(self.values[index].ravel())
        return self.values[index]


@pytest.fixture
def digest_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[_Files], str]:
    """The digest function for a checkpoint of such tensors."""

    def digest(files: _Files) -> str:
        monkeypatch.setattr(weights, "open_checkpoint", lambda *_: files)
        return model_digest(LLAMA)

    return digest


@pytest.mark.parametrize("shape", [(1,), (7, 3), (32_768,), (2, 64, 256)])
def test_a_small_tensor_is_read_whole(
    shape: tuple[int, ...], digest_of: Callable[[_Files], str]
) -> None:
    files = _Files(1, shape)
    before = digest_of(files)
    for at in {0, files.values.size // 3, files.values.size - 1}:
        other = _Files(1, shape)
        other.values.flat[at] += 1
        assert digest_of(other) != before


@pytest.mark.parametrize(
    "shape", [(100_000,), (1000, 999), (3, 200, 300), (40_000, 1), (2, 1, 150_000)]
)
def test_of_a_large_tensor_pieces_are_spread_from_its_start_to_its_end(
    shape: tuple[int, ...], digest_of: Callable[[_Files], str]
) -> None:
    files = _Files(1, shape)
    digest_of(files)
    (pieces,) = files.read_of.values()
    starts = np.array([piece[0] for piece in pieces])
    size = files.values.size
    assert len(starts) == 32
    assert starts[0] == 0
    assert pieces[-1][-1] == size - 1
    assert (np.diff(starts) > 0).all()
    # A piece moves to fit before the end of its row.
    assert np.diff(starts).max() < size / 31 + 512
    assert {len(piece) for piece in pieces} == {min(shape[-1], 256)}


def test_rows_are_sampled_at_other_columns_than_the_first(
    digest_of: Callable[[_Files], str],
) -> None:
    files = _Files(1, (4096, 4096))
    digest_of(files)
    columns = {int(piece[0]) % 4096 for piece in files.read_of["t0"]}
    assert len(columns) > 16
    assert max(columns) - min(columns) > 3000


@pytest.mark.parametrize(("num_tensors", "num_pieces"), [(300, 32), (5_000, 8), (20_000, 3)])
def test_the_more_tensors_there_are_the_less_is_read_of_each(
    num_tensors: int, num_pieces: int, digest_of: Callable[[_Files], str]
) -> None:
    files = _Files(num_tensors, (512, 512))
    digest_of(files)
    assert len(files.read_of) == num_tensors
    assert {len(pieces) for pieces in files.read_of.values()} == {num_pieces}


def test_sampling_defaults_and_the_first_token_are_of_no_worker(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "a", QWEN2)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    told = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "bos_token_id": 5}
    (tmp_path / "b" / "generation_config.json").write_text(json.dumps(told))
    for digest in (model_digest, dummy_digest):
        assert digest(tmp_path / "a") == digest(tmp_path / "b")
    (tmp_path / "b" / "generation_config.json").write_text(json.dumps({"eos_token_id": 9}))
    for digest in (model_digest, dummy_digest):
        assert digest(tmp_path / "a") != digest(tmp_path / "b")
