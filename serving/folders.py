"""Folders that one process has at a time: the lock of any, and a server's own for its sockets."""

import errno
import fcntl
import logging
import os
import re
import stat
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

log = logging.getLogger(__name__)

_PREFIX = "kvferry-api-"  # of these folders alone
_NAME = re.compile(re.escape(_PREFIX) + "[a-z0-9_]{8}")  # as tempfile makes it
_TRIES = 100


@contextmanager
def lock_of(folder: Path, tries: int = 1, each_s: float = 0.0) -> Iterator[bool]:
    """Hold the folder's lock; false, without it, where it cannot be had after so many tries."""
    try:
        held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        yield False
        return
    try:
        yield _locked(held, tries, each_s)
    finally:
        os.close(held)


def _locked(held: int, tries: int, each_s: float) -> bool:
    for _ in range(tries):
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            threading.Event().wait(each_s)
        except OSError:
            return False
        else:
            return True
    return False


@contextmanager
def private_folder() -> Iterator[str]:
    """A new folder that only this user can enter, removed at the end. Raises OSError.

    A process that is killed leaves its folder, and the next one that makes a folder removes it.
    Invariant: a folder belongs to whoever has its lock. So it is used only if it is still there
    once it is locked, as another may have found it before, without a lock.
    """
    _remove_left(Path(tempfile.gettempdir()))
    for _ in range(_TRIES):
        with tempfile.TemporaryDirectory(prefix=_PREFIX) as name:
            with lock_of(Path(name)) as is_held:
                if is_held and Path(name).exists():
                    yield name
                    return
    raise OSError(errno.ENOLCK, f"folders in {tempfile.gettempdir()} cannot be locked")


def _remove_left(parent: Path) -> None:
    """Remove the folders of this user's servers that were killed with all their processes."""
    for folder in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # it went meanwhile, or something else came into it
            if _is_ours(folder):
                with lock_of(folder) as is_held:
                    if is_held:
                        for socket in folder.iterdir():
                            socket.unlink()
                        folder.rmdir()
                        log.info("removed %s, which a server that was killed had left", folder)


def _is_ours(folder: Path) -> bool:
    """Whether it is of the kind that `private_folder` makes for this user: it has sockets alone."""
    found = folder.lstat()
    return (
        _NAME.fullmatch(folder.name) is not None
        and found.st_mode == stat.S_IFDIR | 0o700
        and found.st_uid == os.geteuid()
        and all(stat.S_ISSOCK(file.lstat().st_mode) for file in folder.iterdir())
    )
