"""The fields and the messages of a Messages request become those of a chat."""

import json
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from serving.errors import ApiError
from serving.message_input import messages_of_blocks
from serving.messages_fields import chat_of, read_count, read_messages
from serving.openai_fields import ChatFields
from tests.serving.live import MODEL_NAME, Live, live_server

USER: dict[str, Any] = {"role": "user", "content": "Q"}
TOOL: dict[str, Any] = {"name": "f", "description": "D", "input_schema": {"type": "object"}}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served() -> AsyncIterator[Live]:
    """One server for all that is refused."""
    async with live_server(tool_call_parser="qwen") as live:
        yield live


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


def chat(**fields: Any) -> ChatFields:
    body = {"max_tokens": 9, "messages": [USER]} | fields
    return chat_of(read_messages(json.dumps(body).encode()))


def test_blocks_become_the_messages_and_fields_of_a_chat() -> None:
    call = {"type": "tool_use", "id": "c", "name": "f", "input": {"a": [1]}}
    result = {"type": "tool_result", "tool_use_id": "c"}
    marked = text("B") | {"cache_control": {"type": "ephemeral"}, "citations": None}
    given: list[dict[str, Any]] = [
        {"role": "user", "content": [text("A"), marked]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "T", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                text("One."),
                call,
                {"type": "thinking", "thinking": "U", "signature": "s"},
                text("Two."),
            ],
        },
        {
            "role": "user",
            "content": [
                result | {"content": "R", "is_error": True},
                result | {"content": [text("S"), text("V")]},
                result,
                text("C"),
            ],
        },
        {"role": "system", "content": "Mind."},
        {"role": "assistant", "content": "D"},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": ""}]},
        {"role": "user", "content": []},
    ]
    billed = [text("x-anthropic-billing-header: cc_version=1"), text("I"), text("J")]
    called = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": [1]}}}
    assert messages_of_blocks(given, billed) == [
        {"role": "system", "content": [text("I"), text("J")]},
        {"role": "user", "content": [text("A"), text("B")]},
        {
            "role": "assistant",
            "content": "One.\nTwo.",
            "reasoning_content": "T\nU",
            "tool_calls": [called],
        },
        {"role": "tool", "tool_call_id": "c", "content": "R"},
        {"role": "tool", "tool_call_id": "c", "content": [text("S"), text("V")]},
        {"role": "tool", "tool_call_id": "c", "content": ""},
        {"role": "user", "content": [text("C")]},
        {"role": "system", "content": "Mind."},
        {"role": "assistant", "content": "D"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": ""},
    ]
    assert messages_of_blocks([USER], "I") == [{"role": "system", "content": "I"}, USER]
    assert messages_of_blocks([USER], billed[:1]) == [USER]


def test_fields_become_those_of_a_chat() -> None:
    found = chat(
        stop_sequences=["x"],
        top_k=4,
        cache_salt="s",
        tools=[TOOL | {"strict": True, "cache_control": {"type": "ephemeral"}}],
        tool_choice={"type": "tool", "name": "f", "disable_parallel_tool_use": True},
        output_config={"effort": "high"},
        metadata={"user_id": "u"},
        service_tier="auto",
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    )
    assert (found.max_tokens, found.stop, found.top_k, found.cache_salt) == (9, ["x"], 4, "s")
    function = {"name": "f", "description": "D", "strict": True, "parameters": {"type": "object"}}
    assert found.tools == [{"type": "function", "function": function}]
    assert found.tool_choice == {"type": "function", "function": {"name": "f"}}
    assert found.parallel_tool_calls is False
    assert (found.reasoning_effort, found.chat_template_kwargs) == ("high", None)
    for kind, choice in (("auto", "auto"), ("any", "required"), ("none", "none")):
        assert chat(tools=[TOOL], tool_choice={"type": kind}).tool_choice == choice
    assert chat().continue_final_message is None
    assert read_count(b'{"messages": []}').max_tokens is None


@pytest.mark.parametrize(
    ("kind", "thinks"), [("enabled", True), ("adaptive", True), ("disabled", False)]
)
def test_thinking_turns_that_of_the_template_on_or_off(kind: str, thinks: bool) -> None:
    thinking = {"type": kind, "budget_tokens": 2048}
    kwargs = {"enable_thinking": thinks, "thinking": thinks}
    assert chat(thinking=thinking).chat_template_kwargs == kwargs
    own = {"enable_thinking": "maybe"}
    both = chat(thinking=thinking, chat_template_kwargs=own).chat_template_kwargs
    assert both == kwargs | own


@pytest.mark.parametrize("name", ["output_format", "output_config"])
def test_a_schema_of_the_answer_is_a_strict_response_format(name: str) -> None:
    form = {"type": "json_schema", "schema": {"type": "object"}}
    given = form if name == "output_format" else {"format": form}
    found = chat(**{name: given}).response_format
    assert found is not None
    shape = msgspec.to_builtins(found)
    assert (shape["type"], shape["json_schema"]["schema"]) == ("json_schema", {"type": "object"})
    assert shape["json_schema"]["strict"] is True


def test_only_an_answer_that_has_begun_is_continued() -> None:
    def with_last(content: Any) -> ChatFields:
        return chat(messages=[USER, {"role": "assistant", "content": content}])

    call = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
    assert with_last("abc").continue_final_message
    assert with_last([text("abc")]).continue_final_message
    assert not with_last("").continue_final_message
    assert not with_last([text("abc"), call]).continue_final_message


IMAGE = {"type": "image", "source": {"type": "url", "url": "u"}}
FORM = {"type": "json_schema", "schema": {"type": "object"}}


def says(*blocks: Any) -> dict[str, Any]:
    return {"messages": [USER, {"role": "user", "content": list(blocks)}]}


def answers(*blocks: Any) -> dict[str, Any]:
    return {"messages": [USER, {"role": "assistant", "content": list(blocks)}, USER]}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"messages": None}, "messages: this field is required"),
        ({"messages": []}, "messages: must have at least one message"),
        ({"max_tokens": None}, "max_tokens: this field is required"),
        ({"max_tokens": 0}, "max_tokens: must be at least 1"),
        ({"messages": [USER] * 600}, "messages: this model's maximum context length"),
        (says(*[text("a")] * 16_384), "messages: at most 16384 messages and blocks"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role: expected 'user',"),
        ({"messages": [{"role": "user"}]}, "messages[0].content: expected text or a list, got"),
        (says(IMAGE), "messages[1].content[0]: this server takes text only, got 'image'"),
        (says(text("a"), {"type": "document"}), "messages[1].content[1]: this server takes text"),
        (
            says({"type": "tool_result", "tool_use_id": "c", "content": [IMAGE]}),
            "messages[1].content[0].content[0]: this server takes text only, got 'image'",
        ),
        (says({"type": "tool_result"}), "messages[1].content[0].tool_use_id: expected text, got"),
        (says({"type": "text"}), "messages[1].content[0].text: expected text, got None"),
        (answers({"type": "server_tool_use"}), "messages[1].content[0]: this server takes text"),
        (
            answers({"type": "tool_use", "id": "c", "name": "f", "input": "{}"}),
            "messages[1].content[0].input: expected an object, got '{}'",
        ),
        ({"system": [IMAGE]}, "system[0]: this server takes text only, got 'image'"),
        ({"stop_sequences": [""]}, "stop_sequences: a stop string must not be empty"),
        ({"temperature": -1}, "temperature: must be at least 0, got -1.0"),
        ({"tools": [TOOL | {"type": "web_search_20250305"}]}, "tools[0].type: this server has no"),
        ({"tools": [TOOL | {"defer_loading": True}]}, "tools[0].defer_loading: this server does"),
        ({"tools": [TOOL | {"input_examples": [{}]}]}, "tools[0].input_examples: this server"),
        (
            {"tools": [TOOL | {"allowed_callers": ["code_execution_20250825"]}]},
            "tools[0].allowed_callers: this server does not support it",
        ),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema: expected an object, got None"),
        ({"tools": [TOOL | {"name": 1}]}, "tools[0].name: expected text, got 1"),
        (
            {
                "tools": [TOOL | {"input_schema": {"type": "foo"}}],
                "tool_choice": {"type": "any"},
            },
            "tools[0].input_schema",
        ),
        ({"tool_choice": "auto"}, 'tool_choice: expected {"type": "auto", "any" or "none"}'),
        ({"tool_choice": {"type": "tool"}}, "tool_choice: expected"),
        ({"tool_choice": {"type": "any"}}, "tool_choice: needs tools"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}},
            "tool_choice: names 'g', which is not among the tools",
        ),
        ({"thinking": {"type": "between_tools"}}, "thinking.type 'between_tools': this server"),
        ({"thinking": {}}, "thinking.type: this field is required"),
        ({"thinking": {"type": "enabled", "display": "x"}}, "thinking.display 'x': this server"),
        ({"output_config": {"task_budget": {"total": 9}}}, "output_config.task_budget: this"),
        ({"output_format": FORM, "output_config": {"format": FORM}}, "output_format: cannot go"),
        ({"output_format": {"type": "text"}}, "output_format.type 'text': this server"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format: "),
        ({"context_management": {"edits": [{"type": "clear_tool_uses"}]}}, "context_management: "),
        ({"mcp_servers": [{"name": "m"}]}, "mcp_servers: this server does not support it"),
        ({"container": "c"}, "container: this server does not support it"),
        ({"n": 2}, "n: this server does not support it"),
        ({"stop": ["x"]}, "stop: is called stop_sequences here"),
        ({"max_completion_tokens": 3}, "max_completion_tokens: is called max_tokens here"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls: is called tool_choice.disable_par"),
        ({"response_format": {"type": "text"}}, "response_format: is called output_config.format"),
        ({"reasoning": {"enabled": True}}, "reasoning: is called thinking here"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content: expected text"),
    ],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_what_is_wrong_or_not_served_is_refused_by_its_own_name(
    served: Live, wrong: dict[str, Any], message: str
) -> None:
    body = {"model": MODEL_NAME, "max_tokens": 9, "messages": [USER]} | wrong
    response = await served.post("/v1/messages", body)
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (400, "invalid_request_error")
    assert error["message"].startswith(message)


def test_only_a_user_s_message_must_have_a_content() -> None:
    others: list[dict[str, Any]] = [{"role": "system"}, {"role": "assistant", "content": None}]
    assert messages_of_blocks([USER, *others, USER], None) == [
        USER,
        {"role": "system", "content": ""},
        {"role": "assistant", "content": ""},
        USER,
    ]


def test_blocks_are_counted_before_any_is_looked_at() -> None:
    result = {"type": "tool_result", "content": [None] * 16_384}
    with pytest.raises(ApiError, match="at most 16384 messages and blocks"):
        messages_of_blocks([{"role": "user", "content": [result]}], None)
