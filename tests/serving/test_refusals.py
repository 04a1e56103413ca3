"""Requests that get no tokens: what their clients read of it, and how they are counted."""

import asyncio
from typing import Any

import httpx
import pytest

from tests.recording import until
from tests.serving.live import live_server
from transfer.errors import Code

ASK = {"prompt": "Hi!", "max_tokens": 8}


def id_of(response: httpx.Response) -> str:
    assert response.json()["error"]["message"]
    return response.headers["x-request-id"]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_error_carries_the_id_of_its_request(stream: bool) -> None:
    async with live_server(auto_step=False) as live:
        ask = {**ASK, "stream": stream}
        for headers in ({}, {"X-Request-Id": "not-mine"}):
            asking = asyncio.create_task(
                live.post("/v1/completions", {**ask, "rid": "mine"}, **headers)
            )
            (room,) = await live.cluster.submitted(1)
            live.cluster.prefill[0].fail(room, Code.TOO_LONG, "does not fit the pool")
            assert id_of(await asking) == "mine"
            live.cluster.step()


async def test_an_error_that_comes_before_the_body_was_read_has_the_id_of_the_header() -> None:
    async with live_server(api_key="secret", max_request_bytes=1000) as live:
        key = {"Authorization": "Bearer secret"}
        refused = [
            ("/v1/completions", {**ASK, "top_p": 3}, key, 400),
            ("/generate", {"text": "x" * 1000}, key, 413),
            ("/tokenize", {}, key, 400),
            ("/no/such/path", {}, key, 404),
            ("/health", {}, key, 405),
            ("/v1/completions", ASK, {}, 401),
        ]
        for path, body, headers, status in refused:
            given = await live.post(path, body, **headers, **{"X-Request-Id": "trace-7"})
            assert given.status_code == status
            assert id_of(given) == "trace-7"
            made = [id_of(await live.post(path, body, **headers)) for _ in range(2)]
            assert all(made)
            assert made[0] != made[1]
        long = await live.post("/v1/completions", ASK, **key, **{"X-Request-Id": "i" * 257})
        assert id_of(long)
        assert id_of(long) != "i" * 257


@pytest.mark.parametrize("stream", [False, True])
async def test_each_request_answered_with_429_is_counted_once(stream: bool) -> None:
    limits = {"max_inflight_requests": 2, "max_queued_requests": 0, "queue_timeout_s": 0.2}
    async with live_server(auto_step=False, **limits) as live:

        def counted(count: int) -> bool:
            text = live.dispatcher.metrics.render().decode()
            return f"kvferry_requests_rejected_total {count}.0" in text

        ask = {**ASK, "stream": stream}
        live.cluster.decode[0].refusals.extend([Code.QUEUE_FULL] * 1000)
        full = asyncio.create_task(live.post("/v1/completions", {**ask, "n": 2}))
        await until(lambda: live.dispatcher.num_running() == 2)
        # There is no place, nor any to wait in.
        assert (await live.post("/v1/completions", ask)).status_code == 429
        assert counted(1)
        # Both of its choices were refused by a worker until its time was over.
        assert (await full).status_code == 429
        assert counted(2)


def conversation(arguments: str) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": "look", "arguments": arguments}}
    asked = {"role": "user", "content": "Hello!"}
    return {"messages": [asked, {"role": "assistant", "tool_calls": [call]}], "max_tokens": 1}


async def test_arguments_of_a_call_that_no_text_can_hold_are_a_400_that_names_them() -> None:
    async with live_server() as live:
        for path in ("/v1/chat/completions", "/tokenize"):
            for lone in (r'{"x": "\ud800"}', r'{"\uDC00": [1]}', r'"\ud83d"'):
                response = await live.post(path, conversation(lone))
                assert response.status_code == 400
                error = response.json()["error"]
                assert error["param"] == "messages"
                assert error["message"].startswith("messages[1].tool_calls: expected arguments of")
            for fine in (r'{"x": "\ud83d\ude00"}', r'{"x": "\u00e9"}', ""):
                assert (await live.post(path, conversation(fine))).status_code == 200
