"""Processes that start together do not count on the same memory."""

import contextlib
import logging
import os
import select
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from model import promises
from model.claims import locked
from model.host_memory import available_bytes
from model.promises import Promises
from tests.transfer.children import child, said, tell

MIB = 1 << 20
NEAR = 16 * MIB  # what a Python process may take or give back beside what is meant

_BEGIN = """
import sys
from pathlib import Path
from model.promises import Promises
promises = Promises(Path(sys.argv[1]))
def say(what):
    print(what, flush=True)
    return sys.stdin.readline()
"""
_TAKES = """
with promises.turn():
    promises.make(200 << 20)
say("promised")
taken = b"x" * (150 << 20)
say("taken")
with promises.turn():
    promises.make(20 << 20)
say("promised anew")
"""
_RESERVES = """
with promises.turn():
    promises.make(10 << 20)
    promises.reserve(30 << 20)
    promises.make(100 << 20)
    promises.reserve(50 << 20)
say("reserved")
taken = b"x" * (120 << 20)
say("taken")
"""
_MAPS = """
import mmap
with promises.turn():
    promises.make(200 << 20)
with open(sys.argv[2], "rb") as file:
    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
read = sum(mapped[:: mmap.PAGESIZE])
say("read")
"""
_SHARES = """
import mmap, os
promises.lent_bytes = int(sys.argv[2])
with promises.turn():
    promises.make(50 << 20)
say("promised")
file = os.memfd_create("pages")
os.ftruncate(file, 150 << 20)
shared = mmap.mmap(file, 150 << 20)
for at in range(0, len(shared), mmap.PAGESIZE):
    shared[at] = 1
say("taken")
"""
_ONE_OF_SEVERAL = """
from model.host_memory import available_bytes
from model.programs import memory_budget_bytes
import jax, model.programs
model.programs.PROMISES = promises
cpu = jax.devices("cpu")
wanted = int(sys.argv[2])
say("ready")
with promises.turn():
    fits = memory_budget_bytes(1.0, cpu) >= wanted
    if fits:
        promises.make(wanted)
say("fits" if fits else "does not fit")
"""
_HOLDS = """
with promises.turn():
    say("in turn")
say("over")
"""


def running(
    program: str, folder: Path, *args: str
) -> AbstractContextManager["subprocess.Popen[str]"]:
    """A process that goes on by a line to its stdin; killed when the block ends."""
    return child(_BEGIN + program, str(folder), *args)


def outstanding(folder: Path) -> float:
    """In MiB."""
    promises = Promises(folder)
    with promises.turn():
        return promises.outstanding_bytes() / MIB


def test_a_promise_counts_until_it_is_kept_replaced_or_its_process_is_gone(tmp_path: Path) -> None:
    folder = tmp_path / "promises"
    assert outstanding(folder) == 0
    with running(_TAKES, folder) as process:
        assert said(process) == "promised"
        assert outstanding(folder) == pytest.approx(200, abs=NEAR / MIB)
        tell(process)
        assert said(process) == "taken"
        assert outstanding(folder) == pytest.approx(50, abs=NEAR / MIB)
        tell(process)
        assert said(process) == "promised anew"
        assert outstanding(folder) == pytest.approx(20, abs=NEAR / MIB)
    assert outstanding(folder) == 0
    assert [file.name for file in folder.iterdir()] == ["turn"]


def test_a_checkpoint_that_is_mapped_keeps_no_promise(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    checkpoint.write_bytes(b"x" * (150 * MIB))
    with running(_MAPS, tmp_path / "promises", str(checkpoint)) as process:
        assert said(process) == "read"
        assert outstanding(tmp_path / "promises") == pytest.approx(200, abs=NEAR / MIB)


@pytest.mark.parametrize(
    ("lent", "promised", "left"),
    [(200 * MIB, 250, 100), (0, 50, 50)],  # it lends it, or another lends it to it
)
def test_shared_memory_keeps_the_promise_of_the_process_that_lends_it(
    tmp_path: Path, lent: int, promised: int, left: int
) -> None:
    with running(_SHARES, tmp_path, str(lent)) as process:
        assert said(process) == "promised"
        assert outstanding(tmp_path) == pytest.approx(promised, abs=NEAR / MIB)
        tell(process)
        assert said(process) == "taken"
        assert outstanding(tmp_path) == pytest.approx(left, abs=NEAR / MIB)


def test_containers_that_share_temporary_files_have_promises_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for number in (promises._numbering(), 7):
        monkeypatch.setattr(promises, "_numbering", lambda number=number: number)
        own = Promises()
        with own.turn():
            own.make(MIB)
    (first, *_), (second, *_) = (list(folder.glob("[0-9]*")) for folder in tmp_path.iterdir())
    assert first.name == second.name == str(os.getpid())


def test_its_own_promise_does_not_count(tmp_path: Path) -> None:
    promises = Promises(tmp_path)
    with promises.turn():
        promises.make(100 * MIB)
        assert promises.outstanding_bytes() == 0
        assert promises.outstanding_own_bytes() == pytest.approx(100 * MIB, abs=NEAR)


def test_what_is_reserved_counts_besides_every_promise(tmp_path: Path) -> None:
    with running(_RESERVES, tmp_path) as process:
        assert said(process) == "reserved"
        assert outstanding(tmp_path) == pytest.approx(150, abs=NEAR / MIB)
        tell(process)
        assert said(process) == "taken"
        assert outstanding(tmp_path) == pytest.approx(30, abs=NEAR / MIB)


def test_of_several_that_start_together_only_as_many_begin_as_fit(tmp_path: Path) -> None:
    wanted = str(int(0.6 * available_bytes()))  # promised only: nobody takes it
    with contextlib.ExitStack() as stack:
        start = [running(_ONE_OF_SEVERAL, tmp_path, wanted) for _ in range(3)]
        processes = [stack.enter_context(each) for each in start]
        assert [said(each) for each in processes] == ["ready"] * 3
        for each in processes:
            tell(each)
        assert sorted(said(each) for each in processes) == ["does not fit"] * 2 + ["fits"]


@pytest.mark.parametrize("end", [tell, subprocess.Popen.kill])
def test_a_turn_begins_when_the_one_before_it_is_over_or_its_process_dies(
    tmp_path: Path, end: Callable[["subprocess.Popen[str]"], None]
) -> None:
    with running(_HOLDS, tmp_path) as first:
        assert said(first) == "in turn"
        with running(_HOLDS, tmp_path) as second:
            assert second.stdout is not None
            assert not select.select([second.stdout], [], [], 1.0)[0], "the second one waits"
            end(first)
            assert said(second) == "in turn"


@pytest.mark.parametrize("what", ["a file", "a link to a folder"])
def test_a_worker_without_a_folder_of_its_own_starts_all_the_same(
    tmp_path: Path, what: str
) -> None:
    place = tmp_path / "promises"
    if what == "a file":
        place.write_text("")
    else:
        (tmp_path / "elsewhere").mkdir()
        place.symlink_to(tmp_path / "elsewhere")
    promises = Promises(place)
    with promises.turn():
        promises.make(100 * MIB)
        assert promises.outstanding_bytes() == 0
    if what != "a file":
        assert not list((tmp_path / "elsewhere").iterdir()), "nothing is written through a link"


def test_a_promise_whose_file_another_holds_changes_nothing_of_it_and_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    promises, file = Promises(tmp_path), tmp_path / str(os.getpid())
    with file.open("w") as held, caplog.at_level(logging.INFO):
        assert locked(held.fileno(), 0.0)
        held.write("7")
        held.flush()
        with promises.turn():
            promises.make(MIB)
            promises.make(MIB)
    assert file.read_text() == "7"
    told = [line for line in caplog.messages if "do not know of this one's memory" in line]
    assert len(told) == 2
