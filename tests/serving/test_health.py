"""Probes: what is healthy, and what a full server answers."""

import asyncio

from tests.fakes import until
from tests.serving.live import live_server
from tests.serving.test_app import ASK, error_of, step_until_idle


async def test_health_fails_while_every_worker_of_a_role_stands_still() -> None:
    async with live_server(progress_timeout_s=0.2) as live:
        assert (await live.http.get("/health")).status_code == 200
        live.cluster.decode[0].stuck = True
        await until(lambda: bool(live.dispatcher.roles_without_progress()))
        response = await live.http.get("/health")
        assert response.status_code == 503
        assert error_of(response)["code"] == "no_progress"
        assert error_of(response)["message"] == "no decode worker makes progress"
        live.cluster.decode[0].stuck = False
        await until(lambda: not live.dispatcher.roles_without_progress())
        assert (await live.http.get("/health")).status_code == 200


async def test_a_full_server_is_a_healthy_one() -> None:
    async with live_server(auto_step=False, max_inflight_requests=1, max_queued_requests=0) as live:
        running = asyncio.create_task(live.post("/v1/completions", ASK))
        await until(lambda: live.rooms == 2)
        assert (await live.post("/v1/completions", ASK)).status_code == 429
        # The workers have no slot for the probe; the request that holds the only one goes on.
        live.cluster.prefill[0].slots = live.cluster.decode[0].slots = 1
        probe = asyncio.create_task(live.http.get("/health_generate"))
        await until(lambda: live.rooms == 4)
        live.cluster.step()
        assert (await probe).status_code == 200
        await until(lambda: live.rooms == 1)
        await step_until_idle(live)
        assert (await running).status_code == 200
        metrics = (await live.http.get("/metrics")).text
        assert 'kvferry_num_requests_total{finish_reason="length"} 1.0' in metrics
        assert 'finish_reason="abort"' not in metrics


async def test_a_server_whose_workers_bring_no_token_fails_its_probe() -> None:
    async with live_server(auto_step=False, progress_timeout_s=0.2) as live:
        response = await live.http.get("/health_generate")
        assert response.status_code == 503
        assert error_of(response)["code"] == "no_progress"
        assert error_of(response)["message"] == "no token of any request has arrived"
        await until(lambda: live.rooms == 0)
