"""What tests record and wait with: a recording sink, manual timers, a bounded wait."""

import asyncio
import heapq
import itertools
from collections.abc import Callable

from serving.generation import Tokens
from transfer import wire
from transfer.clock import ManualClock
from transfer.errors import RequestError

_WAIT_S = 20.0


class ManualTimers:
    """Timers that fire when the test moves its clock."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self._due: list[tuple[float, int, _ManualTimer]] = []
        self._numbers = itertools.count()

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> "_ManualTimer":
        timer = _ManualTimer(callback)
        due_s = self.clock.monotonic_s() + max(delay_s, 0.0)
        heapq.heappush(self._due, (due_s, next(self._numbers), timer))
        return timer

    def advance(self, seconds: float) -> None:
        """Move the clock; timers that fall due fire on the way, each at its own time."""
        end_s = self.clock.monotonic_s() + seconds
        while self._due and self._due[0][0] <= end_s:
            due_s, _, timer = heapq.heappop(self._due)
            self.clock.advance(max(due_s - self.clock.monotonic_s(), 0.0))
            timer.fire()
        self.clock.advance(max(end_s - self.clock.monotonic_s(), 0.0))

    @property
    def num_set(self) -> int:
        """Timers that have yet to fire."""
        return sum(not timer.cancelled for _, _, timer in self._due)


class _ManualTimer:
    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback = callback
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True

    def fire(self) -> None:
        if not self.cancelled:
            self.cancelled = True
            self._callback()


class RecordingSink:
    """Keeps what a generation reports, and checks what must never happen."""

    def __init__(self) -> None:
        self.cached_tokens: int | None = None
        self.prompt_logprobs: wire.PromptLogprobs | None = None
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.top: list[list[tuple[int, float]] | None] = []
        self.finish_reason: str | None = None
        self.error: RequestError | None = None
        self.calls: list[str] = []
        self.done = asyncio.Event()
        self.told = asyncio.Event()  # set at every call; for tests that wait for tokens

    def on_prefilled(self, cached_tokens: int, prompt_logprobs: wire.PromptLogprobs | None) -> None:
        assert not self.calls, f"prefilled after {self.calls}"
        self._call("prefilled")
        self.cached_tokens, self.prompt_logprobs = cached_tokens, prompt_logprobs

    def on_tokens(self, tokens: Tokens) -> None:
        self._call("tokens")
        self.token_ids += tokens.ids
        self.logprobs += tokens.logprobs or []
        self.top += tokens.top or []

    def on_end(self, finish_reason: str) -> None:
        self._call("end")
        self.finish_reason = finish_reason
        self.done.set()

    def on_error(self, error: RequestError) -> None:
        self._call("error")
        self.error = error
        self.done.set()

    async def finished(self) -> list[int]:
        """All tokens, once the generation has ended."""
        async with asyncio.timeout(_WAIT_S):
            await self.done.wait()
        return self.token_ids

    async def received(self, num_tokens: int) -> list[int]:
        """The tokens so far, once there are that many."""
        await until(lambda: len(self.token_ids) >= num_tokens)
        return self.token_ids

    def _call(self, name: str) -> None:
        assert not self.done.is_set(), f"{name} after the end: {self.calls}"
        self.calls.append(name)


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop run until the condition holds; fails after 20 s."""
    async with asyncio.timeout(_WAIT_S):
        while not condition():  # noqa: ASYNC110  (it may be about anything)
            await asyncio.sleep(0.001)
