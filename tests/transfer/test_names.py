"""Who calls a name in vain finds it at its next address."""

import asyncio

import pytest

from tests.names import NAME, addresses_by_name
from tests.ports import free_port
from tests.recording import until
from tests.transfer.samples import PATIENCE_S, SECURITY
from transfer import bootstrap, wire
from transfer.bootstrap import RegistryClient, RegistryServer
from transfer.clock import SYSTEM_CLOCK
from transfer.meeting import Meeting, Visit


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
