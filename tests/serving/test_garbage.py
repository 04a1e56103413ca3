"""A request leaves nothing to the garbage collector, which the API process rarely runs."""

import gc

import pytest

from tests.serving.live import live_server

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
        await live.post(path, body)  # makes what is made only once
        gc.collect()
        gc.disable()
        try:
            for _ in range(NUM_REQUESTS):
                assert (await live.post(path, body)).status_code == 200
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            found = ours(gc.garbage)
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
        assert found == [], found
