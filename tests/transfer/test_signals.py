"""A signal that comes while a process ends changes neither its last line nor its exit code."""

import signal
import subprocess
import sys

import pytest

# The loop's wake-up socket is closed before its handlers are removed; the signal comes there.
ENDS = """
import asyncio, os, signal, sys
from transfer import flags
from transfer.errors import ConfigError
from transfer.signals import on_signals

class Loop(asyncio.SelectorEventLoop):
    def _close_self_pipe(self):
        super()._close_self_pipe()
        os.kill(os.getpid(), int(sys.argv[1]))

async def body():
    heard = asyncio.Event()
    with on_signals({signal.SIGINT: heard.set, signal.SIGTERM: heard.set}):
        os.kill(os.getpid(), int(sys.argv[1]))
        await heard.wait()
        raise ConfigError("the reason")

def main():
    with asyncio.Runner(loop_factory=Loop) as runner:
        runner.run(body())

flags.run_main("example", main)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_the_loop_closes_changes_nothing(number: signal.Signals) -> None:
    argv = [sys.executable, "-c", ENDS, str(int(number))]
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert ended.stderr == "kvferry example: the reason\n"
    assert (ended.returncode, ended.stdout) == (2, "")
