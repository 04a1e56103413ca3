"""Payload buffers that are used again once nobody holds a view of them."""

import threading
import weakref

import numpy as np


class BufferPool:
    """Memory for payloads, kept warm.

    Fresh memory is faulted in page by page, which costs as much as the copy into it. Buffers
    come in powers of two; a buffer returns when the last array that views it is gone, whoever
    holds it. At most max_idle_bytes wait for use.
    """

    def __init__(self, max_idle_bytes: int) -> None:
        self.max_idle_bytes = max_idle_bytes
        self._lock = threading.RLock()  # a collection inside `take` may give back
        self._idle: dict[int, list[np.ndarray]] = {}
        self._idle_bytes = 0

    @property
    def idle_bytes(self) -> int:
        return self._idle_bytes

    def take(self, num_bytes: int) -> np.ndarray:
        """u8[num_bytes], not cleared."""
        size = max(4096, 1 << (num_bytes - 1).bit_length()) if num_bytes else 4096
        with self._lock:
            idle = self._idle.get(size)
            memory = idle.pop() if idle else None
            if memory is not None:
                self._idle_bytes -= size
        if memory is None:
            memory = np.empty(size, np.uint8)
        # A view through the buffer protocol stays the base of every view made of it, so its
        # own end is the end of them all.
        lent = np.frombuffer(memoryview(memory), np.uint8)
        weakref.finalize(lent, self._give_back, memory).atexit = False
        return lent[:num_bytes]

    def _give_back(self, memory: np.ndarray) -> None:
        with self._lock:
            if self._idle_bytes + memory.nbytes <= self.max_idle_bytes:
                self._idle.setdefault(memory.nbytes, []).append(memory)
                self._idle_bytes += memory.nbytes
