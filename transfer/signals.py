"""SIGINT, SIGTERM and SIGHUP, from where a process listens to them to its exit."""

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterator, Mapping

# What a parent tells a child of its that drains: SIGTERM, where that is not the second one for
# a child that somebody told before, or that was told together with its parent.
DRAIN = signal.SIGUSR1


@contextlib.contextmanager
def on_signals(actions: Mapping[signal.Signals, Callable[[], object]]) -> Iterator[None]:
    """Call what belongs to a signal on the running loop while the block lasts (main thread).

    SIGHUP, of a terminal or a connection that closes, is the first SIGTERM, unless it was ignored
    (nohup). It is never the second: it comes several times over, of the kernel and of the shell.
    Afterwards the process ignores them: it is about to exit, and how is settled. A loop that
    closes with handlers would let one that comes meanwhile write to a closed file (a complaint
    of the interpreter on stderr) or kill the process before it has said why it ends.
    """
    loop = asyncio.get_running_loop()
    if signal.SIGTERM in actions and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        actions = {**actions, **_with_hangup(actions[signal.SIGTERM])}
    for number, action in actions.items():
        loop.add_signal_handler(number, action)
    try:
        yield
    finally:
        for number in actions:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_IGN)


def _with_hangup(terminated: Callable[[], object]) -> dict[signal.Signals, Callable[[], object]]:
    """What SIGTERM and SIGHUP do."""
    heard = False

    def on_term() -> None:
        nonlocal heard
        heard = True
        terminated()

    def on_hangup() -> None:
        if not heard:
            on_term()

    return {signal.SIGTERM: on_term, signal.SIGHUP: on_hangup}
