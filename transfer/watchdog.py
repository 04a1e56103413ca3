"""Ends a process that stands still, so that whoever supervises it can start it again.

A thread that hangs inside a library never comes back, and may keep Python's lock, without which no
line of ours runs: not in another thread, not on the loop, not in a signal handler. faulthandler's
timer needs no lock.
"""

import asyncio
import faulthandler
import logging
from collections.abc import Callable

log = logging.getLogger(__name__)

_LOOKS = 10  # at the progress, in the time that it may stand still


async def watch(timeout_s: float, *progress: Callable[[], int]) -> None:
    """Watch until cancelled. 0: never ends the process.

    progress: numbers, each of which changes while a part of the process is well. Once one has been
    the same for timeout_s, or up to a tenth more, or if the loop does not run this task for as
    long, every thread's stack is written to stderr and the process exits with code 1, at once: its
    peers see what they see when it is killed.
    """
    if not timeout_s:
        return
    seen: list[int | None] = [None] * len(progress)
    try:
        while True:
            now = [number() for number in progress]
            all_new = all(new != old for new, old in zip(now, seen, strict=True))
            if all_new and _is_set(timeout_s):
                seen = [*now]
            await asyncio.sleep(timeout_s / _LOOKS)
    finally:
        faulthandler.cancel_dump_traceback_later()


def _is_set(timeout_s: float) -> bool:
    """Set the timer anew. False: there is none now, since its thread cannot be started."""
    try:
        faulthandler.dump_traceback_later(timeout_s, exit=True)
    except RuntimeError as error:  # as many threads as this process may have
        log.warning("nobody watches whether this process stands still: %s; trying again", error)
        return False
    return True
