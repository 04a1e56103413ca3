"""Who of several processes does something: the one that holds a lock, which dies with it."""

import contextlib
import fcntl
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Final

log = logging.getLogger(__name__)

_PAUSE_S: Final = 0.05


@contextlib.contextmanager
def claimed(path: Path, wait_s: float) -> Iterator[bool]:
    """Whether the caller holds the claim to what this file stands for, while in the block.

    False if another thread or process holds it for longer than wait_s. True where there is no
    telling, as in a file system without locks.
    """
    try:
        file = path.open("ab")
    except OSError as error:
        log.info("%s cannot be claimed: %s", path, error)
        yield True
        return
    with file:
        if not locked(file, wait_s):
            yield False
            return
        try:
            yield True
        finally:
            with contextlib.suppress(OSError):  # whoever waits for it finds the work done
                path.unlink(missing_ok=True)


def locked(file: IO[bytes] | int, wait_s: float) -> bool:
    """Lock an open file, or its descriptor, until it is closed.

    False if another process holds it for longer than wait_s; true where there is no telling.
    """
    pause = threading.Event()
    for pauses_left in range(int(wait_s / _PAUSE_S), -1, -1):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if pauses_left:
                pause.wait(_PAUSE_S)
        except OSError as error:
            log.info("a file cannot be locked: %s", error)
            return True
        else:
            return True
    return False
