"""How processes of a benchmark end: with the one that started them, and in a line on Ctrl-C.

Standard library alone: other projects' interpreters run it too.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

EXIT_INTERRUPTED = 130  # as transfer/exit_codes.py has it


@contextlib.contextmanager
def lifeline() -> Iterator[int]:
    """A descriptor for another process, which dies with this one, however this one dies, or at the
    end of the block: a `kvferry` process that LIFELINE_ENV tells of it, or one that `end_with`s."""
    read, write = os.pipe()
    try:
        yield read
    finally:
        os.close(read)
        os.close(write)


def end_with(lifeline_fd: int) -> None:
    """End this process, and those it starts in its group, with the one that holds the other end."""

    def wait() -> None:
        os.read(lifeline_fd, 1)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=wait, name="lifeline", daemon=True).start()


@contextlib.contextmanager
def deaf_children() -> Iterator[None]:
    """Processes started in the block do not hear Ctrl-C: who started them does, and ends them.

    They keep to the group, so that whatever else ends that ends them. A Ctrl-C meanwhile comes at
    the end of the block: within, a process might have been started that nobody knows of yet.
    """
    came = False

    def remember(*_: object) -> None:
        nonlocal came
        came = True

    # The mask is for the children. Any thread may be who hears, and then the main one is told.
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


@contextlib.contextmanager
def child(command: Sequence[str]) -> Iterator["subprocess.Popen[str]"]:
    """A process that speaks in lines until its stdin ends, which is at the end of the block.

    Where the block fails nobody listens any more, and it is killed.
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


def exit_with(name: str, main: Callable[[], int]) -> NoReturn:
    """Exit with the status that main gives. Ctrl-C is a line, once main has ended what it began."""
    try:
        code = main()
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        code = EXIT_INTERRUPTED
    sys.exit(code)
