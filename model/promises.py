"""What processes of this host will still take of its memory: those that start together share it.

Each would otherwise count on what is free now, and load its weights into memory that another is
about to fill. So each says first how large it will become, in a file that it keeps locked for as
long as it lives (docs/adr/0066).
"""

import contextlib
import logging
import os
import re
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import psutil

from model.claims import locked

log = logging.getLogger(__name__)

_LENDS: Final = " lends"
_SHARED: Final = re.compile(r"^RssShmem:\s+(\d+) kB$", re.MULTILINE)
_TURN: Final = "turn"  # locked by whoever reads all promises and makes its own
# For another's turn, which takes milliseconds. If it takes longer, that process is frozen.
_LONGEST_WAIT_S: Final = 10.0


class Promises:
    """The promises of all processes of one user that know each other by number."""

    def __init__(self, folder: Path | None = None) -> None:
        """folder: where they are; default: among the host's temporary files. Made if need be."""
        self._asked = folder
        self._folder: Path | None = None  # set in a turn, if it can be used
        self._own: int | None = None  # a descriptor that stays open, and locked, until the end
        self._size = 0  # what it has said
        self._reserved = 0  # of that, what `make` is not told of
        # What it lends to others while it serves, which then counts as its own and not as theirs.
        self.lent_bytes = 0

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """While in the block, no other process takes its turn: what it finds free is still free."""
        with contextlib.ExitStack() as stack:
            try:
                folder = self._made_folder()
                locked(stack.enter_context((folder / _TURN).open("ab")), _LONGEST_WAIT_S)
                self._folder = folder
            except OSError as error:
                self._folder = None
                log.info("workers that start together may count on the same memory: %s", error)
            yield

    def make(self, num_bytes: int) -> None:
        """This process will take so many bytes more than it has now; replaces what it said before.

        Call in a turn.
        """
        self._say(self._has_now() + num_bytes + self.lent_bytes + self._reserved)

    def reserve(self, num_bytes: int) -> None:
        """This process will take so many bytes besides what it makes promises of, then and now.

        Replaces what was reserved before. Call in a turn.
        """
        besides = max(self._size - self._reserved, self._has_now())
        self._reserved = num_bytes
        self._say(besides + num_bytes)

    def outstanding_own_bytes(self) -> int:
        """What it has promised to take but does not have yet, besides what it has reserved.

        Call in a turn.
        """
        return max(self._size - self._reserved - self._has_now(), 0)

    def _has_now(self) -> int:
        return _own_bytes(os.getpid(), self.lent_bytes > 0)

    def _say(self, size: int) -> None:
        self._size = size
        if self._folder is None:
            return
        try:
            if self._own is None:
                file = self._folder / str(os.getpid())
                own = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
                if not locked(own, 0.0):  # by what a former process of this number has left
                    os.close(own)
                    raise BlockingIOError(f"{file} is locked")
                self._own = own
            os.ftruncate(self._own, 0)
            os.pwrite(self._own, f"{size}{_LENDS if self.lent_bytes else ''}".encode(), 0)
        except OSError as error:
            log.info("other workers do not know of this one's memory: %s", error)

    def outstanding_bytes(self) -> int:
        """What the other processes will still take. Call in a turn."""
        try:
            found = list(self._folder.iterdir()) if self._folder is not None else []
        except OSError:
            return 0
        files = [file for file in found if file.name.isdecimal()]
        return sum(_outstanding(file) for file in files if file.name != str(os.getpid()))

    def _made_folder(self) -> Path:
        """Raises OSError if it cannot be made, or belongs to somebody else."""
        name = f"kvferry-memory-{os.geteuid()}-{_numbering()}"
        folder = self._asked or Path(tempfile.gettempdir()) / name
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            raise PermissionError(f"{folder} is no folder of this user")
        return folder


def _outstanding(file: Path) -> int:
    """What a process has promised to take but does not have yet; 0 once it is gone."""
    try:
        with file.open("rb") as promise:
            if locked(promise, 0.0):  # the process is gone
                file.unlink(missing_ok=True)
                return 0
            said = promise.read().decode()
        size = int(said.removesuffix(_LENDS) or 0)
        return max(size - _own_bytes(int(file.name), said.endswith(_LENDS)), 0)
    except (OSError, ValueError, psutil.Error):  # it is leaving
        return 0


def _numbering() -> int:
    """Which namespace has the numbers of processes.

    Containers that share a folder for temporary files number theirs apart: in one of them another's
    promise would seem to be that of some small process, and never kept.
    """
    try:
        return Path("/proc/self/ns/pid").stat().st_ino
    except OSError:  # no /proc
        return 0


def _own_bytes(pid: int, lends: bool = False) -> int:
    """A process's memory without mapped files: the kernel reclaims those, so they count as free.

    A worker that is loading has mapped the part of its checkpoint that it has read so far. lends:
    memory that it shares with others is its own.
    """
    memory = psutil.Process(pid).memory_info()
    return int(memory.rss - memory.shared) + (_shared_bytes(pid) if lends else 0)


def _shared_bytes(pid: int) -> int:
    """Memory that a process shares, and that is no file's."""
    found = _SHARED.search(Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) << 10 if found is not None else 0


PROMISES: Final = Promises()
