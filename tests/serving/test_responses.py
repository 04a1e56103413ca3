"""POST /v1/responses by OpenAI's own client, and what its input becomes."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import openai
import pydantic
import pytest
from openai import AsyncOpenAI
from openai.types.responses import Response, ResponseStreamEvent

from serving.errors import ApiError
from serving.response_input import messages_of_input
from serving.responses_fields import LOGPROBS, chat_of, read_responses
from tests.fakes import until
from tests.serving.live import MODEL_NAME, Live, letters, live_server
from tests.serving.test_parsed_chats import ANSWER, writes
from tests.serving.test_parsed_chats import TOOLS as CHAT_TOOLS
from transfer.errors import Code

PARSERS: dict[str, Any] = {"reasoning_parser": "qwen3", "tool_call_parser": "qwen"}
TOOLS: list[Any] = [{"type": "function", "name": "weather", "parameters": {"type": "object"}}]
ASK: dict[str, Any] = {"model": MODEL_NAME, "input": "Weather?", "temperature": 0}
EVENTS: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(ResponseStreamEvent)
ID_FIELDS = ("id", "call_id")


@contextlib.asynccontextmanager
async def client_of(*args: Any, **config: Any) -> AsyncIterator[Any]:
    async with (
        live_server(*args, **config) as served,
        AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client.responses


async def events_of(live: Live, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The data of a streamed answer's events, each checked against the client's own types."""
    found: list[dict[str, Any]] = []
    async with live.http.stream("POST", "/v1/responses", json=body | {"stream": True}) as response:
        assert response.status_code == 200, (await response.aread()).decode()
        text = (await response.aread()).decode()
    for number, block in enumerate(text.removesuffix("\n\n").split("\n\n")):
        kind, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert kind == f"event: {event['type']}"
        assert event["sequence_number"] == number
        EVENTS.validate_python(event)
        found.append(event)
    return found


def without_ids(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: item[name] for name in item if name not in ID_FIELDS} for item in items]


def shape_of(items: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Each item's type, and its text or arguments."""
    return [
        (item["type"], item["arguments"] if "arguments" in item else item["content"][0]["text"])
        for item in items
    ]


THOUGHT_SAID_AND_CALLED = [
    ("reasoning", "They want é."),
    ("message", "One moment."),
    ("function_call", '{"city": "Zürich"}'),
    ("function_call", '{"city": "Zürich"}'),
]


@pytest.mark.parametrize("interval", [1, 3, 50])
async def test_an_answer_has_its_thought_its_text_and_its_calls_as_items(interval: int) -> None:
    async with live_server(writes(ANSWER), **PARSERS, stream_interval=interval) as live:
        body = ASK | {"tools": TOOLS}
        whole = (await live.post("/v1/responses", body)).json()
        Response.model_validate(whole)
        assert whole["status"] == "completed"
        assert shape_of(whole["output"]) == THOUGHT_SAID_AND_CALLED
        for item in whole["output"]:
            assert item["status"] == "completed"
        usage = whole["usage"]
        assert 0 < usage["output_tokens_details"]["reasoning_tokens"] < usage["output_tokens"]
        assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
        events = await events_of(live, body)
        assert [event["type"] for event in events[:2]] == [
            "response.created",
            "response.in_progress",
        ]
        assert events[-1]["type"] == "response.completed"
        final = events[-1]["response"]
        assert without_ids(final["output"]) == without_ids(whole["output"])
        assert final["usage"]["output_tokens_details"] == usage["output_tokens_details"]
        assert final["usage"]["total_tokens"] == usage["total_tokens"]
        check_items(events, final["output"])


def check_items(events: list[dict[str, Any]], output: list[dict[str, Any]]) -> None:
    """The events of each item are the item, and stand together."""
    told = [event for event in events if "output_index" in event]
    assert [event["output_index"] for event in told] == sorted(e["output_index"] for e in told)
    for index, item in enumerate(output):
        own = [event for event in told if event["output_index"] == index]
        assert own[0]["type"] == "response.output_item.added"
        assert own[0]["item"]["status"] == "in_progress"
        assert own[-1]["type"] == "response.output_item.done"
        assert own[-1]["item"] == item
        assert {event["item_id"] for event in own[1:-1]} == {item["id"]}
        ((_, text),) = shape_of([item])
        assert "".join(event.get("delta", "") for event in own) == text
        done = [event for event in own if event["type"].endswith((".text.done", "_text.done"))]
        assert [event["text"] for event in done] == ([] if "arguments" in item else [text])


async def test_the_official_client_puts_a_stream_together() -> None:
    async with client_of(writes(ANSWER), **PARSERS) as responses:
        whole = await responses.create(**ASK, tools=TOOLS)
        assert whole.output_text == "One moment."
        async with responses.stream(**ASK, tools=TOOLS) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_response()
        assert kinds[-1] == "response.completed"
        assert final.output_text == whole.output_text
        (call, _) = (item for item in final.output if item.type == "function_call")
        assert call.name == "weather"


async def test_a_plain_answer_is_one_message_whatever_is_shown_again() -> None:
    asked: dict[str, Any] = {
        "instructions": "Be brief.",
        "max_output_tokens": 5,
        "metadata": {"a": "b"},
        "user": "u",
        "store": True,
        "parallel_tool_calls": False,
        "reasoning": {"effort": "low", "summary": "auto"},
        "include": ["reasoning.encrypted_content"],
        "truncation": "disabled",
        "tool_choice": "none",
    }
    async with live_server() as live:
        for answer in (
            (await live.post("/v1/responses", ASK | asked)).json(),
            (await events_of(live, ASK | asked))[-1]["response"],
        ):
            assert shape_of(answer["output"]) == [("message", letters(5))]
            assert answer["status"] == "incomplete"
            assert answer["output"][0]["status"] == "incomplete"
            assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
            assert answer["id"].startswith("resp_")
            assert answer["store"] is False
            for name in ("instructions", "max_output_tokens", "metadata", "user", "tool_choice"):
                assert answer[name] == asked[name]
            assert answer["reasoning"] == asked["reasoning"]
            assert answer["parallel_tool_calls"] is False
            assert answer["temperature"] == 0
            assert answer["usage"]["output_tokens"] == 5


async def test_an_answer_that_is_cut_in_its_thought_has_no_message() -> None:
    async with live_server(writes(ANSWER), **PARSERS) as live:
        events = await events_of(live, ASK | {"max_output_tokens": 8})
        assert events[-1]["type"] == "response.incomplete"
        (item,) = events[-1]["response"]["output"]
        assert (item["type"], item["status"]) == ("reasoning", "incomplete")
        check_items(events, [item])


async def test_an_answer_without_a_word_is_an_empty_message() -> None:
    async with live_server(writes("")) as live:
        (item,) = (await live.post("/v1/responses", ASK)).json()["output"]
        assert shape_of([item]) == [("message", "")]
        events = await events_of(live, ASK)
        assert without_ids(events[-1]["response"]["output"]) == without_ids([item])


@pytest.mark.parametrize("asked", [{"include": [LOGPROBS]}, {"top_logprobs": 2}])
async def test_logprobs_come_with_the_text(asked: dict[str, Any]) -> None:
    async with live_server(writes(ANSWER), reasoning_parser="qwen3") as live:
        whole = (await live.post("/v1/responses", ASK | asked)).json()
        (message,) = (item for item in whole["output"] if item["type"] == "message")
        logprobs = message["content"][0]["logprobs"]
        assert len(logprobs) == whole["usage"]["output_tokens"]
        assert {len(entry["top_logprobs"]) for entry in logprobs} == {asked.get("top_logprobs", 0)}
        events = await events_of(live, ASK | asked)
        deltas = [e for e in events if e["type"] == "response.output_text.delta"]
        (done,) = (e for e in events if e["type"] == "response.output_text.done")
        assert done["logprobs"] == logprobs
        streamed = [entry for event in deltas for entry in event["logprobs"]]
        # What ends the text has none, so it comes with the last word.
        assert streamed == logprobs[: len(streamed)]
        assert len(streamed) >= len(logprobs) - 1


async def test_one_call_where_calls_may_not_be_parallel() -> None:
    async with live_server(writes(ANSWER), **PARSERS) as live:
        body = ASK | {"tools": TOOLS, "parallel_tool_calls": False}
        for answer in (
            (await live.post("/v1/responses", body)).json(),
            (await events_of(live, body))[-1]["response"],
        ):
            assert shape_of(answer["output"]) == THOUGHT_SAID_AND_CALLED[:3]


async def test_a_failure_is_a_status_before_the_first_byte_and_the_last_event_after_it() -> None:
    async with live_server(auto_step=False) as live:
        asking = asyncio.create_task(live.post("/v1/responses", ASK | {"stream": True}))
        (room,) = await live.cluster.submitted(1)
        live.cluster.prefill[0].fail(room, Code.TOO_LONG, "does not fit the pool")
        assert (await asking).status_code == 400
        shown = asyncio.Event()

        async def read() -> list[str]:
            lines = []
            body = ASK | {"stream": True}
            async with live.http.stream("POST", "/v1/responses", json=body) as response:
                async for line in response.aiter_lines():
                    lines.append(line)
                    shown.set()
            return lines

        reading = asyncio.create_task(read())
        (room,) = await live.cluster.submitted(1)
        live.cluster.step()
        live.cluster.step()
        await until(shown.is_set)
        live.cluster.decode[0].fail(room, Code.INTERNAL, "it broke")
        kind, data, _ = (await reading)[-3:]
        assert kind == "event: response.failed"
        event = json.loads(data.removeprefix("data: "))
        EVENTS.validate_python(event)
        assert event["response"]["status"] == "failed"
        assert event["response"]["error"] == {"code": "server_error", "message": "it broke"}


async def test_an_aborted_answer_is_cancelled() -> None:
    async with live_server(auto_step=False) as live:
        whole = asyncio.create_task(live.post("/v1/responses", ASK | {"rid": "mine"}))
        streamed = asyncio.create_task(events_of(live, ASK | {"rid": "other"}))
        await live.cluster.submitted(2)
        live.cluster.step()
        assert (await live.post("/abort_request", {"abort_all": True})).json()["aborted"] == 2
        answer = (await whole).json()
        assert (answer["id"], answer["status"]) == ("mine", "cancelled")
        last = (await streamed)[-1]
        assert (last["type"], last["response"]["status"]) == ("response.incomplete", "cancelled")
        await until(lambda: live.rooms == 0)


@pytest.mark.parametrize(
    ("wrong", "param", "message"),
    [
        ({"input": None}, "input", "input: this field is required"),
        ({"input": []}, "input", "input: must have at least one item"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input", "input[0]: this server does"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "u"}]}]},
            "input",
            "input[0].content[0]: this server takes text only, got 'input_image'",
        ),
        ({"input": [{"role": "user"}]}, "input", "input[0]: expected content as text or a list"),
        ({"input": [{"content": "a"}]}, "input", "input[0].role: expected text, got None"),
        (
            {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{"}]},
            "input",
            "input: expected JSON as arguments of 'f'",
        ),
        ({"input": "a" * 40_000}, "input", "input: "),
        ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens: must be at least 1"),
        ({"max_output_tokens": 9999}, "max_output_tokens", "max_output_tokens: "),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "previous_response_id: this"),
        ({"background": True}, "background", "background: this server does not support it"),
        ({"conversation": "c"}, "conversation", "conversation: this server does not support it"),
        ({"prompt": {"id": "p"}}, "prompt", "prompt: this server does not support it"),
        ({"truncation": "auto"}, "truncation", "truncation: this server does not support it"),
        ({"n": 2}, "n", "n: this server does not support it"),
        ({"include": ["web_search_call.results"]}, "include", "include.web_search_call.results: "),
        ({"reasoning": {"summary": "detailed"}}, "reasoning", "reasoning.summary: this server"),
        ({"text": {"verbosity": "low"}}, "text", "text.verbosity: this server"),
        ({"text": {"format": {"type": "json_schema"}}}, "text", "text.format"),
        ({"text": {"format": {"type": "grammar"}}}, "text", "text.format"),
        ({"tools": [{"type": "web_search"}]}, "tools", "tools: this server has no tool of its own"),
        ({"tool_choice": {"type": "mcp"}}, "tool_choice", "tool_choice: this server does not"),
        ({"tool_choice": "required"}, "tool_choice", "tool_choice: that asks for calls needs"),
        ({"top_logprobs": 21}, "top_logprobs", "top_logprobs: must be "),
        ({"stream_options": {}}, "stream_options", "stream_options: is allowed only with stream"),
        ({"temperature": -1}, "temperature", "temperature: must be at least 0, got -1.0"),
    ],
)
async def test_what_is_wrong_or_not_served_is_refused_by_its_own_name(
    wrong: dict[str, Any], param: str, message: str
) -> None:
    async with client_of() as responses:
        with pytest.raises(openai.BadRequestError) as caught:
            await responses.create(model=MODEL_NAME, input="a", extra_body=wrong)
        assert caught.value.param == param
        assert isinstance(caught.value.body, dict)
        assert caught.value.body["message"].startswith(message)


async def test_nothing_is_stored() -> None:
    async with client_of() as responses:
        answer = await responses.create(**ASK, max_output_tokens=2)
        with pytest.raises(openai.NotFoundError):
            await responses.retrieve(answer.id)


def test_items_of_one_turn_are_one_message() -> None:
    user = {"role": "user", "content": "Q"}
    said = {"type": "message", "role": "assistant", "id": "m", "status": "completed"}
    text = {"type": "output_text", "text": "A", "annotations": [], "logprobs": []}

    def called(name: str) -> dict[str, Any]:
        item = {"type": "function_call", "id": "i", "call_id": name}
        return item | {"name": name, "arguments": "{}"}

    def call(name: str) -> dict[str, Any]:
        return {"id": name, "type": "function", "function": {"name": name, "arguments": "{}"}}

    def thought(text: str) -> dict[str, Any]:
        content = [{"type": "reasoning_text", "text": text}]
        return {"type": "reasoning", "id": "r", "summary": [], "content": content}

    def output(name: str, given: Any) -> dict[str, Any]:
        return {"type": "function_call_output", "call_id": name, "output": given}

    items = [
        user, thought("T"), said | {"content": [text]}, called("f"), called("g"),
        output("f", "F"), output("g", [{"type": "input_text", "text": "G"}]),
        thought("U"), called("h"), thought("V"), said | {"content": "B"},
        said | {"content": [{"type": "refusal", "refusal": "No."}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "S"}]},
        {"role": "developer", "content": "D"}, called("k"),
    ]  # fmt: skip
    assistant = {"role": "assistant"}
    content = [{"type": "text", "text": "A"}]
    assert messages_of_input(items, "I") == [
        {"role": "system", "content": "I"},
        user,
        assistant
        | {"reasoning_content": "T", "content": content, "tool_calls": [call("f"), call("g")]},
        {"role": "tool", "tool_call_id": "f", "content": "F"},
        {"role": "tool", "tool_call_id": "g", "content": [{"type": "text", "text": "G"}]},
        assistant | {"reasoning_content": "U", "tool_calls": [call("h")]},
        assistant | {"reasoning_content": "V", "content": "B"},
        assistant | {"content": [{"type": "text", "text": "No."}]},
        assistant | {"reasoning_content": "S"},
        {"role": "developer", "content": "D"},
        assistant | {"tool_calls": [call("k")]},
    ]


async def test_an_answer_can_be_sent_back_as_it_came() -> None:
    async with live_server(writes(ANSWER), **PARSERS) as live:
        first = (await live.post("/v1/responses", ASK | {"tools": TOOLS})).json()
        calls = [item for item in first["output"] if item["type"] == "function_call"]
        outputs = [
            {"type": "function_call_output", "call_id": call["call_id"], "output": "rain"}
            for call in calls
        ]
        items = [{"role": "user", "content": "Weather?"}, *first["output"], *outputs]
        answer = await live.post("/v1/responses", ASK | {"input": items, "tools": TOOLS})
        assert answer.status_code == 200, answer.text
        chat = {
            "messages": [
                {"role": "user", "content": "Weather?"},
                {
                    "role": "assistant",
                    "reasoning_content": "They want é.",
                    "content": "One moment.",
                    "tool_calls": [
                        {
                            "id": call["call_id"],
                            "type": "function",
                            "function": {"name": call["name"], "arguments": call["arguments"]},
                        }
                        for call in calls
                    ],
                },
                *(
                    {"role": "tool", "tool_call_id": call["call_id"], "content": "rain"}
                    for call in calls
                ),
            ],
            "tools": CHAT_TOOLS,
        }
        tokens = (await live.post("/tokenize", chat)).json()["tokens"]
        assert answer.json()["usage"]["input_tokens"] == len(tokens)


def test_a_form_and_a_choice_of_tools_are_those_of_a_chat() -> None:
    schema = {"type": "object"}
    form = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
    body = ASK | {
        "text": {"format": form},
        "tools": [TOOLS[0] | {"description": "D", "strict": None}],
        "tool_choice": {"type": "function", "name": "weather"},
        "reasoning": {"effort": "high"},
        "max_output_tokens": 7,
        "cache_salt": "s",
        "stop": ["x"],
    }
    chat = chat_of(read_responses(json.dumps(body).encode()))
    assert chat.response_format is not None
    assert msgspec.to_builtins(chat.response_format)["json_schema"] | {"description": None} == {
        "name": "n", "schema": schema, "strict": True, "description": None,
    }  # fmt: skip
    function = {"name": "weather", "parameters": {"type": "object"}, "description": "D"}
    assert chat.tools == [{"type": "function", "function": function}]
    assert chat.tool_choice == {"type": "function", "function": {"name": "weather"}}
    assert (chat.reasoning_effort, chat.max_completion_tokens) == ("high", 7)
    assert (chat.cache_salt, chat.stop, chat.top_k) == ("s", ["x"], None)
    assert chat_of(read_responses(b'{"input": "a"}')).tool_choice is None
    with pytest.raises(ApiError, match="input"):
        read_responses(b'{"input": 5}')
