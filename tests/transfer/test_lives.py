"""Two lives of one worker: epochs come from a wall clock that may have gone back between them."""

import asyncio
import contextlib

import pytest

from tests.recording import until
from tests.transfer.samples import PATIENCE_S, SECURITY, a_worker, names
from transfer import wire
from transfer.bootstrap import RegistryClient, RegistryServer
from transfer.clock import SYSTEM_CLOCK
from transfer.errors import Superseded, Unavailable
from transfer.leases import Leases

TTL_S = 3.0
OLD, NEW = 3, 7  # epochs


def a_beat(epoch: int) -> wire.Heartbeat:
    return wire.Heartbeat("decode-0", epoch, wire.Load())


def leases_of(epoch: int) -> Leases:
    """Leases that hold the life of this epoch, from 10 s on."""
    leases = Leases(TTL_S)
    leases.register(a_worker(), epoch, now_s=10.0)
    assert leases.heartbeat(a_beat(epoch), now_s=10.0)
    return leases


def test_an_older_life_is_refused_once_the_newer_one_shows_that_it_lives() -> None:
    leases = leases_of(NEW)
    for epoch in (OLD, OLD + 1):
        for _ in range(2):
            with pytest.raises(Unavailable, match=f"epoch {epoch}.*{NEW}"):
                leases.register(a_worker(), epoch, now_s=10.1)
        assert leases.heartbeat(a_beat(NEW), now_s=10.5)
        with pytest.raises(Superseded, match=f"epoch {epoch}.*{NEW}"):
            leases.register(a_worker(), epoch, now_s=10.6)
    assert names(leases) == [("decode-0", NEW)]


def test_a_life_that_began_on_a_clock_gone_back_follows_one_that_is_dead() -> None:
    leases = leases_of(NEW)
    with pytest.raises(Unavailable):
        leases.register(a_worker(), OLD, now_s=12.9)
    leases.expire(13.1)
    leases.register(a_worker(), OLD, now_s=13.1)
    assert names(leases) == [("decode-0", OLD)]


def test_the_goodbye_of_a_dead_life_is_none_of_the_one_that_followed() -> None:
    leases = leases_of(NEW)
    leases.expire(13.1)
    leases.register(a_worker(), OLD, now_s=13.1)
    assert not leases.deregister("decode-0", NEW)
    assert names(leases) == [("decode-0", OLD)]
    assert leases.deregister("decode-0", OLD)


def test_each_who_wants_the_place_waits_for_a_heartbeat_of_its_own() -> None:
    leases = leases_of(NEW)
    with pytest.raises(Unavailable):
        leases.register(a_worker(), OLD, now_s=10.1)
    leases.heartbeat(a_beat(NEW), now_s=10.5)
    with pytest.raises(Unavailable):  # that heartbeat may have been the last one
        leases.register(a_worker(), OLD + 1, now_s=10.6)
    leases.expire(13.6)
    leases.register(a_worker(), OLD + 1, now_s=13.6)
    assert names(leases) == [("decode-0", OLD + 1)]


@pytest.mark.parametrize("lives", [True, False])
async def test_a_worker_waits_for_the_lease_of_a_dead_life_and_ends_for_one_that_lives(
    lives: bool,
) -> None:
    server = RegistryServer(SECURITY, SYSTEM_CLOCK, ttl_s=1.0)
    port = await server.start("127.0.0.1", 0)
    clients = [RegistryClient(f"127.0.0.1:{port}", SECURITY, SYSTEM_CLOCK) for _ in range(2)]

    def worker(client: RegistryClient, epoch: int) -> "asyncio.Task[None]":
        load = wire.Load(), False
        return asyncio.create_task(client.run_worker(a_worker(), epoch, lambda: load, 0.05))

    newer = worker(clients[0], NEW)
    await asyncio.wait_for(clients[0].registered.wait(), PATIENCE_S)
    if not lives:
        newer.cancel()
    older = worker(clients[1], OLD)
    if lives:
        with pytest.raises(Superseded):
            await asyncio.wait_for(older, PATIENCE_S)
        assert names(server.leases) == [("decode-0", NEW)]
    else:
        await until(lambda: names(server.leases) == [("decode-0", OLD)])
        assert not older.done()
    for task in (newer, older):
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Superseded):
            await task
    for client in clients:
        await client.close()
    await server.stop()
