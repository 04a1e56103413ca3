"""Runs calls one at a time in a thread beside the event loop, with a bounded queue before it."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from serving.limits import Limiter
from serving.timers import Timers


class Turns:
    """The thread and its queue. Used by one event loop."""

    def __init__(
        self, name: str, max_waiting: int, queue_timeout_s: float, timers: Timers | None = None
    ) -> None:
        """name: of the thread. max_waiting: calls. queue_timeout_s: a call's longest wait."""
        self._thread = ThreadPoolExecutor(1, name)
        self._limiter = Limiter(1, max_waiting, queue_timeout_s, timers)

    @property
    def num_waiting(self) -> int:
        """Calls that wait for their turn."""
        return self._limiter.queued

    async def run[T](self, call: Callable[[], T]) -> T:
        """Run the call in the thread; returns what it returns, and raises what it raises.

        A call that has begun runs to its end even if the caller is cancelled, and keeps its turn
        until then. Raises RequestError (QUEUE_FULL) when too many wait, or this one waited too
        long.
        """
        ticket = await self._limiter.admit()
        try:
            running = asyncio.get_running_loop().run_in_executor(self._thread, call)
        except RuntimeError:  # as many threads as this process may have: the next call tries again
            ticket.release()
            raise

        def over(running: asyncio.Future[T]) -> None:
            ticket.release()
            if not running.cancelled():
                running.exception()  # mark it as seen: the caller may be gone

        running.add_done_callback(over)
        await asyncio.wait((running,))
        return running.result()
