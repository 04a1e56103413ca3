"""A process ends with what supervises it, even if it is stopped when that dies."""

import contextlib
import os
import select
import signal
import subprocess
import sys

import pytest

from tests.transfer.samples import PATIENCE_S

# Starts a child on a lifeline, which writes to `said` when it is ready and ends with the pipe.
SUPERVISOR = """
import os, subprocess, sys, time
read, write = os.pipe()
said = int(sys.argv[1])
env = os.environ | {"KVFERRY_LIFELINE_FD": str(read)}
argv = [sys.executable, "-c", sys.argv[2], str(said)]
subprocess.Popen(argv, env=env, pass_fds=(read, said))
os.close(said)
time.sleep(60)
"""
CHILD = """
import os, sys, time
from transfer import flags

def main():
    os.write(int(sys.argv[1]), f"{os.getpid()} ".encode())
    time.sleep(60)

flags.run_main("example", main)
"""


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_process_ends_with_its_supervisor_stopped_or_not(is_stopped: bool) -> None:
    heard, said = os.pipe()
    argv = [sys.executable, "-c", SUPERVISOR, str(said), CHILD]
    supervisor = subprocess.Popen(argv, pass_fds=(said,))
    os.close(said)
    try:
        pid = int(os.read(heard, 100))
        if is_stopped:
            os.kill(pid, signal.SIGSTOP)
    finally:
        supervisor.kill()
        supervisor.wait(PATIENCE_S)
    try:
        assert select.select([heard], [], [], PATIENCE_S)[0]
        assert os.read(heard, 1) == b"", "it is closed when the child ends"
    finally:
        os.close(heard)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
