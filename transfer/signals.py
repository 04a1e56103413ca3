"""Handling of SIGINT, SIGTERM and SIGHUP, from when a process listens for them to its exit."""

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterator, Mapping

# Sent by a parent to make its child drain. It acts like SIGTERM, but is never a second SIGTERM to a
# child that got one before, or that gets one together with its parent.
DRAIN = signal.SIGUSR1

Actions = Mapping[signal.Signals, Callable[[], object]]


def draining_first(
    drain: Callable[[], object],
    stop: Callable[[], object],
    is_ready: Callable[[], bool],
    is_draining: Callable[[], bool],
) -> Actions:
    """What signals do to a process that can drain.

    SIGTERM drains. SIGINT, a second SIGTERM, or a SIGTERM before the process is ready stops at
    once. SIGHUP acts as a first SIGTERM, and never as a second.
    """
    asked = False  # by its parent: the SIGTERM that the parent got may be on its way here, too

    def terminated() -> None:
        nonlocal asked
        if is_ready() and not is_draining():
            drain()
        elif asked:
            asked = False
        else:
            stop()

    def hung_up() -> None:
        if not is_draining():
            terminated()

    def told_to_drain() -> None:
        nonlocal asked
        if not is_draining():
            terminated()
            asked = is_draining()

    return {
        signal.SIGINT: stop,
        signal.SIGTERM: terminated,
        signal.SIGHUP: hung_up,
        DRAIN: told_to_drain,
    }


def exit_on_signals() -> None:
    """Until `on_signals`, SIGTERM and SIGHUP end the process by SystemExit: `with` blocks unwind.

    What is ignored on purpose stays so.
    """

    def leave(number: int, frame: object) -> None:
        raise SystemExit(0)

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, leave)


def forget_inherited() -> None:
    """Hear every signal, and of every child's end, whatever the parent had blocked or ignored.

    A parent that ignores SIGCHLD would have the system drop its children's exit codes, and ours.
    What is ignored on purpose (nohup, a shell's background job) stays so.
    """
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


@contextlib.contextmanager
def on_signals(actions: Actions) -> Iterator[None]:
    """Run each signal's action on the running loop while the `with` lasts (main thread).

    SIGHUP, which a closed terminal or connection sends, acts as the first SIGTERM, unless it was
    ignored (nohup). It never acts as the second: the kernel and the shell each send it, several
    times. Afterwards the process ignores these signals, since it is about to exit. If the loop
    closed with its handlers in place, a late signal would write to a closed file (the interpreter
    complains on stderr) or kill the process before it has said why it ends.
    """
    loop = asyncio.get_running_loop()
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        actions = {number: act for number, act in actions.items() if number != signal.SIGHUP}
    elif signal.SIGTERM in actions and signal.SIGHUP not in actions:
        actions = {**actions, **_with_hangup(actions[signal.SIGTERM])}
    for number, action in actions.items():
        loop.add_signal_handler(number, action)
    try:
        yield
    finally:
        for number in actions:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_IGN)


def _with_hangup(terminated: Callable[[], object]) -> Actions:
    """The actions of SIGTERM and SIGHUP."""
    heard = False

    def on_term() -> None:
        nonlocal heard
        heard = True
        terminated()

    def on_hangup() -> None:
        if not heard:
            on_term()

    return {signal.SIGTERM: on_term, signal.SIGHUP: on_hangup}
