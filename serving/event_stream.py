"""Sends the bytes of streamed responses, with no task, event or queue per token.

What is written to streams in one turn of the event loop leaves at the turn's end, from one
`Outbox`, stream after stream: a stream's events of one turn in one write, and all writes in one
burst. The burst is cheaper than writes in between the work that makes the events: code and sockets
stay in the processor's caches, and a reader that one write wakes is still awake for the next.

A stream runs the server's own `send` inline, by one `send(None)` on its coroutine, which nearly
always finishes at once. When it does not, the client reads slower than it is written to: the
coroutine goes on in a task, later events of this stream queue up and leave merged in one write,
and a timer bounds how long a client may leave more than a buffer unread.

An event that repeats all earlier ones of its choice replaces the one that still waits, so a client
that does not read costs the memory of each choice's latest event only.

A stream may lend its `body_writer` (serving/plain_streams.py); nothing is written here meanwhile.

The response starts with its first event, so whatever fails before that is still an HTTP status.
"""

import asyncio
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any, cast

from starlette.types import Message, Receive, Send

from serving.body_writer import BodyWriter
from serving.errors import ApiError
from serving.timers import Timer, Timers

# ASGI lets `send` return any awaitable; servers and middlewares write coroutine functions, which
# can be driven by hand.
_DrivenSend = Callable[[Message], Coroutine[Any, Any, None]]


_MERGED_BYTES = 1 << 16  # of a merged write; a larger one leaves the queue long before it is read


class SlowClient(Exception):
    """A client left more than a buffer unread for too long; its connection is closed."""


class Outbox:
    """The streams that were written to in this turn of the loop."""

    def __init__(self) -> None:
        self._streams: list[EventStream] = []

    def add(self, stream: "EventStream") -> None:
        """Send what it has at the end of this turn. At most once a turn for each stream."""
        if not self._streams:
            asyncio.get_running_loop().call_soon(self.send)
        self._streams.append(stream)

    def send(self) -> None:
        """Send now."""
        streams, self._streams = self._streams, []
        for stream in streams:
            stream.send()


class EventStream:
    """One response of events. `closed` is done when the last byte left or nobody reads any more.

    closed raises ApiError when it failed before its first byte, SlowClient, or what `send` raised.
    """

    __slots__ = (
        "_begun",
        "_headers",
        "_last",
        "_max_unread_bytes",
        "_num_ahead",
        "_open",
        "_outbox",
        "_places",
        "_queue",
        "_send_body",
        "_send_start",
        "_sender",
        "_slow_client_timeout_s",
        "_timer",
        "_timers",
        "_unread_bytes",
        "_written",
        "body_writer",
        "closed",
        "num_writes",
        "on_begin",
        "started",
    )

    def __init__(
        self,
        send_start: Send,
        send_body: Send,
        body_writer: BodyWriter | None,
        headers: list[tuple[bytes, bytes]],
        outbox: Outbox,
        timers: Timers,
        max_unread_bytes: int,
        slow_client_timeout_s: float,
    ) -> None:
        """send_start: takes the status and headers; send_body, which may be the same: the rest.

        body_writer: of the connection, if there is one.
        """
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.started = False  # from then on errors are events
        self.num_writes = 0
        self.on_begin: Callable[[], None] | None = None  # told when the first byte leaves
        self._open = True  # until `closed` is done; cheaper to look at
        self._begun = False  # status and headers left
        self._send_start = send_start
        self._send_body = cast(_DrivenSend, send_body)
        self.body_writer = body_writer
        if body_writer is not None:
            body_writer.stream = self
        self._headers = headers
        self._outbox = outbox
        self._timers = timers
        self._max_unread_bytes = max_unread_bytes
        self._slow_client_timeout_s = slow_client_timeout_s
        self._written = b""  # since this turn began; the outbox sends it
        self._last = False  # whether what was written ends the response
        self._num_ahead = 0  # bytes written past `send`; if it stalls, they are unread as well
        # Invariant: the queue is empty unless _sender runs, which empties it before it ends.
        self._sender: asyncio.Task[None] | None = None
        self._queue: list[bytes] = []
        self._places: dict[int, int] = {}  # by choice: where in the queue its latest repeat is
        self._unread_bytes = 0  # queued and in _sender's hands
        self._timer: Timer | None = None

    def write(self, data: bytes, last: bool = False, repeats: int | None = None) -> None:
        """Send events; the last ones end the response. Does nothing after them, or once closed.

        repeats: the choice all of whose earlier events these repeat, so that those may be dropped.
        """
        if self._last or not self._open:
            return
        self.started = True
        self._last = last
        if self._sender is not None:
            self._enqueue(data, repeats)
        elif self._written:
            self._written += data
        else:
            self._written = data
            self._outbox.add(self)

    def send(self) -> None:
        """Send now what was written; the outbox calls this."""
        data, self._written = self._written, b""
        if not self._open:
            return
        last = self._last
        self.num_writes += 1
        if self._begun:
            coroutine = self._send_body(
                {"type": "http.response.body", "body": data, "more_body": not last}
            )
        else:
            self._begun = True
            if self.on_begin is not None:
                self.on_begin()
            coroutine = self._start(data, last)
        try:
            awaited = coroutine.send(None)
        except StopIteration:
            if last:
                self._close(None)
        except Exception as error:
            self.broke(error)
        else:
            self._stalled(coroutine, awaited, self._num_ahead + len(data))

    def write_last(self, data: bytes) -> None:
        """Write the last events of a lent stream now; `send` must follow, and ends the stream."""
        if not self._open:
            return
        assert self._idle, "what was lent is idle"
        assert self.body_writer is not None, "likewise"
        self._last = True
        self._num_ahead = len(data)
        try:
            self.body_writer.write_last(data)
        except Exception as error:
            self.broke(error)

    @property
    def lends(self) -> bool:
        """Whether somebody else may use its body writer now."""
        return self.body_writer is not None and self.body_writer.ready and self._idle

    @property
    def _idle(self) -> bool:
        """Begun, and with nothing to send."""
        return (
            self._begun
            and self._open
            and not self._last
            and not self._written
            and self._sender is None
        )

    def _stalled(self, sending: Coroutine[Any, Any, None], awaited: Any, num_bytes: int) -> None:
        """The client reads too slowly for this send, which waits for `awaited`, to end at once."""
        self._unread_bytes = num_bytes
        rest = self._send_rest(resumed(sending, awaited), num_bytes, self._last)
        self._sender = asyncio.ensure_future(rest)
        self._watch_slowness()

    def broke(self, error: Exception) -> None:
        """A send raised, or the borrower that writes in its place cannot go on."""
        # Any error but a lost connection reaches the request's own task.
        self._close(None if isinstance(error, OSError) else error)

    def fail(self, error: ApiError, event: bytes) -> None:
        """End with an error: as a status before the first byte, as this last event after it."""
        if self.started:
            self.write(event, last=True)
        else:
            self._close(error)

    def close(self) -> None:
        """Nobody reads any more. What is queued is dropped."""
        self._close(None)
        # If its client had sent the next request already, that one's stream may have begun.
        if self.body_writer is not None and self.body_writer.stream is self:
            self.body_writer.stream = None
        self._disarm()
        self._queue.clear()
        self._places.clear()
        if self._sender is not None:
            self._sender.cancel()

    async def _start(self, data: bytes, last: bool) -> None:
        """Status, headers and first events: in one write, where the connection is ours."""
        if self.body_writer is not None:
            self.body_writer.server.hold()
        try:
            await self._send_start(
                {"type": "http.response.start", "status": 200, "headers": self._headers}
            )
            await self._send_body(
                {"type": "http.response.body", "body": data, "more_body": not last}
            )
        finally:
            if self.body_writer is not None:
                self.body_writer.server.release()

    async def _send_rest(self, sending: Awaitable[None], num_bytes: int, last: bool) -> None:
        """Finish a send that waits for the client, then send what queued up meanwhile."""
        try:
            await sending
            while True:
                self._unread_bytes -= num_bytes
                if self._unread_bytes <= self._max_unread_bytes:  # else a trickle would be enough
                    self._disarm()
                if not self._queue:
                    break
                data = self._merged()
                num_bytes = len(data)
                last = self._last and not self._queue
                self._watch_slowness()
                self.num_writes += 1
                await self._send_body(
                    {"type": "http.response.body", "body": data, "more_body": not last}
                )
        except OSError:  # the connection is gone
            last = True
        except Exception as error:  # it reaches the request's own task
            self._close(error)
        finally:
            self._sender = None
        if last:
            self._close(None)

    def _enqueue(self, data: bytes, repeats: int | None) -> None:
        """Queue at the end, or in place of what the data repeats: each choice keeps its turn."""
        place = None if repeats is None else self._places.get(repeats)
        if place is not None:
            self._unread_bytes -= len(self._queue[place])
            self._queue[place] = b""
        if place is None or self._last:  # nothing follows what ends the response
            place = len(self._queue)
            self._queue.append(b"")
        self._queue[place] = data
        if repeats is not None:
            self._places[repeats] = place
        self._unread_bytes += len(data)
        self._watch_slowness()

    def _merged(self) -> bytes:
        """Take the next part of the queue as one write; the rest waits until the client took it."""
        count = num_bytes = 0
        while count < len(self._queue) and num_bytes < _MERGED_BYTES:
            num_bytes += len(self._queue[count])
            count += 1
        merged = b"".join(self._queue[:count])
        del self._queue[:count]
        if self._places:
            left = ((choice, place - count) for choice, place in self._places.items())
            self._places = {choice: place for choice, place in left if place >= 0}
        return merged

    def _watch_slowness(self) -> None:
        """Run the timer while too much is unread, or once only the client is waited for."""
        if self._timer is None and (self._last or self._unread_bytes > self._max_unread_bytes):
            self._timer = self._timers.call_later(self._slow_client_timeout_s, self._give_up)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        self._close(
            SlowClient(
                f"a client left {self._unread_bytes} bytes unread for "
                f"{self._slow_client_timeout_s:g} s"
            )
        )
        if self.body_writer is not None:  # otherwise the server waits until the rest is read
            self.body_writer.server.abort()

    def _close(self, error: Exception | None) -> None:
        """Nothing more is written; the first reason counts."""
        if not self._open:
            return
        self._open = False
        if self.closed.done():  # cancelled with the task that waited for it
            return
        if error is None:
            self.closed.set_result(None)
        else:
            self.closed.set_exception(error)


@types.coroutine
def resumed[T](coroutine: Coroutine[Any, Any, T], awaited: Any) -> Generator[Any, Any, T]:
    """The rest of a coroutine that was run by hand until it waited for `awaited`."""
    try:
        while True:
            try:
                value = yield awaited
            except BaseException as error:  # a cancel, mostly: the coroutine decides
                awaited = coroutine.throw(error)
            else:
                awaited = coroutine.send(value)
    except StopIteration as end:
        return cast(T, end.value)


async def until_disconnected(receive: Receive) -> None:
    """Returns when the client left, or the response is complete."""
    while (await receive())["type"] != "http.disconnect":
        pass
