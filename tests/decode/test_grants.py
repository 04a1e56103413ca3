"""Grants on their way to prefill: failures are reported, and the number of clients is bounded."""

import asyncio
import contextlib
import socket
from pathlib import Path

import pytest

from decode import grants
from tests.recording import until
from transfer import wire
from transfer.rpc import RpcServer, Security

SECURITY = Security("a token of the tests")


def a_grant(room: int) -> wire.Grant:
    return wire.Grant(room, 1, ("tcp://127.0.0.1:1",), b"", 1, 1)


async def test_a_grant_that_does_not_get_there_fails_its_rooms() -> None:
    failed: list[tuple[tuple[int, ...], str]] = []
    sender = grants.GrantSender(SECURITY, lambda *failure: failed.append(failure))
    sender.send("127.0.0.1:1", [a_grant(7), a_grant(8)])
    await until(lambda: bool(failed))
    assert failed[0][0] == (7, 8)
    assert "Grant at 127.0.0.1:1" in failed[0][1]


async def test_a_grant_that_cannot_even_be_called_for_fails_its_rooms(tmp_path: Path) -> None:
    failed: list[tuple[tuple[int, ...], str]] = []
    security = Security("a token of the tests", ca_file=tmp_path / "being replaced.pem")
    sender = grants.GrantSender(security, lambda *failure: failed.append(failure))
    sender.send("127.0.0.1:1", [a_grant(7)])
    await until(lambda: bool(failed))
    assert failed[0][0] == (7,)
    assert "being replaced.pem" in failed[0][1]


async def test_a_worker_in_the_place_of_a_dead_one_is_granted_at_once() -> None:
    failed: list[int] = []
    heard: list[int] = []

    async def take(batch: wire.GrantBatch) -> wire.Empty:
        heard.extend(grant.room for grant in batch.grants)
        return wire.Empty()

    async def started(port: int) -> RpcServer:
        server = RpcServer(SECURITY)
        server.unary("Grant", wire.GrantBatch, take)
        ports.append(await server.start("127.0.0.1", port))
        return server

    ports: list[int] = []
    sender = grants.GrantSender(SECURITY, lambda rooms, why: failed.extend(rooms))
    first = await started(0)
    sender.send(f"127.0.0.1:{ports[0]}", [a_grant(0)])
    await until(lambda: heard == [0] and not sender._tasks)  # answered, too
    await first.stop(0.0)
    for room in range(1, 9):  # the back-off grows with each attempt to connect
        sender.send(f"127.0.0.1:{ports[0]}", [a_grant(room)])
        await until(lambda: len(failed) == room)  # noqa: B023  (awaited here)
        await asyncio.sleep(0.15)
    second = await started(ports[0])
    sender.send(f"127.0.0.1:{ports[0]}", [a_grant(9)])
    await until(lambda: len(failed) + len(heard) == 10)
    assert (failed, heard) == ([*range(1, 9)], [0, 9])
    await second.stop(0.0)
    await until(lambda: not sender._tasks)
    for client in sender._clients.values():
        await client.close()


async def test_after_a_grant_without_an_answer_the_next_one_has_a_connection_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first one is still being made, as to a peer behind a cut: gRPC gives it 20 s."""
    monkeypatch.setattr(grants, "GRANT_TIMEOUT_S", 0.2)
    failed: list[int] = []
    heard: list[int] = []

    async def take(batch: wire.GrantBatch) -> wire.Empty:
        heard.extend(grant.room for grant in batch.grants)
        return wire.Empty()

    sender = grants.GrantSender(SECURITY, lambda rooms, why: failed.extend(rooms))
    with contextlib.ExitStack() as stack:
        silent = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        port = silent.getsockname()[1]
        sender.send(f"127.0.0.1:{port}", [a_grant(0)])
        taken, _ = await asyncio.to_thread(silent.accept)
        stack.enter_context(taken)
        await until(lambda: failed == [0])
        silent.close()  # the connection stays, and says nothing
        server = RpcServer(SECURITY)
        server.unary("Grant", wire.GrantBatch, take)
        await server.start("127.0.0.1", port)
        monkeypatch.setattr(grants, "GRANT_TIMEOUT_S", 10.0)
        sender.send(f"127.0.0.1:{port}", [a_grant(1)])
        await until(lambda: len(failed) + len(heard) == 2)
        assert (failed, heard) == ([0], [1])
        await server.stop(0.0)
    await until(lambda: not sender._tasks)
    for client in sender._clients.values():
        await client.close()


async def test_workers_that_were_started_anew_leave_no_clients_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grants, "MAX_CLIENTS", 2)
    heard: list[int] = []

    async def take(batch: wire.GrantBatch) -> wire.Empty:
        heard.extend(grant.room for grant in batch.grants)
        return wire.Empty()

    servers = [RpcServer(SECURITY) for _ in range(4)]
    addresses = []
    for server in servers:
        server.unary("Grant", wire.GrantBatch, take)
        addresses.append(f"127.0.0.1:{await server.start('127.0.0.1', 0)}")
    sender = grants.GrantSender(SECURITY, lambda *failure: pytest.fail(str(failure)))
    order = [0, 1, 0, 2, 3, 0]
    for room, number in enumerate(order):
        sender.send(addresses[number], [a_grant(room)])
        await until(lambda: len(heard) == room + 1)  # noqa: B023  (awaited here)
        assert len(sender._clients) <= 2
    assert heard == list(range(len(order)))
    assert list(sender._clients) == [addresses[3], addresses[0]]
    await until(lambda: not sender._tasks)
    await asyncio.gather(*(server.stop(0.0) for server in servers))
    for client in sender._clients.values():
        await client.close()
