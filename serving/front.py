"""What every route works with, and how it reads a body."""

import asyncio
import contextlib
from collections.abc import Coroutine, Iterator
from typing import Any, cast

from starlette.types import Message, Receive, Scope

from serving.answer import Runner
from serving.choice import Choice
from serving.config import ServeConfig
from serving.dispatch import SHUTTING_DOWN, Dispatcher
from serving.errors import RETRY_AFTER_S, ApiError, from_request_error, quoted
from serving.event_stream import Outbox, resumed, until_disconnected
from serving.protocol import Request, ServedModel
from serving.timers import Timers
from transfer.clock import Clock
from transfer.errors import Code, RequestError
from transfer.leaving import Leaving

_DISCARDED = 4  # times what a body may have: so much of one that is larger is read, and dropped
MAX_JSON_PARTS = 1 << 19  # opening brackets, or colons: more than a million tokens of JSON have


class Front:
    """One API process's parts."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        model: ServedModel,
        config: ServeConfig,
        clock: Clock,
        timers: Timers,
    ) -> None:
        self.dispatcher = dispatcher
        self.model = model
        self.config = config
        self.clock = clock
        self.timers = timers
        self.outbox = Outbox()
        self.leaving = Leaving()
        self._num_held = 0  # requests that generate
        self.runner = Runner(dispatcher, config.request_timeout_s)

    def require_ready(self) -> None:
        """Raises ApiError (503) where we leave, or workers that a request needs are not there."""
        self._require_staying()
        if not self.dispatcher.cluster_ready():
            raise _not_ready("the workers that a request needs are not ready; try again")

    @contextlib.contextmanager
    def holding(self) -> Iterator[None]:
        """A request that generates, from its body to its last byte: whoever drains waits for it.

        Raises ApiError (503) where we leave, and before the workers that it needs were there for
        the first time. Later, requests wait for one that restarts, as for one that is full.
        """
        self._require_staying()
        if not self.dispatcher.was_ready():
            raise _not_ready("the workers that a request needs were not ready yet; try again")
        self._num_held += 1
        try:
            yield
        finally:
            self._num_held -= 1
            self._tell_emptied()

    def drain(self) -> None:
        """Begin to leave: nothing new, what has come is finished."""
        self.leaving.drain(self.config.drain_timeout_s, lambda: self._num_held)
        self._tell_emptied()

    def _tell_emptied(self) -> None:
        if self.leaving.draining and not self._num_held:
            self.leaving.emptied()

    def _require_staying(self) -> None:
        if self.leaving.draining:
            # Over another connection it may come to a process that stays.
            headers = {"Retry-After": str(RETRY_AFTER_S), "Connection": "close"}
            raise ApiError(503, SHUTTING_DOWN, code=str(Code.SHUTTING_DOWN), headers=headers)

    def choices(self, request: Request) -> list[Choice]:
        return [Choice(ask, self.model.tokenizer) for ask in request.choices]


def _not_ready(message: str) -> ApiError:
    headers = {"Retry-After": str(RETRY_AFTER_S)}
    return ApiError(503, message, code="not_ready", headers=headers)


async def read_body(scope: Scope, receive: Receive, config: ServeConfig) -> bytes | None:
    """The request's body; None when the client left in the middle.

    Raises ApiError: 413 when it is too large, 415 when it is encoded, 408 when nothing of it came
    for too long, 400 when it would take long to read.
    """
    most_bytes = config.max_request_bytes
    headers = dict(scope["headers"])
    declared = headers.get(b"content-length", b"")
    if b"content-encoding" in headers and (error := _encoded(scope)) is not None:
        if b"expect" not in headers:
            await _discard(receive, _DISCARDED * most_bytes, config.slow_client_timeout_s)
        raise error
    if declared.isdigit() and int(declared) > most_bytes:
        if b"expect" not in headers and int(declared) <= _DISCARDED * most_bytes:
            await _discard(receive, int(declared), config.slow_client_timeout_s)
        raise _too_large(most_bytes)
    parts: list[bytes] = []
    num_bytes = 0
    while True:
        message = await _in_time(receive, config.slow_client_timeout_s)
        if message["type"] == "http.disconnect":
            return None
        part = message.get("body", b"")
        num_bytes += len(part)
        if num_bytes > most_bytes:
            parts.clear()
            if message.get("more_body", False):
                await _discard(receive, _DISCARDED * most_bytes, config.slow_client_timeout_s)
            raise _too_large(most_bytes)
        parts.append(part)
        if not message.get("more_body", False):
            body = parts[0] if len(parts) == 1 else b"".join(parts)
            _check_parts(body)
            return body


def _check_parts(body: bytes) -> None:
    """Objects, arrays and fields take some 0.3 us each to make, in one piece, and to throw away."""
    if len(body) <= MAX_JSON_PARTS:
        return
    brackets, colons = body.count(b"[") + body.count(b"{"), body.count(b":")
    if max(brackets, colons) > MAX_JSON_PARTS:
        message = f"the body has more than {MAX_JSON_PARTS} opening brackets, or colons"
        raise ApiError(400, message, code="invalid_json")


async def _discard(receive: Receive, num_bytes: int, timeout_s: float) -> None:
    """Let a client send so much more, for so long: many read nothing before they have sent all."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            while num_bytes > 0:
                message = await receive()
                num_bytes -= len(message.get("body", b""))
                if not message.get("more_body", False):
                    return


async def _in_time(receive: Receive, timeout_s: float) -> Message:
    receiving = cast(Coroutine[Any, Any, Message], receive())
    try:
        awaited = receiving.send(None)
    except StopIteration as end:  # mostly: a short body comes with its headers
        return cast(Message, end.value)
    try:
        async with asyncio.timeout(timeout_s):
            return await resumed(receiving, awaited)
    except TimeoutError:
        message = f"nothing of the body came for {timeout_s:g} s"
        headers = {"Connection": "close"}
        raise ApiError(408, message, code="request_timeout", headers=headers) from None


async def while_client_waits[T](
    work: Coroutine[Any, Any, T], receive: Receive, timeout_s: float
) -> T | None:
    """What the work returns; None when the client left before, which cancels it.

    receive: after the body. Raises ApiError (504) when it takes longer than timeout_s.
    """
    try:
        awaited = work.send(None)
    except StopIteration as end:  # mostly: a short prompt, in an answer of no new form
        return cast(T, end.value)
    working = asyncio.create_task(_rest(work, awaited))
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


async def _rest[T](coroutine: Coroutine[Any, Any, T], awaited: Any) -> T:
    return await resumed(coroutine, awaited)


def _encoded(scope: Scope) -> ApiError | None:
    """What one is told whose body is not as it is; such a body would be no JSON."""
    fields = [value for name, value in scope["headers"] if name == b"content-encoding"]
    value = b", ".join(fields).decode("latin-1")
    if all(coding.strip().lower() in ("identity", "") for coding in value.split(",")):
        return None
    message = f"Content-Encoding: expected a body as it is (identity), got {quoted(value)}"
    # What is taken instead (RFC 9110, 15.5.16).
    headers = {"Accept-Encoding": "identity", "Connection": "close"}
    return ApiError(415, message, code="unsupported_encoding", headers=headers)


def _too_large(most_bytes: int) -> ApiError:
    message = f"the body is larger than {most_bytes} bytes"
    return ApiError(413, message, code="request_too_large", headers={"Connection": "close"})
