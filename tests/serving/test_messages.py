"""POST /v1/messages by Anthropic's own client."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import pydantic
import pytest
from anthropic import AsyncAnthropic
from anthropic.types import Message, RawMessageStreamEvent

from serving.errors import ApiError
from tests.fakes import until
from tests.serving.live import MODEL_NAME, Live, letters, live_server
from tests.serving.test_parsed_chats import ANSWER, CALL, ONE, writes
from tests.serving.test_parsed_chats import TOOLS as CHAT_TOOLS
from transfer.errors import Code

PARSERS: dict[str, Any] = {"reasoning_parser": "qwen3", "tool_call_parser": "qwen"}
TOOLS: list[Any] = [{"name": "weather", "input_schema": {"type": "object"}}]
ASK: dict[str, Any] = {
    "model": MODEL_NAME,
    "max_tokens": 200,
    "messages": [{"role": "user", "content": "Weather?"}],
}
INVALID = "invalid_request_error"
EVENTS: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(RawMessageStreamEvent)


@contextlib.asynccontextmanager
async def client_of(live: Live, **options: Any) -> AsyncIterator[Any]:
    """The client; its overloads do not fit arguments that a test collects."""
    own: dict[str, Any] = {"api_key": "none", "max_retries": 0}
    async with AsyncAnthropic(base_url=live.url, **own | options) as client:
        yield client


def events_in(text: str) -> list[dict[str, Any]]:
    """The data of a streamed answer's events, each checked against the client's own types."""
    found: list[dict[str, Any]] = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        kind, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert kind == f"event: {event['type']}"
        if event["type"] != "error":
            EVENTS.validate_python(event)
        found.append(event)
    return found


async def events_of(live: Live, body: dict[str, Any]) -> list[dict[str, Any]]:
    response = await live.post("/v1/messages", body | {"stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return events_in(response.text)


def shape_of(content: list[Any]) -> list[tuple[str, Any]]:
    """Each block's type, and its text or input."""
    return [
        (block["type"], block.get("input", block.get("thinking", block.get("text"))))
        for block in content
    ]


def put_together(events: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    """The blocks of a stream, each of which opens once and closes before the next."""
    blocks: list[tuple[str, Any]] = []
    is_open = False
    for event in events:
        if event["type"] == "content_block_start":
            assert not is_open
            is_open = True
            assert event["index"] == len(blocks)
            blocks.append((event["content_block"]["type"], ""))
        elif event["type"] == "content_block_delta":
            assert is_open
            assert event["index"] == len(blocks) - 1
            kind, text = blocks[-1]
            delta = event["delta"]
            more = delta.get("text", delta.get("thinking", delta.get("partial_json", "")))
            blocks[-1] = (kind, text + more)
        elif event["type"] == "content_block_stop":
            assert is_open
            is_open = False
            assert event["index"] == len(blocks) - 1
    assert not is_open
    return [(kind, json.loads(x) if kind == "tool_use" else x) for kind, x in blocks]


THOUGHT_SAID_AND_CALLED = [
    ("thinking", "They want é."),
    ("text", "One moment."),
    ("tool_use", {"city": "Zürich"}),
    ("tool_use", {"city": "Zürich"}),
]


@pytest.mark.parametrize("interval", [1, 3, 50])
async def test_an_answer_has_its_thought_its_text_and_its_calls_as_blocks(interval: int) -> None:
    async with live_server(writes(ANSWER), **PARSERS, stream_interval=interval) as live:
        body = ASK | {"tools": TOOLS}
        whole = (await live.post("/v1/messages", body)).json()
        Message.model_validate(whole)
        assert whole["id"].startswith("msg_")
        assert (whole["type"], whole["role"], whole["model"]) == (
            "message",
            "assistant",
            MODEL_NAME,
        )
        assert shape_of(whole["content"]) == THOUGHT_SAID_AND_CALLED
        assert (whole["stop_reason"], whole["stop_sequence"]) == ("tool_use", None)
        events = await events_of(live, body)
        assert put_together(events) == THOUGHT_SAID_AND_CALLED
        assert events[0]["type"] == "message_start"
        assert events[0]["message"]["content"] == []
        assert events[0]["message"]["stop_reason"] is None
        assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
        assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
        usage, again = whole["usage"], events[-2]["usage"]
        assert again["output_tokens"] == usage["output_tokens"]
        assert again["output_tokens_details"] == usage["output_tokens_details"]
        assert 0 < usage["output_tokens_details"]["thinking_tokens"] < usage["output_tokens"]


async def test_the_official_client_puts_a_stream_together() -> None:
    async with live_server(writes(ANSWER), **PARSERS) as live, client_of(live) as client:
        whole = await client.messages.create(**ASK, tools=TOOLS)
        async with client.messages.stream(**ASK, tools=TOOLS) as stream:
            kinds = {event.type async for event in stream}
            final = await stream.get_final_message()
        assert {"thinking", "signature", "text", "input_json", "message_stop"} <= kinds
        for message in (whole, final):
            content = [block.model_dump() for block in message.content]
            assert shape_of(content) == THOUGHT_SAID_AND_CALLED
            assert message.stop_reason == "tool_use"
            assert message.content[0].signature
        assert whole._request_id is not None
        assert stream.response.headers["request-id"] not in ("", whole._request_id)
        assert final.usage.output_tokens == whole.usage.output_tokens


async def test_plain_text_ends_at_its_length_its_stop_sequence_or_by_itself() -> None:
    async with live_server() as live, client_of(live) as client:
        for more, text, reason, sequence in (
            ({"max_tokens": 5}, letters(5), "max_tokens", None),
            ({"stop_sequences": ["de", "x"]}, letters(3), "stop_sequence", "de"),
            ({}, letters(26), "end_turn", None),
        ):
            whole = await client.messages.create(**ASK | more)
            async with client.messages.stream(**ASK | more) as stream:
                assert "".join([piece async for piece in stream.text_stream]) == text
                final = await stream.get_final_message()
            for message in (whole, final):
                assert [block.text for block in message.content] == [text]
                assert (message.stop_reason, message.stop_sequence) == (reason, sequence)


async def test_an_answer_ends_with_the_context_however_much_more_it_might_have() -> None:
    async with live_server(context_length=24) as live, client_of(live) as client:
        counted = await client.messages.count_tokens(model=MODEL_NAME, messages=ASK["messages"])
        left = 24 - counted.input_tokens
        for max_tokens, reason in (
            (left, "max_tokens"),
            (left + 1, "model_context_window_exceeded"),
            (9_000, "model_context_window_exceeded"),
        ):
            answer = await client.messages.create(**ASK | {"max_tokens": max_tokens})
            assert (answer.usage.output_tokens, answer.stop_reason) == (left, reason)
        long = [{"role": "user", "content": "Weather? " * 20}]
        with pytest.raises(anthropic.BadRequestError, match="messages: this model's max") as told:
            await client.messages.create(**ASK | {"messages": long})
        # Anthropic's words, by which agents see that they have to shorten the conversation.
        assert "prompt is too long" in str(told.value)


@pytest.mark.parametrize("parsers", [{}, PARSERS])
async def test_an_answer_without_a_word_is_an_empty_text(parsers: dict[str, Any]) -> None:
    async with live_server(writes(""), **parsers) as live:
        whole = (await live.post("/v1/messages", ASK)).json()
        assert shape_of(whole["content"]) == [("text", "")]
        assert put_together(await events_of(live, ASK)) == [("text", "")]


async def test_an_answer_that_is_cut_in_its_thought_has_no_text() -> None:
    async with live_server(writes(ANSWER), **PARSERS) as live:
        whole = (await live.post("/v1/messages", ASK | {"max_tokens": 6})).json()
        ((kind, thought),) = shape_of(whole["content"])
        assert kind == "thinking"
        assert "They want é.".startswith(thought)
        assert whole["stop_reason"] == "max_tokens"
        events = await events_of(live, ASK | {"max_tokens": 6})
        assert put_together(events) == [(kind, thought)]


async def test_thoughts_may_be_left_out() -> None:
    body = ASK | {"tools": TOOLS, "thinking": {"type": "adaptive", "display": "omitted"}}
    without = [("thinking", ""), *THOUGHT_SAID_AND_CALLED[1:]]
    async with live_server(writes(ANSWER), **PARSERS) as live:
        whole = (await live.post("/v1/messages", body)).json()
        assert shape_of(whole["content"]) == without
        assert put_together(await events_of(live, body)) == without
        assert whole["usage"]["output_tokens_details"]["thinking_tokens"] > 0


@pytest.mark.parametrize(
    ("text", "blocks"),
    [
        (f"One.\n{ONE}\nTwo.", [("text", "One."), ("tool_use", {}), ("text", "Two.")]),
        (f"<tool_call>{CALL}</tool_call>", [("tool_use", {})]),
    ],
)
async def test_blocks_come_in_the_order_in_which_they_were_written(
    text: str, blocks: list[tuple[str, Any]]
) -> None:
    expected = [(kind, {"city": "Zürich"} if x == {} else x) for kind, x in blocks]
    async with live_server(writes(text), **PARSERS) as live:
        whole = (await live.post("/v1/messages", ASK | {"tools": TOOLS})).json()
        assert shape_of(whole["content"]) == expected
        assert put_together(await events_of(live, ASK | {"tools": TOOLS})) == expected


async def test_only_the_first_call_is_returned_where_one_is_allowed() -> None:
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    body = ASK | {"tools": TOOLS, "tool_choice": choice}
    async with live_server(writes(ANSWER), **PARSERS) as live:
        whole = (await live.post("/v1/messages", body)).json()
        assert shape_of(whole["content"]) == THOUGHT_SAID_AND_CALLED[:3]
        assert put_together(await events_of(live, body)) == THOUGHT_SAID_AND_CALLED[:3]


async def test_an_answer_can_be_sent_back_with_the_results_of_its_calls() -> None:
    async with live_server(writes(ANSWER), **PARSERS) as live, client_of(live) as client:
        first = await client.messages.create(**ASK, tools=TOOLS)
        calls = [block for block in first.content if block.type == "tool_use"]
        results = [
            {"type": "tool_result", "tool_use_id": calls[0].id, "content": "rain"},
            {
                "type": "tool_result",
                "tool_use_id": calls[1].id,
                "content": [{"type": "text", "text": "sun"}],
            },
            {"type": "text", "text": "Well?"},
        ]
        messages = [*ASK["messages"], first.to_param(), {"role": "user", "content": results}]
        ask = ASK | {"messages": messages, "tools": TOOLS, "system": "Be brief."}
        second = await client.messages.create(**ask)
        chat = {
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "Weather?"},
                {
                    "role": "assistant",
                    "reasoning_content": "They want é.",
                    "content": "One moment.",
                    "tool_calls": [
                        {
                            "id": call.id,
                            "type": "function",
                            "function": {"name": call.name, "arguments": json.dumps(call.input)},
                        }
                        for call in calls
                    ],
                },
                {"role": "tool", "tool_call_id": calls[0].id, "content": "rain"},
                {"role": "tool", "tool_call_id": calls[1].id, "content": "sun"},
                {"role": "user", "content": "Well?"},
            ],
            "tools": CHAT_TOOLS,
        }
        expected = len((await live.post("/tokenize", chat)).json()["tokens"])
        usage = second.usage
        assert usage.input_tokens + usage.cache_read_input_tokens == expected
        assert usage.cache_read_input_tokens > 0
        del ask["max_tokens"]
        assert (await client.messages.count_tokens(**ask)).input_tokens == expected


async def test_the_official_client_runs_tools_on_a_server_that_keeps_no_conversation() -> None:
    ran: list[str] = []

    @anthropic.beta_async_tool
    async def weather(city: str) -> str:
        """How the weather is."""
        ran.append(city)
        return "rain"

    run: dict[str, Any] = {"tools": [weather], "max_iterations": 2}
    async with live_server(writes(ANSWER), **PARSERS) as live, client_of(live) as client:
        answers = [answer async for answer in client.beta.messages.tool_runner(**ASK, **run)]
        streams = client.beta.messages.tool_runner(**ASK, **run, stream=True)
        answers += [await stream.get_final_message() async for stream in streams]
        assert ran == ["Zürich"] * 8
        usages = [answer.usage for answer in answers]
        first, second, *again = [
            usage.input_tokens + usage.cache_read_input_tokens for usage in usages
        ]
        assert again == [first, second]
        assert second > first + usages[0].output_tokens  # the whole conversation, results included


async def test_a_conversation_that_the_server_would_have_to_keep_is_refused() -> None:
    for thread in ({"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}):
        async with live_server() as live:
            answer = await live.post("/v1/messages", ASK | {"thread": thread})
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["message"].startswith("thread: this server keeps no conversations")
        # By this code Anthropic's clients see that they have to send the whole conversation.
        assert error["details"] == {"error_code": "thread_unsupported_request"}


async def test_a_last_message_of_the_assistant_is_continued() -> None:
    messages = [{"role": "user", "content": "Spell!"}, {"role": "assistant", "content": "abc"}]
    async with live_server() as live, client_of(live) as client:
        answer = await client.messages.create(**ASK | {"messages": messages, "max_tokens": 3})
        assert answer.content[0].text == "def"


async def test_a_form_and_a_call_that_must_be_made_reach_the_workers() -> None:
    schema = {"type": "object", "properties": {"said": {"type": "string"}}}
    form = {"type": "json_schema", "schema": schema}
    asks: list[dict[str, Any]] = [
        {"output_config": {"format": form}},
        {"output_format": form},
        {"tools": TOOLS, "tool_choice": {"type": "any"}},
        {"tools": TOOLS, "tool_choice": {"type": "tool", "name": "weather"}},
    ]
    async with live_server(auto_step=False, **PARSERS) as live:
        grammars = []
        for more in asks:
            asking = asyncio.create_task(live.post("/v1/messages", ASK | more))
            (room,) = await live.cluster.submitted(1)
            worker = live.cluster.prefill[0]
            grammars.append(worker.rooms[room].submit.sampling.grammar)
            worker.fail(room, Code.TOO_LONG, "seen enough")
            assert (await asking).json()["error"]["type"] == INVALID
    assert ["said" in grammar for grammar in grammars] == [True, True, False, False]
    assert ["weather" in grammar for grammar in grammars] == [False, False, True, True]


async def test_a_failure_is_a_status_before_the_first_byte_and_the_last_event_after_it() -> None:
    async with live_server(auto_step=False) as live, client_of(live) as client:
        asking = asyncio.create_task(client.messages.create(**ASK, stream=True))
        (room,) = await live.cluster.submitted(1)
        live.cluster.prefill[0].fail(room, Code.TOO_LONG, "does not fit the pool")
        with pytest.raises(anthropic.BadRequestError) as refused:
            await asking
        assert refused.value.type == INVALID
        shown = asyncio.Event()

        async def read() -> None:
            async for _ in await client.messages.create(**ASK, stream=True):
                shown.set()

        reading = asyncio.create_task(read())
        (room,) = await live.cluster.submitted(1)
        live.cluster.step()
        live.cluster.step()
        await until(shown.is_set)
        live.cluster.decode[0].fail(room, Code.INTERNAL, "it broke")
        with pytest.raises(anthropic.APIStatusError) as broken:
            await reading
        assert broken.value.body == {
            "type": "error",
            "error": {"type": "api_error", "message": "it broke"},
        }


async def test_a_client_that_vanishes_frees_everything_it_held() -> None:
    async with live_server(auto_step=False) as live, client_of(live) as client:
        asking = asyncio.create_task(client.messages.create(**ASK, stream=True))
        await live.cluster.submitted(1)
        live.cluster.step()
        live.cluster.step()
        stream = await asking
        assert live.rooms > 0
        await stream.close()
        await until(lambda: live.rooms == 0)


async def test_an_aborted_answer_says_so() -> None:
    async with live_server(auto_step=False) as live:
        asking = asyncio.create_task(live.post("/v1/messages", ASK | {"rid": "mine"}))
        await live.cluster.submitted(1)
        live.cluster.step()
        await live.post("/abort_request", {"rid": "mine"})
        answer = (await asking).json()
        assert (answer["id"], answer["stop_reason"]) == ("mine", "abort")


async def test_a_key_may_come_in_either_header() -> None:
    async with live_server(api_key="right") as live:
        for options in ({"api_key": "right"}, {"api_key": None, "auth_token": "right"}):
            async with client_of(live, **options) as client:
                assert (await client.messages.create(**ASK)).content
                counted = {name: ASK[name] for name in ("model", "messages")}
                assert (await client.messages.count_tokens(**counted)).input_tokens
        async with client_of(live, api_key="wrong") as client:
            with pytest.raises(anthropic.AuthenticationError) as caught:
                await client.messages.create(**ASK)
            assert caught.value.type == "authentication_error"
        without = await live.post("/v1/messages", ASK)
        assert (without.status_code, without.json()["error"]["type"]) == (
            401,
            "authentication_error",
        )
        # Elsewhere errors keep OpenAI's shape, and either header is taken there, too.
        other = await live.post("/v1/chat/completions", {}, **{"x-api-key": "wrong"})
        assert other.json()["error"]["code"] == "invalid_api_key"
        assert (await live.http.get("/v1/models", headers={"x-api-key": "right"})).is_success


async def test_every_error_has_the_shape_of_this_api() -> None:
    async with live_server(max_request_bytes=4096) as live, client_of(live) as client:
        with pytest.raises(anthropic.NotFoundError) as caught:
            await client.messages.create(**ASK | {"model": "other"})
        assert caught.value.type == "not_found_error"
        assert caught.value.request_id == caught.value.response.headers["x-request-id"] != ""
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            long = await live.http.post(path, content=b" " * 5000)
            wrong = await live.http.post(path, content=b"[]")
            method = await live.http.get(path)
            for response, status, kind in (
                (long, 413, "request_too_large"),
                (wrong, 400, INVALID),
                (method, 405, INVALID),
            ):
                body = response.json()
                assert (response.status_code, body["type"]) == (status, "error")
                assert body["error"]["type"] == kind
                assert body["error"].keys() == {"type", "message"}


async def test_a_full_server_is_a_rate_limit() -> None:
    limits: dict[str, Any] = {"max_inflight_requests": 1, "max_queued_requests": 0}
    async with live_server(auto_step=False, **limits) as live, client_of(live) as client:
        asking = asyncio.create_task(client.messages.create(**ASK))
        await live.cluster.submitted(1)
        with pytest.raises(anthropic.RateLimitError) as full:
            await client.messages.create(**ASK)
        assert full.value.type == "rate_limit_error"
        assert full.value.response.headers["retry-after"]
        asking.cancel()
        await until(lambda: live.rooms == 0)


@pytest.mark.parametrize(
    ("status", "kind"),
    [(500, "api_error"), (503, "overloaded_error"), (504, "timeout_error"), (415, INVALID)],
)
def test_each_status_has_its_type(status: int, kind: str) -> None:
    error = ApiError(status, "why", "a", "b")
    told = {"type": "error", "error": {"type": kind, "message": "why"}}
    assert error.messages_body() == told
    assert json.loads(bytes(error.response(for_messages=True).body)) == told
