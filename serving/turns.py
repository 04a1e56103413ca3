"""One thread whose calls take turns, beside the event loop, and a bounded queue before it."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from serving.limits import Limiter
from serving.timers import Timers


class Turns:
    """Used by one event loop."""

    def __init__(
        self, name: str, max_waiting: int, queue_timeout_s: float, timers: Timers | None = None
    ) -> None:
        """name: of the thread. max_waiting: calls. queue_timeout_s: the longest wait of one."""
        self._thread = ThreadPoolExecutor(1, name)
        self._limiter = Limiter(1, max_waiting, queue_timeout_s, timers)

    @property
    def num_waiting(self) -> int:
        """Calls that wait for their turn."""
        return self._limiter.queued

    async def run[T](self, call: Callable[[], T]) -> T:
        """What the call returns, or raises, in the thread.

        One that has begun is ended though it is cancelled, and has its turn so long. Raises
        RequestError (QUEUE_FULL) when too many wait, or this one waited too long.
        """
        ticket = await self._limiter.admit()
        running = asyncio.get_running_loop().run_in_executor(self._thread, call)

        def over(running: asyncio.Future[T]) -> None:
            ticket.release()
            if not running.cancelled():
                running.exception()  # which nobody else may be there to look at

        running.add_done_callback(over)
        await asyncio.wait((running,))
        return running.result()
