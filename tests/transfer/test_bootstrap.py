"""The registry over real sockets."""

import asyncio
import contextlib
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from tests.recording import until
from tests.transfer.samples import PATIENCE_S, SECURITY, a_worker, names
from transfer import bootstrap, wire
from transfer.bootstrap import RegistryClient, RegistryServer
from transfer.clock import SYSTEM_CLOCK, Clock, ManualClock
from transfer.errors import ConfigError, Incompatible, Superseded, Unauthenticated, Unavailable
from transfer.routes import RouteTable
from transfer.rpc import RpcClient, Security

TTL_S = 3.0


def a_beat(worker_id: str = "decode-0", epoch: int = 1, **load: int) -> wire.Heartbeat:
    return wire.Heartbeat(worker_id, epoch, wire.Load(**load))


class Registry:
    """A registry that can die and come back on the same port, and its clients."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.port = 0
        self.server: RegistryServer | None = None
        self._clients: list[RegistryClient] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        self.server = RegistryServer(SECURITY, self.clock, TTL_S)
        self.port = await self.server.start("127.0.0.1", self.port)

    async def stop(self) -> None:
        if self.server is not None:
            await self.server.stop()
            self.server = None

    @property
    def members(self) -> list[tuple[str, int]]:
        assert self.server is not None
        return names(self.server.leases)

    def client(self, security: Security = SECURITY) -> RegistryClient:
        client = RegistryClient(f"127.0.0.1:{self.port}", security, SYSTEM_CLOCK)
        self._clients.append(client)
        return client

    def run_worker(
        self,
        client: RegistryClient,
        info: wire.WorkerInfo,
        epoch: int = 1,
        load: Callable[[], tuple[wire.Load, bool]] = lambda: (wire.Load(), False),
    ) -> "asyncio.Task[None]":
        task = asyncio.create_task(client.run_worker(info, epoch, load, interval_s=0.01))
        self._tasks.append(task)
        return task

    def watch(self) -> "asyncio.Queue[wire.ClusterView]":
        views: asyncio.Queue[wire.ClusterView] = asyncio.Queue()
        self._tasks.append(asyncio.create_task(self.client().watch(views.put_nowait)))
        return views

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for client in self._clients:
            await client.close()
        if (server := self.server) is not None:
            await until(lambda: not server._watchers)  # no watcher that left is remembered
        await self.stop()


@contextlib.asynccontextmanager
async def a_registry(clock: Clock = SYSTEM_CLOCK) -> AsyncIterator[Registry]:
    registry = Registry(clock)
    await registry.start()
    try:
        yield registry
    finally:
        await registry.close()


async def a_view(
    views: "asyncio.Queue[wire.ClusterView]", fits: Callable[[wire.ClusterView], bool]
) -> wire.ClusterView:
    """The next view that `fits` accepts."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            view = await views.get()
            if fits(view):
                return view


def shows(*expected: tuple[str, int]) -> Callable[[wire.ClusterView], bool]:
    """Accepts a view of exactly these (worker, epoch)."""

    def fits(view: wire.ClusterView) -> bool:
        return [(member.info.worker_id, member.epoch) for member in view.members] == list(expected)

    return fits


async def registered(client: RegistryClient) -> None:
    await asyncio.wait_for(client.registered.wait(), PATIENCE_S)


async def test_a_watcher_is_told_at_once_then_of_every_coming_and_going(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("LOAD_REFRESH_S", "WATCH_IDLE_S"):
        monkeypatch.setattr(bootstrap, name, 0.02)
    async with a_registry() as registry:
        views = registry.watch()
        await a_view(views, shows())
        client = registry.client()
        task = registry.run_worker(client, a_worker())
        await a_view(views, shows(("decode-0", 1)))
        other = registry.client()
        registry.run_worker(other, a_worker("prefill"))
        await a_view(views, shows(("decode-0", 1), ("prefill-0", 1)))
        task.cancel()
        await client.deregister()
        for _ in range(2):  # again, as a sign of life
            await a_view(views, shows(("prefill-0", 1)))


async def test_a_watcher_sees_the_load_of_a_heartbeat() -> None:
    async with a_registry() as registry:
        views = registry.watch()
        registry.run_worker(
            registry.client(), a_worker(), load=lambda: (wire.Load(pages_free=42), True)
        )
        view = await a_view(
            views, lambda view: any(member.load.pages_free for member in view.members)
        )
        assert view.members[0].load.pages_free == 42
        assert view.members[0].draining


@pytest.mark.parametrize(("steps", "left"), [(12, []), (1, [("decode-0", 1)])])
async def test_who_is_silent_leaves_unless_the_registry_was(steps: int, left: list[Any]) -> None:
    clock = ManualClock()
    async with a_registry(clock) as registry:
        assert registry.server is not None
        registry.server.leases.register(a_worker(), 1, clock.monotonic_s())
        for _ in range(steps):
            await asyncio.sleep(TTL_S / 10)
            clock.advance(1.2 * TTL_S / steps)
        await asyncio.sleep(2 * TTL_S / 10)
        assert registry.members == left


async def test_a_restarted_registry_learns_its_workers_and_keeps_its_watchers() -> None:
    async with a_registry() as registry:
        views = registry.watch()
        registry.run_worker(registry.client(), a_worker(), epoch=5)
        await a_view(views, shows(("decode-0", 5)))
        await registry.stop()
        while not views.empty():
            views.get_nowait()
        await registry.start()
        await a_view(views, shows(("decode-0", 5)))


async def test_a_view_that_could_not_be_used_is_told_of_and_comes_again() -> None:
    async with a_registry() as registry:
        seen: asyncio.Queue[wire.ClusterView] = asyncio.Queue()
        errors = [ConfigError("cannot read ca.pem: it is being replaced")]

        def use(view: wire.ClusterView) -> None:
            if errors:
                raise errors.pop()
            seen.put_nowait(view)

        watching = asyncio.create_task(registry.client().watch(use))
        await a_view(seen, shows())
        watching.cancel()


async def test_a_registry_behind_a_port_that_said_nothing_is_watched(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Like a frozen registry: the system accepts connections, but nobody answers."""
    monkeypatch.setattr(bootstrap, "SILENCE_S", 0.3)
    async with a_registry() as registry:
        await registry.stop()
        with socket.create_server(("127.0.0.1", registry.port)) as silent:
            silent.setblocking(False)
            views = registry.watch()
            connection, _ = await asyncio.get_running_loop().sock_accept(silent)
            await until(lambda: "trying again: nothing came for 0.3 s" in caplog.text)
        await registry.start()
        await a_view(views, shows())
        connection.close()


async def test_a_worker_finds_the_registry_behind_a_port_that_said_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("SILENCE_S", "CALL_TIMEOUT_S"):
        monkeypatch.setattr(bootstrap, name, 0.3)
    async with a_registry() as registry:
        await registry.stop()
        client = registry.client()
        renewed = asyncio.Event()
        renew = client._client.renew

        async def renew_and_tell() -> None:
            await renew()
            renewed.set()

        monkeypatch.setattr(client._client, "renew", renew_and_tell)
        with socket.create_server(("127.0.0.1", registry.port)) as silent:
            silent.setblocking(False)
            registry.run_worker(client, a_worker())
            connection, _ = await asyncio.get_running_loop().sock_accept(silent)
            await asyncio.wait_for(renewed.wait(), PATIENCE_S)
        assert "no answer in time" in caplog.text
        monkeypatch.setattr(bootstrap, "CALL_TIMEOUT_S", 2.0)
        await registry.start()
        await registered(client)
        connection.close()


async def test_a_worker_that_serves_outlives_whoever_came_first_to_a_new_registry(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with a_registry() as registry:
        serving = registry.client()
        task = registry.run_worker(serving, a_worker())
        await registered(serving)
        await registry.stop()
        await registry.start()
        assert registry.server is not None
        other = a_worker("prefill", model_digest="d2")
        registry.server.leases.register(other, 1, SYSTEM_CLOCK.monotonic_s())
        await until(lambda: "d2" in caplog.text)
        assert not task.done()
        registry.server.leases.deregister(other.worker_id, 1)
        await until(lambda: registry.members == [("decode-0", 1)])


async def test_calls_under_way_fail_when_their_client_begins_anew() -> None:
    async with a_registry() as registry:
        client = RpcClient(f"127.0.0.1:{registry.port}", SECURITY)
        stream = client.stream("Watch", wire.Empty(), wire.ClusterView)
        await anext(stream)
        waiting = asyncio.create_task(anext(stream))
        await client.renew()
        with pytest.raises(Unavailable, match="the channel was closed"):
            await waiting
        found = await client.call("FindRoutes", wire.Empty(), wire.RoutesAddress, 20.0)
        assert found.port
        await client.close()


async def test_a_worker_registers_once_its_registry_is_there() -> None:
    async with a_registry() as registry:
        await registry.stop()
        client = registry.client()
        registry.run_worker(client, a_worker())
        await registry.start()
        await registered(client)
        assert registry.members == [("decode-0", 1)]


async def test_a_registry_that_is_away_is_complained_of_once_by_each_who_wants_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(bootstrap, "RETRY_S", 0.0)
    client = RegistryClient("127.0.0.1:1", SECURITY, SYSTEM_CLOCK)
    asked: Counter[str] = Counter()

    async def refuse(name: str, *_: object) -> None:
        asked[name] += 1
        raise Unavailable(f"{name}: connection refused")

    monkeypatch.setattr(client._client, "call", refuse)
    tasks = [
        asyncio.create_task(client.run_worker(a_worker(), 1, lambda: (wire.Load(), False))),
        asyncio.create_task(client.watch_routes(RouteTable())),
    ]
    await until(lambda: min(asked["Register"], asked["FindRoutes"]) > 3)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await client.close()
    records = [record for record in caplog.records if record.name == "transfer.bootstrap"]
    told = [record.getMessage().split(": ", 2)[2] for record in records]
    assert sorted(told) == ["FindRoutes: connection refused", "Register: connection refused"]


async def test_a_newer_life_takes_over_and_the_older_one_ends() -> None:
    async with a_registry() as registry:
        older = registry.client()
        task = registry.run_worker(older, a_worker(), epoch=1)
        await registered(older)
        newer = registry.client()
        registry.run_worker(newer, a_worker(), epoch=2)
        await registered(newer)
        with pytest.raises(Superseded, match=r"epoch.* --worker-id each"):
            await asyncio.wait_for(task, PATIENCE_S)
        assert registry.members == [("decode-0", 2)]


async def test_an_incompatible_worker_ends_at_once_with_both_values() -> None:
    async with a_registry() as registry:
        first = registry.client()
        registry.run_worker(first, a_worker())
        await registered(first)
        task = registry.run_worker(registry.client(), a_worker("prefill", model_digest="d2"))
        with pytest.raises(Incompatible, match=r"(?s)(?=.*d1)(?=.*d2)"):
            await asyncio.wait_for(task, PATIENCE_S)


async def test_a_worker_of_another_version_is_refused_even_as_the_first() -> None:
    async with a_registry() as registry:
        task = registry.run_worker(registry.client(), a_worker(wire_version=99))
        with pytest.raises(Incompatible, match=rf"has 99, the registry has {wire.WIRE_VERSION}"):
            await asyncio.wait_for(task, PATIENCE_S)
        assert registry.members == []


async def test_a_wrong_token_ends_a_worker_at_once() -> None:
    async with a_registry() as registry:
        stranger = registry.client(Security("another-token-of-the-tests"))
        task = registry.run_worker(stranger, a_worker())
        with pytest.raises(Unauthenticated):
            await asyncio.wait_for(task, PATIENCE_S)
        assert registry.members == []


async def test_saying_goodbye_to_a_dead_registry_is_unavailable_and_closes() -> None:
    async with a_registry() as registry:
        client = registry.client()
        task = registry.run_worker(client, a_worker())
        await registered(client)
        task.cancel()
        await registry.stop()
        with pytest.raises(Unavailable):
            await client.deregister()


async def test_saying_goodbye_without_having_registered_does_nothing() -> None:
    async with a_registry() as registry:
        await registry.client().deregister()
        assert registry.members == []


async def test_a_heartbeat_from_before_a_restart_is_answered_with_unknown() -> None:
    async with a_registry() as registry:
        rpc = RpcClient(f"127.0.0.1:{registry.port}", SECURITY)
        reply = await rpc.call("Heartbeat", a_beat(), wire.HeartbeatReply, PATIENCE_S)
        assert not reply.known
        await rpc.close()


async def test_a_heartbeat_with_news_does_not_wait_for_its_turn() -> None:
    async with a_registry(ManualClock()) as registry:
        client = registry.client()
        news = [False]
        beating = client.run_worker(
            a_worker(), 1, lambda: (wire.Load(), news[0]), interval_s=3600.0
        )
        task = asyncio.create_task(beating)
        views = registry.watch()
        while not (await asyncio.wait_for(views.get(), 10.0)).members:
            pass
        news[0] = True
        client.hurry()
        while not (await asyncio.wait_for(views.get(), 10.0)).members[0].draining:
            pass
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
