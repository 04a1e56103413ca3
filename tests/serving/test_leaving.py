"""An API process that is told to leave: what has come is finished, what comes goes elsewhere."""

import asyncio
import signal
import socket
from pathlib import Path
from typing import Any, cast

import httpx
import psutil
import pytest
from starlette.applications import Starlette
from uvicorn import Config
from uvicorn.server import ServerState

from serving import api, connection
from serving.config import ServeConfig
from serving.connection import Connection
from serving.metrics import Metrics
from tests.fakes import FakeCluster, until
from tests.serving.live import alphabet, letters
from tests.serving.processes import (
    Server,
    all_ready,
    begun_streams,
    cut_off,
    info_of,
    serving,
    step_until,
    stream,
)
from tests.serving.test_connection import LOOPS, UNBOUND, Transport

PROCESSES = pytest.mark.parametrize("processes", [1, 2])
NEW = {"prompt": "Hi!", "max_tokens": 1}
GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


def several(processes: int) -> tuple[str, ...]:
    """The flags for a server of so many processes."""
    return (f"--api-workers={processes}",) if processes > 1 else ()


async def told_to_leave(server: Server, processes: int) -> None:
    """Send SIGTERM, and wait until every process drains."""
    server.command.signal(signal.SIGTERM)
    await until(lambda: server.command.text.count(" draining: ") == processes)


async def ended(server: Server) -> None:
    assert await asyncio.to_thread(server.command.ends, 20) == 0, server.command.text
    assert "Traceback" not in server.command.text, server.command.text


def refusal_of(answer: httpx.Response) -> str:
    """The code of an answer that sends its client to another process."""
    assert answer.status_code == 503
    assert answer.headers["Connection"] == "close"
    assert answer.headers["Retry-After"] == "1"
    code: str = answer.json()["error"]["code"]
    return code


@PROCESSES
async def test_what_has_come_is_finished_and_nothing_new_is_taken(
    processes: int, tmp_path: Path
) -> None:
    limits = ("--max-inflight-requests=2", "--max-queued-requests=2")
    last = processes - 1
    async with (
        FakeCluster(network=alphabet, auto_step=False) as cluster,
        serving(cluster, tmp_path, *several(processes), *limits) as server,
        server.door(0) as first,
        server.door(last) as second,
        server.door(last) as third,
        server.door(last) as fourth,
        server.door(0) as fifth,
    ):
        running = [stream(first), stream(second)]
        await cluster.submitted(2)
        waiting = stream(third)  # for a place
        async with asyncio.timeout(20):
            while (await info_of(fifth))["queued"] != 1:  # noqa: ASYNC110  (of another process)
                await asyncio.sleep(0)
        await told_to_leave(server, processes)
        assert refusal_of(await fourth.post("/v1/completions", json=NEW)) == "shutting_down"
        assert refusal_of(await fourth.get("/health")) == "shutting_down"
        assert refusal_of(await fourth.get("/health_generate")) == "shutting_down"
        # The metrics still show what is left.
        assert (await fifth.get("/metrics")).status_code == 200
        await step_until(cluster, *(each.task for each in [*running, waiting]))
        assert [each.text for each in [*running, waiting]] == [letters(8)] * 3
        await ended(server)
        assert server.command.text.count(" drained") == processes
        await until(lambda: not any(worker.num_streams for worker in cluster.workers))


@PROCESSES
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_told_again_it_ends_at_once(
    number: signal.Signals, processes: int, tmp_path: Path
) -> None:
    async with (
        FakeCluster(network=alphabet, auto_step=False) as cluster,
        serving(cluster, tmp_path, *several(processes)) as server,
        server.door(0) as http,
    ):
        (begun,) = await begun_streams(cluster, http)
        await told_to_leave(server, processes)
        server.command.signal(number)
        await cut_off(begun)
        await ended(server)


@PROCESSES
async def test_what_takes_longer_than_that_ends_with_an_error(
    processes: int, tmp_path: Path
) -> None:
    async with (
        FakeCluster(network=alphabet, auto_step=False) as cluster,
        serving(cluster, tmp_path, *several(processes), "--drain-timeout=0.2") as server,
        server.door(0) as http,
    ):
        (begun,) = await begun_streams(cluster, http)
        await told_to_leave(server, processes)
        await cut_off(begun)
        await ended(server)
        assert "not drained after 0.2 s: 1 requests are left" in server.command.text


async def test_told_alone_and_then_with_all_it_still_finishes_what_has_come(
    tmp_path: Path,
) -> None:
    async with (
        FakeCluster(network=alphabet, auto_step=False) as cluster,
        serving(cluster, tmp_path, *several(2)) as server,
        server.door(0) as http,
    ):
        (begun,) = await begun_streams(cluster, http)
        psutil.Process((await server.pids())[0]).terminate()
        await until(lambda: " draining: 1 requests " in server.command.text)
        server.command.signal(signal.SIGTERM)
        await until(lambda: " draining: 0 requests " in server.command.text)
        await step_until(cluster, begun.task)
        assert begun.text == letters(8)
        await ended(server)


async def test_one_of_several_that_was_told_alone_comes_back(tmp_path: Path) -> None:
    async with (
        FakeCluster(network=alphabet, auto_step=False) as cluster,
        serving(cluster, tmp_path, *several(2)) as server,
        server.door(0) as http,
    ):
        (begun,) = await begun_streams(cluster, http)
        leaving = (await server.pids())[0]
        psutil.Process(leaving).terminate()
        await until(lambda: " draining: 1 requests " in server.command.text)
        await step_until(cluster, begun.task)
        assert begun.text == letters(8)
        await until(lambda: "api-0 ended with code 0: starting it again" in server.command.text)
        await all_ready(server)
        async with server.door(0) as http:
            pids = {state["process"]: state["pid"] for state in (await info_of(http))["processes"]}
            assert pids[0] != leaving


def connected() -> tuple[Connection, Transport]:
    """A client that has just connected to a server where nothing is found."""
    config = Config(Starlette(), lifespan="off", log_config=None, log_level="warning")
    config.load()
    transport = Transport()
    made = Connection(config, ServerState(), {}, linger_s=600.0, bound=UNBOUND)
    made.connection_made(cast(asyncio.Transport, transport))
    return made, transport


def is_answered(transport: Transport) -> bool:
    return b"".join(transport.told).startswith(b"HTTP/1.1 404 ")


@pytest.mark.parametrize("is_begun", [False, True])
async def test_a_server_that_ends_still_answers_who_has_just_connected(
    is_begun: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_LAST_S", 600.0)
    made, transport = connected()
    if is_begun:
        made.data_received(GET[:9])
    made.shutdown()
    assert not transport.told
    made.data_received(GET[9:] if is_begun else GET)
    await until(lambda: is_answered(transport))


async def test_a_server_that_ends_waits_only_for_a_while_for_who_has_just_connected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "_LAST_S", 0.0)
    made, transport = connected()
    made.shutdown()
    await until(lambda: transport.told == [b"closed"])


async def test_a_server_that_ends_does_not_wait_for_who_had_an_answer() -> None:
    made, transport = connected()
    made.data_received(GET)
    await until(lambda: is_answered(transport))
    made.shutdown()
    assert transport.told[-1] == b"closed"


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_UNIX])
@pytest.mark.parametrize("loop_factory", LOOPS)
def test_who_connected_just_before_a_server_ends_is_answered(
    loop_factory: Any,
    family: socket.AddressFamily,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "_LAST_S", 600.0)

    async def play() -> None:
        settings: dict[str, Any] = {"model_path": Path("m"), "registry_address": "127.0.0.1:1"}
        config = api.http_config(Starlette(), ServeConfig(**settings), Metrics())
        config.timeout_graceful_shutdown = None
        config.load()
        server = api._Server(config)
        server.lifespan = config.lifespan_class(config)
        is_unix = family == socket.AF_UNIX
        with socket.socket(family) as listener:
            listener.bind(str(tmp_path / "socket") if is_unix else ("127.0.0.1", 0))
            listener.listen()
            await server.startup([listener])
            clients = [socket.socket(family) for _ in range(5)]
            for client in clients:  # the loop does not turn: the kernel has made these alone
                client.connect(listener.getsockname())
                client.sendall(GET)
                client.setblocking(False)
            ending = asyncio.create_task(server.shutdown([listener]))
            for client in clients:
                with client:
                    answer = await asyncio.get_running_loop().sock_recv(client, 12)
                    assert answer == b"HTTP/1.1 404"
            await ending

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(play())
