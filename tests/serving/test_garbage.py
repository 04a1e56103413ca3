"""A request leaves nothing to the garbage collector, which the API process rarely runs."""

import asyncio
import gc
from typing import Any

import pytest

from tests.recording import until
from tests.serving.live import Live, live_server

ASK = {"prompt": [1, 2, 3], "max_tokens": 4, "temperature": 0}
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "temperature": 0}
NUM_REQUESTS = 5


def ours(found: list[object]) -> list[str]:
    """Types of the server's objects among what a collection found."""
    packages = ("serving.", "transfer.", "uvicorn.")
    return sorted(
        {
            f"{type(item).__module__}.{type(item).__qualname__}"
            for item in found
            if type(item).__module__.startswith(packages)
        }
    )


async def left_by(live: Live, path: str, body: dict[str, object], status: int) -> list[str]:
    """What requests that are answered so leave to the collector."""
    await live.post(path, body)  # makes what is made only once
    gc.collect()
    gc.disable()
    try:
        for _ in range(NUM_REQUESTS):
            assert (await live.post(path, body)).status_code == status
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        return ours(gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {**ASK, "stream": True}),
        ("/v1/completions", {**ASK, "n": 2, "stop": ["b"], "stream": True}),
        ("/v1/chat/completions", {**CHAT, "logprobs": True, "stream": True}),
        ("/generate", {"input_ids": [1, 2, 3], "stream": True}),
        ("/v1/completions", ASK),
    ],
)
async def test_a_request_leaves_nothing_to_collect(path: str, body: dict[str, object]) -> None:
    async with live_server() as live:
        assert await left_by(live, path, body, 200) == []


@pytest.mark.parametrize("limit", [{"max_queued_requests": 1}, {"queue_timeout_s": 0.05}])
async def test_a_request_that_finds_no_place_leaves_nothing_to_collect(
    limit: dict[str, Any],
) -> None:
    async with live_server(auto_step=False, max_inflight_requests=1, **limit) as live:
        asking = [asyncio.create_task(live.post("/v1/completions", ASK))]
        await live.cluster.submitted(1)
        if "max_queued_requests" in limit:
            asking.append(asyncio.create_task(live.post("/v1/completions", ASK)))
            await until(lambda: live.dispatcher.num_queued() == 1)
        assert await left_by(live, "/v1/completions", ASK, 429) == []
        for task in asking:
            task.cancel()
        await asyncio.wait(asking)


async def test_a_request_whose_form_is_wrong_leaves_nothing_to_collect() -> None:
    async with live_server() as live:
        assert await left_by(live, "/v1/completions", {**ASK, "regex": "(a"}, 400) == []
