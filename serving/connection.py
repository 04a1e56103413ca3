"""HTTP connections on which a response's body can be written past the server's `send`.

uvicorn takes any protocol class, and hands the protocol's state on to the application. This class
is uvicorn's own, with the connection's `BodyWriter` in that state, where applications find it in
the scope.
"""

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Any, Final, cast

import httptools
from starlette.types import Scope
from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)
from uvicorn.server import ServerState

from serving.body_writer import BodyWriter
from serving.errors import ApiError, unavailable
from serving.protocol import request_id_of
from transfer.complaint import Tally

# Limit of a head, or of what follows a body, beyond one read. The parser copies a field as it
# grows, and keeps all fields.
MAX_HEAD_BYTES: Final = 64 << 10
_MAX_DROPPED_BYTES: Final = 1 << 20  # that a refused client may still send
_REFUSED_S = 5.0  # how long a refused client may go on sending, or take to read
_SURPLUS_S = 1.0  # how long a client beyond the bound may send nothing
_LAST_S = 0.5  # how long a server that ends waits for a request; http_config gives it 2 s in all
_MAX_QUEUED: Final = 32  # requests of one client that wait for the answers before theirs
_KEY = "kvferry.body_writer"  # in the state of a scope
_invalid = Tally(logging.getLogger(__name__), "%d connection(s) sent something other than HTTP")


class Bound:
    """How many clients may be connected at once. Some beyond it are told so, the rest are cut.

    on_surplus: called with the peer of every client beyond the bound.
    """

    def __init__(self, most: int, most_told: int, on_surplus: Callable[[str], object]) -> None:
        """most_told: how many beyond `most` may stay connected until they are told."""
        self.most = most
        self.most_with_told = most + most_told
        self.on_surplus = on_surplus

    def refusal(self) -> ApiError:
        """What a client beyond the bound is told."""
        message = f"this server has {self.most} connections, its maximum"
        return unavailable(message, "too_many_connections")


def body_writer_of(scope: Scope) -> BodyWriter | None:
    """The BodyWriter of a request's connection; None on other servers and for HTTP/1.0."""
    if scope.get("http_version") != "1.1":
        return None
    return cast(BodyWriter | None, scope.get("state", {}).get(_KEY))


class _UntilClosed(int):
    """A length that uvicorn never finds exceeded or short: the body ends with its connection."""

    def __lt__(self, other: int) -> bool:
        return False

    def __ne__(self, other: object) -> bool:
        return False

    def __sub__(self, other: int) -> "_UntilClosed":
        return self

    __hash__ = int.__hash__


class Connection(HttpToolsProtocol):
    """uvicorn's protocol, with a BodyWriter.

    A client of HTTP/1.0 does not know chunks, so a body of unknown length goes to it unchunked and
    ends with the connection (RFC 9112, 6.1 and 6.3); uvicorn would send chunks.

    It reads requests as uvicorn's does, with seven differences. The number of connected clients has
    a bound. A head has a bound and a deadline. What is not a valid request is answered like any
    other error. A request that also offers another protocol keeps its body, which uvicorn drops;
    some clients, such as Java's own, offer HTTP/2 with every request. A client may send requests
    before it has the answers to earlier ones, but only so many: the connection closes after their
    answers. When such a client leaves, the request being answered is told, where uvicorn tells the
    last, and the others are dropped. A connection is idle, too, once a body came that its answer
    did not wait for.
    """

    # Slots, unlike uvicorn's attributes: with a few more attributes, each connection's dictionary
    # would no longer share its keys, and take 1.2 KB more.
    __slots__ = (
        "_awaits_head",
        "_exceeds",
        "_got_on",
        "_head_due",
        "_linger_s",
        "_num_dropped",
        "_num_unread",
        "_running",
        "_unread_due",
        "_writer",
    )

    @classmethod
    def lingering(cls, linger_s: float, bound: Bound) -> type[asyncio.Protocol]:
        """For uvicorn. linger_s: longest wait for a client to read the rest, or to send a head."""
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
        self._exceeds: Bound | None = bound  # None: the connection is within its bound
        self._writer: BodyWriter | None = None
        self._awaits_head = True  # of the first request, or of one that has begun
        self._head_due: asyncio.TimerHandle | None = None
        self._got_on = False  # in the latest read a request began or ended, or body came
        self._num_unread = 0  # bytes read since the last read that got on
        self._num_dropped = -1  # bytes since the client was refused; -1: it was not
        self._running: RequestResponseCycle | None = None  # being answered; later ones may wait
        self._unread_due: asyncio.TimerHandle | None = None  # only while writing is paused
        super().__init__(config, server_state, dict(app_state), _loop)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wrap the transport, check the bound and start the deadline of the first head."""
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
            # Only now: a client does not understand an answer that comes before its request.
            self._refuse(self._exceeds.refusal())
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
            if len(self.pipeline) < _MAX_QUEUED:
                _invalid.tell(self._peer)
            error = ApiError(400, "this is not a valid HTTP request", code="invalid_http")
            self._refuse_unread(error)
            return
        self._num_unread = 0 if self._got_on else self._num_unread + len(data)
        if self._num_unread > MAX_HEAD_BYTES:
            message = f"the head of the request is larger than {MAX_HEAD_BYTES} bytes"
            self._refuse_unread(ApiError(431, message, code="head_too_large"))
            return
        if self._awaits_head or self._got_on:  # line ends alone are no request
            self._unset_keepalive_if_required()
        # Most heads come in one read, so later requests of a connection mostly need no timer.
        if not self._awaits_head:
            self._cancel_head_due()
            if self._got_on and self._answering is None:
                self._await_next()
        elif self._head_due is None:
            self._head_due = self.loop.call_later(self._linger_s, self._give_up_head)

    def on_message_begin(self) -> None:
        """A request begins."""
        self._got_on = self._awaits_head = True
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """A field of its head. Those after the body are dropped: a proxy may not look at them."""
        if self._awaits_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Its head is there."""
        self._awaits_head = False
        if self._is_offered_another():
            return
        if len(self.pipeline) >= _MAX_QUEUED:
            # uvicorn pauses reading, but each answer resumes it for a whole read of requests.
            raise httptools.HttpParserError("too many requests at once")
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
        if self.flow.write_paused:
            self._watch_unread()

    def _feed(self, data: memoryview) -> None:
        """Raises HttpParserError."""
        while True:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                if not self._is_offered_another():
                    return  # CONNECT, which is refused: what follows is ignored
                data = data[upgrade.args[0] :]
                head = self._head_without_offer()
            # The old parser takes the request for ended.
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's
            self.parser.feed_data(head)

    def _is_offered_another(self) -> bool:
        """Whether the request offers another protocol, which the parser takes for its end."""
        return bool(self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT")

    def _head_without_offer(self) -> bytes:
        version = self.parser.get_http_version().encode()
        line = b"%b %b HTTP/%b\r\n" % (self.parser.get_method(), self.url, version)
        fields = [b"%b: %b\r\n" % field for field in self.headers if field[0] != b"upgrade"]
        return b"".join((line, *fields, b"\r\n"))

    @property
    def _peer(self) -> str:
        return self.client[0] if self.client else "a Unix socket"

    @property
    def _answering(self) -> RequestResponseCycle | None:
        """The latest request, unless it has its whole answer."""
        latest = cast(RequestResponseCycle | None, self.cycle)
        return None if latest is None or latest.response_complete else latest

    def _give_up_head(self) -> None:
        self._head_due = None
        if not (self._got_on or self._num_unread):  # nothing came
            self.transport.close()
            return
        if self._answering is not None:  # the answer before it goes on
            self._head_due = self.loop.call_later(self._linger_s, self._give_up_head)
            return
        message = f"the head of the request did not come within {self._linger_s:g} s"
        self._refuse(ApiError(408, message, code="request_timeout"))

    def _await_next(self) -> None:
        """Start an idle connection's time anew, which uvicorn does only after an answer.

        An answer that needs no body, such as a 404, came before it, and the body ended that time.
        """
        if not self.transport.is_closing():
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def _cancel_head_due(self) -> None:
        if self._head_due is not None:
            self._head_due.cancel()
            self._head_due = None

    def _refuse_unread(self, error: ApiError) -> None:
        """As `_refuse`, for a client that may send more: closing now would reset the connection.

        Many clients read nothing until they have sent all, and a reset takes the answer from them.
        So it closes when the client does, after a while (RFC 9112, 9.6), or after earlier answers.
        """
        latest = self._answering
        if latest is not None and latest.more_body:
            self._refuse(error)  # the request that is being answered sees its client leave
            return
        self._num_dropped = 0
        self._unset_keepalive_if_required()
        self._cancel_head_due()
        if latest is not None:
            latest.keep_alive = False  # its answer is the last
            return
        self._answer(error)
        self._head_due = self.loop.call_later(min(self._linger_s, _REFUSED_S), self.transport.close)
        if self.transport.can_write_eof():
            self.transport.write_eof()

    def _refuse(self, error: ApiError) -> None:
        """Answer with an error, unless that would fall inside another answer, and close."""
        latest = self._answering
        if not self.pipeline and (latest is None or not latest.response_started):
            self._answer(error)
        self.transport.close()

    def _answer(self, error: ApiError) -> None:
        """Write an error as the last answer of this connection."""
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
            if self._writer.stream is None:
                self._watch_unread()

    def resume_writing(self) -> None:
        """The client has read most of it."""
        super().resume_writing()
        self._unwatch_unread()
        if self._writer is not None:
            self._writer.ready = True

    def _watch_unread(self) -> None:
        """Cut the client if it reads nothing for too long while another answer waits for that."""
        if self._unread_due is None:
            cut, num_unread = self._cut_unless_read, self.transport.get_write_buffer_size()
            self._unread_due = self.loop.call_later(self._linger_s, cut, num_unread)

    def _cut_unless_read(self, num_unread: int) -> None:
        self._unread_due = None
        due = self._running if self._answering is not None else None
        # An answer by HTTP/1.0 is the only one of its connection, and may be a stream.
        has_others = due is not None and due.scope["http_version"] != "1.0"
        is_watched = has_others and self._writer is not None and self._writer.stream is None
        if is_watched and self.transport.get_write_buffer_size() >= num_unread:
            self.transport.abort()
        else:
            self._watch_unread()

    def _unwatch_unread(self) -> None:
        if self._unread_due is not None:
            self._unread_due.cancel()
            self._unread_due = None

    def eof_received(self) -> None:
        """The client asks for nothing more. Close now: asyncio would, but without a time limit."""
        self.transport.close()

    def shutdown(self) -> None:
        """The server ends. A client whose request may be on its way is answered if it comes soon.

        Of idle clients only those that have just connected get this time: one that had an answer
        knows that its connection may close at any time, and sends its next request again.
        """
        if self._awaits_head and self._answering is None:
            self.loop.call_later(_LAST_S, self._shut_down)
        else:
            self._shut_down()

    def _shut_down(self) -> None:
        if not self.transport.is_closing():
            super().shutdown()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nobody reads any more. Tells the request that is being answered."""
        self._cancel_head_due()
        self._unwatch_unread()
        if self._writer is not None:
            self._writer.close()
        super().connection_lost(exc)
        # Those that wait refer to this connection, which must not refer to them.
        self.pipeline.clear()
        self.cycle = cast(RequestResponseCycle, None)
        running, self._running = self._running, None
        if running is not None and not running.response_complete:
            running.disconnected = True
            running.message_event.set()
