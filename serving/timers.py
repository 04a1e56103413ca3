"""Calls something later: a door of its own, so that tests move deadlines and backoffs by hand."""

import asyncio
from collections.abc import Callable
from typing import Protocol


class Timer(Protocol):
    """A call that has not happened yet."""

    def cancel(self) -> None:
        """Make it never happen; nothing when it already has."""
        ...


class Timers(Protocol):
    """Where deadlines, backoffs and watchdogs are set."""

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Timer:
        """Run `callback` on the event loop after delay_s; delays below 0 count as 0."""
        ...


class LoopTimers:
    """The running event loop's own timers."""

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Timer:
        return asyncio.get_running_loop().call_later(max(delay_s, 0.0), callback)


async def pause(timers: Timers, delay_s: float) -> None:
    """Wait for delay_s as `timers` count it."""
    passed = asyncio.Event()
    timer = timers.call_later(delay_s, passed.set)
    try:
        await passed.wait()
    finally:
        timer.cancel()
