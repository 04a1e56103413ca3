"""The host's wall clock is set while requests run: they are timed and end as ever."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.fakes import FakeCluster, RecordingSink, until
from tests.serving.live import Live, letters, live_server
from tests.serving.processes import step_until
from transfer.clock import SYSTEM_CLOCK, ManualClock
from transfer.errors import Code

SET_BY_S = [3600.0, -86_400.0]
MOST_S = 60.0  # the most that a request takes here


class SetClock:
    """The machine's clock, whose wall time a test may set."""

    ahead_s = 0.0
    num_reads = 0
    monotonic_s = staticmethod(SYSTEM_CLOCK.monotonic_s)
    thread_cpu_s = staticmethod(SYSTEM_CLOCK.thread_cpu_s)

    def now_s(self) -> float:
        self.num_reads += 1
        return SYSTEM_CLOCK.now_s() + self.ahead_s


async def metric(live: Live, name: str) -> float:
    text = (await live.http.get("/metrics")).text
    (line,) = (line for line in text.splitlines() if line.startswith(f"kvferry_{name} "))
    return float(line.split()[1])


@pytest.mark.parametrize("by_s", SET_BY_S)
async def test_latencies_are_those_of_a_clock_that_only_grows(by_s: float) -> None:
    clock = SetClock()
    async with live_server(auto_step=False, clock=clock) as live:
        began_s = clock.now_s()
        body = {"text": "Hi!", "rid": "mine", "sampling_params": {"max_new_tokens": 3}}
        asking = asyncio.create_task(live.post("/generate", body))
        await live.cluster.submitted(1)
        clock.ahead_s += by_s
        await step_until(live.cluster, asking)
        answer: Any = (await asking).json()
        assert answer["text"] == letters(3)
        assert 0.0 < answer["meta_info"]["e2e_latency"] < MOST_S
        for name in ("time_to_first_token", "e2e_request_latency"):
            assert await metric(live, f"{name}_seconds_count") == 1
            assert 0.0 < await metric(live, f"{name}_seconds_sum") < MOST_S
        told = (await live.http.get("/requests/mine/timeline")).json()
        assert told["arrival_unix_s"] == pytest.approx(began_s, abs=MOST_S)
        assert 0.0 < told["admitted_ms"] < told["ended_ms"] < MOST_S * 1e3


@pytest.mark.parametrize("by_s", SET_BY_S)
async def test_a_body_that_comes_meanwhile_is_read_and_its_answer_has_the_time_of_then(
    by_s: float,
) -> None:
    clock = SetClock()

    async def body() -> AsyncIterator[bytes]:
        before = clock.num_reads
        yield b'{"max_tokens": 2, "prompt": "'
        await until(lambda: clock.num_reads > before)  # the server knows that it comes
        clock.ahead_s += by_s
        yield b"Hi! " * 2_000 + b'"}'  # so long that it is tokenized on a thread

    async with live_server(clock=clock, context_length=20_000) as live:
        began_s = clock.now_s()
        reply = await live.http.post("/v1/completions", content=body())
        assert reply.status_code == 200, reply.text
        assert reply.json()["created"] == pytest.approx(began_s, abs=MOST_S)
        told = (await live.http.get(f"/requests/{reply.json()['id']}/timeline")).json()
        assert 0.0 < told["admitted_ms"] < told["ended_ms"] < MOST_S * 1e3


@pytest.mark.parametrize("by_s", SET_BY_S)
async def test_a_deadline_is_met_when_its_time_has_passed(by_s: float) -> None:
    clock = ManualClock()
    async with FakeCluster(auto_step=False, clock=clock) as cluster:
        dispatcher = await cluster.dispatcher()
        spec, sink = cluster.spec(timeout_s=2.0), RecordingSink()
        clock.set_ahead(by_s)  # since the request came in
        dispatcher.submit(spec, sink)
        await cluster.submitted(1)
        cluster.timers.advance(1.9)
        assert not sink.done.is_set()
        cluster.timers.advance(0.2)
        assert sink.error is not None
        assert sink.error.code is Code.DEADLINE
