"""How routes reach the registry and leave it: a worker tells its routes, followers get them all."""

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterable

from transfer import open_files, wire
from transfer.clock import Clock
from transfer.complaint import Complaint, Complaints, Tally
from transfer.errors import BadMessage, ConfigError, RpcError, Unavailable
from transfer.handshake import HANDSHAKE_TIMEOUT_S, server_context
from transfer.places import Places
from transfer.ports import address_of
from transfer.route_link import RouteHello, RouteLink, accept_link, greet
from transfer.routes import RouteNews, RouteTable
from transfer.rpc import Security

log = logging.getLogger(__name__)

MAX_LINKS = 4096  # of one registry, or fewer, where files are short
MAX_STRANGERS_OF_HOST = 256  # links whose peer has not shown the token yet, see transfer.places
RETRY_S = 0.2
_ACCEPT_AGAIN_S = 0.1  # after a failed accept
_BYTES_PER_ROOM = 12  # in a message with its route


class RouteFeeds:
    """The registry's side: one table, workers that update it, and followers. Used on its loop."""

    def __init__(
        self,
        table: RouteTable,
        security: Security,
        clock: Clock,
        has_lease: Callable[[str, int], bool],
    ) -> None:
        """has_lease(worker_id, epoch): whether this incarnation may tell of routes."""
        self._table = table
        self._security = security
        self._clock = clock
        self._has_lease = has_lease
        self._followers: set[RouteLink] = set()
        most = min(MAX_LINKS, open_files.beside_control())
        self._places = Places(most, MAX_STRANGERS_OF_HOST, self._send_away)
        self._visits: set[asyncio.Task[None]] = set()
        self._ended = Complaints(log, "a connection for routes was ended")  # by host
        self._crowded = Tally(log, "too many connections for routes: %d closed", clock)
        self._context: ssl.SSLContext | None = None
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port. Raises ConfigError when it is taken."""
        self._context = server_context(self._security)
        try:
            self._listener = _listen(host, port)
        except OSError as error:
            raise ConfigError(
                f"cannot listen for routes on {host}:{port}: {error.strerror}; "
                "choose another --host or --routes-port"
            ) from error
        self._listener.setblocking(False)
        self._accepting = asyncio.create_task(self._accept(self._listener))
        return int(self._listener.getsockname()[1])

    async def stop(self) -> None:
        if self._accepting is not None and self._listener is not None:
            self._accepting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._accepting
            self._listener.close()
        for sock in self._places:
            _end(sock)
        if self._visits:
            await asyncio.wait(self._visits, timeout=HANDSHAKE_TIMEOUT_S)

    def put(self, routes: wire.Routes, data: bytes) -> bool:
        """Apply a worker's routes, and push data, their encoded form. False: it has no lease."""
        known = self._has_lease(routes.worker_id, routes.epoch)
        if known and self._table.apply(routes, self._clock.monotonic_s()):
            for follower in self._followers:
                follower.send(data)
        return known

    # --- connections ------------------------------------------------------------------------------

    async def _accept(self, listener: socket.socket) -> None:
        """Take connections until cancelled, counting each before TLS has begun.

        asyncio's own servers tell of a connection only after TLS, and before that anybody may have
        as many as there are files.
        """
        loop = asyncio.get_running_loop()
        complaint = Complaint(log, "a connection for routes cannot be accepted")
        while True:
            try:
                sock, address = await loop.sock_accept(listener)
            except OSError as error:
                # This connection failed, or files ran out: a later accept may succeed.
                complaint.tell(error)
                await asyncio.sleep(_ACCEPT_AGAIN_S)
                continue
            self._take(sock, str(address[0]))
            await asyncio.sleep(0)  # those who are here have their turn, however many come

    def _take(self, sock: socket.socket, host: str) -> None:
        """Give a connection a task of its own, or close it."""
        if not self._places.enter(sock, host):
            self._crowded.tell(host)
            sock.close()
            return
        visit = asyncio.get_running_loop().create_task(self._visit(sock, host))
        self._visits.add(visit)
        visit.add_done_callback(self._visits.discard)

    def _send_away(self, sock: socket.socket, host: str) -> None:
        self._crowded.tell(host)
        _end(sock)

    async def _visit(self, sock: socket.socket, host: str) -> None:
        complaint = self._ended.of(host)
        try:
            link = await accept_link(sock, self._context)
            try:
                hello = await greet(link, self._security, lambda: self._proved(sock))
                complaint.settle()
                await (self._feed(link) if hello.follows else self._hear(link, hello))
            finally:
                link.close()
                await link.closed()
        except Unavailable as error:
            log.debug("%s", error)  # the peer is gone: the usual end of a link
        except RpcError as error:
            complaint.tell(error)
        finally:
            self._places.leave(sock)

    def _proved(self, sock: socket.socket) -> None:
        """The peer has shown the token. Raises Unavailable if it had to go before that."""
        if not self._places.know(sock):
            raise Unavailable("it gave way to a newcomer")

    async def _hear(self, link: RouteLink, hello: RouteHello) -> None:
        """Apply what a worker tells, until it goes or has no lease any more."""
        while self._has_lease(hello.peer_id, hello.epoch):
            data = await link.receive()
            routes = wire.decode(data, wire.Routes)
            if (routes.worker_id, routes.epoch) != (hello.peer_id, hello.epoch):
                raise BadMessage(f"{hello.peer_id} reports routes of {routes.worker_id}")
            self.put(routes, data)

    async def _feed(self, link: RouteLink) -> None:
        """Send a follower the whole table and then every change, until it goes.

        A follower that falls behind is cut off: it reconnects and gets everything anew.
        """
        link.expect_behind(_BYTES_PER_ROOM * self._table.max_rooms)
        for routes in self._table.snapshot():
            link.send(wire.encode(routes))
        self._followers.add(link)
        try:
            await link.receive(0)
            raise BadMessage("a follower of routes must send nothing after its hello")
        finally:
            self._followers.discard(link)


def _end(sock: socket.socket) -> None:
    """Have whatever goes on over a socket fail, be it TLS; whoever does that then closes it."""
    with contextlib.suppress(OSError):  # closed already
        sock.shutdown(socket.SHUT_RDWR)


def _listen(host: str, port: int) -> socket.socket:
    """Listen on one socket, so that one port serves the host's name; `::` takes IPv4 too."""
    family, address = address_of(host, port)
    both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
    return socket.create_server(address, family=family, dualstack_ipv6=both)


class RoutePublisher:
    """Tells the registry one worker's routes. Used on the worker's loop.

    While the registry is away only live routes are kept; all of them are told once it is back.
    """

    def __init__(
        self, worker_id: str, epoch: int, connect: Callable[[str, int], Awaitable[RouteLink]]
    ) -> None:
        """connect(worker_id, epoch): as RegistryClient.connect_routes; raises RpcError."""
        self._news = RouteNews(worker_id, epoch)
        self._connect = lambda: connect(worker_id, epoch)
        self._link: RouteLink | None = None
        self._complaint = Complaint(log, "routes cannot be reported")

    def feed(self, bound: Iterable[tuple[int, int]], ended: Iterable[int]) -> None:
        """Add the changes of one turn: rooms with their ranks, and rooms that ended."""
        self._news.add(bound, ended)
        if self._link is not None:
            self._complaint.settle()  # the link works, so the next failure is news
        self._tell()

    def registered(self) -> None:
        """The registry has just registered this worker, and may know none of its routes."""
        self._news.tell_all()
        self._tell()

    async def run(self) -> None:
        """Keep a connection open until cancelled."""
        while True:
            try:
                await self._serve(await self._connect())
            except RpcError as error:
                self._complaint.tell(error)
            await asyncio.sleep(RETRY_S)

    async def _serve(self, link: RouteLink) -> None:
        """Tell over this connection until it ends. Raises RpcError."""
        self._link = link
        try:
            self.registered()
            await link.receive(0)
            raise BadMessage("the registry must send nothing to a worker that reports routes")
        finally:
            self._link = None
            link.close()

    def _tell(self) -> None:
        if self._link is not None:
            routes = self._news.take()
            if routes is not None:
                self._link.send(wire.encode(routes))
