"""Payload buffers that are reused once nobody holds a view of them."""

import mmap
import threading
import weakref
from collections.abc import Callable
from typing import Final

import numpy as np

# Called with memory, u8[n], that devices will read many times, before anything is written to it.
# Raises nothing.
PinMemory = Callable[[np.ndarray], None]
_LEAST_PINNED: Final = 1 << 20  # smaller buffers are copied sooner than they are pinned


class BufferPool:
    """Memory for payloads, kept warm.

    Fresh memory is faulted in page by page, which costs as much as the copy into it. Buffers
    come in powers of two; a buffer returns when the last array that views it is gone, whoever
    held it. At most max_idle_bytes are kept idle.
    """

    def __init__(self, max_idle_bytes: int, pin: PinMemory | None = None) -> None:
        """pin: called for buffers that are worth pinning."""
        self.max_idle_bytes = max_idle_bytes
        self.pin = pin
        self._lock = threading.RLock()  # a garbage collection inside `take` may give back a buffer
        self._idle: dict[int, list[np.ndarray]] = {}
        self.idle_bytes = 0

    def take(self, num_bytes: int) -> np.ndarray:
        """u8[num_bytes], not cleared."""
        size = max(4096, 1 << (num_bytes - 1).bit_length()) if num_bytes else 4096
        with self._lock:
            idle = self._idle.get(size)
            memory = idle.pop() if idle else None
            if memory is not None:
                self.idle_bytes -= size
        if memory is None:
            memory = self._fresh(size)
        # A view made through the buffer protocol stays the base of every view made of it, so it
        # is collected only after all of them.
        lent = np.frombuffer(memoryview(memory), np.uint8)
        weakref.finalize(lent, self._give_back, memory).atexit = False
        return lent[:num_bytes]

    def _fresh(self, size: int) -> np.ndarray:
        if self.pin is None or size < _LEAST_PINNED:
            return np.empty(size, np.uint8)
        # On memory pages of its own: no memory page may be pinned twice.
        memory = np.frombuffer(mmap.mmap(-1, size), np.uint8)
        self.pin(memory)
        return memory

    def _give_back(self, memory: np.ndarray) -> None:
        with self._lock:
            if self.idle_bytes + memory.nbytes <= self.max_idle_bytes:
                self._idle.setdefault(memory.nbytes, []).append(memory)
                self.idle_bytes += memory.nbytes
