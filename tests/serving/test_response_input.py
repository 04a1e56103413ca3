"""The fields and the input of a request for a response become those of a chat."""

import json
from typing import Any

import msgspec
import pytest

from serving.errors import ApiError
from serving.response_input import messages_of_input
from serving.responses_fields import chat_of, read_responses
from tests.serving.test_responses import ASK, TOOLS


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
        thought("U"), called("h"), thought("V"), said | {"content": "B"}, output("h", "H"),
        said | {"content": [{"type": "refusal", "refusal": "No."}]}, said | {"content": ["Yes."]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "S"}]}, thought("W"),
        {"role": "developer", "content": "D"}, called("k"),
    ]  # fmt: skip

    def turn(**fields: Any) -> dict[str, Any]:
        return {"role": "assistant"} | fields

    def parts(*texts: str) -> list[dict[str, Any]]:
        return [{"type": "text", "text": text} for text in texts]

    assert messages_of_input(items, "I") == [
        {"role": "system", "content": "I"},
        user,
        turn(reasoning_content="T", content=parts("A"), tool_calls=[call("f"), call("g")]),
        {"role": "tool", "tool_call_id": "f", "content": "F"},
        {"role": "tool", "tool_call_id": "g", "content": parts("G")},
        # What comes before its calls' outputs is one turn, in whatever order it was written.
        turn(reasoning_content="U\nV", content=parts("B"), tool_calls=[call("h")]),
        {"role": "tool", "tool_call_id": "h", "content": "H"},
        turn(content=parts("No.")),
        turn(content=parts("Yes.")),
        turn(reasoning_content="S\nW"),
        {"role": "developer", "content": "D"},
        turn(tool_calls=[call("k")]),
    ]


def test_what_was_said_before_and_after_a_call_stays_on_lines_of_its_own() -> None:
    """A template may join the parts of a message without anything between them."""
    said: dict[str, Any] = {"type": "message", "role": "assistant"}
    called = {"type": "function_call", "call_id": "f", "name": "f", "arguments": "{}"}
    one, two = [{"type": "output_text", "text": "A"}], [{"type": "output_text", "text": "B"}]
    items = [said | {"content": one}, called, said | {"content": two}, called]
    (turn,) = messages_of_input(items, None)
    assert turn["content"] == [{"type": "text", "text": "A\nB"}]
    assert len(turn["tool_calls"]) == 2


def test_only_a_user_s_item_must_have_a_content() -> None:
    said = {"role": "assistant", "content": None}
    output = {"type": "function_call_output", "call_id": "f", "output": None}
    assert messages_of_input([said, output, {"role": "developer"}], None) == [
        {"role": "assistant", "content": [{"type": "text", "text": ""}]},
        {"role": "tool", "tool_call_id": "f", "content": ""},
        {"role": "developer", "content": ""},
    ]
    with pytest.raises(ApiError, match=r"input\[0\].content: expected text"):
        messages_of_input([{"role": "user"}], None)


def test_thoughts_that_are_not_told_leave_nothing() -> None:
    secret = {"type": "reasoning", "id": "r", "summary": [], "encrypted_content": "x"}
    user, said = {"role": "user", "content": "Q"}, {"role": "assistant", "content": None}
    assert messages_of_input([user, secret, secret, user], None) == [user, user]
    (_, turn) = messages_of_input([user, secret, said, secret], None)
    assert turn == {"role": "assistant", "content": [{"type": "text", "text": ""}]}


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
    ferry = TOOLS[0] | {"name": "ferry"}
    chosen = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function"} | ferry]}
    chat = chat_of(
        read_responses(
            json.dumps(body | {"tools": [*TOOLS, ferry], "tool_choice": chosen}).encode()
        )
    )
    assert chat.tool_choice == "required"
    assert [tool["function"]["name"] for tool in chat.tools or ()] == ["ferry"]
    for wrong in ({"mode": "none"}, {"tools": None}):
        asked = json.dumps(body | {"tool_choice": chosen | wrong}).encode()
        with pytest.raises(ApiError, match=r"tool_choice: expected .*allowed_tools"):
            chat_of(read_responses(asked))
    with pytest.raises(ApiError, match="input"):
        read_responses(b'{"input": 5}')
