"""Ends processes of a benchmark: with the one that started them, and in one line on a signal.

It needs the standard library alone, as other projects' interpreters run it too.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

EXIT_INTERRUPTED = 130  # as transfer/exit_codes.py has it


@contextlib.contextmanager
def lifeline() -> Iterator[int]:
    """A descriptor that ends another process at the end of the block, or with this process.

    It does so however this process dies. The other process is one of `kvferry` that learns the
    descriptor from LIFELINE_ENV, or one that calls `end_with`.
    """
    read, write = os.pipe()
    try:
        yield read
    finally:
        os.close(read)
        os.close(write)


def end_with(lifeline_fd: int) -> None:
    """Have this process and its group killed when the holder of the other end closes it or dies."""

    def wait() -> None:
        os.read(lifeline_fd, 1)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=wait, name="lifeline", daemon=True).start()


@contextlib.contextmanager
def deaf_children() -> Iterator[None]:
    """Processes started in the block do not receive Ctrl-C: this process does, and ends them.

    They stay in the process group, so that whatever else ends the group ends them. A Ctrl-C during
    the block is raised at its end: before, a process may have started that nobody knows of yet.
    """
    came = False

    def remember(*_: object) -> None:
        nonlocal came
        came = True

    # The children inherit the mask. Any other thread of this process may still receive the signal,
    # and its handler then runs in the main thread.
    handler = signal.getsignal(signal.SIGINT)
    waits = callable(handler) and threading.current_thread() is threading.main_thread()
    if waits:
        signal.signal(signal.SIGINT, remember)
    heard = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, heard)
        if waits:
            signal.signal(signal.SIGINT, handler)
        if came:
            signal.raise_signal(signal.SIGINT)


def words_of(module: str) -> list[str]:
    """The words that run a module of ours, found where this process has found its own.

    `kvferry bench` passes -P: the current folder may have a model.py of its own.
    """
    return [sys.executable, *(["-P"] if sys.flags.safe_path else []), "-m", module]


def paths() -> dict[str, str]:
    """The environment in which a server's own processes find our modules where this one did.

    They do not look in the current folder. A clone that is not installed would have no server, and
    one beside an installed one would measure the other's.
    """
    if sys.flags.safe_path:
        return {}
    root, told = str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")
    return {"PYTHONPATH": os.pathsep.join(filter(None, (root, told)))}


@contextlib.contextmanager
def child(command: Sequence[str]) -> Iterator["subprocess.Popen[str]"]:
    """A process that answers in lines until its stdin ends, at the end of the block.

    If the block fails, nobody listens any more, and the process is killed.
    """
    with contextlib.ExitStack() as stack:
        with deaf_children():
            pipe = subprocess.PIPE
            process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
            stack.enter_context(process)
            assert process.stdin is not None
            stack.callback(process.stdin.close)
            failed = stack.enter_context(contextlib.ExitStack())
            failed.callback(process.kill)
        yield process
        failed.pop_all()


def end_as_ctrl_c_does() -> None:
    """Have the first SIGTERM or SIGHUP end this process as Ctrl-C does, and ignore later ones.

    Otherwise it would leave folders and processes. `timeout` sends two, and the second would come
    while what the first interrupted is cleared up.
    """
    came = False

    def end(*_: object) -> None:
        nonlocal came
        if came:
            return
        came = True
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a script's background
            raise KeyboardInterrupt
        signal.raise_signal(signal.SIGINT)  # it waits where Ctrl-C would: see deaf_children

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, end)


def exit_with(name: str, main: Callable[[], int]) -> NoReturn:
    """Exit with main's status. Ctrl-C prints one line, after main has ended what it started.

    SIGTERM and SIGHUP do the same.
    """
    end_as_ctrl_c_does()
    try:
        code = main()
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        code = EXIT_INTERRUPTED
    sys.exit(code)
