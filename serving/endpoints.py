"""The routes that generate: chat, completions, responses, messages and SGLang's /generate."""

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from functools import partial
from typing import Any, Protocol
from urllib.parse import quote

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from serving import (
    messages_api,
    messages_fields,
    openai_api,
    openai_fields,
    responses_api,
    responses_fields,
    sglang_api,
)
from serving.answer import WholeAnswer
from serving.arrival import Arrival
from serving.bodies import Body
from serving.choice import Choice, check_prompt_logprobs, is_long_to_spell
from serving.connection import body_writer_of
from serving.errors import ApiError, bad_field, quoted
from serving.event_stream import EventStream
from serving.front import Front, while_client_waits
from serving.interval import Interval
from serving.json_fields import read_json
from serving.messages_answers import MessagesAnswer
from serving.openai_answers import chat_answer, completion_answer
from serving.protocol import Request, ServedModel, request_id_of
from serving.responses_answers import ResponsesAnswer
from serving.stream import Events, StreamedAnswer

# Keys in a scope: of the server's own `send`, and of the request's id once it is known.
RAW_SEND = "kvferry.send"
REQUEST_ID = "kvferry.request_id"
# Anthropic's API, where errors have another shape and the request's id another header.
MESSAGES_PATHS = frozenset({"/v1/messages", "/v1/messages/count_tokens"})


class Spelling(Events, Protocol):
    """How an API spells an answer, whole or in events.

    is_cumulative: each event of a choice repeats all earlier ones, and no event opens a choice.
    """

    @property
    def is_cumulative(self) -> bool: ...

    def whole(self, choices: list[Choice]) -> bytes: ...


class Reader(Protocol):
    """A request whose fields were checked."""

    def finish(self, request_id: str | None) -> Coroutine[Any, Any, Request]:
        """Tokenize the prompts, and try the grammar of the answer's form. Raises ApiError."""
        ...


class Endpoint(Protocol):
    """What differs between the routes that generate."""

    def read(self, body: bytes, model: ServedModel) -> Reader:
        """Check all fields, before any work is done. Raises ApiError for a wrong one."""
        ...

    def spell(self, reader: Any, request: Request, front: Front, arrival: Arrival) -> Spelling: ...


class ChatEndpoint:
    """POST /v1/chat/completions."""

    def read(self, body: bytes, model: ServedModel) -> Reader:
        return openai_api.ChatReader(openai_fields.read_chat(body), model)

    def spell(self, reader: Any, request: Request, front: Front, arrival: Arrival) -> Spelling:
        assert isinstance(reader, openai_api.ChatReader), "this endpoint made it"
        model = front.model
        return chat_answer(request, model.tokenizer, model.name, arrival.created, reader.parsing)


class CompletionEndpoint:
    """POST /v1/completions."""

    def read(self, body: bytes, model: ServedModel) -> Reader:
        return openai_api.CompletionReader(openai_fields.read_completion(body), model)

    def spell(self, reader: Any, request: Request, front: Front, arrival: Arrival) -> Spelling:
        return completion_answer(request, front.model.tokenizer, front.model.name, arrival.created)


class ResponsesEndpoint:
    """POST /v1/responses."""

    def read(self, body: bytes, model: ServedModel) -> Reader:
        return responses_api.ResponsesReader(responses_fields.read_responses(body), model)

    def spell(self, reader: Any, request: Request, front: Front, arrival: Arrival) -> Spelling:
        assert isinstance(reader, responses_api.ResponsesReader), "this endpoint made it"
        model, created = front.model, arrival.created
        return ResponsesAnswer(
            request, reader.asked, model.tokenizer, model.name, created, reader.parsing
        )


class MessagesEndpoint:
    """POST /v1/messages."""

    def read(self, body: bytes, model: ServedModel) -> Reader:
        return messages_api.MessagesReader(messages_fields.read_messages(body), model)

    def spell(self, reader: Any, request: Request, front: Front, arrival: Arrival) -> Spelling:
        assert isinstance(reader, messages_api.MessagesReader), "this endpoint made it"
        model = front.model
        return MessagesAnswer(request, reader.asked, model.tokenizer, model.name, reader.parsing)


class SglangEndpoint:
    """POST /generate."""

    def read(self, body: bytes, model: ServedModel) -> Reader:
        return sglang_api.GenerateReader(sglang_api.read_generate(body), model)

    def spell(self, reader: Any, request: Request, front: Front, arrival: Arrival) -> Spelling:
        assert isinstance(reader, sglang_api.GenerateReader), "this endpoint made it"
        return sglang_api.GenerateAnswer(
            front.model.tokenizer, reader.is_batch, arrival.monotonic_s, front.clock
        )


class _Named(msgspec.Struct):
    """The fields that tell for which route a body is."""

    prompt: Any = None
    input: Any = None


class InvocationEndpoint:
    """POST /invocations, SageMaker's only path: completions, responses, or else chats."""

    def __init__(self) -> None:
        self._endpoints: dict[type[Reader], Endpoint] = {
            openai_api.ChatReader: ChatEndpoint(),
            openai_api.CompletionReader: CompletionEndpoint(),
            responses_api.ResponsesReader: ResponsesEndpoint(),
        }

    def read(self, body: bytes, model: ServedModel) -> Reader:
        named = read_json(_named, body)
        kind: type[Reader] = openai_api.ChatReader
        if named.prompt is not None:
            kind = openai_api.CompletionReader
        elif named.input is not None:
            kind = responses_api.ResponsesReader
        return self._endpoints[kind].read(body, model)

    def spell(self, reader: Any, request: Request, front: Front, arrival: Arrival) -> Spelling:
        return self._endpoints[type(reader)].spell(reader, request, front, arrival)


_named = msgspec.json.Decoder(_Named)


class Generate:
    """A route that generates: an ASGI app of its own, so that nothing wraps its `send`."""

    def __init__(self, front: Front, endpoint: Endpoint) -> None:
        self._front = front
        self._endpoint = endpoint

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
            reader = self._endpoint.read(body, front.model)
            del body  # perhaps megabytes, which are not needed while the answer is made
            with front.holding():
                request = await self._finished(reader, scope, receive, arrival)
                if request is None:
                    return
                scope[REQUEST_ID] = request.request_id
                check_prompt_logprobs(request.choices)
                spelling = self._endpoint.spell(reader, request, front, arrival)
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
            streamed = StreamedAnswer(
                choices, stream, spelling, interval, abort, spelling.is_cumulative
            )
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
