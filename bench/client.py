"""An HTTP client that stamps each event of a stream when its bytes arrive: nothing more.

Written on asyncio's streams, so that the load it can make is bounded by the server under test
and not by a client library.
"""

import asyncio
import json
import re
import time
from dataclasses import dataclass, field, replace
from typing import Any, Final

from transfer.ports import host_port

READ_LIMIT_BYTES = 1 << 20
# A blank line. Atomic groups keep one "\r\n" from counting as two line ends.
_FRAME_END = re.compile(rb"(?>\r\n|\r|\n)(?>\r\n|\r|\n)")
# The errors that reading JSON of an unexpected form raises.
MALFORMED: Final = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


class NoAnswer(OSError):
    """The answer is not HTTP."""


@dataclass
class Trace:
    """What one request saw, in seconds of the client's monotonic clock.

    sent_s: when its connection was asked for. event_s: arrival of each event that brought text.
    output_tokens: from the server's usage, or else the number of events. prompt_tokens: from usage.
    cached_tokens: of the prompt, from usage; None if that does not say. error: empty when the
    stream ended with [DONE].
    """

    sent_s: float = 0.0
    event_s: list[float] = field(default_factory=list)
    done_s: float = 0.0
    output_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    finish_reason: str = ""
    request_id: str = ""
    status: int = 0
    error: str = ""

    @property
    def ok(self) -> bool:
        """Whether it ended as it should, with at least one token."""
        return not self.error and bool(self.event_s)

    @property
    def ttft_s(self) -> float:
        """From opening the connection to the first text."""
        return self.event_s[0] - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """(last - first) / (output_tokens - 1); None for a single token."""
        if self.output_tokens < 2:
            return None
        return (self.event_s[-1] - self.event_s[0]) / (self.output_tokens - 1)

    @property
    def itl_s(self) -> list[float]:
        """Gaps between events."""
        pairs = zip(self.event_s, self.event_s[1:], strict=False)
        return [later - earlier for earlier, later in pairs]


@dataclass(frozen=True)
class Server:
    """Where to send. api_key: empty for none. at: the host's address, if it was looked up."""

    host: str
    port: int
    api_key: str = ""
    at: str = ""

    @property
    def address(self) -> str:
        """Host and port as one."""
        return host_port(self.host, self.port)

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A new connection."""
        host = self.at or self.host
        return await asyncio.open_connection(host, self.port, limit=READ_LIMIT_BYTES)

    async def looked_up(self) -> "Server":
        """The same, found: the time to look up a name is not a request's. Raises OSError."""
        _, writer = await self.connect()
        writer.close()
        return replace(self, at=writer.get_extra_info("peername")[0])

    def request(self, method: str, path: str, body: bytes = b"") -> bytes:
        """An HTTP/1.1 request that asks the server to close afterwards."""
        lines = [
            f"{method} {path} HTTP/1.1",
            f"Host: {self.address}",
            "Connection: close",
            "Accept: */*",
        ]
        if self.api_key:
            lines.append(f"Authorization: Bearer {self.api_key}")
        if body:
            lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        return ("\r\n".join(lines) + "\r\n\r\n").encode() + body


async def stream_completion(server: Server, payload: dict[str, Any], timeout_s: float) -> Trace:
    """POST /v1/completions with stream=true and follow it. Failures are in the trace."""
    trace = Trace()
    try:
        body = json.dumps(payload | {"stream": True}).encode()
        async with asyncio.timeout(timeout_s):
            trace.sent_s = time.perf_counter()  # a server too busy to accept is waited for, too
            reader, writer = await server.connect()
            try:
                writer.write(server.request("POST", "/v1/completions", body))
                await writer.drain()
                await _follow(reader, trace)
            finally:
                writer.close()
    except TimeoutError:
        trace.error = f"no end within {timeout_s} s"
    except (OSError, ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
        trace.error = f"{type(error).__name__}: {error}"
    trace.done_s = time.perf_counter()
    return trace


async def get_json(server: Server, path: str, timeout_s: float) -> tuple[int, Any]:
    """(status, parsed body or None). Raises OSError (TimeoutError is one) without an answer."""
    async with asyncio.timeout(timeout_s):
        reader, writer = await server.connect()
        try:
            writer.write(server.request("GET", path))
            await writer.drain()
            status, chunked = await _read_head(reader)
            body = b"".join([piece async for piece in _pieces(reader, chunked)])
        except (ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            raise NoAnswer(f"no HTTP: {error}") from error
        finally:
            writer.close()
    try:
        return status, json.loads(body) if body else None
    except MALFORMED:
        return status, None


async def _follow(reader: asyncio.StreamReader, trace: Trace) -> None:
    trace.status, chunked = await _read_head(reader)
    if trace.status != 200:
        body = b"".join([piece async for piece in _pieces(reader, chunked)])
        trace.error = f"HTTP {trace.status}: {body[:200].decode(errors='replace')}"
        return
    pending, ended = b"", False
    async for piece in _pieces(reader, chunked):
        now_s = time.perf_counter()
        pending += piece
        lines_end_in_cr = b"\r" in pending  # rare, and the regex takes longer
        *frames, pending = _FRAME_END.split(pending) if lines_end_in_cr else pending.split(b"\n\n")
        for frame in frames:
            if data := _data_of(frame):
                ended = _take_event(data, trace, now_s) or ended
    if not ended and not trace.error:
        trace.error = "stream ended without [DONE]"
    trace.output_tokens = trace.output_tokens or len(trace.event_s)


def _data_of(frame: bytes) -> bytes:
    """The data of its `data:` lines. Its first line may be half of the last frame's line end."""
    lines = [line[5:] for line in frame.splitlines() if line.startswith(b"data:")]
    return b"\n".join(line.removeprefix(b" ") for line in lines)


def _take_event(data: bytes, trace: Trace, now_s: float) -> bool:
    """Account for one event; returns whether it was the last. Raises ValueError if it is none."""
    if data.strip() == b"[DONE]":
        return True
    try:
        return _take_values(json.loads(data), trace, now_s)
    except MALFORMED as error:
        raise ValueError(f"no event: {data[:100]!r}: {error!r}") from error


def _take_values(event: Any, trace: Trace, now_s: float) -> bool:
    """As `_take_event`, but raises any of MALFORMED, as any server may be at the other end."""
    if "error" in event:
        trace.error = f"error event: {json.dumps(event['error'])[:200]}"
        return False
    trace.request_id = str(event.get("id", ""))
    usage = event.get("usage")
    if usage:
        trace.output_tokens = int(usage["completion_tokens"])
        trace.prompt_tokens = int(usage["prompt_tokens"])
        details = usage.get("prompt_tokens_details") or {}
        if (cached := details.get("cached_tokens")) is not None:
            trace.cached_tokens = int(cached)
    for choice in event.get("choices", ()):
        # An incomplete character yields an event with empty text: a token came all the same.
        # And an answer that ends with its first token may bring the end alone.
        if choice.get("text") or not choice.get("finish_reason") or not trace.event_s:
            trace.event_s.append(now_s)
        if choice.get("finish_reason"):
            trace.finish_reason = choice["finish_reason"]
    return False


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, bool]:
    """Status, and whether the body is chunked."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    parts = head[0].split(" ", 2)
    if len(parts) < 2 or not parts[1].isdigit():
        raise ValueError(f"not an HTTP status line: {head[0]!r}")
    fields = [line.lower().replace(" ", "") for line in head[1:]]
    return int(parts[1]), "transfer-encoding:chunked" in fields


async def _pieces(reader: asyncio.StreamReader, chunked: bool) -> Any:
    """Body as it arrives; the connection closes after it."""
    while not chunked:
        piece = await reader.read(1 << 16)
        if not piece:
            return
        yield piece
    while True:
        size = int((await reader.readuntil(b"\r\n")).split(b";")[0], 16)
        piece = await reader.readexactly(size + 2)
        if size == 0:
            return
        yield piece[:-2]
