"""Threads that do not hold up the exit of their process."""

import threading
from collections.abc import Callable
from concurrent.futures import Future


def in_daemon_thread[T](function: Callable[[], T], name: str) -> "Future[T]":
    """A concurrent future of function(), on a thread of this name.

    asyncio's future of it, once cancelled, ignores the outcome, even after its loop has closed.
    """
    future: Future[T] = Future()

    def main() -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=main, name=name, daemon=True).start()
    return future
