"""Names of hosts: called in vain until they have another address, or of IPv6 alone."""

import asyncio
import socket
from typing import Any

import pytest

from tests.names import NAME, addresses_by_name
from tests.ports import free_port
from tests.recording import until
from tests.transfer.samples import KV, PATIENCE_S, SECURITY
from transfer import bootstrap, ports, wire
from transfer.bootstrap import RegistryClient, RegistryServer
from transfer.clock import SYSTEM_CLOCK
from transfer.meeting import Meeting, Visit
from transfer.tcp import TcpReceiver


async def test_who_watches_a_registry_finds_it_at_its_names_next_address(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    addresses = addresses_by_name(monkeypatch)
    monkeypatch.setattr(bootstrap, "SILENCE_S", 0.3)
    registry = RegistryServer(SECURITY, SYSTEM_CLOCK)
    client = RegistryClient(NAME, SECURITY, SYSTEM_CLOCK)
    try:
        seen: asyncio.Queue[wire.ClusterView] = asyncio.Queue()
        watching = asyncio.create_task(client.watch(seen.put_nowait))
        await until(lambda: "trying again" in caplog.text)
        addresses[NAME] = f"127.0.0.1:{await registry.start('127.0.0.1', 0)}"
        await asyncio.wait_for(seen.get(), PATIENCE_S)
        watching.cancel()
    finally:
        await client.close()
        await registry.stop()


async def test_a_node_finds_node_0_at_its_names_next_address(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    addresses = addresses_by_name(monkeypatch)
    caplog.set_level("INFO")
    address = f"127.0.0.1:{free_port()}"
    leader = Meeting(address, 2, SECURITY, lambda _: None)
    visit = Visit(NAME, 1, SECURITY)
    try:
        coming = asyncio.create_task(visit.all_came({}, PATIENCE_S))
        await until(lambda: "waiting for node 0" in caplog.text)
        addresses[NAME] = address
        coordinator = await leader.all_came({}, PATIENCE_S)
        assert await coming == coordinator
    finally:
        await visit.close()
        await leader.close()


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
async def test_a_name_that_has_only_an_address_of_ipv6_is_listened_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    getaddrinfo = socket.getaddrinfo

    def six(host: str, *args: Any, **how: Any) -> Any:
        return getaddrinfo("::1" if host == "six.test" else host, *args, **how)

    monkeypatch.setattr(socket, "getaddrinfo", six)
    with ports.bind("six.test", 0, "--port") as sock:
        assert sock.getsockname()[0] == "::1"
    registry = RegistryServer(SECURITY, SYSTEM_CLOCK)
    receiver = TcpReceiver(SECURITY, "six.test", 0, KV, 1, print)
    client = None
    try:
        port = await registry.start("six.test", 0)
        client = RegistryClient(f"[::1]:{port}", SECURITY, SYSTEM_CLOCK)
        (await client.connect_routes("watcher", follows=True)).close()
        host, _, port_of_pages = receiver.start().rpartition(":")
        assert host == "tcp://six.test"
        socket.create_connection(("::1", int(port_of_pages)), PATIENCE_S).close()
    finally:
        receiver.close()
        if client is not None:
            await client.close()
        await registry.stop()


async def test_a_name_that_only_the_system_can_read_is_called_where_it_is_listened_on() -> None:
    registry = RegistryServer(SECURITY, SYSTEM_CLOCK)
    port = await registry.start("127.1", 0)
    client = RegistryClient(f"127.1:{port}", SECURITY, SYSTEM_CLOCK)
    try:
        (await client.connect_routes("watcher", follows=True)).close()
    finally:
        await client.close()
        await registry.stop()
