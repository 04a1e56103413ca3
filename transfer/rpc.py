"""Control plane calls: gRPC generic handlers carrying wire messages, behind a cluster token."""

import asyncio
import contextlib
import hmac
import logging
import os
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterator,
    Mapping,
)
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

# gRPC's C core reads these once. What it would log also reaches us as exceptions. And it would look
# names up by itself, and find other addresses than those that are listened on, or none.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
os.environ.setdefault("GRPC_DNS_RESOLVER", "native")

import grpc
import grpc.aio
import msgspec

from transfer import open_files, ports, wire
from transfer.certificates import Certificate, check_reached, read_pem
from transfer.clock import SYSTEM_CLOCK, Clock
from transfer.complaint import Tally
from transfer.errors import (
    BadMessage,
    ConfigError,
    Incompatible,
    RpcError,
    Superseded,
    Unauthenticated,
    Unavailable,
)

log = logging.getLogger(__name__)
# It reports every stream that ends with its server as an unhandled error; we log our own below.
logging.getLogger("grpc").setLevel(logging.CRITICAL + 1)

SERVICE = "kvferry.v1"
_CALLS = "Calls"  # the stream of calls in order
_TOKEN_KEY = "kvferry-token"
_LAST_S = 1.0  # for gRPC's own tasks to end, when a process ends
_GRPC_TASKS = ("_schedule_rpc_coro", "_handle_exceptions")
_LAST_TURNS = 50  # of the loop, for handlers to release what they hold
_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", 256 << 20),
    ("grpc.max_send_message_length", 256 << 20),
    ("grpc.so_reuseport", 0),  # a port in use must be an error, not a second listener
    ("grpc.keepalive_time_ms", 2_000),
    ("grpc.keepalive_timeout_ms", 4_000),  # TCP gives up then, too: after 3 s of silence we did
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 1_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
]
_HANDSHAKE_S = 5.0  # for TLS, and again for HTTP/2's settings; a minute if not set
# How much a peer may send ahead of a slow reader. By default gRPC takes in megabytes: seconds of
# steps, one message each, which transfer.replies could have merged into one.
_CLIENT_OPTIONS: list[tuple[str, Any]] = [
    *_OPTIONS,
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 1 << 16),
]

UnaryHandler = Callable[[Any], Awaitable[msgspec.Struct]]
StreamHandler = Callable[[Any], AsyncIterator[msgspec.Struct]]


@dataclass(frozen=True)
class Security:
    """What both planes demand of a peer. TLS is on when certificate files are given."""

    token: str
    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None
    hosts: tuple[str, ...] = ()  # by which peers reach this process, as far as it knows

    def certificate(self) -> Certificate | None:
        """What a server of this process shows; None without TLS. Raises ConfigError."""
        if self.cert_file is None or self.key_file is None:
            return None
        return Certificate(self.cert_file, self.key_file, self.hosts)

    def reached_by(self, hosts: Mapping[str, str]) -> "Security":
        """The same, with a certificate that names every host, now and after each renewal.

        hosts: by flag, the hosts by which peers reach this process. Raises ConfigError if the
        certificate does not name them.
        """
        if self.cert_file is not None and self.key_file is not None:
            check_reached(self.cert_file, self.key_file, hosts)
        return replace(self, hosts=tuple(hosts.values()))

    def channel_credentials(self) -> grpc.ChannelCredentials | None:
        if self.ca_file is None:
            return None
        return grpc.ssl_channel_credentials(read_pem(self.ca_file))


class _Call(wire.Message, frozen=True):
    """One of the calls that share a stream."""

    name: str
    data: bytes  # the request, encoded


class _Answer(wire.Message, frozen=True):
    """The answer to the oldest unanswered call of the stream."""

    data: bytes  # the reply, encoded; b"" when the call failed
    status: str = ""  # why it failed: the name of a gRPC status code; `message` has the text
    message: str = ""


class _Guard(grpc.aio.ServerInterceptor):
    """Turns away callers that do not know the token, before it reads any of their message."""

    def __init__(self, token: str, clock: Clock) -> None:
        self._token = token.encode()
        what = "wrong or missing cluster token: %d call(s) refused"
        self._refused = Tally(log, what, clock)
        self._refusal = grpc.stream_stream_rpc_method_handler(self._refuse)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        given = str(dict(handler_call_details.invocation_metadata or ()).get(_TOKEN_KEY, ""))
        if hmac.compare_digest(given.encode(), self._token):
            return await continuation(handler_call_details)
        return self._refusal  # a stream handler for every method: it reads only on request

    async def _refuse(
        self, _messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext
    ) -> None:
        self._refused.tell(context.peer())
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, "wrong or missing cluster token")


class RpcServer:
    """Serves unary and streaming methods that speak wire messages."""

    def __init__(
        self, security: Security, clock: Clock = SYSTEM_CLOCK, most_connections: int = 0
    ) -> None:
        """most_connections: at once. 0, for the one server that strangers reach: half of the files
        that this process may open, with a warning in its log when they run short."""
        self._security = security
        self._clock = clock
        self._most_connections = most_connections
        self._unary: dict[str, tuple[type[msgspec.Struct], UnaryHandler]] = {}
        self._methods: dict[str, grpc.RpcMethodHandler] = {
            _CALLS: grpc.stream_stream_rpc_method_handler(self._answer_calls)
        }
        self._server: grpc.aio.Server | None = None
        self._counting: asyncio.Task[None] | None = None

    def unary(self, name: str, request: type[msgspec.Struct], handler: UnaryHandler) -> None:
        """Register `handler(request) -> reply` under `name`, before start().

        It serves single calls (RpcClient.call) and ordered ones (OrderedCalls).
        """

        async def behave(data: bytes, context: grpc.aio.ServicerContext) -> bytes:
            message = await _accept(data, request, context)
            try:
                return wire.encode(await handler(message))
            except RpcError as error:
                await context.abort(_status(error), str(error))
                raise
            except Exception as error:
                await _abort_unexpected(name, error, context)
                raise

        self._unary[name] = (request, handler)
        self._methods[name] = grpc.unary_unary_rpc_method_handler(behave)

    def stream(self, name: str, request: type[msgspec.Struct], handler: StreamHandler) -> None:
        """Register `handler(request) -> async iterator of replies` under `name`."""

        async def behave(data: bytes, context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
            message = await _accept(data, request, context)
            replies = handler(message)
            try:
                async for reply in replies:
                    yield wire.encode(reply)
            except RpcError as error:
                await context.abort(_status(error), str(error))
            except Exception as error:
                await _abort_unexpected(name, error, context)
            finally:
                # When the peer goes away, the handler's own `finally` must run at once.
                close = getattr(replies, "aclose", None)
                if close is not None:
                    await close()

        self._methods[name] = grpc.unary_stream_rpc_method_handler(behave)

    async def start(self, host: str, port: int, flag: str = "--port") -> int:
        """Listen; port 0 picks one. Returns the port. Raises ConfigError when it is taken.

        flag: the flag that sets the port.
        """
        # gRPC gets a numeric address that was free. Given a name, or `::`, it would settle for any
        # one of its addresses, and be the second server on the others.
        with ports.bind(host, port, flag) as sock:
            numeric, _ = ports.bound_to(sock)
        bound = await self.start_at(ports.host_port(numeric, port))
        if not self._most_connections:
            self._counting = asyncio.create_task(open_files.tell_when_short(self._clock))
        return bound

    async def start_at(self, address: str) -> int:
        """Listen at host:port or unix:path; a socket left at the path by a dead server is replaced.

        Returns the port, which has no meaning for a path. Raises ConfigError when it is taken.
        """
        guard = _Guard(self._security.token, self._clock)
        server = grpc.aio.server(options=self._options(), interceptors=[guard])
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, self._methods),)
        )
        certificate = self._security.certificate()
        try:
            if certificate is None:
                bound = server.add_insecure_port(address)
            else:
                bound = server.add_secure_port(address, certificate.grpc_credentials())
        except RuntimeError as error:
            raise ConfigError(
                f"cannot listen on {address}: in use or not an address of this host; "
                "choose another port"
            ) from error
        await server.start()
        self._server = server
        return int(bound)

    def _options(self) -> list[tuple[str, Any]]:
        """Drop strangers soon, and leave this process the files that it needs itself."""
        handshake_ms = int(_HANDSHAKE_S * 1000)
        most = self._most_connections or open_files.for_control()
        return [
            *_OPTIONS,
            ("grpc.server_handshake_timeout_ms", handshake_ms),
            ("grpc.http2.settings_timeout", handshake_ms),
            ("grpc.max_allowed_incoming_connections", most),
        ]

    async def stop(self, grace_s: float = 0.5) -> None:
        if self._counting is not None:
            self._counting.cancel()
            self._counting = None
        if self._server is not None:
            await self._server.stop(grace_s)
            self._server = None
            # gRPC does not wait for handlers whose call the peer has just cancelled, and its tasks
            # print a traceback when the loop closes under them.
            for _ in range(_LAST_TURNS):
                await asyncio.sleep(0)

    async def _answer_calls(
        self, calls: AsyncIterator[bytes], _context: grpc.aio.ServicerContext
    ) -> AsyncIterator[bytes]:
        """One client's calls in order; each is handled after the one before it was answered."""
        async for data in calls:
            yield wire.encode(await self._answer(data))

    async def _answer(self, data: bytes) -> _Answer:
        what = "a call"
        try:
            call = wire.decode(data, _Call)
            what = call.name
            if what not in self._unary:
                raise Incompatible(f"there is no {what} here")
            request, handler = self._unary[what]
            return _Answer(wire.encode(await handler(wire.decode(call.data, request))))
        except RpcError as error:
            return _Answer(b"", _status(error).name, str(error))
        except Exception as error:
            return _Answer(b"", grpc.StatusCode.INTERNAL.name, _unexpected(what, error))


async def to_the_end[T](main: Coroutine[Any, Any, T]) -> T:
    """Run a process's main, then wait until gRPC has let go of every call that it answered.

    On a busy host that may take more turns of the loop than `RpcServer.stop` allows.
    """
    try:
        return await main
    finally:
        tasks = [
            task
            for task in asyncio.all_tasks()
            if getattr(task.get_coro(), "__qualname__", "") in _GRPC_TASKS
        ]
        if tasks:
            await asyncio.wait(tasks, timeout=_LAST_S)


class RpcClient:
    """Calls one peer. Errors come back as RpcError and its children."""

    def __init__(self, address: str, security: Security) -> None:
        self.address = address
        self._credentials = security.channel_credentials()
        self._metadata = ((_TOKEN_KEY, security.token),)
        self._channel = self._open()

    def _open(self) -> grpc.aio.Channel:
        if self._credentials is None:
            return grpc.aio.insecure_channel(self.address, options=_CLIENT_OPTIONS)
        return grpc.aio.secure_channel(self.address, self._credentials, options=_CLIENT_OPTIONS)

    async def renew(self) -> None:
        """Start over with another connection; calls under way raise Unavailable.

        Otherwise gRPC waits up to 20 s for an attempt to connect, even if another process has
        the port by now, and up to 2 minutes before it asks again for the address of a name.
        """
        old, self._channel = self._channel, self._open()
        await old.close(None)

    async def call[M: msgspec.Struct](
        self, name: str, request: msgspec.Struct, reply: type[M], timeout_s: float
    ) -> M:
        """One request, one reply, within timeout_s."""
        method = self._channel.unary_unary(f"/{SERVICE}/{name}")
        with _errors_of(f"{name} at {self.address}"):
            data = await method(wire.encode(request), timeout=timeout_s, metadata=self._metadata)
        return wire.decode(data, reply)

    async def stream[M: msgspec.Struct](
        self, name: str, request: msgspec.Struct, reply: type[M]
    ) -> AsyncGenerator[M, None]:
        """One request, replies until either side ends the stream."""
        method = self._channel.unary_stream(f"/{SERVICE}/{name}")
        call = method(wire.encode(request), metadata=self._metadata)
        try:
            with _errors_of(f"{name} at {self.address}"):
                async for data in call:
                    yield wire.decode(data, reply)
        finally:
            call.cancel()

    def in_order(self) -> "OrderedCalls":
        """Calls that share one stream, which ends with this client."""

        def open_stream() -> Any:
            method = self._channel.stream_stream(f"/{SERVICE}/{_CALLS}")
            return method(metadata=self._metadata)

        return OrderedCalls(self.address, open_stream)

    @property
    def is_backing_off(self) -> bool:
        """Whether calls fail at once, without an attempt to connect.

        For up to `grpc.max_reconnect_backoff_ms` after a failed attempt.
        """
        return self._channel.get_state() is grpc.ChannelConnectivity.TRANSIENT_FAILURE

    async def close(self, grace_s: float | None = None) -> None:
        """Give calls under way grace_s to end; None: they raise Unavailable at once."""
        await self._channel.close(grace_s)


class OrderedCalls:
    """Calls to one peer over one stream, one at a time, each of one message each way.

    A separate gRPC call costs either end several times as much. The first call opens the stream. A
    call that gets no answer ends it, and the next call opens another; an error that the handler
    raised is an answer.
    """

    def __init__(self, address: str, open_stream: Callable[[], Any]) -> None:
        self._address = address
        self._open_stream = open_stream
        self._stream: Any = None
        self._turn = asyncio.Lock()

    async def call[M: msgspec.Struct](
        self, name: str, request: msgspec.Struct, reply: type[M], timeout_s: float
    ) -> M:
        """As RpcClient.call, after all earlier calls; waiting for them is not timed."""
        what = f"{name} at {self._address}"
        data = wire.encode(_Call(name, wire.encode(request)))
        async with self._turn:
            answer = wire.decode(await self._exchange(data, what, timeout_s), _Answer)
        if answer.status:
            kind = _ERROR_NAMES.get(answer.status, RpcError)
            raise kind(f"{what}: {answer.message}")
        return wire.decode(answer.data, reply)

    async def _exchange(self, data: bytes, what: str, timeout_s: float) -> bytes:
        """Write data, read the next message. When this raises, the stream is no longer usable."""
        if self._stream is None or self._stream.done():
            self._stream = self._open_stream()
        stream = self._stream
        answer = None
        try:
            # A handler's errors come in an answer; other errors end the stream itself.
            with _errors_of(what, Unavailable):
                async with asyncio.timeout(timeout_s):
                    await stream.write(data)
                    answer = await stream.read()
        except TimeoutError as error:
            raise Unavailable(f"{what}: no answer in time") from error
        except asyncio.InvalidStateError as error:  # the stream ended before the write
            raise Unavailable(f"{what}: {await stream.details()}") from error
        finally:
            if not isinstance(answer, bytes):
                self.reset()
        if not isinstance(answer, bytes):
            raise Unavailable(f"{what}: the stream of calls ended")
        return answer

    def reset(self) -> None:
        """End the stream; a call under way raises Unavailable."""
        if self._stream is not None:
            self._stream.cancel()
            self._stream = None


_STATUS: dict[type[RpcError], grpc.StatusCode] = {
    Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    Incompatible: grpc.StatusCode.FAILED_PRECONDITION,
    Superseded: grpc.StatusCode.ABORTED,
    BadMessage: grpc.StatusCode.INVALID_ARGUMENT,
    Unavailable: grpc.StatusCode.UNAVAILABLE,
}
_ERRORS = {status: kind for kind, status in _STATUS.items()}
_ERROR_NAMES = {status.name: kind for status, kind in _ERRORS.items()}


async def _accept(
    data: bytes, kind: type[msgspec.Struct], context: grpc.aio.ServicerContext
) -> msgspec.Struct:
    try:
        return wire.decode(data, kind)
    except BadMessage as error:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        raise


async def _abort_unexpected(name: str, error: Exception, context: grpc.aio.ServicerContext) -> None:
    """Log a handler's bug, since gRPC's own logger is silenced, and report it to the caller."""
    if isinstance(error, grpc.aio.AbortError):
        raise error
    await context.abort(grpc.StatusCode.INTERNAL, _unexpected(name, error))


def _unexpected(name: str, error: Exception) -> str:
    log.error("%s failed", name, exc_info=error)
    return f"{name} failed: {type(error).__name__}"


def _status(error: RpcError) -> grpc.StatusCode:
    return _STATUS.get(type(error), grpc.StatusCode.INTERNAL)


@contextlib.contextmanager
def _errors_of(what: str, otherwise: type[RpcError] = RpcError) -> Iterator[None]:
    """Raise gRPC's errors inside as ours, about `what`. otherwise: for a status not of ours.

    Their frames and this one would hold each other, with the call, until the collector runs, which
    is seldom. Meanwhile a channel that is closed would connect again, and stay connected.
    """
    try:
        yield
    except grpc.aio.AioRpcError as error:
        if error.code() in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED):
            raise Unavailable(f"{what}: no answer in time") from error.with_traceback(None)
        kind, told = _ERRORS.get(error.code(), otherwise), error.details()
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            told = "a process of another kind is at this address"  # gRPC: "Method not found!"
            kind = Incompatible if otherwise is RpcError else otherwise
        raise kind(f"{what}: {told}") from error.with_traceback(None)
    except asyncio.CancelledError as error:
        # gRPC raises it in the calls of a channel that is closed, too: is it meant for the caller?
        if (task := asyncio.current_task()) is not None and task.cancelling() > 0:
            raise
        del task  # it will hold what is raised here
        error.with_traceback(None)
        raise Unavailable(f"{what}: the channel was closed") from None
