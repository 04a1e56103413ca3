"""The registry, which says which workers serve what and where, and its clients.

It holds nothing that it cannot be told again: when it restarts, workers register anew and running
rooms do not notice. The rules are those of transfer/leases.py and transfer/routes.py.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Iterator

from transfer import wire
from transfer.clock import Clock
from transfer.complaint import Complaint
from transfer.errors import (
    BadMessage,
    ConfigError,
    Incompatible,
    KvferryError,
    RpcError,
    Superseded,
    Unauthenticated,
    Unavailable,
)
from transfer.layout import check_fit
from transfer.leases import Leases
from transfer.ports import split_host_port
from transfer.route_feeds import RouteFeeds
from transfer.route_link import RouteLink, open_link
from transfer.routes import RouteTable
from transfer.rpc import RpcClient, RpcServer, Security

log = logging.getLogger(__name__)

CALL_TIMEOUT_S = 2.0
RETRY_S = 0.2
LOAD_REFRESH_S = 0.25  # watchers see new load figures at most this often
WATCH_IDLE_S = 1.0  # and a view at least this often, as a sign of life
SILENCE_S = 5.0  # after which a registry, or the connection to it, is taken for dead


def _misfit(info: wire.WorkerInfo, view: wire.ClusterView) -> Incompatible | None:
    """Why a worker does not fit the others in a view; None if it does.

    Workers that drain do not count: they may have left by the time this one has loaded.
    """
    try:
        for member in view.members:
            if member.info.worker_id != info.worker_id and not member.draining:
                check_fit(info, member.info)
    except Incompatible as error:
        return error
    return None


@contextlib.contextmanager
def _of_one_version() -> Iterator[None]:
    """Raise Incompatible, which the operator mends, where the other side is of another version."""
    try:
        yield
    except BadMessage as error:
        raise Incompatible(f"the registry has another version of kvferry: {error}") from error


class RegistryServer:
    """Serves `Leases` and routes over RPC, and pushes changes to watchers."""

    def __init__(
        self,
        security: Security,
        clock: Clock,
        ttl_s: float = 3.0,
        routes: RouteTable | None = None,
    ) -> None:
        self.leases = Leases(ttl_s)
        self.routes = RouteTable() if routes is None else routes
        self._feeds = RouteFeeds(self.routes, security, clock, self.leases.has)
        self._routes_port = 0
        self._clock = clock
        self._watchers: set[asyncio.Event] = set()
        self._sweeper: asyncio.Task[None] | None = None
        self._server = RpcServer(security)
        self._server.unary("Register", wire.Register, self._register)
        self._server.unary("Heartbeat", wire.Heartbeat, self._heartbeat)
        self._server.unary("Deregister", wire.Deregister, self._deregister)
        self._server.stream("Watch", wire.Empty, self._watch)
        self._server.unary("FindRoutes", wire.Empty, self._find_routes)

    async def start(self, host: str, port: int, routes_port: int = 0) -> int:
        """Listen; returns the port. Raises ConfigError when it or the routes' port is taken."""
        self._routes_port = await self._feeds.start(host, routes_port)
        try:
            bound = await self._server.start(host, port, "--disaggregation-bootstrap-port")
        except ConfigError:
            await self._feeds.stop()
            raise
        self._sweeper = asyncio.create_task(self._sweep())
        return bound

    async def stop(self) -> None:
        if self._sweeper is not None:
            self._sweeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._sweeper
        await self._feeds.stop()
        await self._server.stop(0.1)

    async def _register(self, message: wire.Register) -> wire.Registered:
        if (theirs := message.info.wire_version) != wire.WIRE_VERSION:
            what = f"{message.info.worker_id} has {theirs}, the registry has {wire.WIRE_VERSION}"
            raise Incompatible(f"wire version differs: {what}")
        with self._pushing():
            self.leases.register(message.info, message.epoch, self._clock.monotonic_s())
        self.routes.drop_others(message.info.worker_id, message.epoch)
        log.info("%s registered (epoch %d)", message.info.worker_id, message.epoch)
        return wire.Registered(self.leases.ttl_s)

    async def _heartbeat(self, message: wire.Heartbeat) -> wire.HeartbeatReply:
        with self._pushing():
            known = self.leases.heartbeat(message, self._clock.monotonic_s())
        return wire.HeartbeatReply(known)

    async def _deregister(self, message: wire.Deregister) -> wire.Empty:
        with self._pushing():
            if self.leases.deregister(message.worker_id, message.epoch):
                self.routes.drop(message.worker_id)
                log.info("%s left", message.worker_id)
        return wire.Empty()

    async def _find_routes(self, _: wire.Empty) -> wire.RoutesAddress:
        return wire.RoutesAddress(self._routes_port)

    async def _watch(self, _: wire.Empty) -> AsyncIterator[wire.ClusterView]:
        changed = asyncio.Event()
        self._watchers.add(changed)
        try:
            idle_s = 0.0
            sent: wire.ClusterView | None = None
            while True:
                view = self.leases.view()
                if view != sent or idle_s >= WATCH_IDLE_S:
                    yield view
                    sent, idle_s = view, 0.0
                try:
                    await asyncio.wait_for(changed.wait(), LOAD_REFRESH_S)
                    changed.clear()
                except TimeoutError:
                    idle_s += LOAD_REFRESH_S
        finally:
            self._watchers.discard(changed)

    async def _sweep(self) -> None:
        pause_s = self.leases.ttl_s / 10
        looked_s = self._clock.monotonic_s()
        while True:
            await asyncio.sleep(pause_s)
            before_s, looked_s = looked_s, self._clock.monotonic_s()
            if looked_s - before_s > 3 * pause_s:  # this process stood still, the workers did not
                self.leases.prolong(looked_s - before_s, looked_s)
            self.expire()

    def expire(self) -> None:
        """Forget the workers and routes that have expired."""
        with self._pushing():
            gone = self.leases.expire(self._clock.monotonic_s())
        for name in gone:
            self.routes.drop(name)
            log.warning("%s: lease ended", name)
        self.routes.expire(self._clock.monotonic_s())

    @contextlib.contextmanager
    def _pushing(self) -> Iterator[None]:
        """Wake the watchers if a worker came or went inside the `with`."""
        before = self.leases.revision
        yield
        if self.leases.revision != before:
            for watcher in self._watchers:
                watcher.set()


def registry_host(address: str) -> str:
    """The host of a --registry-address. Raises ConfigError unless it is host:port."""
    try:
        return split_host_port(address)[0]
    except ValueError as error:
        raise ConfigError(
            f"--registry-address must be host:port, or [host]:port for IPv6, got {address!r}"
        ) from error


class RegistryClient:
    """A worker's lease, or an API process's view of the cluster. Survives registry restarts."""

    def __init__(self, address: str, security: Security, clock: Clock) -> None:
        """Raises ConfigError unless the address is host:port."""
        self._host = registry_host(address)
        self._client = RpcClient(address, security)
        self._security = security
        self._clock = clock
        self._lease: tuple[str, int] | None = None
        self._hurry = asyncio.Event()
        self.registered = asyncio.Event()
        self.on_registered: Callable[[], None] = lambda: None  # called at each registration

    async def check_fit(self, info: wire.WorkerInfo) -> None:
        """Raise what `run_worker` would for a worker that does not fit the registered ones.

        A dead worker is listed until its lease ends, so only a misfit that lasts SILENCE_S counts.
        When the registry cannot be reached, or goes away meanwhile, the check passes: `run_worker`
        waits for it.
        """
        misfit: Incompatible | None = None
        stream = self._client.stream("Watch", wire.Empty(), wire.ClusterView)
        with contextlib.suppress(Unavailable), _of_one_version():
            try:
                async with asyncio.timeout(SILENCE_S), contextlib.aclosing(stream):
                    async for view in stream:
                        misfit = _misfit(info, view)
                        if misfit is None:
                            return
            except TimeoutError:
                if misfit is not None:
                    raise misfit from None

    async def run_worker(
        self,
        info: wire.WorkerInfo,
        epoch: int,
        load: Callable[[], tuple[wire.Load, bool]],
        interval_s: float = 0.5,
        ranks: Callable[[], tuple[wire.Load, ...]] = tuple,
    ) -> None:
        """Register and send heartbeats until cancelled.

        load(): current load, and whether the worker is draining. ranks(): as in wire.Heartbeat.
        Retries an unreachable registry for ever. Raises Incompatible or Unauthenticated at once. A
        worker that was registered before raises Superseded only: it is serving, and a
        worker that registers first after a restart of the registry must not end it.
        """
        complaint, call = self._complaint(), self._client.call
        known = False
        heard_s = self._clock.monotonic_s()
        while True:
            try:
                if not known:
                    register = wire.Register(info, epoch)
                    with _of_one_version():
                        await call("Register", register, wire.Registered, CALL_TIMEOUT_S)
                    self._lease = (info.worker_id, epoch)
                    self.registered.set()
                    self.on_registered()
                figures, draining = load()
                beat = wire.Heartbeat(info.worker_id, epoch, figures, draining, ranks())
                reply = await call("Heartbeat", beat, wire.HeartbeatReply, CALL_TIMEOUT_S)
                known, heard_s = reply.known, self._clock.monotonic_s()
                complaint.settle()
                await self._pause(interval_s if known else 0)
            except RpcError as error:
                is_over = isinstance(error, Superseded)
                if is_over or (self._lease is None and not isinstance(error, Unavailable)):
                    raise
                complaint.tell(error)
                if self._clock.monotonic_s() - heard_s > SILENCE_S:
                    heard_s = self._clock.monotonic_s()
                    await self._client.renew()
                await asyncio.sleep(RETRY_S)

    def hurry(self) -> None:
        """Send the next heartbeat now: it has news."""
        self._hurry.set()

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._hurry.wait(), seconds)
        self._hurry.clear()

    async def deregister(self) -> None:
        """Deregister, if registered. Raises RpcError when the registry does not answer."""
        lease, self._lease = self._lease, None
        try:
            if lease is not None:
                farewell = wire.Deregister(*lease)
                await self._client.call("Deregister", farewell, wire.Empty, CALL_TIMEOUT_S)
        finally:
            await self._client.close()

    async def watch(
        self,
        on_view: Callable[[wire.ClusterView], None],
        on_begin: Callable[[], None] = lambda: None,
    ) -> None:
        """Call on_view with each view until cancelled; reconnects for ever.

        on_begin: called before each stream of views; the registry may have restarted in between.
        A KvferryError from on_view is logged, and the next view comes with the next connection.
        Before the first view it raises Unauthenticated if the token is refused, and Incompatible if
        this is no registry of this version; later that may be one started anew, and whoever watches
        is serving.
        """
        complaint = self._complaint()
        has_seen, heard_s = False, self._clock.monotonic_s()

        def take(view: wire.ClusterView) -> None:
            nonlocal has_seen, heard_s
            has_seen, heard_s = True, self._clock.monotonic_s()
            on_view(view)

        while True:
            on_begin()
            try:
                await self._watch_once(take, complaint)
            except TimeoutError:
                complaint.tell(f"nothing came for {SILENCE_S:g} s")
            except KvferryError as error:
                if isinstance(error, Unauthenticated | Incompatible) and not has_seen:
                    raise
                complaint.tell(error)
            if self._clock.monotonic_s() - heard_s >= SILENCE_S:
                heard_s = self._clock.monotonic_s()
                await self._client.renew()
            await asyncio.sleep(RETRY_S)

    async def _watch_once(
        self, on_view: Callable[[wire.ClusterView], None], complaint: Complaint
    ) -> None:
        """Follow one stream until it ends. Raises TimeoutError when it is silent for too long."""
        stream = self._client.stream("Watch", wire.Empty(), wire.ClusterView)
        async with contextlib.aclosing(stream):
            while True:
                async with asyncio.timeout(SILENCE_S):
                    with _of_one_version():
                        view = await anext(stream, None)
                if view is None:
                    return
                on_view(view)
                complaint.settle()

    async def connect_routes(
        self, peer_id: str, epoch: int = 0, follows: bool = False
    ) -> RouteLink:
        """Open a connection that tells this worker's routes, or one that follows all routes.

        Waits until the worker is registered, unless it only follows. Raises RpcError.
        """
        if not follows:
            await self.registered.wait()
        reply = wire.RoutesAddress
        found = await self._client.call("FindRoutes", wire.Empty(), reply, CALL_TIMEOUT_S)
        return await open_link(self._host, found.port, self._security, peer_id, epoch, follows)

    async def watch_routes(
        self,
        table: RouteTable,
        watcher_id: str = "watcher",
        on_news: Callable[[wire.Routes], None] = lambda _: None,
    ) -> None:
        """Keep a copy of the registry's table until cancelled; reconnects for ever.

        on_news: called with each message after it was applied to the table.
        """
        complaint = self._complaint()
        while True:
            try:
                link = await self.connect_routes(watcher_id, follows=True)
                complaint.settle()
                table.clear()  # the whole table follows
                try:
                    await self._follow(link, table, on_news)
                finally:
                    link.close()
            except RpcError as error:
                complaint.tell(error)
            await asyncio.sleep(RETRY_S)

    async def _follow(
        self, link: RouteLink, table: RouteTable, on_news: Callable[[wire.Routes], None]
    ) -> None:
        """Apply messages as they arrive. Raises RpcError."""
        while True:
            routes = wire.decode(await link.receive(), wire.Routes)
            now_s = self._clock.monotonic_s()
            table.expire(now_s)
            table.apply(routes, now_s)
            on_news(routes)

    def _complaint(self) -> Complaint:
        """A complaint for one endless task: each task may fail in a way of its own."""
        return Complaint(log, f"registry {self._client.address}: trying again")

    async def close(self) -> None:
        await self._client.close()
