"""More than a real API process can serve: refused at once, dropped unstarted, or served in time."""

import asyncio
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from tests.fakes import until
from tests.serving.crowd import Client, Crowd, Manner, crowd
from tests.serving.processes import Server, info_of, serving_at

NUM_SERVED = 8
NUM_QUEUED = 16
NUM_TOKENS = 6
NUM_ROUNDS = 12
QUEUE_TIMEOUT_S = 2.0
SLACK_S = 10.0  # for a busy machine; without the bound waits are minutes


async def ask(server: Server, streams: Sequence[int], manner: Manner = "reads") -> list[Client]:
    """Send requests one after the other, each on a connection of its own."""
    host, port = server.address.removeprefix("http://").split(":")
    clients = [Client(stream, NUM_TOKENS, manner) for stream in streams]
    for client in clients:
        await client.connect(host, int(port))
    return clients


async def known(http: httpx.AsyncClient, running: int, queued: int) -> None:
    """Wait until the server counts so many generations."""
    async with asyncio.timeout(20):
        while True:
            info = await info_of(http)
            if (info["running"], info["queued"]) == (running, queued):
                return


async def taken(http: httpx.AsyncClient, clients: Sequence[Client]) -> None:
    """Wait until each was answered, or is one of the generations that the server counts."""
    async with asyncio.timeout(60):
        while True:
            info = await info_of(http)
            answered = sum(client.is_answered for client in clients)
            if answered + info["running"] + info["queued"] == len(clients):
                return


def check_refused(client: Client, message: str) -> None:
    """Check for a 429 as OpenAI's clients read it, with a time to come back."""
    assert client.status == 429, client.data
    assert int(client.head["retry-after"]) >= 1
    assert client.head["content-type"].startswith("application/json")
    body: dict[str, Any] = json.loads(client.data.partition(b"\r\n\r\n")[2])
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert (body["error"]["type"], body["error"]["code"]) == ("rate_limit_error", "queue_full")
    assert message in body["error"]["message"]


async def finish(workers: Crowd, clients: Sequence[Client]) -> None:
    """Step until these are closed, and no room is left."""

    def step() -> bool:
        workers.step()
        return all(client.closed.is_set() for client in clients) and not workers.rooms

    await until(step)


async def test_beyond_the_queue_all_are_refused_at_once_and_who_leaves_it_is_never_started(
    tmp_path: Path,
) -> None:
    async with (
        crowd() as workers,
        serving_at(
            workers.address,
            tmp_path,
            f"--max-inflight-requests={NUM_SERVED}",
            f"--max-queued-requests={NUM_QUEUED}",
        ) as server,
        server.connection() as http,
    ):
        workers.held_back = True  # nobody's place becomes free
        served = await ask(server, range(NUM_SERVED))
        await until(lambda: workers.rooms == 2 * NUM_SERVED)
        queued = await ask(server, range(100, 100 + NUM_QUEUED - 6))
        leavers = await ask(server, range(200, 203)) + await ask(server, range(203, 206))
        await known(http, NUM_SERVED, NUM_QUEUED)

        refused = await ask(server, range(300, 300 + 2 * (NUM_SERVED + NUM_QUEUED)))
        # All are refused while nothing at all moves at the workers.
        await until(lambda: all(client.is_answered for client in refused))
        for client in refused:
            check_refused(client, f"at most {NUM_QUEUED} may wait")
            client.leave()
        for place, client in enumerate(leavers):
            client.leave(reset=place % 2 == 0)
        await known(http, NUM_SERVED, NUM_QUEUED - 6)
        assert workers.rooms == 2 * NUM_SERVED

        workers.held_back = False
        workers.first_tokens()
        await finish(workers, [*served, *queued])
        for client in (*served, *queued):
            client.check()
        assert set(workers.seen) == {client.rid for client in (*served, *queued)}
        await known(http, 0, 0)


async def test_at_thrice_the_load_nobody_who_is_served_waited_longer_than_the_timeout(
    tmp_path: Path,
) -> None:
    async with (
        crowd() as workers,
        serving_at(
            workers.address,
            tmp_path,
            f"--max-inflight-requests={NUM_SERVED}",
            f"--max-queued-requests={NUM_QUEUED}",
            f"--queue-timeout={QUEUE_TIMEOUT_S}",
        ) as server,
        server.connection() as http,
    ):
        clients: list[Client] = []

        def step(goal: int) -> bool:
            """Take one step; whether so many have their whole answer."""
            workers.step()
            return sum(client.is_answered for client in clients) >= goal

        def step_to_tokens(goal: int) -> bool:
            """Take one step; whether so many have it and were not refused."""
            workers.step()
            return sum(client.is_answered and client.status == 200 for client in clients) >= goal

        # Each round, three times as many requests come as are served meanwhile.
        for number in range(NUM_ROUNDS):
            first = 3 * NUM_SERVED * number
            clients += await ask(server, range(first, first + 3 * NUM_SERVED))
            await taken(http, clients)
            await until(partial(step_to_tokens, NUM_SERVED * (number + 1)))
        await until(partial(step, len(clients)))
        # The workers stop: requests that wait now are refused when their time is over.
        workers.held_back = True
        held = await ask(server, range(1000, 1000 + NUM_SERVED))
        await known(http, NUM_SERVED, 0)
        late = await ask(server, range(2000, 2000 + NUM_QUEUED))
        clients += [*held, *late]
        await until(partial(step, len(clients) - NUM_SERVED))
        for client in late:
            check_refused(client, f"waited {QUEUE_TIMEOUT_S:g} s")
        workers.held_back = False
        workers.first_tokens()
        await finish(workers, clients)

        served = [client for client in clients if client.status == 200]
        for client in clients:
            if client.status == 200:
                client.check()
            else:
                check_refused(client, "wait")
        assert set(workers.seen) == {client.rid for client in served}
        assert len(served) < len(clients) / 2
        longest_s = max(workers.seen.values())
        assert longest_s <= QUEUE_TIMEOUT_S + SLACK_S, workers.seen
        await known(http, 0, 0)
