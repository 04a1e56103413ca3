"""The HTTP app over a real socket, on a fake cluster that spells the alphabet."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from model.config import ModelConfig
from serving.api import http_config
from serving.app import app_of, create_front
from serving.dispatch import Dispatcher
from serving.tokenizer import Tokenizer
from tests.fakes import FakeCluster
from transfer.clock import SYSTEM_CLOCK, Clock

MODEL_PATH = Path(__file__).parents[1] / "goldens" / "qwen3" / "model"
MODEL_NAME = "alphabet"
EOS = 1019  # <|im_end|>
LETTER_A = 64  # ids 64 to 89 are a to z
FIRST_BYTE, SECOND_BYTE = 127, 102  # together: é


def alphabet(token_ids: Sequence[int]) -> int:
    """a after anything that is no letter, then b, c, ...; after z comes the end."""
    last = token_ids[-1]
    if last == LETTER_A + 25:
        return EOS
    return last + 1 if LETTER_A <= last < LETTER_A + 25 else LETTER_A


def letters(count: int) -> str:
    """What the network writes after a prompt that ends in no letter."""
    return "abcdefghijklmnopqrstuvwxyz"[:count]


@dataclass
class Live:
    """A running server, and what is behind it."""

    url: str
    cluster: FakeCluster
    dispatcher: Dispatcher
    http: httpx.AsyncClient
    tokenizer: Tokenizer

    async def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        return await self.http.post(path, json=body, headers=headers)

    async def events(
        self, path: str, body: Any, on_first: Callable[[], object] = lambda: None
    ) -> list[Any]:
        """The events of a streamed answer; the last one is [DONE], or an error.

        on_first: called when the first one is here.
        """
        found: list[Any] = []
        async with self.http.stream("POST", path, json=body) as response:
            assert response.status_code == 200, (await response.aread()).decode()
            async for line in response.aiter_lines():
                if line:
                    assert line.startswith("data: "), line
                    data = line.removeprefix("data: ")
                    found.append(data if data == "[DONE]" else json.loads(data))
                    if len(found) == 1:
                        on_first()
        return found

    @property
    def rooms(self) -> int:
        """How many legs workers still have."""
        return sum(len(worker.rooms) for worker in self.cluster.workers)


@contextlib.asynccontextmanager
async def live_server(
    network: Callable[[Sequence[int]], int] = alphabet,
    *,
    auto_step: bool = True,
    prefills: int = 1,
    decodes: int = 1,
    context_length: int = 512,
    send_buffer_bytes: int = 0,
    tokenizer: Tokenizer | None = None,
    clock: Clock = SYSTEM_CLOCK,
    **config: Any,
) -> AsyncIterator[Live]:
    """uvicorn with our connections, as `kvferry serve` runs it, in this process and loop.

    send_buffer_bytes: of the server's sockets; 0 leaves it to the system. tokenizer: another than
    the model's own.
    """
    settings = {"model_path": MODEL_PATH, "served_model_name": MODEL_NAME, **config}
    async with FakeCluster(
        network=network,
        prefills=prefills,
        decodes=decodes,
        auto_step=auto_step,
        context_length=context_length,
        clock=clock,
    ) as cluster:
        dispatcher = await cluster.dispatcher(**settings)
        tokenizer = tokenizer or tokenizer_of_tests()
        model_config = ModelConfig.from_dir(MODEL_PATH)
        front = create_front(dispatcher, tokenizer, cluster.config(**settings), model_config, clock)
        with socket.create_server(("127.0.0.1", 0)) as sock:
            if send_buffer_bytes:  # accepted connections inherit it
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer_bytes)
            server = _Server(
                http_config(app_of(front), cluster.config(**settings), dispatcher.metrics)
            )
            serving = asyncio.create_task(server.serve(sockets=[sock]))
            url = f"http://127.0.0.1:{sock.getsockname()[1]}"
            try:
                async with httpx.AsyncClient(base_url=url, timeout=30) as http:
                    yield Live(url, cluster, dispatcher, http, tokenizer)
            finally:
                server.should_exit = True
                server.force_exit = True
                await serving


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        yield


def tokenizer_of_tests() -> Tokenizer:
    return Tokenizer.from_dir(MODEL_PATH)
