"""Processes that share a mesh load a program only if all have their part of one compilation."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from model import fingerprint, members
from model.devices import prepare_devices
from model.executables import _MOST_PARTS, ExecutableCache
from model.programs import Program, compile_all
from model.sharding import make_mesh
from tests.ports import free_port
from tests.transfer.children import child, said, tell

_NODE = "import sys; from tests.model.test_compiled_together import node; node(*sys.argv[1:])"
_TOLD = "told: "
NUM = 3  # programs
WANT = [6.0 + i for i in range(NUM)]


def sum_of(more: int) -> Callable[[jax.Array, jax.Array], jax.Array]:
    def total(row: jax.Array, unused: jax.Array) -> jax.Array:
        return jnp.sum(row) + jnp.float32(more)

    return total


def node(rank: str, address: str) -> None:
    """One process of two: for each folder that it reads, it starts as a worker would."""
    setattr(fingerprint, "_KNOWN", (*fingerprint._KNOWN, "tests"))  # noqa: B010
    prepare_devices(2, "127.0.0.1")
    members.join(address, 2, int(rank))
    assert not jax.config.jax_enable_compilation_cache  # JAX's own: only node 0 would use it
    sharding = NamedSharding(make_mesh(4, 1), P("tensor"))
    row = jax.make_array_from_callback((4,), sharding, np.arange(4, dtype=np.float32).__getitem__)
    for folder in map(str.strip, sys.stdin):
        programs = [Program(f"sum {i}", sum_of(i), [row, row]) for i in range(NUM)]
        compile_all(programs, kept=ExecutableCache(Path(folder)) if folder else None)
        sums = [float(np.asarray(program(row, row).addressable_data(0))) for program in programs]
        takes = [argument_bytes(program) for program in programs]
        kept = [program.was_kept for program in programs]
        print(_TOLD, json.dumps([sums, kept, takes]), flush=True)


def argument_bytes(program: Program) -> int:
    memory = program.compiled.memory_analysis()
    assert memory is not None
    return int(memory.argument_size_in_bytes)


Nodes = list["subprocess.Popen[str]"]


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    address = f"127.0.0.1:{free_port()}"
    with contextlib.ExitStack() as running:
        running.enter_context(pytest.MonkeyPatch.context()).delenv("XLA_FLAGS", raising=False)
        yield [running.enter_context(child(_NODE, str(rank), address)) for rank in (0, 1)]


def started(nodes: Nodes, *folders: Path | str) -> list[bool]:
    """Whether each program came from the folders.

    Both nodes have the same programs, also if one keeps none, with the same results.
    """
    for node, folder in zip(nodes, folders, strict=True):
        tell(node, str(folder))
    (sums, kept, takes), other = map(_told, nodes)
    assert [sums, kept, takes] == other
    assert sums == WANT
    return list(map(bool, kept))


def _told(node: "subprocess.Popen[str]") -> list[list[float]]:
    while not (line := said(node)).startswith(_TOLD):  # JAX's communication says a few words too
        assert line
    told: list[list[float]] = json.loads(line.removeprefix(_TOLD))
    return told


def parts(folder: Path) -> list[Path]:
    """In the order of programs' digests."""
    return sorted(folder.glob("part-*"))


def test_what_all_compiled_together_all_load(nodes: Nodes, tmp_path: Path) -> None:
    """Also where they share the folder, as on one host."""
    assert started(nodes, tmp_path, tmp_path) == [False] * NUM
    assert len(parts(tmp_path)) == 2 * NUM
    assert started(nodes, tmp_path, tmp_path) == [True] * NUM
    assert len(parts(tmp_path)) == 2 * NUM


def test_what_one_does_not_have_or_cannot_read_all_compile(nodes: Nodes, tmp_path: Path) -> None:
    folders = tmp_path / "0", tmp_path / "1"
    assert started(nodes, *folders) == [False] * NUM
    lost, damaged, _ = parts(folders[1])
    lost.unlink()
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert sorted(started(nodes, *folders)) == [False, False, True]
    assert started(nodes, *folders) == [True] * NUM


def test_parts_of_two_compilations_are_not_used_together(nodes: Nodes, tmp_path: Path) -> None:
    """As when groups with the same flags start at a time on the same hosts."""
    first, other = (tmp_path / "0", tmp_path / "1"), (tmp_path / "2", tmp_path / "3")
    for folders in (first, other):
        assert started(nodes, *folders) == [False] * NUM
    assert started(nodes, first[0], other[1]) == [False] * NUM
    assert started(nodes, first[0], other[1]) == [True] * NUM
    assert started(nodes, *first) == [True] * NUM


def test_a_node_that_keeps_nothing_has_all_compile(nodes: Nodes, tmp_path: Path) -> None:
    for _ in range(_MOST_PARTS + 2):
        assert started(nodes, tmp_path, "") == [False] * NUM
    assert len(parts(tmp_path)) == _MOST_PARTS * NUM  # however often it is started
    assert started(nodes, "", "") == [False] * NUM
