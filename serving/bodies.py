"""How a request's body is read: in time, as it is, and with bounded memory for all of them."""

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any, cast

from starlette.types import Message, Receive, Scope

from serving.errors import RETRY_AFTER_S, ApiError, quoted
from serving.event_stream import resumed
from transfer.errors import Code

_DISCARDED = 4  # times what a body may have: so much of one that is refused is read, and dropped
MAX_JSON_PARTS = 1 << 19  # opening brackets, or colons: more than a million tokens of JSON have
ALWAYS_BYTES = 1 << 20  # of a body that have room, whatever comes beside it
AT_ONCE = 8  # of the largest bodies: what all may have in memory, beyond that, while they come


class Bodies:
    """The bodies that come to one process.

    Large ones are held one part after the other while their clients send, as slowly as they like:
    a few hundred at once would be all memory of a host, and the end of every stream there.
    """

    def __init__(self, most_bytes: int, timeout_s: float) -> None:
        """most_bytes: of one body. timeout_s: the longest wait for its next part."""
        self._most_bytes = most_bytes
        self._timeout_s = timeout_s
        self.held_bytes = 0  # of bodies that are not all here, beyond ALWAYS_BYTES of each

    async def read(self, scope: Scope, receive: Receive) -> bytes | None:
        """The request's body; None when the client left in the middle.

        Raises ApiError: 413 when it is too large, 415 when it is encoded, 408 when nothing of it
        came for too long, 400 when it would take long to read, 429 while others take the memory.
        """
        headers = dict(scope["headers"])
        declared = headers.get(b"content-length", b"")
        if b"content-encoding" in headers and (error := _encoded(scope)) is not None:
            if b"expect" not in headers:
                await self._discard(receive, _DISCARDED * self._most_bytes)
            raise error
        if declared.isdigit() and int(declared) > self._most_bytes:
            if b"expect" not in headers and int(declared) <= _DISCARDED * self._most_bytes:
                await self._discard(receive, int(declared))
            raise _too_large(self._most_bytes)
        body = await self._receive(receive)
        if body is not None:
            _check_parts(body)
        return body

    async def _receive(self, receive: Receive) -> bytes | None:
        parts: list[bytes] = []
        num_bytes = held = 0
        try:
            while True:
                message = await _in_time(receive, self._timeout_s)
                if message["type"] == "http.disconnect":
                    return None
                part = message.get("body", b"")
                more = message.get("more_body", False)
                num_bytes += len(part)
                self.held_bytes -= held
                held = max(num_bytes - ALWAYS_BYTES, 0)
                if (error := self._refusal(num_bytes, held)) is not None:
                    held = 0
                    parts.clear()
                    if more:
                        await self._discard(receive, _DISCARDED * self._most_bytes)
                    raise error
                self.held_bytes += held
                parts.append(part)
                if not more:
                    return parts[0] if len(parts) == 1 else b"".join(parts)
        finally:
            self.held_bytes -= held

    def _refusal(self, num_bytes: int, held: int) -> ApiError | None:
        """Of a body of which so much is here."""
        if num_bytes > self._most_bytes:
            return _too_large(self._most_bytes)
        if held and self.held_bytes + held > AT_ONCE * self._most_bytes:
            message = f"{self.held_bytes} bytes of other large bodies are on their way; try again"
            headers = {"Retry-After": str(RETRY_AFTER_S), "Connection": "close"}
            return ApiError(429, message, code=str(Code.QUEUE_FULL), headers=headers)
        return None

    async def _discard(self, receive: Receive, num_bytes: int) -> None:
        """Let a client send so much more, for so long: many read nothing before all is sent."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._timeout_s):
                while num_bytes > 0:
                    message = await receive()
                    num_bytes -= len(message.get("body", b""))
                    if not message.get("more_body", False):
                        return


def _check_parts(body: bytes) -> None:
    """Objects, arrays and fields take some 0.3 us each to make, in one piece, and to throw away."""
    if len(body) <= MAX_JSON_PARTS:
        return
    brackets, colons = body.count(b"[") + body.count(b"{"), body.count(b":")
    if max(brackets, colons) > MAX_JSON_PARTS:
        message = f"the body has more than {MAX_JSON_PARTS} opening brackets, or colons"
        raise ApiError(400, message, code="invalid_json")


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
