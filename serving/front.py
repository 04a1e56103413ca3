"""Holds what every HTTP route works with, and knows when this process is ready and leaves."""

import asyncio
import contextlib
from collections.abc import Coroutine, Iterator
from typing import Any, cast

from starlette.types import Receive

from serving.answer import Runner
from serving.bodies import Bodies
from serving.choice import Choice
from serving.config import ServeConfig
from serving.dispatch import SHUTTING_DOWN, Dispatcher
from serving.errors import from_request_error, unavailable
from serving.event_stream import Outbox, resumed, until_disconnected
from serving.protocol import Request, ServedModel
from serving.timers import LoopTimers
from transfer.clock import Clock
from transfer.errors import Code, RequestError
from transfer.leaving import Leaving


class Front:
    """One API process's parts."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        model: ServedModel,
        config: ServeConfig,
        clock: Clock,
    ) -> None:
        self.dispatcher = dispatcher
        self.model = model
        self.config = config
        self.clock = clock
        self.timers = LoopTimers()
        self.outbox = Outbox()
        self.leaving = Leaving()
        self.bodies = Bodies(config.max_request_bytes, config.slow_client_timeout_s, clock)
        self._num_held = 0  # requests that generate
        self.runner = Runner(dispatcher, config.request_timeout_s)

    def require_ready(self) -> None:
        """Raises ApiError (503) while this process drains, or needed workers are not ready."""
        self._require_staying()
        self._require_workers()

    @contextlib.contextmanager
    def holding(self) -> Iterator[None]:
        """Held by a request that generates, until its last byte: `drain` waits for it.

        Raises ApiError (503) while this process drains, and before the workers that it needs were
        first there. Later, requests wait for a worker that restarts, as they do for a full one.
        """
        self._require_staying()
        if not self.dispatcher.was_ready():
            self._require_workers()
        self._num_held += 1
        try:
            yield
        finally:
            self._num_held -= 1
            self._tell_emptied()

    def drain(self) -> None:
        """Begin to leave: take nothing new, and finish what has come."""
        self.leaving.drain(self.config.drain_timeout_s, lambda: self._num_held)
        self._tell_emptied()

    def _tell_emptied(self) -> None:
        if self.leaving.draining and not self._num_held:
            self.leaving.emptied()

    def _require_workers(self) -> None:
        missing = self.dispatcher.missing_roles()
        if missing:
            message = f"no {' and no '.join(missing)} worker takes work; try again"
            raise unavailable(message, "not_ready")

    def _require_staying(self) -> None:
        if self.leaving.draining:
            # On a new connection the client may reach a process that stays.
            headers = {"Connection": "close"}
            raise unavailable(SHUTTING_DOWN, str(Code.SHUTTING_DOWN), headers)

    def choices(self, request: Request) -> list[Choice]:
        return [Choice(ask, self.model.tokenizer) for ask in request.choices]


async def while_client_waits[T](
    work: Coroutine[Any, Any, T], receive: Receive, timeout_s: float
) -> T | None:
    """What the work returns; None when the client left before, which cancels it.

    receive: the request's, after its body. Raises ApiError (504) when the work takes longer than
    timeout_s.
    """
    try:
        awaited = work.send(None)
    except StopIteration as end:  # the usual case: a short prompt, and no form that is new
        return cast(T, end.value)
    working = asyncio.ensure_future(resumed(work, awaited))
    gone = asyncio.create_task(until_disconnected(receive))
    try:
        ended = asyncio.FIRST_COMPLETED
        await asyncio.wait((working, gone), timeout=timeout_s, return_when=ended)
        if working.done():
            return working.result()
        if gone.done():
            return None
        message = f"not done within {timeout_s:.3g} s, still being read"
        raise from_request_error(RequestError(Code.DEADLINE, message))
    finally:
        working.cancel()
        gone.cancel()
