"""Reads the bodies of requests: within a time limit, unencoded, all in bounded memory."""

import asyncio
import contextlib
from collections.abc import Coroutine
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, cast

from starlette.types import Message, Receive, Scope

from serving.errors import RETRY_AFTER_S, ApiError, quoted
from serving.event_stream import resumed
from transfer.clock import SYSTEM_CLOCK, Clock
from transfer.errors import Code

_DISCARDED = 4  # times the largest body: how much of a refused one is read and dropped
MAX_JSON_PARTS = 1 << 19  # opening brackets, or colons: more than a million tokens of JSON have
MAX_JSON_COMMAS = 1 << 21  # a number in a list costs less; so many are 16 prompts of 128k tokens
ALWAYS_BYTES = 1 << 20  # of each body: these have room whatever other bodies hold
_LEAST_RATE = 32 << 10  # bytes a second; a larger body that came slower would hold room for good
AT_ONCE = 8  # largest bodies: what all together may hold in memory beyond ALWAYS_BYTES of each


@dataclass(eq=False)
class Bodies:
    """The memory that the large request bodies of one process hold.

    Clients send a body part by part, and the parts that are here wait for the rest: a few hundred
    large bodies at once would take all memory of a host.
    """

    most_bytes: int  # of one body
    timeout_s: float  # the longest wait for its next part
    clock: Clock = SYSTEM_CLOCK
    held_bytes: int = 0  # beyond ALWAYS_BYTES of each

    def has_room(self, num_bytes: int) -> bool:
        return self.held_bytes + num_bytes <= AT_ONCE * self.most_bytes

    async def skip(self, scope: Scope, receive: Receive) -> None:
        """Read a body that nobody needs, within limits, if its connection closes after the answer.

        Closed with bytes unread it would be reset, and the answer lost. A connection that stays is
        read on by the server.
        """
        headers = dict(scope["headers"])
        wish = headers.get(b"connection", b"").lower()
        if (scope["http_version"] == "1.0" or b"close" in wish) and b"expect" not in headers:
            await self.discard(receive, _DISCARDED * self.most_bytes)

    async def discard(self, receive: Receive, num_bytes: int) -> None:
        """Drop what the client still sends, within limits: many read nothing until all is sent."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.timeout_s):
                while num_bytes > 0:
                    message = await receive()
                    num_bytes -= len(message.get("body", b""))
                    if not message.get("more_body", False):
                        return


class Body:
    """One request's body; its memory counts until `release`, or the end of its `with` block."""

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies
        self._held = 0

    def release(self) -> None:
        """The body's memory is free again; a second call does nothing."""
        self._bodies.held_bytes -= self._held
        self._held = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()

    async def read(self, scope: Scope, receive: Receive) -> bytes | None:
        """The whole body; None when the client left before its end.

        Raises ApiError: 413 when it is too large, 415 when it is encoded, 408 when none of it comes
        for too long or it comes too slowly, 400 when it would take long to parse, 429 while other
        bodies hold the memory.
        """
        most_bytes = self._bodies.most_bytes
        headers = dict(scope["headers"])
        declared = headers.get(b"content-length", b"")
        if b"content-encoding" in headers and (error := _encoded(scope)) is not None:
            if b"expect" not in headers:
                await self._bodies.discard(receive, _DISCARDED * most_bytes)
            raise error
        if declared.isdigit() and int(declared) > most_bytes:
            if b"expect" not in headers and int(declared) <= _DISCARDED * most_bytes:
                await self._bodies.discard(receive, int(declared))
            raise _too_large(most_bytes)
        body = await self._receive(receive)
        if body is not None:
            _check_parts(body)
        return body

    async def _receive(self, receive: Receive) -> bytes | None:
        parts: list[bytes] = []
        num_bytes = 0
        clock, timeout_s = self._bodies.clock, self._bodies.timeout_s
        began_s = clock.monotonic_s()
        while True:
            message = await _in_time(receive, timeout_s)
            if message["type"] == "http.disconnect":
                return None
            part = message.get("body", b"")
            more = message.get("more_body", False)
            num_bytes += len(part)
            if (error := self._hold(num_bytes)) is not None:
                parts.clear()
                if more:
                    await self._bodies.discard(receive, _DISCARDED * self._bodies.most_bytes)
                raise error
            parts.append(part)
            if not more:
                return parts[0] if len(parts) == 1 else b"".join(parts)
            if self._held and clock.monotonic_s() - began_s > timeout_s + num_bytes / _LEAST_RATE:
                raise _too_slow(f"only {num_bytes} bytes of the body came in over {timeout_s:g} s")

    def _hold(self, num_bytes: int) -> ApiError | None:
        """Count so many bytes as held; or hold nothing, and return why they are too many."""
        self.release()
        most_bytes = self._bodies.most_bytes
        if num_bytes > most_bytes:
            return _too_large(most_bytes)
        held = max(num_bytes - ALWAYS_BYTES, 0)
        if held and not self._bodies.has_room(held):
            return _no_room(self._bodies.held_bytes)
        self._held = held
        self._bodies.held_bytes += held
        return None


def _check_parts(body: bytes) -> None:
    """Raise ApiError for too many parts: each blocks the loop for some 0.3 us, made and freed."""
    if len(body) <= MAX_JSON_PARTS:
        return
    brackets, colons = body.count(b"[") + body.count(b"{"), body.count(b":")
    if max(brackets, colons) > MAX_JSON_PARTS:
        message = f"the body has more than {MAX_JSON_PARTS} opening brackets, or colons"
        raise ApiError(400, message, code="invalid_json")
    if body.count(b",") > MAX_JSON_COMMAS:
        message = f"the body has more than {MAX_JSON_COMMAS} commas"
        raise ApiError(400, message, code="invalid_json")


async def _in_time(receive: Receive, timeout_s: float) -> Message:
    receiving = cast(Coroutine[Any, Any, Message], receive())
    try:
        awaited = receiving.send(None)
    except StopIteration as end:  # the usual case: a short body comes with its headers
        return cast(Message, end.value)
    try:
        async with asyncio.timeout(timeout_s):
            return await resumed(receiving, awaited)
    except TimeoutError:
        raise _too_slow(f"nothing of the body came for {timeout_s:g} s") from None


def _encoded(scope: Scope) -> ApiError | None:
    """The error for a body with a content coding, which would be no JSON; None without one."""
    fields = [value for name, value in scope["headers"] if name == b"content-encoding"]
    value = b", ".join(fields).decode("latin-1")
    if all(coding.strip().lower() in ("identity", "") for coding in value.split(",")):
        return None
    message = f"Content-Encoding: expected a body as it is (identity), got {quoted(value)}"
    # The header says what is taken instead (RFC 9110, 15.5.16).
    headers = {"Accept-Encoding": "identity", "Connection": "close"}
    return ApiError(415, message, code="unsupported_encoding", headers=headers)


def _too_slow(message: str) -> ApiError:
    headers = {"Connection": "close"}
    return ApiError(408, message, code="request_timeout", headers=headers)


def _too_large(most_bytes: int) -> ApiError:
    message = f"the body is larger than {most_bytes} bytes"
    return ApiError(413, message, code="request_too_large", headers={"Connection": "close"})


def _no_room(held_bytes: int) -> ApiError:
    message = f"{held_bytes} bytes of other large bodies are being received; try again"
    headers = {"Retry-After": str(RETRY_AFTER_S), "Connection": "close"}
    return ApiError(429, message, code=str(Code.QUEUE_FULL), headers=headers)
