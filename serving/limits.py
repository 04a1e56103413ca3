"""Bounds the generations with the workers, and the length and wait of the queue before a 429."""

import asyncio
from collections import deque

from serving.timers import LoopTimers, Timers
from transfer.errors import Code, RequestError


class Ticket:
    """Room for n generations. Release it when they have ended."""

    def __init__(self, limiter: "Limiter", count: int) -> None:
        self._limiter = limiter
        self.count = count

    def release(self) -> None:
        """Give the room back; a second call does nothing."""
        count, self.count = self.count, 0
        if count:
            self._limiter._give_back(count)


class _Waiter:
    def __init__(self, count: int) -> None:
        self.count = count
        self.ticket: asyncio.Future[Ticket] = asyncio.get_running_loop().create_future()


class Limiter:
    """A counter with a bounded first-come-first-served queue in front.

    Invariant: there are waiters only while the first of them does not fit, and nobody is admitted
    past them.
    """

    def __init__(
        self,
        max_inflight: int,
        max_queued: int,
        queue_timeout_s: float,
        timers: Timers | None = None,
    ) -> None:
        self._max_inflight = max_inflight
        self._max_queued = max_queued
        self._queue_timeout_s = queue_timeout_s
        self._timers = timers or LoopTimers()
        self._waiters: deque[_Waiter] = deque()
        self.inflight = 0
        self.queued = 0

    def admit_now(self, count: int = 1) -> Ticket | None:
        """Room for `count` generations, if there is room and nobody waits for it."""
        assert count > 0, f"a ticket is for at least one generation, got {count}"
        if self._waiters or self.inflight + count > self._max_inflight:
            return None
        self.inflight += count
        return Ticket(self, count)

    async def admit(self, count: int = 1) -> Ticket:
        """Room for `count` generations, at once or after those that came before.

        Raises RequestError: BAD_REQUEST when it can never fit, QUEUE_FULL when the queue is full
        or the wait took longer than queue_timeout_s. A cancelled waiter leaves without a trace.
        """
        if count > self._max_inflight:
            raise RequestError(
                Code.BAD_REQUEST,
                f"{count} generations in one request, at most {self._max_inflight} are served",
            )
        if (ticket := self.admit_now(count)) is not None:
            return ticket
        if self.queued + count > self._max_queued:
            raise RequestError(
                Code.QUEUE_FULL,
                f"{self.inflight} generations are being served and {self.queued} are waiting, "
                f"at most {self._max_queued} may wait",
            )
        return await self._wait(_Waiter(count))

    async def _wait(self, waiter: _Waiter) -> Ticket:
        self._waiters.append(waiter)
        self.queued += waiter.count
        timer = self._timers.call_later(self._queue_timeout_s, lambda: self._expire(waiter))
        try:
            return await waiter.ticket
        except asyncio.CancelledError:
            if waiter in self._waiters:
                self._remove(waiter)
            elif not waiter.ticket.cancelled() and waiter.ticket.exception() is None:
                # Admitted in the same turn in which the client left. (Refused in it, there is
                # nothing to give back, and the cancellation must not become a refusal.)
                waiter.ticket.result().release()
            raise
        finally:
            timer.cancel()

    def _expire(self, waiter: _Waiter) -> None:
        if waiter not in self._waiters:
            return
        if not waiter.ticket.done():
            waiter.ticket.set_exception(
                RequestError(
                    Code.QUEUE_FULL,
                    f"waited {self._queue_timeout_s:g} s in a queue of {self.queued}",
                )
            )
        self._remove(waiter)

    def _remove(self, waiter: _Waiter) -> None:
        self._waiters.remove(waiter)
        self.queued -= waiter.count
        self._admit_waiting()

    def _give_back(self, count: int) -> None:
        self.inflight -= count
        assert self.inflight >= 0, f"{-self.inflight} more released than admitted"
        self._admit_waiting()

    def _admit_waiting(self) -> None:
        while self._waiters:
            waiter = self._waiters[0]
            if self.inflight + waiter.count > self._max_inflight:
                return
            self._waiters.popleft()
            self.queued -= waiter.count
            if waiter.ticket.done():  # cancelled; its task has not run yet
                continue
            self.inflight += waiter.count
            waiter.ticket.set_result(Ticket(self, waiter.count))
