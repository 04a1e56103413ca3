"""How many files and sockets this process may have open at once.

Most systems let a process have 1,024, and more for the asking, for the sake of programs that hand
many of them to select(2). None of ours does.
"""

import resource

from transfer.errors import ConfigError

WANTED = 65_536
_LEAST = 64  # below, libraries fail by themselves, and not in a line


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


def _count(value: int) -> int:
    return WANTED if value == resource.RLIM_INFINITY else value
