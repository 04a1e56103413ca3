"""Writes a process's text to stdout and stderr, whether or not anybody reads it.

A server outlives the terminal, or the `| head`, that it was started from: text that cannot be
written must not end it. Nor may it make the server wait: when a pager, a paused terminal or a hung
log driver stops reading, text is queued, and some of it is dropped.
"""

import atexit
import contextlib
import io
import os
import select
import sys
import threading
from collections import deque
from typing import Final, TextIO

MAX_WAITING: Final = 1000  # texts
_PIECE_BYTES: Final = select.PIPE_BUF  # what a pipe with room takes at once
_FLUSH_S: Final = 1.0


def open_missing() -> None:
    """Open /dev/null as stdin, stdout or stderr if the process was started without it.

    Otherwise pipes and sockets would get these numbers, and a child's standard streams would
    replace them.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number: this one
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr does: LANG may be C


def say(text: str) -> None:
    """Write a line to stdout, for the person at the terminal."""
    _write(sys.stdout, text)


def complain(text: str) -> None:
    """Write a line to stderr."""
    _write(sys.stderr, text)


def flush() -> None:
    """Wait until queued text is written, for a second per stream; then give it up."""
    _flush_queues()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()


@atexit.register
def _flush_queues() -> None:
    for outlet in list(_outlets.values()):
        outlet.flush(_FLUSH_S)


def _write(stream: TextIO, text: str) -> None:
    try:
        number = stream.fileno()
    except OSError:  # the stream was replaced by an object without a file
        with contextlib.suppress(OSError):
            stream.write(text + "\n")
        return
    with contextlib.suppress(OSError):
        stream.flush()  # what a library has printed comes first; our text bypasses the buffer
    data = (text + "\n").encode(stream.encoding, stream.errors or "strict")
    (_outlets.get(number) or _outlets.setdefault(number, _Outlet(number))).put(data)


class _Outlet:
    """Writes to an open file, in order: at once if that needs no waiting, else from a thread."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._changed = threading.Condition()
        self._waiting: deque[bytes] = deque()
        self._dropped = 0
        self._has_thread = False
        # A terminal says that it has room when it has some, and then waits for room for the rest.
        self._may_wait = os.isatty(number)

    def put(self, text: bytes) -> None:
        with self._changed:
            if not (self._may_wait or self._has_thread or self._waiting):
                text = self._write(text, 0)
                if not text:
                    return
            if len(self._waiting) < MAX_WAITING:
                self._waiting.append(text)
            else:
                self._dropped += 1
            if not self._has_thread:
                self._start_thread()

    def _start_thread(self) -> None:
        """Have a thread write what waits. If there can be none now, the next text tries again."""
        writing = threading.Thread(target=self._write_waiting, name="said", daemon=True)
        with contextlib.suppress(RuntimeError):  # as many threads as this process may have
            writing.start()
            self._has_thread = True

    def flush(self, timeout_s: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting, timeout_s)

    def _write(self, text: bytes, wait_ms: int | None) -> bytes:
        """Write while the file has room, or soon has; returns the rest, nothing if writing fails.

        wait_ms: the longest wait for room; None: without end. The file itself makes nobody wait if
        another process, which has it open too, has made it non-blocking.
        """
        ready = select.poll()
        ready.register(self._number, select.POLLOUT)
        try:
            while text and ready.poll(wait_ms):
                with contextlib.suppress(BlockingIOError):  # another process has filled the room
                    text = text[os.write(self._number, text[:_PIECE_BYTES]) :]
        except OSError:
            return b""
        return text

    def _write_waiting(self) -> None:
        while True:
            with self._changed:
                if not self._waiting:
                    self._has_thread = False
                    return
                text = self._waiting[0]
            self._write(text, None)
            with self._changed:
                self._waiting.popleft()
                if not self._waiting and self._dropped:
                    said = f"{self._dropped} lines were dropped: nobody read them in time\n"
                    self._waiting.append(said.encode())
                    self._dropped = 0
                self._changed.notify_all()


_outlets: dict[int, _Outlet] = {}  # by file descriptor
