"""Which signals tell a process to leave, and that signals change nothing once it is ending."""

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from transfer.signals import DRAIN, draining_first, on_signals

# The signal arrives after the loop's wake-up socket is closed and before its handlers are removed.
ENDS = """
import asyncio, os, signal, sys
from transfer import flags
from transfer.errors import ConfigError
from transfer.signals import on_signals

class Loop(asyncio.SelectorEventLoop):
    def _close_self_pipe(self):
        super()._close_self_pipe()
        os.kill(os.getpid(), int(sys.argv[1]))

signal.signal(signal.SIGHUP, signal.SIG_DFL)

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


# What a careless parent leaves to its children.
DEAF = """
import os, signal, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
os.execv(sys.executable, [sys.executable, "-c", sys.argv[1]])
"""
HEARS = """
import asyncio, os, signal, sys
from transfer import flags
from transfer.errors import ConfigError
from transfer.signals import on_signals

async def body():
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", "raise SystemExit(7)")
    told = asyncio.Event()
    with on_signals({signal.SIGTERM: told.set}):
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(20):
            await told.wait()
        raise ConfigError(f"told to leave, its child ended with {await child.wait()}")

flags.run_main("example", lambda: asyncio.run(body()))
"""


TERM, HUP, INT = signal.SIGTERM, signal.SIGHUP, signal.SIGINT


@pytest.mark.parametrize(
    ("numbers", "is_ready", "did"),
    [
        ((TERM,), True, ["drain"]),
        ((TERM, TERM), True, ["drain", "stop"]),
        ((TERM, DRAIN), True, ["drain"]),  # its parent and it get a SIGTERM, in any order
        ((DRAIN, TERM), True, ["drain"]),
        ((DRAIN, TERM, TERM), True, ["drain", "stop"]),
        ((DRAIN, HUP, HUP), True, ["drain"]),
        ((HUP, HUP), True, ["drain"]),
        ((HUP, TERM), True, ["drain", "stop"]),
        ((TERM, DRAIN, TERM), True, ["drain", "stop"]),
        ((DRAIN, INT), True, ["drain", "stop"]),
        ((DRAIN,), False, ["stop"]),
        ((HUP,), False, ["stop"]),
    ],
)
def test_a_second_sigterm_is_one_that_its_parent_did_not_get(
    numbers: tuple[signal.Signals, ...], is_ready: bool, did: list[str]
) -> None:
    done: list[str] = []
    actions = draining_first(
        lambda: done.append("drain"),
        lambda: done.append("stop"),
        lambda: is_ready,
        lambda: "drain" in done,
    )
    for number in numbers:
        actions[number]()
    assert done == did


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_the_loop_closes_changes_nothing(number: signal.Signals) -> None:
    argv = [sys.executable, "-c", ENDS, str(int(number))]
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert ended.stderr == "kvferry example: the reason\n"
    assert (ended.returncode, ended.stdout) == (2, "")


def test_a_process_hears_signals_and_its_children_whatever_its_parent_did_not_hear() -> None:
    argv = [sys.executable, "-c", DEAF, HEARS]
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert ended.stderr == "kvferry example: told to leave, its child ended with 7\n"


@pytest.mark.parametrize(
    ("before", "numbers", "told"),
    [
        (signal.SIG_DFL, (signal.SIGHUP,), 1),
        (signal.SIG_DFL, (signal.SIGHUP, signal.SIGHUP), 1),  # from a terminal that closes
        (signal.SIG_DFL, (signal.SIGTERM, signal.SIGHUP), 1),  # systemd may send both
        (signal.SIG_DFL, (signal.SIGHUP, signal.SIGTERM), 2),
        (signal.SIG_IGN, (signal.SIGHUP,), 0),  # as under nohup
        (signal.SIG_IGN, (signal.SIGTERM, signal.SIGTERM), 2),
    ],
)
@pytest.mark.usefixtures("own_signals")
async def test_a_terminal_that_closes_is_the_first_sigterm_unless_that_is_ignored(
    before: signal.Handlers, numbers: tuple[signal.Signals, ...], told: int
) -> None:
    signal.signal(signal.SIGHUP, before)
    heard = []
    with on_signals({signal.SIGTERM: lambda: heard.append("told")}):
        for number in numbers:
            os.kill(os.getpid(), number)
            for _ in range(5):
                await asyncio.sleep(0)  # the loop handles it in its next turn
    assert len(heard) == told
