"""Threads with large stacks to read grammars: llguidance recurses for each nested rule."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Final

# The deepest grammars of wire.MAX_GRAMMAR_BYTES use a third; an overflow would kill the process.
_STACK_BYTES: Final = 512 << 20


def grammar_threads(count: int, name: str) -> ThreadPoolExecutor:
    """A pool whose threads are all started here; other threads keep their stack size.

    Raises RuntimeError if the system refuses one, for example for want of address space.
    """
    started = threading.Barrier(count + 1)
    before = threading.stack_size(_STACK_BYTES)
    try:
        threads = ThreadPoolExecutor(count, name)
        for _ in range(count):
            threads.submit(started.wait)  # none is idle until all are there
    except RuntimeError:
        started.abort()  # a process ends after its pools' threads, which would wait for ever
        raise
    finally:
        threading.stack_size(before)
    started.wait()
    return threads
