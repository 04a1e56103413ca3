"""An answer whose end cannot be made is an error, and its place is free."""

import asyncio
import contextlib
from typing import Any

import httpx
import pytest

from serving import openai_answers, plain_streams
from serving.choice import Choice
from tests.recording import until
from tests.serving.live import live_server


def broken(*_: Any) -> None:
    raise ValueError("a fault of ours")


@pytest.mark.parametrize("lent", [False, True])
@pytest.mark.parametrize(
    ("stream", "owner", "name"),
    [
        (True, openai_answers.CompletionShape, "end"),
        (True, Choice, "finish"),
        (False, Choice, "finish"),
    ],
    ids=["its last event", "the last text of a stream", "its last text"],
)
async def test_a_fault_at_the_end_of_an_answer_is_told_and_leaves_nothing(
    stream: bool, owner: type, name: str, lent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if lent:
        monkeypatch.setattr(plain_streams, "LEAST_STREAMS", 1)
    monkeypatch.setattr(owner, name, broken)
    body = {"prompt": "Hi!", "max_tokens": 6, "stream": stream}
    async with live_server(max_inflight_requests=1) as live, asyncio.timeout(20):
        for _ in range(2):  # the second needs the place that the first frees
            # A stream that has begun can only be cut.
            with contextlib.suppress(*((httpx.HTTPError, ValueError) if stream else ())):
                answer = await live.post("/v1/completions", body)
                assert "[DONE]" not in answer.text
                assert stream or answer.status_code == 500
        await until(lambda: live.dispatcher.num_running() == 0)
        assert live.dispatcher.admit_now(1) is not None
