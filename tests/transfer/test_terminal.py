"""What is said where nobody reads, and a process that was started without its standard files."""

import os
import subprocess
import sys

import pytest

from tests.transfer.children import ROOT

SAYS = (
    "from transfer import terminal; terminal.open_missing(); import os, sys\n"
    "for k in range(3): terminal.say('out'); terminal.complain('err')\n"
    "terminal.flush()\n"
    "pipe, _ = os.pipe(); os._exit(0 if pipe > 2 else 1)"
)


def test_a_reader_that_has_left_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-c", SAYS]
    try:
        subprocess.run(command, cwd=ROOT, stdout=writer, stderr=writer, timeout=20, check=True)
    finally:
        os.close(writer)


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_process_without_standard_files_opens_nothing_in_their_places(closed: str) -> None:
    command = ["sh", "-c", f'exec "$0" -c "$1" {closed}', sys.executable, SAYS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=20, check=True)
    assert done.stdout == ("" if ">&-" in closed.split() else "out\n" * 3)


def test_what_the_terminal_cannot_spell_is_said_all_the_same() -> None:
    code = "from transfer import terminal; terminal.open_missing(); terminal.say('bac à voile')"
    surroundings = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=surroundings,
        capture_output=True,
        timeout=20,
        check=True,
    )
    assert done.stdout == b"bac \\xe0 voile\n"
