"""Calls that must be made in chats and responses, beside a form of the text and any tools."""

import asyncio
import json
from typing import Any

import openai
import pytest

from tests.serving.live import MODEL_NAME, live_server
from tests.serving.test_parsed_chats import HELLO, ONE, TOOLS, client_of, streamed, writes
from tests.serving.test_responses import ASK, events_of
from tests.serving.test_responses import TOOLS as FLAT_TOOLS
from transfer.errors import Code

SAID = {"type": "object", "properties": {"said": {"type": "string"}}}
MUST: dict[str, Any] = {"model": MODEL_NAME, "messages": HELLO, "tool_choice": "required"}
FORMATS: list[Any] = [
    {"type": "json_schema", "json_schema": {"name": "said", "schema": SAID, "strict": True}},
    {"type": "json_object"},
]
NAMED = {"type": "function", "function": {"name": "weather"}}
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}
FLAT_NAMED = {"type": "function", "name": "weather"}
FLAT_ALLOWED = {"type": "allowed_tools", "mode": "required", "tools": [FLAT_NAMED]}
BAD = {"type": "function", "function": {"name": "bad", "parameters": {"type": "foo"}}}
FLAT_BAD = {"type": "function", "name": "bad", "parameters": {"type": "foo"}}


@pytest.mark.parametrize("choice", ["required", NAMED, ALLOWED])
@pytest.mark.parametrize("form", FORMATS)
async def test_a_chat_makes_its_call_whatever_form_a_text_would_have(
    choice: Any, form: Any
) -> None:
    asked: dict[str, Any] = {"tools": TOOLS, "tool_choice": choice, "response_format": form}
    async with client_of(ONE, tool_call_parser="qwen") as chats:
        (whole,) = (await chats.create(model=MODEL_NAME, messages=HELLO, **asked)).choices
        assert not whole.message.content
        calls = [(call.function.name, call.function.arguments) for call in whole.message.tool_calls]
        assert calls == [("weather", '{"city": "Zürich"}')]
        assert await streamed(chats, **asked) == ("", "", calls, ["tool_calls"])


@pytest.mark.parametrize("choice", ["required", FLAT_NAMED, FLAT_ALLOWED])
async def test_a_response_makes_its_call_whatever_form_a_text_would_have(choice: Any) -> None:
    form = {"type": "json_schema", "name": "said", "schema": SAID, "strict": True}
    body = ASK | {"tools": FLAT_TOOLS, "tool_choice": choice, "text": {"format": form}}
    async with live_server(writes(ONE), tool_call_parser="qwen") as live:
        for answer in (
            (await live.post("/v1/responses", body)).json(),
            (await events_of(live, body))[-1]["response"],
        ):
            (call,) = answer["output"]
            assert (call["type"], json.loads(call["arguments"])) == (
                "function_call",
                {"city": "Zürich"},
            )
            assert answer["text"]["format"]["schema"] == SAID


async def test_the_grammar_of_such_an_answer_is_that_of_the_call() -> None:
    body = MUST | {"tools": TOOLS}
    async with live_server(auto_step=False, tool_call_parser="qwen") as live:
        asking = [
            asyncio.create_task(live.post("/v1/chat/completions", body | more))
            for more in ({}, {"response_format": FORMATS[0]})
        ]
        rooms = await live.cluster.submitted(2)
        worker = live.cluster.prefill[0]
        grammars = {worker.rooms[room].submit.sampling.grammar for room in rooms}
        for room in rooms:
            worker.fail(room, Code.TOO_LONG, "seen enough")
        assert {answer.status_code for answer in await asyncio.gather(*asking)} == {400}
    (grammar,) = grammars
    assert "weather" in grammar
    assert "said" not in grammar


@pytest.mark.parametrize(
    ("more", "param", "message"),
    [
        ({"response_format": {"type": "yaml"}}, "response_format", "response_format.type: "),
        (
            {"response_format": {"type": "json_schema"}},
            "response_format",
            "response_format.json_schema.schema: is required",
        ),
        (
            {"extra_body": {"regex": "a+"}},
            "tool_choice",
            "tool_choice: a required tool call cannot",
        ),
        ({"tools": []}, "tool_choice", "tool_choice: needs tools"),
        (
            {"tools": [*TOOLS, BAD]},
            "tools[1].function.parameters",
            "tools[1].function.parameters: of 'bad': Invalid type: foo",
        ),
        (
            {
                "tools": [*TOOLS, BAD],
                "tool_choice": ALLOWED | {"allowed_tools": {"mode": "required", "tools": [BAD]}},
            },
            "tools[1].function.parameters",
            "tools[1].function.parameters: of 'bad': Invalid type: foo",
        ),
    ],
)
async def test_what_is_wrong_beside_a_call_of_a_chat_is_named(
    more: dict[str, Any], param: str, message: str
) -> None:
    async with client_of(ONE, tool_call_parser="qwen") as chats:
        with pytest.raises(openai.BadRequestError) as caught:
            await chats.create(**{"tools": TOOLS} | MUST | more)
    assert caught.value.param == param
    assert isinstance(caught.value.body, dict)
    assert caught.value.body["message"].startswith(message)


@pytest.mark.parametrize(
    ("more", "param", "message"),
    [
        ({"text": {"format": {"type": "yaml"}}}, "text", "text.format: "),
        ({"text": {"format": {"type": "json_schema"}}}, "text", "text.format: is required"),
        (
            {"tools": [{"type": "web_search"}, FLAT_BAD]},
            "tools[1].parameters",
            "tools[1].parameters: of 'bad': Invalid type: foo",
        ),
        (
            {"tools": [*FLAT_TOOLS, {"type": "namespace", "name": "n", "tools": [FLAT_BAD]}]},
            "tools[1].tools[0].parameters",
            "tools[1].tools[0].parameters: of 'bad': Invalid type: foo",
        ),
    ],
)
async def test_what_is_wrong_beside_a_call_of_a_response_is_named(
    more: dict[str, Any], param: str, message: str
) -> None:
    body = ASK | {"tools": FLAT_TOOLS, "tool_choice": "required"} | more
    async with live_server(writes(ONE), tool_call_parser="qwen") as live:
        refused = await live.post("/v1/responses", body)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["param"] == param
    assert error["message"].startswith(message)


@pytest.mark.parametrize("kind", ["json_object", "json_schema"])
async def test_a_schema_in_a_format_of_a_response_is_that_of_its_text(kind: str) -> None:
    body = ASK | {"text": {"format": {"type": kind, "name": "x", "schema": SAID}}}
    async with live_server(auto_step=False) as live:
        asking = asyncio.create_task(live.post("/v1/responses", body))
        (room,) = await live.cluster.submitted(1)
        worker = live.cluster.prefill[0]
        assert "said" in worker.rooms[room].submit.sampling.grammar
        worker.fail(room, Code.TOO_LONG, "seen enough")
        assert (await asking).status_code == 400


async def test_who_may_not_be_called_need_not_be_one_that_can() -> None:
    async with client_of(ONE, tool_call_parser="qwen") as chats:
        answer = await chats.create(**MUST | {"tools": [BAD, *TOOLS], "tool_choice": ALLOWED})
        assert answer.choices[0].message.tool_calls[0].function.name == "weather"


async def test_a_structural_tag_of_a_response_stands_beside_its_text() -> None:
    tag = {"type": "structural_tag", "format": {"type": "const_string", "value": "said"}}
    async with live_server(auto_step=False) as live:
        refused = await live.post("/v1/responses", ASK | {"text": {"format": tag}})
        assert refused.status_code == 400
        assert refused.json()["error"]["message"].startswith("text.format.type: text, json_object")
        asking = asyncio.create_task(live.post("/v1/responses", ASK | {"structural_tag": tag}))
        (room,) = await live.cluster.submitted(1)
        worker = live.cluster.prefill[0]
        assert "said" in worker.rooms[room].submit.sampling.grammar
        worker.fail(room, Code.TOO_LONG, "seen enough")
        assert (await asking).status_code == 400
