"""How a process leaves: at once, or drained, when it takes nothing new and finishes the rest."""

import asyncio
import logging
from collections.abc import Callable

log = logging.getLogger(__name__)

# A peer that chose this process before it heard of the drain gets a refusal, not a cut connection.
LINGER_S = 1.0


class Leaving:
    """The way out of one process. Used on the loop."""

    def __init__(self) -> None:
        self.over = asyncio.Event()  # leave now
        self.draining = False
        self.drained = False  # nothing was left behind
        self._empty = asyncio.Event()
        self._waiting: asyncio.Task[None] | None = None

    def drain(self, timeout_s: float, num_left: Callable[[], int]) -> None:
        """Begin to leave: over once `emptied` was called, at the latest after timeout_s.

        num_left: requests still held, for the log.
        """
        assert not self.draining, "a process drains once"
        self.draining = True
        log.info("draining: %d requests are held, %g s at most", num_left(), timeout_s)
        self._waiting = asyncio.create_task(self._wait(timeout_s, num_left))

    def emptied(self) -> None:
        """Nothing is held any more, and nothing will be."""
        self._empty.set()

    async def _wait(self, timeout_s: float, num_left: Callable[[], int]) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.gather(self._empty.wait(), asyncio.sleep(LINGER_S))
        except TimeoutError:
            pass
        if self.over.is_set():  # told again, to end at once
            return
        # With nothing left it has drained, even if there was no time to linger.
        self.drained = self._empty.is_set()
        if self.drained:
            log.info("drained")
        else:
            log.warning("not drained after %g s: %d requests are left", timeout_s, num_left())
        self.over.set()
