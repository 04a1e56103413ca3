"""Peers that connect for routes and prove nothing: counted before TLS begins, and let go."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest
import uvloop

from tests.recording import until
from tests.transfer.samples import PATIENCE_S, SECURITY
from tests.transfer.test_tcp import Exhausted
from transfer import open_files, route_feeds, route_link
from transfer.clock import SYSTEM_CLOCK
from transfer.errors import Unavailable
from transfer.route_feeds import RouteFeeds
from transfer.route_link import RouteLink, open_link
from transfer.routes import RouteTable
from transfer.rpc import Security

LONG_S = 1000.0  # no handshake ends within it by itself
LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}

type Run = Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture(params=LOOPS)
def run(request: pytest.FixtureRequest) -> Run:
    """Runs a coroutine on a loop as tests have, or on one as the registry has."""

    def on_this_loop(main: Coroutine[Any, Any, None]) -> None:
        with asyncio.Runner(loop_factory=LOOPS[request.param]) as runner:
            runner.run(main)

    return on_this_loop


@pytest.fixture(params=["plain", "tls"])
def security(request: pytest.FixtureRequest, tls_security: Security) -> Security:
    return tls_security if request.param == "tls" else SECURITY


class Door:
    """The port of a registry's routes, and who knocks at it."""

    def __init__(self, port: int, security: Security, feeds: RouteFeeds) -> None:
        self.feeds = feeds
        self._port, self._security = port, security
        self._socks: list[socket.socket] = []
        self._links: list[RouteLink] = []

    async def knock(self, host: str = "127.0.0.1") -> socket.socket:
        """A connection that says nothing."""
        sock = socket.socket()
        self._socks.append(sock)
        sock.setblocking(False)
        sock.bind((host, 0))
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", self._port))
        return sock

    async def enter(self) -> RouteLink:
        link = await open_link("127.0.0.1", self._port, self._security, "decode-0", 0, follows=True)
        self._links.append(link)
        return link

    async def close(self) -> None:
        for link in self._links:
            link.close()
            await link.closed()
        for sock in self._socks:
            sock.close()
        await self.feeds.stop()


@contextlib.asynccontextmanager
async def a_door(security: Security) -> AsyncIterator[Door]:
    feeds = RouteFeeds(RouteTable(), security, SYSTEM_CLOCK, lambda *_: False)
    door = Door(await feeds.start("127.0.0.1", 0), security, feeds)
    try:
        yield door
    finally:
        await door.close()


async def let_go(sock: socket.socket) -> None:
    """Read until the registry ends the connection. Raises TimeoutError."""
    async with asyncio.timeout(PATIENCE_S):
        while await asyncio.get_running_loop().sock_recv(sock, 4096):
            pass


@pytest.fixture(params=["a bound of ours", "few files"])
def few_places(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight places, two of them for strangers of one host."""
    if request.param == "few files":
        monkeypatch.setattr(open_files, "limit", lambda: 32)
    else:
        monkeypatch.setattr(route_feeds, "MAX_LINKS", 8)
    monkeypatch.setattr(route_feeds, "MAX_STRANGERS_OF_HOST", 2)
    monkeypatch.setattr(route_link, "HANDSHAKE_TIMEOUT_S", LONG_S)


def test_the_oldest_silent_stranger_of_a_host_gives_way_to_whoever_comes_from_there(
    run: Run, security: Security, few_places: None, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with a_door(security) as door:
            silent = [await door.knock() for _ in range(3)]
            await let_go(silent[0])
            await door.enter()
            await let_go(silent[1])

    run(main())
    assert caplog.text.count("too many connections for routes: 1 closed") == 1
    assert [record.name for record in caplog.records] == ["transfer.route_feeds"]


def test_who_has_shown_the_token_stays_and_strangers_take_no_more_than_the_places(
    run: Run, security: Security, few_places: None
) -> None:
    async def main() -> None:
        async with a_door(security) as door:
            known = [await door.enter() for _ in range(7)]
            first = await door.knock("127.0.0.2")
            second = await door.knock("127.0.0.3")
            await let_go(first)
            known.append(await door.enter())
            await let_go(second)
            await let_go(await door.knock("127.0.0.2"))
            await until(lambda: len(door.feeds._places) == 8)
            assert not any(link.is_over for link in known)

    run(main())


def test_a_silent_stranger_is_let_go_when_its_time_is_up(
    run: Run, security: Security, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(route_link, "HANDSHAKE_TIMEOUT_S", 0.1)

    async def main() -> None:
        async with a_door(security) as door:
            await let_go(await door.knock())
            await until(lambda: not len(door.feeds._places))

    run(main())


def test_a_connection_that_cannot_be_accepted_is_not_the_last(
    run: Run, security: Security, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def exhausted(host: str, port: int) -> socket.socket:
        listener = Exhausted(socket.AF_INET)
        listener.bind((host, port))
        listener.listen()
        return listener

    monkeypatch.setattr(route_feeds, "_listen", exhausted)
    monkeypatch.setattr(route_feeds, "_ACCEPT_AGAIN_S", 0.0)

    async def main() -> None:
        async with a_door(security) as door:
            await door.enter()

    run(main())
    assert caplog.text.count("a connection for routes cannot be accepted: ") == 1


def test_a_registry_that_stops_lets_go_of_everybody(
    run: Run, security: Security, few_places: None
) -> None:
    async def main() -> None:
        async with a_door(security) as door:
            link = await door.enter()
            silent = await door.knock()
            await until(lambda: len(door.feeds._places) == 2)
            await door.feeds.stop()
            await let_go(silent)
            with pytest.raises(Unavailable):
                await asyncio.wait_for(link.receive(), PATIENCE_S)
            assert not len(door.feeds._places)

    run(main())
