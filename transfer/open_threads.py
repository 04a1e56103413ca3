"""Whether this process can have the threads that it is going to need.

gRPC and XLA end a process by SIGABRT or SIGSEGV, without a word, when they cannot start a thread.
"""

import threading
from typing import Final

from transfer.errors import KvferryError

NO_THREAD: Final = "can't start new thread"  # as Python says it
LIMITS: Final = "the limits are those of `ulimit -u`, `ulimit -v` and the container"
FOR_ANY: Final = 12  # gRPC's, and our own
FOR_WORKER: Final = 24  # and XLA's, beside those of its devices


def check_room(least: int) -> None:
    """Raises KvferryError if `least` more threads cannot be started now."""
    over = threading.Event()
    started: list[threading.Thread] = []
    try:
        for _ in range(least):
            thread = threading.Thread(target=over.wait)
            thread.start()
            started.append(thread)
    except RuntimeError as error:
        raise KvferryError(
            f"{NO_THREAD}: {len(started)} were started, expected at least {least}: {LIMITS}"
        ) from error
    finally:
        over.set()
        for thread in started:
            thread.join()
