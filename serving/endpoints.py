"""The routes that generate: chat, completions, responses, messages and SGLang's /generate."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial
from typing import Any, Protocol
from urllib.parse import quote

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from serving.answer import WholeAnswer
from serving.arrival import Arrival
from serving.bodies import Body
from serving.choice import check_prompt_logprobs, is_long_to_spell
from serving.connection import body_writer_of
from serving.errors import ApiError, bad_field, quoted
from serving.event_stream import EventStream
from serving.front import Front, while_client_waits
from serving.interval import Interval
from serving.json_fields import read_json
from serving.messages_api import MessagesReader
from serving.messages_fields import read_messages
from serving.openai_api import ChatReader, CompletionReader
from serving.openai_fields import read_chat, read_completion
from serving.protocol import Request, ServedModel, request_id_of
from serving.responses_api import ResponsesReader
from serving.responses_fields import read_responses
from serving.sglang_api import GenerateReader, read_generate
from serving.stream import Spelling, StreamedAnswer
from transfer.clock import Clock

# Keys in a scope: of the server's own `send`, and of the request's id once it is known.
RAW_SEND = "kvferry.send"
REQUEST_ID = "kvferry.request_id"
# Anthropic's API, where errors have another shape and the request's id another header.
MESSAGES_PATHS = frozenset({"/v1/messages", "/v1/messages/count_tokens"})


class Reader(Protocol):
    """A request whose fields were checked."""

    def finish(self, request_id: str | None) -> Coroutine[Any, Any, Request]:
        """Tokenize the prompts, and try the grammar of the answer's form. Raises ApiError."""
        ...

    def spelling(self, request: Request, arrival: Arrival, clock: Clock) -> Spelling:
        """How to spell the answer. request: the one that `finish` returned. Raises ApiError."""
        ...


# --- each checks all fields, before any work is done, and raises ApiError for a wrong one ---------


def chat(body: bytes, model: ServedModel) -> Reader:
    """POST /v1/chat/completions."""
    return ChatReader(read_chat(body), model)


def completion(body: bytes, model: ServedModel) -> Reader:
    """POST /v1/completions."""
    return CompletionReader(read_completion(body), model)


def responses(body: bytes, model: ServedModel) -> Reader:
    """POST /v1/responses."""
    return ResponsesReader(read_responses(body), model)


def messages(body: bytes, model: ServedModel) -> Reader:
    """POST /v1/messages."""
    return MessagesReader(read_messages(body), model)


def generate(body: bytes, model: ServedModel) -> Reader:
    """POST /generate."""
    return GenerateReader(read_generate(body), model)


class _Named(msgspec.Struct):
    """The fields that tell for which route a body is."""

    prompt: Any = None
    input: Any = None


def invocation(body: bytes, model: ServedModel) -> Reader:
    """POST /invocations, SageMaker's only path: completions, responses, or else chats."""
    named = read_json(_named, body)
    if named.prompt is not None:
        return completion(body, model)
    return chat(body, model) if named.input is None else responses(body, model)


_named = msgspec.json.Decoder(_Named)


class Generate:
    """A route that generates: an ASGI app of its own, so that nothing wraps its `send`."""

    def __init__(self, front: Front, read: Callable[[bytes, ServedModel], Reader]) -> None:
        self._front = front
        self._read = read

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        front = self._front
        arrival = Arrival.now(front.clock)
        with Body(front.bodies) as held:
            try:
                body = await held.read(scope, receive)
            except ApiError as error:
                raise front.runner.counted(error) from None
            if body is None:
                return
            reader = self._read(body, front.model)
            del body  # perhaps megabytes, which are not needed while the answer is made
            with front.holding():
                request = await self._finished(reader, scope, receive, arrival)
                if request is None:
                    return
                scope[REQUEST_ID] = request.request_id
                check_prompt_logprobs(request.choices)
                spelling = reader.spelling(request, arrival, front.clock)
                del reader  # it refers to all fields
                held.release()
                await self._generate(request, spelling, scope, receive, send, arrival)

    async def _generate(
        self,
        request: Request,
        spelling: Spelling,
        scope: Scope,
        receive: Receive,
        send: Send,
        arrival: Arrival,
    ) -> None:
        front = self._front
        choices, arrival_s = front.choices(request), arrival.monotonic_s
        timeline = front.dispatcher.timelines.open(request, arrival)
        if request.stream:
            stream = self._event_stream(request.request_id, scope, send)
            if timeline is not None:
                timeline.writes = stream
                stream.on_begin = partial(timeline.written, front.clock.monotonic_s)
            abort = front.dispatcher.abort
            asked = request.stream_interval
            interval = front.dispatcher.interval if asked is None else Interval(asked)
            streamed = StreamedAnswer(choices, stream, spelling, interval, abort)
            await front.runner.run(request, streamed, arrival_s, receive, timeline=timeline)
            return
        answer = WholeAnswer(choices, front.dispatcher)
        if await front.runner.run(request, answer, arrival_s, receive, timeline=timeline):
            if is_long_to_spell(choices):
                spelled = await asyncio.to_thread(spelling.whole, choices)
            else:
                spelled = spelling.whole(choices)
            response = Response(spelled, media_type="application/json")
            response.raw_headers += _id_headers(request.request_id, scope)
            await response(scope, receive, send)

    async def _finished(
        self, reader: Reader, scope: Scope, receive: Receive, arrival: Arrival
    ) -> Request | None:
        """The request, tokenized; None when the client left before."""
        front = self._front
        finish = reader.finish(_header(scope, b"x-request-id"))
        deadline_s = arrival.monotonic_s + front.config.request_timeout_s
        left_s = deadline_s - front.clock.monotonic_s()
        try:
            request = await while_client_waits(finish, receive, left_s)
            return None if request is None else _on_rank(request, scope, front.model)
        except ApiError as error:
            front.runner.counted(error)
            raise

    def _event_stream(self, request_id: str, scope: Scope, send: Send) -> EventStream:
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),  # otherwise a proxy would hold tokens back
            *_id_headers(request_id, scope),
        ]
        return EventStream(
            send,
            scope.get(RAW_SEND, send),
            body_writer_of(scope),
            headers,
            self._front.outbox,
            self._front.timers,
            self._front.config.slow_client_buffer_bytes,
            self._front.config.slow_client_timeout_s,
        )


def _on_rank(request: Request, scope: Scope, model: ServedModel) -> Request:
    """The request, on the rank of decode that its header dictates, whatever its body says.

    As with SGLang: proxies that choose ranks leave bodies alone. Raises ApiError.
    """
    name = "X-Data-Parallel-Rank"
    asked = _header(scope, name.lower().encode())
    if asked is None:
        return request
    try:
        rank = int(asked)
    except ValueError:
        raise bad_field(name, f"expected an integer, got {quoted(asked)}") from None
    decode = model.rank_of(name, rank, "decode")
    return replace(request, ranks=request.ranks._replace(decode=decode))


def error_headers(scope: Scope) -> dict[str, str]:
    """The id of a request that failed: its own, if it was read, else its header's or a new one."""
    request_id = scope.get(REQUEST_ID)
    if request_id is None:
        try:
            request_id = request_id_of(_header(scope, b"x-request-id"), "", None)
        except ApiError:  # too long
            request_id = request_id_of(None, "", None)
    return {name.decode(): value.decode() for name, value in _id_headers(request_id, scope)}


def _header(scope: Scope, name: bytes) -> str | None:
    value = dict(scope["headers"]).get(name)
    return None if value is None else value.decode("latin-1")


def _id_headers(request_id: str, scope: Scope) -> list[tuple[bytes, bytes]]:
    """The headers with the id; an id from a body may be any text, so it is escaped if need be."""
    if not (request_id.isascii() and request_id.isprintable()):
        request_id = quote(request_id, safe="", errors="replace")
    names = [b"x-request-id"]
    if scope.get("path") in MESSAGES_PATHS:
        names.append(b"request-id")
    return [(name, request_id.encode()) for name in names]
