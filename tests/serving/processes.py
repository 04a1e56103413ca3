"""A real `kvferry serve` of one or more processes, with a fake cluster in the test's loop."""

import asyncio
import contextlib
import json
import re
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.fakes import SECURITY, FakeCluster, until
from tests.serving.commands import MODEL, Command, start

LISTENS = re.compile(r"HTTP (?:server|processes) listens? on (?:unix:)?(\S+)$", re.MULTILINE)
ASK = {"prompt": "Hi!", "max_tokens": 8, "temperature": 0, "stream": True}
_TRIES = 64  # connections until one lands at a given process


@dataclass
class Server:
    """A running server; each connection to it stays with one process."""

    command: Command
    address: str  # url, or path of its socket

    def connection(self) -> httpx.AsyncClient:
        """One connection, kept open."""
        limits = httpx.Limits(max_connections=1)
        if self.address.startswith("http"):
            return httpx.AsyncClient(base_url=self.address, limits=limits, timeout=30)
        transport = httpx.AsyncHTTPTransport(uds=self.address, limits=limits)
        return httpx.AsyncClient(base_url="http://localhost", transport=transport, timeout=30)

    @contextlib.asynccontextmanager
    async def door(self, process: int) -> AsyncIterator[httpx.AsyncClient]:
        """A connection to that process."""
        for _ in range(_TRIES):
            async with self.connection() as http:
                if (await info_of(http))["process"] == process:
                    yield http
                    return
        raise AssertionError(f"none of {_TRIES} connections came to process {process}")

    async def info(self) -> dict[str, Any]:
        """The server's info, as whichever process answers tells it."""
        async with self.connection() as http:
            return await info_of(http)

    async def pids(self) -> dict[int, int]:
        return {state["process"]: state["pid"] for state in (await self.info())["processes"]}

    async def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Stop it; its exit code, once everything that it started has ended too."""
        self.command.signal(number)
        return await asyncio.to_thread(self.command.ends, 20)


async def info_of(http: httpx.AsyncClient) -> dict[str, Any]:
    response = await http.get("/get_server_info")
    assert response.status_code == 200, response.text
    info: dict[str, Any] = response.json()
    return info


@contextlib.asynccontextmanager
async def serving(cluster: FakeCluster, folder: Path, *flags: str) -> AsyncIterator[Server]:
    """Run `kvferry serve` with these flags until the end; every process sees both workers."""
    async with serving_at(cluster.registry.address, folder, *flags) as server:
        yield server


@contextlib.asynccontextmanager
async def serving_at(registry: str, folder: Path, *flags: str) -> AsyncIterator[Server]:
    """Like `serving`, in the cluster of the registry at this address, with SECURITY's token."""
    command = start(
        folder,
        "serve",
        f"--model-path={MODEL}",
        f"--registry-address={registry}",
        *(() if any(flag.startswith(("--port", "--uds")) for flag in flags) else ("--port=0",)),
        *flags,
        KVFERRY_CLUSTER_TOKEN=SECURITY.token,
    )
    try:
        last = "HTTP processes listen" if "--api-workers" in " ".join(flags) else "HTTP server"
        await until(lambda: command.process.poll() is not None or last in command.text)
        found = LISTENS.findall(command.text)
        assert command.process.poll() is None, command.text
        assert found, command.text
        server = Server(command, found[-1])
        await all_ready(server)
        yield server
        if command.process.poll() is None:
            assert await server.stop() == 0, command.text
    finally:
        command.kill()


async def all_ready(server: Server) -> None:
    """Wait until all processes answer, and see the workers."""
    async with asyncio.timeout(30):
        while True:
            info = await server.info()
            if info["ready"] and len(info["processes"]) == info["api_workers"]:
                return
            await asyncio.sleep(0.02)  # another process's state


@dataclass
class Stream:
    """A completion that is being read."""

    task: asyncio.Task[list[Any]]
    events: list[Any]  # so far

    @property
    def text(self) -> str:
        return "".join(event["choices"][0]["text"] for event in self.events)

    @property
    def finish_reason(self) -> str | None:
        reason: str | None = self.events[-1]["choices"][0]["finish_reason"]
        return reason


def stream(http: httpx.AsyncClient, **more: Any) -> Stream:
    """Begin to read a completion over this connection. The task raises what the client raises."""
    events: list[Any] = []

    async def read() -> list[Any]:
        async with http.stream("POST", "/v1/completions", json=ASK | more) as response:
            assert response.status_code == 200, (await response.aread()).decode()
            async for line in response.aiter_lines():
                if not line or line == "data: [DONE]":
                    continue
                events.append(json.loads(line.removeprefix("data: ")))
        return events

    return Stream(asyncio.create_task(read()), events)


async def begun_streams(cluster: FakeCluster, *doors: httpx.AsyncClient) -> list[Stream]:
    """A completion over each of these connections; each has its first event."""
    streams = [stream(http) for http in doors]
    await cluster.submitted(len(streams))
    cluster.step()
    await until(lambda: all(begun.events for begun in streams))
    return streams


async def cut_off(*streams: Stream) -> None:
    """Check that these end as streams do when the server does not wait for them."""
    for begun in streams:
        *_, last = await begun.task
        assert last["error"]["code"] == "shutting_down"


async def step_until(cluster: FakeCluster, *tasks: "asyncio.Task[Any]") -> None:
    """Step the workers until these have ended."""

    def done() -> bool:
        cluster.step()
        return all(task.done() for task in tasks)

    await until(done)
