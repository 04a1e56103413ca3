"""Output that nobody reads, and processes started without their standard files."""

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


def test_a_reader_that_reads_no_more_holds_nobody_up() -> None:
    says = (
        "from transfer import logs, terminal; terminal.open_missing(); import logging, os, sys\n"
        "logs.set_up('x')\n"
        "for k in range(3000): terminal.complain(f'{k:099}'); logging.warning('%d', k)\n"
        "terminal.say('done'); terminal.flush(); os._exit(0)"
    )
    reader, writer = os.pipe()
    with os.fdopen(reader) as unread:
        with os.fdopen(writer, "w") as pipe:
            command = [sys.executable, "-c", says]
            done = subprocess.run(command, cwd=ROOT, stderr=pipe, timeout=20, check=True)
        assert done.returncode == 0
        lines = unread.read().splitlines()
    assert 100 < len(lines) < 3000
    told = [line for line in lines if len(line) == 99]
    assert told == [f"{k:099}" for k in range(len(told))]


def test_a_terminal_that_nobody_reads_holds_nobody_up() -> None:
    says = (
        "from transfer import terminal; terminal.open_missing(); import os\n"
        "for k in range(3000): terminal.complain(f'{k:099}')\n"
        "terminal.say('done'); terminal.flush(); os._exit(0)"
    )
    ours, theirs = os.openpty()
    try:
        command = [sys.executable, "-c", says]
        done = subprocess.run(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=theirs, timeout=20, check=True
        )
        assert done.stdout == b"done\n"
        os.set_blocking(ours, False)
        lines = os.read(ours, 1 << 20).decode().splitlines()[:-1]  # the last is incomplete
        assert len(lines) > 10
        assert lines == [f"{k:099}" for k in range(len(lines))]
    finally:
        os.close(ours)
        os.close(theirs)


@pytest.mark.parametrize("end", ["", "raise SystemExit(0)"])
def test_a_process_that_ends_has_said_all_to_its_terminal(end: str) -> None:
    says = f"from transfer import terminal; terminal.open_missing()\nterminal.say('all')\n{end}"
    ours, theirs = os.openpty()
    try:
        command = [sys.executable, "-c", says]
        subprocess.run(command, cwd=ROOT, stdout=theirs, timeout=20, check=True)
        assert os.read(ours, 100) == b"all\r\n"
    finally:
        os.close(ours)
        os.close(theirs)


def _complaints(says: str) -> list[str]:
    """All lines of a program's stderr, of which nobody reads any before it says "go"."""
    command, pipe = [sys.executable, "-c", says], subprocess.PIPE
    with subprocess.Popen(
        command, cwd=ROOT, text=True, stdin=pipe, stdout=pipe, stderr=pipe
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "go\n"  # although nothing can be written to stderr
        _, told = process.communicate("\n", timeout=20)
    return told.splitlines()


def test_who_reads_again_is_told_how_much_is_missing() -> None:
    says = (
        "from transfer import terminal; terminal.open_missing(); import sys\n"
        "for k in range(3000): terminal.complain(f'{k:099}')\n"
        "terminal.say('go'); sys.stdin.readline(); terminal._outlets[2].flush(20)\n"
        "terminal.complain('after'); terminal.flush()"
    )
    *kept, missing, last = _complaints(says)
    assert [*map(int, kept)] == sorted({*map(int, kept)})  # in order, and none twice
    assert 1000 < len(kept) < 3000
    assert missing == f"{3000 - len(kept)} lines were dropped: nobody read them in time"
    assert last == "after"


def test_text_waits_for_a_thread_where_there_can_be_none_now() -> None:
    says = (
        "from transfer import terminal; terminal.open_missing(); import sys, threading\n"
        "start = threading.Thread.start\n"
        "def refuse(thread): raise RuntimeError('no more threads')\n"
        "threading.Thread.start = refuse\n"
        "for k in range(700): terminal.complain(f'{k:099}')\n"  # more than a pipe takes
        "threading.Thread.start = start\n"
        "terminal.say('go'); sys.stdin.readline()\n"
        "terminal.complain('after'); terminal._outlets[2].flush(20)"
    )
    assert _complaints(says) == [*(f"{k:099}" for k in range(700)), "after"]


def test_a_file_that_another_process_has_made_non_blocking_is_waited_for_all_the_same() -> None:
    says = (
        "from transfer import terminal; terminal.open_missing(); import os, sys\n"
        "os.set_blocking(2, False)\n"
        "for k in range(700): terminal.complain(f'{k:099}')\n"  # more than a pipe takes
        "terminal.say('go'); sys.stdin.readline(); terminal._outlets[2].flush(20)"
    )
    assert _complaints(says) == [f"{k:099}" for k in range(700)]


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
