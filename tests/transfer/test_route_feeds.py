"""Routes over real sockets: sent once, sent again after every loss, and only with permission."""

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Callable

import pytest

from tests.ports import free_port
from tests.transfer.samples import PATIENCE_S, SECURITY, a_worker
from transfer import wire
from transfer.bootstrap import RegistryClient, RegistryServer
from transfer.clock import SYSTEM_CLOCK, Clock, ManualClock
from transfer.errors import ConfigError, Unauthenticated, Unavailable
from transfer.route_feeds import RoutePublisher
from transfer.route_link import RouteLink, open_link
from transfer.routes import RouteTable
from transfer.rpc import RpcClient, Security

WORKER = "prefill-0"
TTL_S = 3.0


class Cluster:
    """A registry that can die and return on its port, prefill workers, and copies of the routes."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self.port = 0
        self.server: RegistryServer | None = None
        self.leases: dict[str, asyncio.Task[None]] = {}
        self._clock = clock
        self._tasks: list[asyncio.Task[None]] = []
        self._clients: list[RegistryClient] = []

    async def start(self, max_rooms: int = 1000, ttl_s: float = 600.0) -> None:
        table = RouteTable(max_rooms, ttl_s)
        self.server = RegistryServer(SECURITY, self._clock, TTL_S, table)
        self.port = await self.server.start("127.0.0.1", self.port)

    async def stop(self) -> None:
        if self.server is not None:
            await self.server.stop()
            self.server = None

    @property
    def table(self) -> RouteTable:
        assert self.server is not None
        return self.server.routes

    async def prefill(self, epoch: int = 1, worker_id: str = WORKER) -> RoutePublisher:
        """A registered worker that publishes its routes."""
        client = self._client()
        publisher = RoutePublisher(worker_id, epoch, client.connect_routes)
        client.on_registered = publisher.registered
        info = a_worker("prefill", worker_id)
        lease = client.run_worker(info, epoch, lambda: (wire.Load(), False), interval_s=0.01)
        self.leases[worker_id] = asyncio.create_task(lease)
        self._tasks += [self.leases[worker_id], asyncio.create_task(publisher.run())]
        await asyncio.wait_for(client.registered.wait(), PATIENCE_S)
        return publisher

    def decode(self, name: str = "decode-0") -> "Copy":
        """A copy that follows the routes."""
        copy = Copy()
        watching = self._client().watch_routes(copy.table, name, copy.heard)
        self._tasks.append(asyncio.create_task(watching))
        return copy

    def rpc(self, security: Security = SECURITY) -> RpcClient:
        return RpcClient(f"127.0.0.1:{self.port}", security)

    async def link(
        self, worker_id: str, epoch: int = 1, follows: bool = False, security: Security = SECURITY
    ) -> RouteLink:
        """A routes connection of a peer that claims to be this worker."""
        rpc = self.rpc()
        found = await rpc.call("FindRoutes", wire.Empty(), wire.RoutesAddress, PATIENCE_S)
        await rpc.close()
        return await open_link("127.0.0.1", found.port, security, worker_id, epoch, follows)

    def _client(self) -> RegistryClient:
        self._clients.append(RegistryClient(f"127.0.0.1:{self.port}", SECURITY, SYSTEM_CLOCK))
        return self._clients[-1]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for client in self._clients:
            await client.close()
        await self.stop()


class Copy:
    """A decode worker's copy of the routes."""

    def __init__(self) -> None:
        self.table = RouteTable()
        self._changed = asyncio.Event()

    def heard(self, _: wire.Routes) -> None:
        self._changed.set()

    async def until(self, fits: Callable[[RouteTable], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not fits(self.table):
                self._changed.clear()
                await self._changed.wait()


@contextlib.asynccontextmanager
async def a_cluster(clock: Clock = SYSTEM_CLOCK) -> AsyncIterator[Cluster]:
    cluster = Cluster(clock)
    await cluster.start()
    try:
        yield cluster
    finally:
        await cluster.close()


def a_route(worker_id: str = WORKER, epoch: int = 1) -> wire.Routes:
    return wire.Routes(worker_id, epoch, 1, wire.pack_i64([7]), wire.pack_i32([0]))


def has(room: int, rank: int | None, epoch: int = 1) -> Callable[[RouteTable], bool]:
    return lambda table: table.get(WORKER, epoch, room) == rank


async def test_a_bound_room_reaches_every_decode_worker_and_its_end_too() -> None:
    async with a_cluster() as cluster:
        early = cluster.decode()
        prefill = await cluster.prefill()
        prefill.feed([(7, 2), (8, 0)], [])
        await early.until(has(7, 2))
        late = cluster.decode("decode-1")
        await late.until(has(8, 0))
        prefill.feed([(9, 1)], [7])
        for copy in (early, late):
            await copy.until(has(9, 1))
            assert len(copy.table) == 2
        assert len(cluster.table) == 2


async def test_a_restarted_registry_is_told_all_that_is_live() -> None:
    async with a_cluster() as cluster:
        copy = cluster.decode()
        prefill = await cluster.prefill()
        prefill.feed([(7, 2), (8, 0)], [])
        await copy.until(has(8, 0))
        await cluster.stop()
        prefill.feed([(9, 1)], [8])
        await cluster.start()
        await copy.until(lambda table: has(9, 1)(table) and has(8, None)(table))
        assert has(7, 2)(copy.table)
        assert len(cluster.table) == 2


async def test_a_worker_whose_lease_ended_takes_its_routes_along_and_brings_them_back() -> None:
    clock = ManualClock()
    async with a_cluster(clock) as cluster:
        prefill = await cluster.prefill()
        copy = cluster.decode()
        prefill.feed([(7, 2)], [])
        await copy.until(has(7, 2))
        server = cluster.server
        assert server is not None
        clock.advance(TTL_S + 1)
        server.expire()
        assert len(cluster.table) == 0
        again = cluster.decode()  # gets nothing until the worker has told the registry again
        await again.until(has(7, 2))
        assert len(cluster.table) == 1


async def test_a_later_life_replaces_the_routes_of_the_earlier_one() -> None:
    async with a_cluster() as cluster:
        copy = cluster.decode()
        older = await cluster.prefill(epoch=1)
        older.feed([(7, 2)], [])
        await copy.until(has(7, 2))
        newer = await cluster.prefill(epoch=2)
        newer.feed([(8, 1)], [])
        await copy.until(has(8, 1, epoch=2))
        older.feed([(9, 3)], [])
        newer.feed([(10, 0)], [])
        await copy.until(has(10, 0, epoch=2))
        assert cluster.table.get(WORKER, 1, 9) is None
        assert len(cluster.table) == 2


async def test_a_worker_that_says_goodbye_leaves_no_route() -> None:
    async with a_cluster() as cluster:
        copy = cluster.decode()
        prefill = await cluster.prefill()
        prefill.feed([(7, 2)], [])
        await copy.until(has(7, 2))
        cluster.leases[WORKER].cancel()
        rpc = cluster.rpc()
        await rpc.call("Deregister", wire.Deregister(WORKER, 1), wire.Empty, PATIENCE_S)
        await rpc.close()
        assert len(cluster.table) == 0


async def ends(link: RouteLink) -> None:
    """The registry must end this connection without sending anything first."""
    with pytest.raises(Unavailable):
        await asyncio.wait_for(link.receive(), PATIENCE_S)
    link.close()


@pytest.mark.parametrize(("worker_id", "epoch"), [("prefill-9", 5), (WORKER, 4), (WORKER, 6)])
async def test_nobody_without_a_lease_has_routes(worker_id: str, epoch: int) -> None:
    async with a_cluster() as cluster:
        await cluster.prefill(epoch=5)
        link = await cluster.link(worker_id, epoch)
        link.send(wire.encode(a_route(worker_id, epoch)))
        await ends(link)
        assert len(cluster.table) == 0


@pytest.mark.parametrize(
    "data", [wire.encode(a_route("prefill-9")), wire.encode(a_route(epoch=2)), b"nonsense"]
)
async def test_who_tells_what_is_not_its_own_is_cut_off(data: bytes) -> None:
    async with a_cluster() as cluster:
        await cluster.prefill()
        link = await cluster.link(WORKER)
        link.send(data)
        await ends(link)
        assert len(cluster.table) == 0


async def test_a_reader_has_nothing_to_tell() -> None:
    async with a_cluster() as cluster:
        await cluster.prefill()
        link = await cluster.link(WORKER, follows=True)
        await asyncio.wait_for(link.receive(), PATIENCE_S)  # nothing is known of this worker
        link.send(wire.encode(a_route()))
        await ends(link)
        assert len(cluster.table) == 0


@pytest.mark.parametrize(
    ("name", "message", "reply"),
    [
        ("FindRoutes", wire.Empty(), wire.RoutesAddress),
        ("Register", wire.Register(a_worker("prefill"), 1), wire.Registered),
        ("Heartbeat", wire.Heartbeat(WORKER, 1, wire.Load()), wire.HeartbeatReply),
        ("Deregister", wire.Deregister(WORKER, 1), wire.Empty),
    ],
)
async def test_nothing_is_written_without_the_cluster_token(
    name: str, message: wire.Message, reply: type[wire.Message]
) -> None:
    async with a_cluster() as cluster:
        rpc = cluster.rpc(Security("another-token-of-the-tests"))
        with pytest.raises(Unauthenticated):
            await rpc.call(name, message, reply, PATIENCE_S)
        await rpc.close()


@pytest.mark.parametrize("follows", [False, True])
async def test_no_route_is_told_or_read_without_the_cluster_token(follows: bool) -> None:
    async with a_cluster() as cluster:
        prefill = await cluster.prefill()
        prefill.feed([(7, 2)], [])
        await cluster.decode().until(has(7, 2))
        with pytest.raises(Unavailable):
            await cluster.link(WORKER, 1, follows, Security("another-token-of-the-tests"))
        assert len(cluster.table) == 1


async def test_a_registry_that_does_not_know_the_token_is_told_nothing() -> None:
    """The fake registry echoes what it was sent, hoping to pass for a real one."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(struct.pack("<I", 32) + bytes(32))
        writer.write(struct.pack("<I", 32) + (await reader.read(100))[-32:])
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    with pytest.raises(Unauthenticated):
        await open_link("127.0.0.1", port, SECURITY, WORKER, 1, follows=False)
    server.close()


async def test_a_stranger_cannot_have_the_registry_wait_for_a_large_frame() -> None:
    async with a_cluster() as cluster:
        rpc = cluster.rpc()
        found = await rpc.call("FindRoutes", wire.Empty(), wire.RoutesAddress, PATIENCE_S)
        await rpc.close()
        reader, writer = await asyncio.open_connection("127.0.0.1", found.port)
        await reader.readexactly(4 + 32)
        writer.write(struct.pack("<I", 1 << 20))
        assert await asyncio.wait_for(reader.read(), PATIENCE_S) == b""
        writer.close()


async def test_the_same_stranger_again_and_again_is_told_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def told() -> int:
        return caplog.text.count("a connection for routes was ended")

    async with a_cluster() as cluster:
        other = Security("another-token-of-the-tests")
        for _ in range(3):
            with pytest.raises(Unavailable):
                await cluster.link(WORKER, security=other)
        assert told() == 1
        (await cluster.link(WORKER, follows=True)).close()
        with pytest.raises(Unavailable):
            await cluster.link(WORKER, security=other)
        assert told() == 2


async def test_many_rooms_over_sockets_leave_no_more_than_the_bound() -> None:
    """Twenty times the bound, none of them ended."""
    async with a_cluster() as cluster:
        copy = cluster.decode()
        prefill = await cluster.prefill()
        last = 20_000
        for room in range(0, last, 200):
            prefill.feed([(at, at % 4) for at in range(room, room + 200)], [])
            await copy.until(has(room + 199, (room + 199) % 4))
            assert len(cluster.table) <= 1000
        assert len(cluster.table) == 1000
        prefill.feed([], range(last))
        prefill.feed([(last, 0)], [])
        await copy.until(has(last, 0))
        assert len(cluster.table) == len(copy.table) == 1


async def test_a_peer_that_does_not_read_is_cut_off() -> None:
    """Once the unread data exceeds a bound, which does not count what was sent at the start."""
    over = asyncio.Event()

    async def idle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await over.wait()
        writer.close()

    server = await asyncio.start_server(idle, "127.0.0.1", 0)
    link = RouteLink(*await asyncio.open_connection(*server.sockets[0].getsockname()))
    link.expect_behind(32 << 20)
    link.send(bytes(32 << 20))
    ended = asyncio.create_task(ends(link))
    for _ in range(3):
        link.send(bytes(1 << 20))
        assert not link.is_over
    for _ in range(64):
        link.send(bytes(1 << 20))
    assert link.is_over
    await ended
    over.set()
    server.close()


async def test_a_registry_that_cannot_have_its_port_lets_go_of_that_of_its_routes() -> None:
    routes_port = free_port()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        server = RegistryServer(SECURITY, SYSTEM_CLOCK)
        with pytest.raises(ConfigError):
            await server.start("127.0.0.1", taken.getsockname()[1], routes_port)
    socket.create_server(("127.0.0.1", routes_port)).close()
