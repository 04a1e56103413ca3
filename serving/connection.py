"""HTTP connections whose responses can be written to without a message to the server each time.

uvicorn takes any protocol class and hands its own state on to the application. This one is
uvicorn's own with the `BodyWriter` of its connection in that state, where applications find it in
the scope: what asyncio tells a protocol (its transport, when to pause) is all that one has. The
server itself gets a `ServerTransport`, which can hold or drop what it writes.
"""

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Any, Final, Protocol, cast

import httptools
from starlette.types import Scope
from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)
from uvicorn.server import ServerState

from serving.errors import RETRY_AFTER_S, ApiError
from serving.protocol import request_id_of
from transfer.complaint import Tally

# Of a head, or of what follows a body, beyond one read. The parser copies a field as it grows,
# and keeps all of them.
MAX_HEAD_BYTES: Final = 64 << 10
_MAX_DROPPED_BYTES: Final = 1 << 20  # of what a client sends on that was refused
_REFUSED_S = 5.0  # how long it may do so, or read
_SURPLUS_S = 1.0  # how long a client that is one too many may say nothing
_KEY = "kvferry.body_writer"  # in the state of a scope
_invalid = Tally(logging.getLogger(__name__), "%d connection(s) sent what is no HTTP request")
_CRLF = b"\r\n"
_LAST_CHUNK = b"0\r\n\r\n"
_HEADS = [b"%x\r\n" % num_bytes for num_bytes in range(4096)]  # of all but huge chunks


class Borrower(Protocol):
    """Writes in a stream's place."""

    def hindered(self, slot: int) -> None:
        """The stream that has this slot must write for itself again, from its next event on."""
        ...


class ServerTransport:
    """The transport of a connection as its server has it: writes can be held, or one be dropped.

    A closed one waits for its client only while that reads. All else is asyncio's.
    """

    __slots__ = ("_held", "_linger_s", "_lingering", "_transport", "write")

    def __init__(self, transport: asyncio.Transport, linger_s: float) -> None:
        """linger_s: how long a client that is to read the rest may not do so."""
        self._transport = transport
        self._linger_s = linger_s
        self._lingering: asyncio.TimerHandle | None = None
        self._held: list[bytes] | None = None
        self.write: Callable[[bytes], None] = transport.write

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def close(self) -> None:
        """After what is held and unsent."""
        self.release()
        self._transport.close()
        if self._lingering is None:
            self._linger(self._transport.get_write_buffer_size())

    def lost(self) -> None:
        """The connection is gone."""
        self.write = _dropped
        self._held = None
        if self._lingering is not None:
            self._lingering.cancel()

    def hold(self) -> None:
        """Keep what is written until `release`."""
        self._held = []
        self.write = self._held.append

    def release(self) -> None:
        """Write what was kept, at once."""
        held, self._held = self._held, None
        if held is not None:
            self.write = self._transport.write
            if held:
                self.write(b"".join(held))

    def drop_last_chunk(self) -> None:
        """The next end of a body in chunks goes nowhere."""
        self.write = self._drop_last_chunk

    def _drop_last_chunk(self, data: bytes) -> None:
        if data == _LAST_CHUNK:
            self.write = self._transport.write
        else:  # of what a client asked for after this
            self._transport.write(data)

    def _linger(self, num_unsent: int) -> None:
        """Cut a closed connection unless, of so many bytes, some leave in time."""
        if num_unsent:
            loop = asyncio.get_running_loop()
            self._lingering = loop.call_later(self._linger_s, self._cut_unless_read, num_unsent)

    def _cut_unless_read(self, num_unsent: int) -> None:
        left = self._transport.get_write_buffer_size()
        if left < num_unsent:
            self._linger(left)
        else:
            self._transport.abort()


class Bound:
    """How many clients may be connected at once. Some more are told so and closed, others cut.

    on_surplus: called with the peer of each of both.
    """

    def __init__(self, most: int, most_told: int, on_surplus: Callable[[str], object]) -> None:
        """most_told: of those beyond `most`, how many may be connected until they are told."""
        self.most = most
        self.most_with_told = most + most_told
        self.on_surplus = on_surplus

    def refusal(self) -> ApiError:
        """What one too many is told."""
        return ApiError(
            503,
            f"this server has {self.most} connections, which is all it may have",
            code="too_many_connections",
            headers={"Retry-After": str(RETRY_AFTER_S)},
        )


class BodyWriter:
    """Puts chunks of a response's body on its connection, past the server's `send`.

    Whoever writes does so while the server's response is between two messages of a body that goes
    out in chunks, and while `ready`. server: what the server writes to.
    """

    __slots__ = ("_borrower", "_slot", "ready", "server", "write")

    def __init__(self, transport: asyncio.Transport, linger_s: float) -> None:
        """linger_s: as of ServerTransport."""
        self.write: Callable[[bytes], None] = transport.write  # takes whole chunks (chunk_head)
        self.server = ServerTransport(transport, linger_s)
        self.ready = True  # nothing waits for the client, who is there
        self._borrower: Borrower | None = None
        self._slot = -1

    def lend(self, borrower: Borrower, slot: int) -> None:
        """To one who is told at once when it is not ready any more, or who gives it back."""
        self._borrower = borrower
        self._slot = slot

    def take_back(self) -> None:
        """Nobody is told any more."""
        self._borrower = None

    def write_last(self, data: bytes) -> None:
        """The last of the body and its end, before the server ends it with an empty message."""
        self.server.drop_last_chunk()
        self.write(b"".join((chunk_head(len(data)), data, _CRLF, _LAST_CHUNK)))

    def hinder(self) -> None:
        """What is written would wait for the client, or be lost."""
        self.ready = False
        if self._borrower is not None:
            self._borrower.hindered(self._slot)

    def close(self) -> None:
        """The connection is gone. Lets go of its transport, which has the protocol."""
        self.server.lost()
        self.hinder()
        self.write = _dropped


def chunk_head(num_bytes: int) -> bytes:
    """What goes before a chunk's data, and CRLF after it (RFC 9112, 7.1). num_bytes: at least 1."""
    return _HEADS[num_bytes] if num_bytes < len(_HEADS) else b"%x\r\n" % num_bytes


def body_writer_of(scope: Scope) -> BodyWriter | None:
    """The one of a request's connection; None on other servers, and for a client of HTTP/1.0."""
    if scope.get("http_version") != "1.1":
        return None
    writer: BodyWriter | None = scope.get("state", {}).get(_KEY)
    return writer


class _UntilClosed(int):
    """Of a body that ends with its connection: always what is left of it, as uvicorn counts."""

    def __lt__(self, other: int) -> bool:
        return False

    def __ne__(self, other: object) -> bool:
        return False

    def __sub__(self, other: int) -> "_UntilClosed":
        return self

    __hash__ = int.__hash__


class Connection(HttpToolsProtocol):
    """uvicorn's protocol, with a BodyWriter.

    A client of HTTP/1.0, which knows of no chunks, gets a body of unknown length as it is, and its
    end with the connection's (RFC 9112, 6.1 and 6.3); uvicorn's sends chunks.

    It reads requests as uvicorn's does, but for five things: there is a bound to how many clients
    may be connected, a head has a bound and a deadline, what is no request is answered as any
    other error is, and a request that offers another protocol beside is a request like any other.
    uvicorn drops the body of those; some clients, such as Java's own, offer HTTP/2 with every
    request. And of a client that sent several requests at once and left, the one that is being
    answered hears; uvicorn tells the last.
    """

    # Not attributes like uvicorn's: with a few more of these each connection's dictionary would
    # have keys of its own, and 1.2 KB more.
    __slots__ = (
        "_awaits_head",
        "_exceeds",
        "_got_on",
        "_head_due",
        "_linger_s",
        "_num_dropped",
        "_num_unread",
        "_running",
        "_writer",
    )

    @classmethod
    def lingering(cls, linger_s: float, bound: Bound) -> type[asyncio.Protocol]:
        """For uvicorn. linger_s: how long a client may not read the rest, or not send a head."""
        return cast(type[asyncio.Protocol], partial(cls, linger_s=linger_s, bound=bound))

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        linger_s: float,
        bound: Bound,
    ) -> None:
        self._linger_s = linger_s
        self._exceeds: Bound | None = bound  # None: it does not
        self._writer: BodyWriter | None = None
        self._awaits_head = True  # of the first request, or of one that has begun
        self._head_due: asyncio.TimerHandle | None = None
        self._got_on = False  # by the latest read: a request began or ended, or body came
        self._num_unread = 0  # bytes of the reads since one that got on
        self._num_dropped = -1  # bytes since it was refused; -1: it was not
        self._running: RequestResponseCycle | None = None  # the latest may wait for it yet
        super().__init__(config, server_state, dict(app_state), _loop)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Its transport is there."""
        self._writer = self.app_state[_KEY] = BodyWriter(transport, self._linger_s)
        super().connection_made(cast(asyncio.Transport, self._writer.server))
        patience_s = self._linger_s
        if (bound := self._exceeds) is not None:
            if len(self.connections) <= bound.most:
                self._exceeds = None
            else:
                bound.on_surplus(self._peer)
                patience_s = min(patience_s, _SURPLUS_S)
                if len(self.connections) > bound.most_with_told:
                    transport.abort()
        self._head_due = self.loop.call_later(patience_s, self._give_up_head)

    def data_received(self, data: bytes) -> None:
        """Requests, or parts of them."""
        if self._exceeds is not None:
            self._refuse(self._exceeds.refusal())  # now: an answer to nothing is not understood
            return
        if self._num_dropped >= 0:
            self._num_dropped += len(data)
            if self._num_dropped > _MAX_DROPPED_BYTES:
                self.transport.close()
            return
        self._got_on = False
        try:
            self._feed(memoryview(data))
        except httptools.HttpParserError:
            _invalid.tell(self._peer)
            self._refuse_unread(
                ApiError(400, "this is not a valid HTTP request", code="invalid_http")
            )
            return
        self._num_unread = 0 if self._got_on else self._num_unread + len(data)
        if self._num_unread > MAX_HEAD_BYTES:
            message = f"the head of the request is larger than {MAX_HEAD_BYTES} bytes"
            self._refuse_unread(ApiError(431, message, code="head_too_large"))
            return
        if self._awaits_head or self._got_on:  # line ends alone are no request
            self._unset_keepalive_if_required()
        # Most heads come in one read: no timer for those that follow on a connection.
        if not self._awaits_head:
            self._cancel_head_due()
        elif self._head_due is None:
            self._head_due = self.loop.call_later(self._linger_s, self._give_up_head)

    def on_message_begin(self) -> None:
        """A request begins."""
        self._got_on = self._awaits_head = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Its head is there."""
        self._awaits_head = False
        if not self._is_offered_another():
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Some of its body."""
        self._got_on = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        """All of it is there."""
        self._got_on = True
        if not self._is_offered_another():
            super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        if cycle.scope["http_version"] == "1.0":
            cycle.chunked_encoding = False
            cycle.expected_content_length = _UntilClosed()
        super()._start_asgi_task(cycle, app)

    def _feed(self, data: memoryview) -> None:
        """Raises HttpParserError."""
        while True:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                if not self._is_offered_another():
                    return  # CONNECT, which is refused: what follows is for nobody
                data = data[upgrade.args[0] :]
                head = self._head_without_offer()
            # The old one is at the end of the request.
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's
            self.parser.feed_data(head)

    def _is_offered_another(self) -> bool:
        """Whether the request offers another protocol, which the parser takes for its end."""
        upgrade: bool = self.parser.should_upgrade()
        return upgrade and self.parser.get_method() != b"CONNECT"

    def _head_without_offer(self) -> bytes:
        version = self.parser.get_http_version().encode()
        line = b"%b %b HTTP/%b\r\n" % (self.parser.get_method(), self.url, version)
        fields = [b"%b: %b\r\n" % field for field in self.headers if field[0] != b"upgrade"]
        return b"".join((line, *fields, b"\r\n"))

    @property
    def _peer(self) -> str:
        return self.client[0] if self.client else "a Unix socket"

    def _give_up_head(self) -> None:
        self._head_due = None
        if not (self._got_on or self._num_unread):  # nothing came
            self.transport.close()
            return
        latest = cast(RequestResponseCycle | None, self.cycle)
        if latest is not None and not latest.response_complete:  # nor is the answer before it over
            self._head_due = self.loop.call_later(self._linger_s, self._give_up_head)
            return
        message = f"the head of the request did not come within {self._linger_s:g} s"
        self._refuse(ApiError(408, message, code="request_timeout"))

    def _cancel_head_due(self) -> None:
        if self._head_due is not None:
            self._head_due.cancel()
            self._head_due = None

    def _refuse_unread(self, error: ApiError) -> None:
        """As `_refuse`, of which more may come: a connection that is closed then is reset.

        Many clients read nothing before they have sent all, and a reset takes the answer from them.
        So it is closed once the client has, or has sent on for too long (RFC 9112, 9.6).
        """
        latest = cast(RequestResponseCycle | None, self.cycle)
        if self.pipeline or not (latest is None or latest.response_complete):
            self._refuse(error)  # whoever still answers hears that the client is gone
            return
        self._answer(error)
        self._num_dropped = 0
        self._unset_keepalive_if_required()
        self._cancel_head_due()
        patience_s = min(self._linger_s, _REFUSED_S)
        self._head_due = self.loop.call_later(patience_s, self.transport.close)
        if self.transport.can_write_eof():
            self.transport.write_eof()

    def _refuse(self, error: ApiError) -> None:
        """Answer what cannot be read, unless that would be within another answer, and close."""
        latest = cast(RequestResponseCycle | None, self.cycle)
        if not self.pipeline and (
            latest is None or latest.response_complete or not latest.response_started
        ):
            self._answer(error)
        self.transport.close()

    def _answer(self, error: ApiError) -> None:
        """The last one of this connection."""
        headers = {"Connection": "close", "X-Request-Id": request_id_of(None, "", None)}
        answer = error.response(headers)
        fields = (*self.server_state.default_headers, *answer.raw_headers)
        head = [STATUS_LINE[error.status], *(b"%b: %b\r\n" % field for field in fields)]
        self.transport.write(b"".join((*head, b"\r\n", bytes(answer.body))))

    def pause_writing(self) -> None:
        """More is unsent than a buffer holds."""
        super().pause_writing()
        if self._writer is not None:
            self._writer.hinder()

    def resume_writing(self) -> None:
        """The client has read most of it."""
        super().resume_writing()
        if self._writer is not None:
            self._writer.ready = True

    def eof_received(self) -> None:
        """The client asks for nothing more. asyncio closes the connection after this, but waits."""
        self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nobody reads any more."""
        self._cancel_head_due()
        if self._writer is not None:
            self._writer.close()
        super().connection_lost(exc)
        running, self._running = self._running, None
        if running is not None and not running.response_complete:
            running.disconnected = True
            running.message_event.set()


def _dropped(data: bytes) -> None:
    """Nobody reads it."""
