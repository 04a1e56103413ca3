"""Workers that share a cache compile each program once, whoever of them hangs or dies."""

import contextlib
import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from model import claims, executables, fingerprint
from model.claims import claimed, locked
from model.executables import ExecutableCache
from model.programs import Program, compile_all
from tests.model import test_executables
from tests.model.test_executables import ARGS, made, matrix_of, result

held = test_executables.held
_of_this_file = test_executables._of_this_file
SPAWN = multiprocessing.get_context("spawn")


def programs_of(held: int, number: int = 6) -> list[Program]:
    return [Program(f"matrix {i}", matrix_of(held + i), ARGS, (0,)) for i in range(number)]


def compile_in_process(folder: str, held: int) -> list[bool]:
    """What a worker does. Whether each program came from the folder."""
    setattr(fingerprint, "_KNOWN", (*fingerprint._KNOWN, "tests"))  # noqa: B010
    programs = programs_of(held)
    compile_all(programs, kept=ExecutableCache(Path(folder)))
    return [program.was_kept for program in programs]


@contextlib.contextmanager
def claimed_by_another(folder: Path, held: int) -> Iterator[None]:
    """Someone else compiles the first program for as long as the block lasts."""
    made(folder / "other", held)
    (asked,) = (folder / "other").glob("asked-*")
    with claimed(folder / asked.name.replace("asked", "claim"), 0.0) as mine:
        assert mine
        yield


def test_processes_that_start_together_compile_each_program_once(tmp_path: Path, held: int) -> None:
    with SPAWN.Pool(2) as pool:
        both = pool.starmap(compile_in_process, [(str(tmp_path), held)] * 2)
    for one, other in zip(*both, strict=True):
        assert one != other
    assert not list(tmp_path.glob("claim-*"))


def test_programs_that_another_compiles_come_last(
    tmp_path: Path, held: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "model.programs")
    programs = programs_of(held)

    def done() -> list[str]:
        return [record.message.split()[-1] for record in caplog.records]

    with ThreadPoolExecutor(1) as threads:
        with claimed_by_another(tmp_path, held):
            caplog.clear()
            compiling = threads.submit(compile_all, programs, None, ExecutableCache(tmp_path))
            while len(done()) < 5:
                assert not compiling.done()
        compiling.result(timeout=60)
    assert sorted(done()[:-1]) == ["1", "2", "3", "4", "5"]
    assert done()[-1] == "0"
    for i, program in enumerate(programs):
        np.testing.assert_allclose(result(program), result(programs[0]) + i, rtol=1e-6)


def test_whoever_hangs_is_not_waited_for_for_ever(
    tmp_path: Path, held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executables, "_LONGEST_WAIT_S", 0.1)
    with claimed_by_another(tmp_path, held):
        assert not made(tmp_path, held).was_kept


# --- claims ---------------------------------------------------------------------------------------


def hold(path: Path, held: "multiprocessing.synchronize.Event") -> None:
    with claimed(path, 0.0) as mine:
        assert mine
        held.set()
        threading.Event().wait()


def test_a_claim_dies_with_its_process(tmp_path: Path) -> None:
    path, held = tmp_path / "claim", SPAWN.Event()
    holder = SPAWN.Process(target=hold, args=(path, held))
    holder.start()
    assert held.wait(60)
    with claimed(path, 0.0) as mine:
        assert not mine
    assert holder.pid is not None
    os.kill(holder.pid, signal.SIGKILL)
    holder.join()
    with claimed(path, 0.0) as mine:
        assert mine
    assert not path.exists()


def test_a_claim_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "claim"
    waiting = threading.Event()

    def wait() -> bool:
        waiting.set()
        with claimed(path, 60.0) as mine:
            return mine

    with ThreadPoolExecutor(1) as threads:
        with claimed(path, 0.0) as mine:
            assert mine
            later = threads.submit(wait)
            assert waiting.wait(60)
            assert not later.done()
        assert later.result(timeout=60)


@pytest.mark.parametrize(("wait_s", "pauses"), [(0.0, 0), (0.12, 2)])
def test_whoever_waits_for_a_lock_pauses_no_longer_than_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wait_s: float, pauses: int
) -> None:
    """A worker that asks for memory tries the lock of every other one, while all wait for it."""
    waits: list[float] = []
    pause = SimpleNamespace(wait=waits.append)
    monkeypatch.setattr(claims, "threading", SimpleNamespace(Event=lambda: pause))
    path = tmp_path / "held"
    with path.open("ab") as holder, path.open("ab") as other:
        assert locked(holder, 0.0)
        assert not locked(other, wait_s)
    assert waits == [claims._PAUSE_S] * pauses


def test_where_nothing_can_be_claimed_nobody_waits(tmp_path: Path) -> None:
    with claimed(tmp_path / "no folder" / "claim", 60.0) as mine:
        assert mine
