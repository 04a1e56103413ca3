"""Threads that read grammars: llguidance goes down the stack with each rule that names another."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Final

# The deepest grammars of wire.MAX_GRAMMAR_BYTES touch a third; a process dies of one too deep.
_STACK_BYTES: Final = 512 << 20


def grammar_threads(count: int, name: str) -> ThreadPoolExecutor:
    """Threads that are started here: for others the size of a stack is as it was."""
    started = threading.Barrier(count + 1)
    before = threading.stack_size(_STACK_BYTES)
    try:
        threads = ThreadPoolExecutor(count, name)
        for _ in range(count):
            threads.submit(started.wait)  # none is idle until all are there
    finally:
        threading.stack_size(before)
    started.wait()
    return threads
