"""A request that gives up while it waits for a place is never started, but it is counted."""

import asyncio
import re

import httpx

from tests.recording import until
from tests.serving.live import Live, live_server
from tests.serving.test_app import ASK, step_until_idle


def _ended(live: Live) -> dict[str, float]:
    """How many generations ended for each reason, as /metrics has it."""
    text = live.dispatcher.metrics.render().decode()
    found = re.findall(r'kvferry_num_requests_total\{finish_reason="(\w+)"\} (\S+)', text)
    return {reason: float(count) for reason, count in found}


async def test_a_client_that_leaves_the_queue_is_never_started() -> None:
    async with live_server(auto_step=False, max_inflight_requests=1) as live:
        first = asyncio.create_task(live.post("/v1/completions", ASK))
        await live.cluster.submitted(1)
        async with httpx.AsyncClient(base_url=live.url) as client:
            second = asyncio.create_task(client.post("/v1/completions", json=ASK))
            await until(lambda: b"kvferry_num_queue_reqs 1.0" in live.dispatcher.metrics.render())
            second.cancel()
            await asyncio.gather(second, return_exceptions=True)
        await until(lambda: b"kvferry_num_queue_reqs 0.0" in live.dispatcher.metrics.render())
        await step_until_idle(live)
        assert (await first).status_code == 200
        assert sum(live.cluster.prefill[0].submit_calls) == 1
        assert _ended(live) == {"length": 1.0, "abort": 1.0}


async def test_what_is_aborted_in_the_queue_is_counted_each_choice() -> None:
    async with live_server(auto_step=False, max_inflight_requests=2) as live:
        first = asyncio.create_task(live.post("/v1/completions", {**ASK, "n": 2}))
        await live.cluster.submitted(2)
        second = asyncio.create_task(live.post("/v1/completions", {**ASK, "n": 2}))
        await until(lambda: b"kvferry_num_queue_reqs 2.0" in live.dispatcher.metrics.render())
        assert (await live.post("/abort_request", {"abort_all": True})).status_code == 200
        assert (await second).json()["error"]["code"] == "aborted"
        assert (await first).status_code == 200
        assert _ended(live) == {"abort": 4.0}
