"""Ends a process that stands still, so that whoever supervises it can start it again.

A thread that hangs inside a library never comes back. While others run, a thread of Python's ends
the process: it has Python's lock as it writes all stacks, so none of them changes meanwhile. The
hanging thread may keep that lock, without which no line of ours runs: not in another thread, not on
the loop, not in a signal handler. faulthandler's timer needs no lock, and ends the process then.
Where threads do run, the timer would read stacks that change, which can crash: so it is the later
of the two.
"""

import asyncio
import contextlib
import faulthandler
import logging
import os
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

from transfer.checks import MAX_TIMEOUT_S, at_least, at_most
from transfer.clock import SYSTEM_CLOCK

log = logging.getLogger(__name__)

TIMEOUT_S = 300.0  # a process that stands still for so long ends; 0 = none does
HELP = (
    "seconds without progress of its loop, and in a worker also at one grammar, after which a "
    "process writes where it hangs and exits; must be longer than a chunk or a step takes; 0: it "
    "never does"
)
_LOOKS = 10  # at the progress, in the time that it may stand still
_LATER = 1.5  # by how much longer the timer waits: also longer than looks are late on a busy host


def check(config: Any) -> None:
    """Raises ConfigError for a --watchdog-timeout that no timer takes."""
    at_least(config, "watchdog_timeout_s", 0)
    at_most(config, "watchdog_timeout_s", MAX_TIMEOUT_S)


async def watch(timeout_s: float, *progress: Callable[[], int]) -> None:
    """Watch until cancelled. 0: never ends the process.

    progress: numbers, each of which changes while a part of the process is well. Once one has been
    the same for timeout_s, or up to a tenth more, or if the loop does not run this task for as
    long, every thread's stack is written to stderr and the process exits with code 1, at once: its
    peers see what they see when it is killed. Where a thread keeps Python's lock, that takes half
    as long again.
    """
    if not timeout_s:
        return
    seen: list[int | None] = [None] * len(progress)
    with _stderr_that_waits_for_nobody() as stderr:
        ender, is_set = _Ender(timeout_s, stderr), False
        try:
            while True:
                now = [number() for number in progress]
                if all(new != old for new, old in zip(now, seen, strict=True)):
                    is_set = False
                    if ender.put_off():
                        seen = [*now]
                is_set = is_set or _is_set(timeout_s * _LATER, stderr)
                await asyncio.sleep(timeout_s / _LOOKS)
        finally:
            ender.stop()
            faulthandler.cancel_dump_traceback_later()


class _Ender:
    """The thread that ends the process once nobody has put that off for timeout_s."""

    def __init__(self, timeout_s: float, stderr: int) -> None:
        self._timeout_s = timeout_s
        self._stderr = stderr
        self._since_s = 0.0  # monotonic
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None

    def put_off(self) -> bool:
        """False: nobody would end it, since the thread cannot be started."""
        self._since_s = SYSTEM_CLOCK.monotonic_s()
        if self._thread is None:
            thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                return _cannot_watch(error)
            self._thread = thread
        return True

    def stop(self) -> None:
        self._is_over.set()
        if self._thread is not None:
            self._thread.join()

    def _watch(self) -> None:
        while not self._is_over.wait(self._timeout_s / _LOOKS):
            if SYSTEM_CLOCK.monotonic_s() - self._since_s >= self._timeout_s:
                _end_process(self._timeout_s, self._stderr)


def _end_process(timeout_s: float, stderr: int) -> None:
    """Write all stacks, then exit."""
    with contextlib.suppress(OSError):
        os.write(stderr, f"Timeout ({timedelta(seconds=timeout_s)})!\n".encode())
    faulthandler.dump_traceback(stderr)
    os._exit(1)


@contextlib.contextmanager
def _stderr_that_waits_for_nobody() -> Iterator[int]:
    """A file for the stacks, which drops what does not fit: their thread ends the process only once
    it has written them, and whoever sets or cancels the timer meanwhile waits for that thread.
    """
    flags = os.O_WRONLY | os.O_NONBLOCK | os.O_APPEND | os.O_NOCTTY
    try:
        number = os.open("/proc/self/fd/2", flags)
    except OSError:  # a socket, or a file of another user
        yield 2
        return
    try:
        yield number
    finally:
        os.close(number)


def _is_set(timeout_s: float, stderr: int) -> bool:
    """Set the timer anew. False: there is none now, since its thread cannot be started."""
    try:
        faulthandler.dump_traceback_later(timeout_s, exit=True, file=stderr)
    except RuntimeError as error:
        return _cannot_watch(error)
    return True


def _cannot_watch(error: RuntimeError) -> bool:
    """It has as many threads as it may."""
    log.warning("this process may stand still and not be ended: %s; trying again", error)
    return False
