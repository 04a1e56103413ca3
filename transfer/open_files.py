"""How many files and sockets this process may have open at once.

Most systems let a process have 1,024 and raise that on request; the limit is low for the sake of
programs that use select(2). None of ours does.
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
_LEAST = 64  # with fewer, libraries fail in ways of their own instead of with one line
_LOOK_S = 2.0
_MINUTE_S = 60.0
_OPEN = Path("/proc/self/fd")


def raise_limit() -> None:
    """Raise the soft limit to the hard limit, but at most to WANTED. Children inherit it.

    Raises ConfigError when the hard limit is too low to serve at all.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if _count(hard) < _LEAST:
        raise ConfigError(f"{hard} files may be open (ulimit -n); expected at least {_LEAST}")
    wanted = min(WANTED, _count(hard))
    if _count(soft) < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def limit() -> int:
    """How many files this process may have open."""
    return _count(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def for_control() -> int:
    """How many files the connections to a control port may take."""
    return limit() // 2


def beside_control() -> int:
    """How many files the connections to a data port, or to the routes' port, may take."""
    return limit() // 4


async def tell_when_short(clock: Clock) -> None:
    """Warn while a control port may be full, at most once a minute, until cancelled.

    When it is full, gRPC closes new connections and says nothing.
    """
    shortage = Shortage(clock)
    while True:
        shortage.look()
        await asyncio.sleep(_LOOK_S)


class Shortage:
    """Warns when as many files are open, of any kind, as a control port's connections may take."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._told_s = -math.inf

    def look(self) -> None:
        """Warn if files are short, at most once a minute."""
        num, now_s = _num_open(), self._clock.monotonic_s()
        if num >= for_control() and now_s - self._told_s >= _MINUTE_S:
            self._told_s = now_s
            log.warning(
                "%d of %d files are open (ulimit -n): new connections may be refused",
                num,
                limit(),
            )


def _num_open() -> int:
    """Number of open files; 0 where the system does not tell."""
    try:
        # Newer kernels give it as the folder's size; listing 10,000 names takes 50 ms.
        return _OPEN.stat().st_size or sum(1 for _ in _OPEN.iterdir())
    except OSError as error:
        return limit() if error.errno in (errno.EMFILE, errno.ENFILE) else 0


def _count(value: int) -> int:
    return WANTED if value == resource.RLIM_INFINITY else value
