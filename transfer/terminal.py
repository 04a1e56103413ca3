"""What a process says on stdout and stderr, whether or not anybody is there to read it.

A server outlives the terminal, or the `| head`, that it was started from: text that cannot be
written is no reason to end.
"""

import contextlib
import io
import os
import sys
from typing import TextIO


def open_missing() -> None:
    """Give a process that was started without stdin, stdout or stderr an empty one.

    Else pipes and sockets get their numbers, and a child's own three take these pipes' places.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free: this one
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr does: LANG may be C


def say(text: str) -> None:
    """A line for the person at the terminal, on stdout."""
    _write(sys.stdout, text)


def complain(text: str) -> None:
    """A line on stderr."""
    _write(sys.stderr, text)


def flush() -> None:
    """Whatever was written and not sent yet."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()


def _write(stream: TextIO, text: str) -> None:
    with contextlib.suppress(OSError):
        stream.write(text + "\n")
        stream.flush()
