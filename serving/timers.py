"""Timers on the event loop, behind an interface so that tests can move time by hand."""

import asyncio
from collections.abc import Callable
from typing import Protocol


class Timer(Protocol):
    """A call that has not happened yet."""

    def cancel(self) -> None:
        """Cancel the call; does nothing if it has already happened."""
        ...


class Timers(Protocol):
    """Sets deadlines, backoffs and watchdogs."""

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Timer:
        """Run `callback` on the event loop after delay_s; delays below 0 count as 0."""
        ...


class LoopTimers:
    """The running event loop's own timers."""

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Timer:
        return asyncio.get_running_loop().call_later(max(delay_s, 0.0), callback)


async def pause(timers: Timers, delay_s: float) -> None:
    """Wait for delay_s, as `timers` measure it."""
    passed = asyncio.Event()
    timer = timers.call_later(delay_s, passed.set)
    try:
        await passed.wait()
    finally:
        timer.cancel()
