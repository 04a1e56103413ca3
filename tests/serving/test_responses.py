"""POST /v1/responses by OpenAI's own client, and what its input becomes."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pydantic
import pytest
from openai import AsyncOpenAI
from openai.types.responses import Response, ResponseStreamEvent

from serving.responses_fields import LOGPROBS
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
    """Check that each item's events spell the item, and stand together."""
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
        "reasoning": {"effort": "low", "summary": "detailed"},
        "include": ["reasoning.encrypted_content", "web_search_call.results"],
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
@pytest.mark.parametrize("parsers", [{}, PARSERS])
@pytest.mark.parametrize("interval", [1, 7, 100])
async def test_logprobs_are_those_of_the_tokens_of_a_text(
    asked: dict[str, Any], parsers: dict[str, Any], interval: int
) -> None:
    body = ASK | asked | {"tools": TOOLS}
    async with live_server(writes(ANSWER), **parsers, stream_interval=interval) as live:
        whole = (await live.post("/v1/responses", body)).json()
        (message,) = (item for item in whole["output"] if item["type"] == "message")
        logprobs = message["content"][0]["logprobs"]
        text = b"".join(bytes(entry["bytes"]) for entry in logprobs).decode()
        if parsers:  # with the end of the thought before it, without the calls after it
            assert text == "</think>\n\nOne moment.\n"
        else:
            assert len(logprobs) == whole["usage"]["output_tokens"]
        assert {len(entry["top_logprobs"]) for entry in logprobs} == {asked.get("top_logprobs", 0)}
        events = await events_of(live, body)
        assert without_ids(events[-1]["response"]["output"]) == without_ids(whole["output"])
        deltas = [e for e in events if e["type"] == "response.output_text.delta"]
        streamed = [entry for event in deltas for entry in event["logprobs"]]
        assert streamed == logprobs  # what ends the text comes in an empty delta


HARMONY = "<|channel|>{}<|message|>{}<|end|><|start|>assistant"
CALL = '<tool_call>{"name": "weather", "arguments": {}}</tool_call>'


@pytest.mark.parametrize(
    ("text", "parsers", "items"),
    [
        (f"One.\n{CALL}\nTwo.", PARSERS, ["One.", "{}", "Two."]),
        (f"{CALL}\nTwo.", PARSERS, ["{}", "Two."]),
        (f"{CALL}{CALL}", PARSERS, ["{}", "{}"]),
        ("[TOOL_CALLS]weather{}", {"tool_call_parser": "mistral"}, ["{}"]),
        ('{"name": "weather", "parameters": {}}', {"tool_call_parser": "llama3"}, ["{}"]),
        (
            HARMONY.format("analysis", "A") + HARMONY.format("commentary", "B")
            + HARMONY.format("analysis", "C") + HARMONY.format("final", "D"),
            {"reasoning_parser": "gpt-oss", "tool_call_parser": "gpt-oss"},
            ["A", "B", "C", "D"],
        ),
        (
            HARMONY.format("commentary", "A") + HARMONY.format("final", "B"),
            {"reasoning_parser": "gpt-oss", "tool_call_parser": "gpt-oss"},
            ["A\nB"],
        ),
        (
            HARMONY.format("analysis", "A") + "<|channel|>commentary to=functions.weather "
            "<|constrain|>json<|message|>{}",
            {"reasoning_parser": "gpt-oss", "tool_call_parser": "gpt-oss"},
            ["A", "{}"],
        ),
        (
            "<|channel|>analysis<|message|>A",
            {"reasoning_parser": "gpt-oss", "tool_call_parser": "gpt-oss"},
            ["A"],
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("interval", [1, 100])
@pytest.mark.parametrize("asked", [{}, {"top_logprobs": 1}])
async def test_items_come_in_the_order_in_which_they_were_written(
    text: str, parsers: dict[str, Any], items: list[str], interval: int, asked: dict[str, Any]
) -> None:
    body = ASK | {"tools": TOOLS} | asked
    async with live_server(writes(text), **parsers, stream_interval=interval) as live:
        whole = (await live.post("/v1/responses", body)).json()["output"]
        assert [shown for _, shown in shape_of(whole)] == items
        events = await events_of(live, body)
        output = events[-1]["response"]["output"]
        assert without_ids(output) == without_ids(whole)
        check_items(events, output)


DEEP: Any = {}
for _ in range(300):
    DEEP = {"a": DEEP}


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ({"tools": [TOOLS[0] | {"parameters": {"maximum": 10**30}}]}, "tools"),
        ({"tools": [TOOLS[0] | {"parameters": DEEP}]}, "tools"),
        ({"text": {"format": {"type": "json_schema", "schema": {"examples": [10**20]}}}}, "text"),
        ({"text": {"format": {"type": "json_schema", "schema": {}, "strict": False}}}, "text"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_whatever_json_a_request_has_is_shown_again(
    asked: dict[str, Any], name: str, stream: bool
) -> None:
    async with live_server(writes("abc"), context_length=4096) as live:
        if stream:
            answer = (await events_of(live, ASK | asked))[-1]["response"]
        else:
            answer = (await live.post("/v1/responses", ASK | asked)).json()
        assert answer["status"] == "completed", answer
        (given,), (shown,) = (asked[name], answer[name]) if name == "tools" else (
            [asked[name]["format"]], [answer[name]["format"]],
        )  # fmt: skip
        assert given.items() <= shown.items()


async def test_one_call_where_calls_may_not_be_parallel() -> None:
    async with live_server(writes(ANSWER), **PARSERS) as live:
        body = ASK | {"tools": TOOLS, "parallel_tool_calls": False}
        for answer in (
            (await live.post("/v1/responses", body)).json(),
            (await events_of(live, body))[-1]["response"],
        ):
            assert shape_of(answer["output"]) == THOUGHT_SAID_AND_CALLED[:3]


async def test_of_tools_the_functions_are_offered_those_of_a_namespace_too() -> None:
    space = {"type": "namespace", "name": "sky", "description": "d", "tools": [TOOLS[0]]}
    other = {"type": "function", "name": "ferry", "parameters": {}, "strict": False}
    tools = [{"type": "web_search", "external_web_access": False}, space, other]
    async with live_server(writes(ANSWER), **PARSERS) as live:
        for answer in (
            (await live.post("/v1/responses", ASK | {"tools": tools})).json(),
            (await events_of(live, ASK | {"tools": tools}))[-1]["response"],
        ):
            assert shape_of(answer["output"]) == THOUGHT_SAID_AND_CALLED
            assert answer["output"][-1]["namespace"] == "sky"
            assert [tool["name"] for tool in answer["tools"]] == ["weather", "ferry"]
        body = ASK | {"tools": tools[:1], "tool_choice": "required"}
        refused = await live.post("/v1/responses", body)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "tool_choice"


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
        (item,) = event["response"]["output"]
        assert item["status"] == "incomplete"
        assert letters(9).startswith(item["content"][0]["text"])


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
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input", "input[0]: nothing is store"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "u"}]}]},
            "input",
            "input[0].content[0]: this server takes text only, got 'input_image'",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": [], "text": "a"}]}]},
            "input",
            "input[0].content[0]: this server takes text only, got",
        ),
        ({"input": [{"role": "user"}]}, "input", "input[0].content: expected text or a list, got"),
        ({"input": [{"role": "user", "content": "a"}] * 16_385}, "input", "input: at most 16384"),
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
        ({"truncation": "some"}, "truncation", 'truncation: expected "auto" or "disabled", got'),
        ({"n": 2}, "n", "n: this server does not support it"),
        ({"include": ["thoughts"]}, "include", "include.thoughts: this server does not support it"),
        (
            {"logits_processors": [5]},
            "logits_processors",
            "logits_processors: this server does not",
        ),
        ({"max_tokens": 3}, "max_tokens", "max_tokens: is called max_output_tokens here"),
        ({"logprobs": True}, "logprobs", "logprobs: is called include: message.output_text.log"),
        (
            {"response_format": {"type": "text"}},
            "response_format",
            "response_format: is called tex",
        ),
        ({"echo": True}, "echo", "echo: this server does not support it"),
        ({"text": {"verbosity": "low"}}, "text", "text.verbosity: this server"),
        ({"text": {"format": {"type": "json_schema"}}}, "text", "text.format"),
        ({"text": {"format": {"type": "grammar"}}}, "text", "text.format"),
        ({"tools": [{"type": "namespace"}]}, "tools", "tools[0].tools: expected a list, got None"),
        ({"tools": [{"type": "function"}]}, "tools", "tools[0].name: expected text, got None"),
        (
            {"tools": [TOOLS[0] | {"parameters": "x"}]},
            "tools",
            "tools[0].parameters: expected an object, got 'x'",
        ),
        ({"tool_choice": "any"}, "tool_choice", 'tool_choice: expected "none", "auto", "required"'),
        ({"tool_choice": {"type": "mcp"}}, "tool_choice", "tool_choice: this server does not"),
        ({"tool_choice": "required"}, "tool_choice", "tool_choice: required tool calls need"),
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


@pytest.mark.parametrize("truncation", [None, "disabled", "auto"])
async def test_what_does_not_fit_is_refused_however_it_may_be_truncated(
    truncation: str | None,
) -> None:
    asked = ASK | {"max_output_tokens": 2, "truncation": truncation}
    async with live_server() as live:
        answer = (await live.post("/v1/responses", asked)).json()
        assert shape_of(answer["output"]) == [("message", letters(2))]
        assert answer["truncation"] == (truncation or "disabled")
        for too_long in (
            {"input": "a" * 40_000},  # refused before it is tokenized
            {"input": "a b " * 400},  # and after
            {"input": [{"role": "user", "content": "a"}] * 600},
            {"max_output_tokens": 600},
        ):
            response = await live.post("/v1/responses", asked | too_long)
            error = response.json()["error"]
            assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
            assert error["param"] == next(iter(too_long))
            assert ("this server drops no items" in error["message"]) == (truncation == "auto")


async def test_nothing_is_stored() -> None:
    async with client_of() as responses:
        answer = await responses.create(**ASK, max_output_tokens=2)
        with pytest.raises(openai.NotFoundError):
            await responses.retrieve(answer.id)


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
