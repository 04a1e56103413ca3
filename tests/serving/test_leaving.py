"""An API process that is told to leave: what has come is finished, what comes goes elsewhere."""

import asyncio
import signal
from pathlib import Path

import httpx
import psutil
import pytest

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

PROCESSES = pytest.mark.parametrize("processes", [1, 2])
NEW = {"prompt": "Hi!", "max_tokens": 1}


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
