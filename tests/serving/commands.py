"""Real command lines for tests: run one, read what it said, check that it left no process."""

import os
import re
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.cluster import environment, wait_until

GOLDENS = Path(__file__).parents[1] / "goldens"
MODEL = GOLDENS / "qwen3" / "model"
MARK = "KVFERRY_TEST_MARK"
TOKEN = "a-token-for-the-tests"
# A log line, also one of a child of `up`, or a child's own refusal.
LOG_LINE = re.compile(
    r"(\[[\w-]+\] )?\d\d:\d\d:\d\d (\[\w+\] )?[DIWE] |\[[\w-]+\] kvferry |kvferry: starting "
)
# Flags for a worker of which only the start matters: few and small programs.
SMALL = ("--context-length=32", "--page-size=16")
SMALL_PREFILL = (*SMALL, "--chunked-prefill-size=32", "--max-seqs-per-chunk=1")
SMALL_DECODE = (*SMALL, "--max-running-requests=1")
END_TIMEOUT_S = 60.0


@dataclass
class Command:
    """One `kvferry` command, running or ended, with everything it started."""

    process: subprocess.Popen[str]
    log: Path
    mark: str

    @property
    def text(self) -> str:
        """What it and its children have said so far, stdout and stderr."""
        return self.log.read_text(errors="replace")

    def says(self, pattern: str, times: int = 1) -> None:
        """Wait until it has said this so many times."""

        def said() -> bool:
            assert self.process.poll() is None or self._found(pattern) >= times, self.text
            return self._found(pattern) >= times

        wait_until(said, END_TIMEOUT_S)

    def ends(self, timeout_s: float = END_TIMEOUT_S) -> int:
        """Its exit code, once everything that it started has ended too."""
        code = self.process.wait(timeout_s)
        wait_until(lambda: not self.family(), 10.0)
        return code

    def family(self) -> list[psutil.Process]:
        """Every live process that has this command's mark, itself included."""
        return [process for process in psutil.process_iter() if self._is_ours(process)]

    def child(self, module: str) -> psutil.Process:
        """The child that runs `python -m module`."""
        return next(p for p in self.family() if module in p.cmdline() and p.pid != self.process.pid)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        """End whatever is left."""
        for process in self.family():
            process.kill()
        self.process.wait()

    def _found(self, pattern: str) -> int:
        return len(re.findall(pattern, self.text))

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            is_alive = process.status() != psutil.STATUS_ZOMBIE
            return is_alive and process.environ().get(MARK) == self.mark
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            return False


def start(folder: Path, *argv: str, **variables: str) -> Command:
    """Start `kvferry` with these words; its output goes to a file in the folder."""
    mark = uuid.uuid4().hex
    log = folder / f"{mark}.log"
    with log.open("w") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "serving.launch", *argv],
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            env={**environment(), "KVFERRY_CLUSTER_TOKEN": TOKEN, **variables, MARK: mark},
            text=True,
            start_new_session=True,
        )
    return Command(process, log, mark)


def refused(command: Command) -> str:
    """The one line with which a command refused to start; only log lines may precede it."""
    try:
        code = command.ends()
    finally:
        command.kill()
    lines = command.text.splitlines()
    assert code == 2, command.text
    assert lines, "nothing was said"
    assert "Traceback" not in command.text, command.text
    noise = [line for line in lines[:-1] if not LOG_LINE.match(line)]
    assert not noise, noise
    return lines[-1]


def copy_of(model: Path, folder: Path, damage: Callable[[Path], object] | None = None) -> Path:
    """A copy of a checkpoint, damaged if `damage` is given."""
    copy = folder / uuid.uuid4().hex
    copy.mkdir()
    for file in model.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    if damage is not None:
        damage(copy)
    return copy


def truncate(folder: Path) -> None:
    """Cut the end off the weights, as a download that broke off does."""
    file = folder / "model.safetensors"
    os.truncate(file, file.stat().st_size // 2)


def told_while_loading(
    folder: Path, module: str, name: str, number: signal.Signals
) -> tuple[int, str]:
    """Run a command, and send it a signal while `module` loads, which takes for ever.

    Returns its exit code and all that it said.
    """
    # SIGINT acts as from a terminal, whatever started the tests.
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from serving.launch import main; main()"
    )
    loads = "import threading\nprint('loading', flush=True)\nthreading.Event().wait()\n"
    (folder / f"{module}.py").write_text(loads)
    with subprocess.Popen(
        [sys.executable, "-c", code, name],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "PYTHONPATH": str(folder)},
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "loading\n"
            process.send_signal(number)
            rest, _ = process.communicate(timeout=END_TIMEOUT_S)
        finally:
            process.kill()
    return process.returncode, rest
