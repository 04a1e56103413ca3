"""How many files and sockets this process may have open at once.

Most systems let a process have 1,024, and more for the asking, for the sake of programs that hand
many of them to select(2). None of ours does.
"""

import asyncio
import errno
import logging
import math
import resource
from pathlib import Path

from transfer.clock import Clock
from transfer.errors import ConfigError

log = logging.getLogger(__name__)

WANTED = 65_536
_LEAST = 64  # below, libraries fail by themselves, and not in a line
_LOOK_S = 2.0
_MINUTE_S = 60.0
_OPEN = Path("/proc/self/fd")


def raise_limit() -> None:
    """Take as many as the hard limit lets us have, WANTED at most. Children inherit it.

    Raises ConfigError where it is too low to serve at all.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if _count(hard) < _LEAST:
        raise ConfigError(f"{hard} files may be open (ulimit -n); expected {_LEAST} at least")
    wanted = min(WANTED, _count(hard))
    if _count(soft) < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def limit() -> int:
    """How many there may be."""
    return _count(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def for_control() -> int:
    """How many of them connections to a control port may take."""
    return limit() // 2


async def tell_when_short(clock: Clock) -> None:
    """Warn while a control port may be full, once a minute at most. Until cancelled.

    gRPC, which has it, closes what comes then and says nothing.
    """
    shortage = Shortage(clock)
    while True:
        shortage.look()
        await asyncio.sleep(_LOOK_S)


class Shortage:
    """As many are open as control ports may take, by whatever: they are not full before that."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._told_s = -math.inf

    def look(self) -> None:
        """Tell of it, once a minute at most."""
        num, now_s = _num_open(), self._clock.monotonic_s()
        if num >= for_control() and now_s - self._told_s >= _MINUTE_S:
            self._told_s = now_s
            log.warning(
                "%d of %d files are open (ulimit -n): who connects to this process may be refused",
                num,
                limit(),
            )


def _num_open() -> int:
    """0 where this system does not tell."""
    try:
        # The size of that folder on newer kernels: to go through 10,000 names takes 50 ms.
        return _OPEN.stat().st_size or sum(1 for _ in _OPEN.iterdir())
    except OSError as error:
        return limit() if error.errno in (errno.EMFILE, errno.ENFILE) else 0


def _count(value: int) -> int:
    return WANTED if value == resource.RLIM_INFINITY else value
