"""Thousands of clients of one real API process over real sockets: each gets its tokens, none leaks.

The workers and the clients are in the test's process; see tests/serving/crowd.py.
"""

import asyncio
import contextlib
import random
import resource
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import uvloop

from tests.recording import until
from tests.serving.crowd import Client, Crowd, Manner, crowd
from tests.serving.processes import Server, info_of, serving_at

SEED = 20
NUM_STREAMS = 2048
# Clients of a wave by manner; the others read to their end.
MANNERS: dict[Manner, int] = {"fin": 250, "rst": 250, "aborted": 200, "pauses": 24, "stalls": 16}
LONG_TOKENS = 800  # for clients that stop reading: more than sockets and buffers hold
MOST_TOKENS = 2000  # for some that stall: they are closed in the middle
CONNECTING = 128  # at once
SLOW_CLIENT_TIMEOUT_S = 10  # longer than any client pauses, on a busy host too
PAUSE_TURNS = 400  # turns with only paused clients left, before these read on
FEW = 200  # streams left, for which steps need not wait for readers
PATIENCE_S = 60.0
GROWTH_BYTES = 10 << 20  # in a second wave; less than stalled clients leave unread


def play(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run it on uvloop, which is fast enough for so many clients."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


@pytest.fixture(autouse=True)
def files_for_all() -> Iterator[None]:
    """Allow a socket for each stream at either end; servers inherit the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4 * NUM_STREAMS)), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class Wave:
    """Clients of all manners at once, and the steps that serve them."""

    def __init__(self, workers: Crowd, server: Server, http: httpx.AsyncClient, seed: int) -> None:
        self._rng = random.Random(seed)
        self._workers = workers
        self._server = server
        self._num_closed = server.command.text.count("unread for") + MANNERS["stalls"]
        host, port = server.address.removeprefix("http://").split(":")
        self._address = host, int(port)
        self._http = http
        self._aborting: list[asyncio.Task[None]] = []
        self._aborted: set[str] = set()
        self._reads = 0  # of all clients, ever
        self._read = asyncio.Event()
        kinds = [kind for kind, count in MANNERS.items() for _ in range(count)]
        kinds += ["reads"] * (NUM_STREAMS - len(kinds))
        self._rng.shuffle(kinds)
        self.clients = [self._client(stream, kind) for stream, kind in enumerate(kinds)]

    def _client(self, stream: int, manner: Manner) -> Client:
        rng = self._rng
        is_long = manner in ("pauses", "stalls")
        fields: dict[str, Any] = {} if rng.randrange(4) else {"stream_interval": rng.randint(1, 4)}
        if rng.randrange(2):
            fields["messages"] = [{"role": "user", "content": "Tell me."}]
        if is_long:
            fields["stream_interval"] = 1
        num_tokens = LONG_TOKENS if is_long else rng.randint(6, 24)
        if manner == "stalls" and rng.randrange(2):
            num_tokens = MOST_TOKENS
        return Client(
            stream, num_tokens, manner, rng.randint(1, 4), is_long, fields,
            on_data=self._heard, on_turn=self._turned,
        )  # fmt: skip

    def _heard(self, client: Client) -> None:
        self._reads += 1
        self._read.set()

    def _turned(self, client: Client) -> None:
        if client.manner == "aborted":
            self._aborting.append(asyncio.create_task(self._abort(client)))

    async def _abort(self, client: Client) -> None:
        reply = await self._http.post("/abort_request", json={"rid": client.rid})
        assert reply.status_code == 200, reply.text
        if reply.json()["aborted"]:
            self._aborted.add(client.rid)

    async def run(self) -> None:
        """Run until every stream has ended as its client has it; then check each."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                await self._connect()
                # Each has its first token, and hardly any has left.
                assert self._workers.rooms > 0.8 * NUM_STREAMS
                await self._step()
            # Stalled clients do not see the server close them once their time is over.
            await until(lambda: self._server.command.text.count("unread for") >= self._num_closed)
            for client in self.clients:
                if client.manner == "stalls":
                    client.read_on()
            async with asyncio.timeout(PATIENCE_S):
                await asyncio.gather(*(client.closed.wait() for client in self.clients))
                await asyncio.gather(*self._aborting)
        finally:
            for client in self.clients:
                client.abort()
        for client in self.clients:
            assert client.status == 200, client.data[:500]
            client.check(client.rid in self._aborted)
            await asyncio.sleep(0)  # workers that say nothing for a while count as dead

    async def _connect(self) -> None:
        gate = asyncio.Semaphore(CONNECTING)

        async def connect(client: Client) -> None:
            async with gate:
                await client.connect(*self._address)
                await client.answered.wait()

        await asyncio.gather(*map(connect, self.clients))

    async def _step(self) -> None:
        """Step as fast as reading clients take it, until only stalled clients are left."""
        left = set(self.clients)
        num_alone = 0  # turns with only pausing clients left
        while left:
            is_crowded = len(left) > FEW
            for _ in range(self._rng.choice((1, 1, 2, 3)) if is_crowded else 1):
                self._workers.step()
            left = {client for client in left if not client.is_done}
            num_alone += all(client.manner == "pauses" for client in left)
            if num_alone == PAUSE_TURNS:
                for client in left:
                    client.read_on()
            if is_crowded:
                await self._keep_pace(len(left) // 2)
            else:
                await self._workers.taken()
                await asyncio.sleep(0)

    async def _keep_pace(self, num_reads: int) -> None:
        """Wait for so many more reads, or for a while at most."""
        goal = self._reads + num_reads
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.05):
                while self._reads < goal:
                    self._read.clear()
                    await self._read.wait()


async def at_rest(workers: Crowd, http: httpx.AsyncClient) -> None:
    """Wait until neither role holds a room, no generation is known, and the server is ready."""
    await until(lambda: not workers.rooms)
    async with asyncio.timeout(20):
        while True:
            info = await info_of(http)
            if info["ready"] and (info["running"], info["queued"]) == (0, 0):
                break
    metrics = (await http.get("/metrics")).text
    assert "kvferry_num_running_reqs 0.0" in metrics
    assert "kvferry_num_queue_reqs 0.0" in metrics


def test_two_thousand_streams_of_all_manners_end_as_they_should(tmp_path: Path) -> None:
    async def main() -> None:
        async with (
            crowd() as workers,
            serving_at(
                workers.address,
                tmp_path,
                f"--max-inflight-requests={2 * NUM_STREAMS}",
                f"--slow-client-timeout={SLOW_CLIENT_TIMEOUT_S}",
                "--slow-client-buffer-bytes=4096",
            ) as server,
            server.connection() as http,
        ):
            process = psutil.Process(server.command.process.pid)
            await at_rest(workers, http)
            files = process.num_fds()
            sizes = []
            for _ in range(2):
                wave = Wave(workers, server, http, SEED)
                await wave.run()
                await at_rest(workers, http)
                await until(lambda: process.num_fds() <= files)
                sizes.append(process.memory_info().rss)
            assert sizes[1] - sizes[0] < GROWTH_BYTES, sizes
            assert "Traceback" not in server.command.text, server.command.text

    play(main)
