"""Runs front ends of other projects: finds one in its environment, and owns its server process."""

import json
import os
import select
import subprocess
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Self

import psutil

from bench.endings import lifeline
from bench.frontend_cases import Design
from bench.serve import NoServer, free_address, not_ready, wait_ready
from bench.surroundings import ROOT

_START_TIMEOUT_S = 180.0  # a first import of torch from a cold disk
_ASK_TIMEOUT_S = 30.0
_ASK = "import importlib.metadata, sys; print(importlib.metadata.version(sys.argv[1]))"


def version_in(python: str, package: str) -> str:
    """The version of a package that a Python has installed. Raises NoServer if it has none."""
    try:
        words = [python, "-c", _ASK, package]
        done = subprocess.run(
            words, capture_output=True, text=True, check=False, timeout=_ASK_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoServer(f"--{package}-python {python} does not run: {error}") from error
    if done.returncode:
        last = done.stderr.strip().rpartition("\n")[2]
        raise NoServer(f"--{package}-python {python} has no {package}: {last}")
    return done.stdout.strip()


def environment() -> dict[str, str]:
    """The environment in which a peer's Python runs a module of ours: offline, on the CPU."""
    ours = {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    return os.environ | ours


class PeerServer:
    """Another project's server, from start to end, with all processes that it starts."""

    def __init__(self, design: Design, python: str, model_path: Path, core: int) -> None:
        self._design = design
        self._python = python
        self._model_path = model_path
        self._core = core

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._log = stack.enter_context(tempfile.TemporaryFile())
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            self.server = free_address()
            read, write = os.pipe()
            self._told = stack.enter_context(os.fdopen(read))
            life = stack.enter_context(lifeline())
            words = ["serve", str(write), str(life), str(self._model_path), str(self.server.port)]
            self._process = subprocess.Popen(
                [self._python, "-m", self._design.module, *words],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                pass_fds=(write, life),
                start_new_session=True,
                env=environment() | {"TMPDIR": folder},
            )
            os.close(write)
            stack.callback(self._end)
            os.sched_setaffinity(self._process.pid, {self._core})
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def addresses(self) -> dict[str, Any]:
        """The addresses of the sockets to and from its engine. Raises NoServer if it tells none."""
        ready, _, _ = select.select([self._told], [], [], _START_TIMEOUT_S)
        line = self._told.readline() if ready else ""
        if not line:
            raise not_ready(self._design.name, self._log)
        values: dict[str, Any] = json.loads(line)
        return values

    def wait(self) -> None:
        """Wait until it is ready. Raises NoServer."""
        if not wait_ready(self.server, self._process, _START_TIMEOUT_S):
            raise not_ready(self._design.name, self._log)

    def _end(self) -> None:
        with suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self._process.pid).children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    child.kill()
        self._process.kill()
        self._process.wait()
