"""Serves other ways from a step to the bytes of its streams, to compare the product's with them.

`python -m bench.frontend_designs --design NAME ...` takes the flags of `kvferry serve`. Everything
up to a generation's sink is the product's own: wire, placement, order of tokens, reading of
requests. So are the detokenizer, the encoding of events that are not typed, and the server. Here a
sink puts what it hears into a queue. One task per stream, Starlette's StreamingResponse, takes it
out, detokenizes and encodes it.
"""

import asyncio
import dataclasses
import socket
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import orjson
import uvicorn
import uvloop
from starlette.applications import Starlette
from starlette.responses import StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from model.config import ModelConfig
from serving.admin import Admin
from serving.api import HELP
from serving.app import ERROR_ANSWERS
from serving.arrival import Arrival
from serving.bodies import Body
from serving.choice import Choice, Piece
from serving.config import ServeConfig
from serving.dispatch import Dispatcher
from serving.endpoints import chat
from serving.errors import ApiError
from serving.front import Front
from serving.generation import FinishReason, Generation, Tokens
from serving.listening import BACKLOG, claimed
from serving.protocol import Request, ServedModel, Shown
from serving.stream import Events
from serving.tokenizer import Tokenizer
from transfer import flags, wire
from transfer.clock import SYSTEM_CLOCK
from transfer.errors import ConfigError, RequestError
from transfer.rpc import Security

GROUP = 16


@dataclass(frozen=True)
class Ways:
    """What makes a design. wake: "token" wakes a stream by a callback of the loop for each token;
    "group" by none, but the loop turns after each GROUP of streams. spell: see `_speller`."""

    wake: Literal["token", "group"]
    spell: Literal["typed", "json", "spliced"]


DESIGNS = {
    "naive": Ways("token", "typed"),
    "grouped": Ways("group", "typed"),
    "grouped+json": Ways("group", "json"),
    "spliced": Ways("token", "spliced"),
}

# What a sink hears, in order: tokens, then why the generation ended or failed.
Heard = Tokens | FinishReason | Exception


class QueuedChoice:
    """The sink of one choice: passes on what it hears."""

    def __init__(self, choice: Choice, put: Callable[[Heard], object]) -> None:
        self.generation: Generation | None = None  # set by the caller that submits it
        self._choice = choice
        self._put = put

    def on_prefilled(self, cached_tokens: int, prompt_logprobs: wire.PromptLogprobs | None) -> None:
        self._choice.prefilled(cached_tokens, prompt_logprobs)

    def on_tokens(self, tokens: Tokens) -> None:
        """Put one entry per token, even if the wire brought several steps at once."""
        for token_id in tokens.ids:
            self._put(Tokens([token_id]))

    def on_end(self, finish_reason: FinishReason) -> None:
        self._put(finish_reason)

    def on_error(self, error: RequestError) -> None:
        self._put(error)


class QueuedAnswer:
    """The only choice of one request (serving.answer.Answer), as a queue that `events` empties.

    The queue holds at most an entry for each token that was asked for, and the end.
    """

    def __init__(self, choice: Choice, events: Events, ways: Ways) -> None:
        loop = asyncio.get_running_loop()
        self.closed: asyncio.Future[None] = loop.create_future()
        self._choice = choice
        self._events = events
        self._spell = _speller(ways, choice, events)
        self._queue: asyncio.Queue[Heard] = asyncio.Queue()
        put = self._queue.put_nowait
        late = ways.wake == "token"
        self.sinks = [
            QueuedChoice(choice, (lambda heard: loop.call_soon(put, heard)) if late else put)
        ]

    def close(self) -> None:
        if not self.closed.done():
            self.closed.set_result(None)

    def run_ended(self, running: asyncio.Task[bool]) -> None:
        """The task that runs the request ended: if by an error, put that into the queue."""
        if not running.cancelled() and (error := running.exception()) is not None:
            self._queue.put_nowait(ConnectionError(str(error)))

    async def written(self) -> AsyncIterator[bytes]:
        """The response's body. Raises the error with which the generation failed."""
        yield self._events.opening(self._choice)
        while True:
            heard = await self._queue.get()
            if isinstance(heard, Tokens):
                if text := self._choice.take(heard):
                    yield self._spell(text)
            elif isinstance(heard, Exception):
                raise heard
            else:
                rest = Piece(self._choice.finish(heard))
                yield self._events.finish(self._choice, rest)
                yield self._events.closing([self._choice])
                return


def _speller(ways: Ways, choice: Choice, events: Events) -> Callable[[str], bytes]:
    """Text -> event: encoded as an object or a dict, or spliced between two byte strings."""
    if ways.spell != "spliced":
        return lambda text: events.piece(choice, Piece(text))
    frame = events.frame(choice)
    assert frame is not None, "a plain choice has a frame"
    before, after, _ = frame
    return lambda text: before + orjson.dumps(text) + after


class DesignedChat:
    """POST /v1/chat/completions, for streams of one plain choice."""

    def __init__(self, front: Front, ways: Ways) -> None:
        """Raises ConfigError when a package that the design needs is not installed."""
        self._front = front
        self._ways = ways
        self._typed = _typed_events() if ways.spell == "typed" else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        front = self._front
        arrival = Arrival.now(front.clock)
        with Body(front.bodies) as held:
            body = await held.read(scope, receive)
        if body is None:
            return
        reader = chat(body, front.model)
        front.require_ready()
        request = await reader.finish(None)
        _require_plain(request)
        events: Events
        if self._typed is None:
            events = reader.spelling(request, arrival, front.clock)
        else:
            events = self._typed(request.request_id, front.model.name, arrival.created)
        (choice,) = front.choices(request)
        answer = QueuedAnswer(choice, events, self._ways)
        run = front.runner.run(request, answer, arrival.monotonic_s, receive)
        running = asyncio.create_task(run)
        running.add_done_callback(answer.run_ended)
        response = StreamingResponse(answer.written(), media_type="text/event-stream")
        try:
            await response(scope, receive, send)
        finally:
            answer.close()
            await running


def _require_plain(request: Request) -> None:
    shown = request.choices[0].shown
    if not request.stream or len(request.choices) != 1 or shown != Shown():
        raise ApiError(400, "this server streams one plain choice and serves nothing else")


def _typed_events() -> Callable[[str, str, int], Events]:
    try:
        from bench.frontend_typed import TypedEvents
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"a design with typed events needs {error.name}; ./kvferry test --version brings it"
        ) from error
    return TypedEvents


def main(argv: Sequence[str]) -> None:
    """Serve one design until this process is killed."""
    parser = flags.Parser(prog="python -m bench.frontend_designs")
    parser.add_argument("--design", required=True, choices=sorted(DESIGNS))
    flags.add_flags(parser, ServeConfig, HELP)
    flags.add_security_flags(parser)
    args = parser.parse_args(argv)
    ways = DESIGNS[args.design]
    config = flags.config_from(ServeConfig, args)
    if ways.wake == "group":
        config = dataclasses.replace(config, batch_notify_size=GROUP)
    security = flags.security_from(args)
    with claimed(config) as sock:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(ways, config, security, sock))


def http_config(app: ASGIApp, config: ServeConfig) -> uvicorn.Config:
    """uvicorn's settings as in serving.api, except for how connections are handled."""
    return uvicorn.Config(
        app,
        http="httptools",
        loop="uvloop",
        lifespan="off",
        log_level="warning",
        access_log=False,
        timeout_keep_alive=config.timeout_keep_alive_s,  # type: ignore[arg-type]  # a timer's
        backlog=BACKLOG,
    )


async def _serve(ways: Ways, config: ServeConfig, security: Security, sock: socket.socket) -> None:
    dispatcher = Dispatcher(config, security)
    tokenizer = Tokenizer.from_dir(config.model_path)
    model_config = ModelConfig.from_dir(config.model_path)
    model = ServedModel(tokenizer, config, model_config, dispatcher.context_length)
    front = Front(dispatcher, model, config, SYSTEM_CLOCK)
    route = Route("/v1/chat/completions", DesignedChat(front, ways), methods=["POST"])
    health = Route("/health", Admin(front).health)
    app = Starlette(routes=[route, health], exception_handlers=ERROR_ANSWERS)
    server = uvicorn.Server(http_config(app, config))
    await dispatcher.start()
    host, port = sock.getsockname()[:2]
    flags.notify_ready(url=f"http://{host}:{port}")
    await server.serve(sockets=[sock])


if __name__ == "__main__":
    flags.run_main("frontend_designs", lambda: main(sys.argv[1:]))
