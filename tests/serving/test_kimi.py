"""Answers as Kimi K2 writes them: its own call ids go to the client and come back."""

import json
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from serving.parsing import Parsing
from serving.tool_calls import ToolCall
from tests.serving.live import MODEL_NAME, live_server
from tests.serving.test_conversation import rendered, served
from tests.serving.test_parsed_chats import HELLO, TOOLS, writes
from tests.serving.test_parsing import TOOLS as TYPES
from tests.serving.test_parsing import Read, told

BEGIN, END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
ARGUMENTS = '{"city": "Zürich"}'
CALLS = (
    ToolCall("weather", ARGUMENTS, "functions.weather:3"),
    ToolCall("ferry_times", "{}", "functions.ferry_times:4"),
)
PARSING = Parsing("none", "kimi_k2", TYPES)
BOTH = Parsing("kimi_k2", "kimi_k2", TYPES)
# As the published template prints a conversation, as far as calls go.
TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.tool_calls %}{{ m.content }}<|tool_calls_section_begin|>"
    "{% for call in m.tool_calls %}<|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>"
    "{% if call.function.arguments is string %}{{ call.function.arguments }}"
    "{% else %}{{ call.function.arguments | tojson }}{% endif %}<|tool_call_end|>{% endfor %}"
    "<|tool_calls_section_end|>"
    "{% elif m.role == 'tool' %}## Return of {{ m.tool_call_id }}\n{{ m.content }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>"
    "{% endfor %}"
)


def _call(named: str, arguments: str = ARGUMENTS) -> str:
    return f"<|tool_call_begin|>{named}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"


SECTION = f"{BEGIN}{_call('functions.weather:3')}{_call('functions.ferry_times:4', '{}')}{END}"


def _spaced(named: str) -> str:
    return _call(f" {named} \n", f"\n{ARGUMENTS}\n")


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (SECTION, "", CALLS),
        (f"One moment.\n{SECTION}", "One moment.", CALLS),
        (f"{BEGIN}\n{_spaced('functions.weather:3')}\n{END}\n", "", CALLS[:1]),
        (_call("functions.weather:3"), "", CALLS[:1]),  # the section is left out
        (f"{BEGIN}{_call('functions.weather:3')}", "", CALLS[:1]),
        # The marker that ends the call was a token that ends the text.
        (SECTION.partition("<|tool_call_end|>")[0], "", CALLS[:1]),
        (_call("weather:3"), "", (ToolCall("weather", ARGUMENTS, "weather:3"),)),
        (_call("functions.weather"), "", (ToolCall("weather", ARGUMENTS, "functions.weather"),)),
        (f"{SECTION} Done.{SECTION}", "Done.", CALLS * 2),
    ],
)
def test_a_call_is_known_by_the_id_that_the_model_wrote(
    text: str, content: str, calls: tuple[ToolCall, ...]
) -> None:
    assert told(PARSING, text) == Read("", content, calls)


@pytest.mark.parametrize(
    "text",
    [
        _call("functions.nobody:0"),
        _call("functions.weather:x"),
        _call("functions.weather:0", '{"city": "Zür'),
        _call("functions.weather:0", '"Zürich"'),
        _call("functions.weather:0", ""),
        _call("", "{}"),
        _call("functions.:0", "{}"),
        "<|tool_call_begin|>functions.weather:0<|tool_call_end|>",
        "<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>",
        "<|tool_call_begin|>functions.wea",
        "<|tool_call_be",
    ],
)
def test_what_is_no_call_or_was_cut_stays_text(text: str) -> None:
    assert told(PARSING, text) == Read("", text)


@pytest.mark.parametrize(
    ("parsing", "text", "expected"),
    [
        (BOTH, "<think>Hm.</think>Yes.", Read("Hm.", "Yes.")),
        (BOTH, "Hm.</think>Yes.", Read("Hm.", "Yes.")),
        (BOTH, f"<think>Hm.</think>See:{SECTION}", Read("Hm.", "See:", CALLS)),
        # The end of the thought is left out.
        (BOTH, f"<think>Hm.\n{SECTION}", Read("Hm.", "", CALLS)),
        (BOTH, f"<think>Hm.{_call('functions.weather:3')}", Read("Hm.", "", CALLS[:1])),
        (BOTH, f"<think>{SECTION}Yes.", Read("", "Yes.", CALLS)),
        # The end of the thought comes after the calls.
        (BOTH, f"<think>Hm.{SECTION}</think>", Read("Hm.", "", CALLS)),
        (BOTH, f"<think>Hm.{SECTION}\n</think>\nYes.", Read("Hm.", "Yes.", CALLS)),
        (BOTH, f"<think>Hm.{SECTION}</think></think>", Read("Hm.", "</think>", CALLS)),
        (BOTH, "<think>Cut", Read("Cut")),
        (Parsing("kimi_k2", prompt="<|im_middle|><think>"), "Hm.</think>Yes.", Read("Hm.", "Yes.")),
        (Parsing("kimi_k2", prompt="<|im_middle|><think></think>"), "Yes.", Read("", "Yes.")),
        # The answer goes on where its prompt ends.
        (
            Parsing("kimi_k2", prompt="<think></think>It is ", begun="It is "),
            "wet.",
            Read("", "wet."),
        ),
        (Parsing("kimi_k2", prompt="<think>It is", begun="It is"), " wet.", Read("wet.")),
        # Without tools nothing is a call.
        (
            Parsing("kimi_k2", "kimi_k2"),
            f"a{BEGIN}</think>b{BEGIN}",
            Read(f"a{BEGIN}", f"b{BEGIN}"),
        ),
        (
            Parsing("qwen3", "hermes", TYPES),
            "<think><tool_call></think>a",
            Read("<tool_call>", "a"),
        ),
    ],
)
def test_a_thought_ends_at_its_tag_or_at_a_call(
    parsing: Parsing, text: str, expected: Read
) -> None:
    assert told(parsing, text) == expected


ANSWER = (
    f"<think>They want é.</think>One moment.{BEGIN}"
    f"{_call('functions.weather:0')}{_call('functions.weather:1')}{END}"
)
PARSERS: dict[str, Any] = {"reasoning_parser": "kimi_k2", "tool_call_parser": "kimi_k2"}
IDS = ["functions.weather:0", "functions.weather:1"]


@pytest.mark.parametrize("interval", [1, 50])
async def test_chats_and_responses_keep_the_ids_of_calls(interval: int) -> None:
    async with (
        live_server(writes(ANSWER), **PARSERS, stream_interval=interval) as live,
        AsyncOpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client,
    ):
        asked: dict[str, Any] = {"model": MODEL_NAME, "messages": HELLO, "tools": TOOLS}
        (choice,) = (await client.chat.completions.create(**asked)).choices
        message = choice.message
        assert (message.reasoning_content, message.content) == ("They want é.", "One moment.")
        assert [call.id for call in message.tool_calls] == IDS
        assert choice.finish_reason == "tool_calls"
        stream = await client.chat.completions.create(**asked, stream=True)
        deltas = [call async for x in stream for call in x.choices[0].delta.tool_calls or ()]
        assert [(call.index, call.id) for call in deltas] == list(enumerate(IDS))
        assert [call.function.arguments for call in deltas] == [ARGUMENTS] * 2

        tools: Any = [{"type": "function", **TOOLS[0]["function"]}]
        more: dict[str, Any] = {"model": MODEL_NAME, "input": "Weather?", "tools": tools}
        answer = await client.responses.create(**more)
        called = [item for item in answer.output if item.type == "function_call"]
        assert [item.call_id for item in called] == IDS
        async with client.responses.stream(**more) as events:
            final = await events.get_final_response() if [x async for x in events] else None
        assert final is not None
        assert [item.call_id for item in final.output if item.type == "function_call"] == IDS


def test_the_next_turn_has_the_call_as_it_was_written(tmp_path: Path) -> None:
    model = served(tmp_path, TEMPLATE)
    (call, _) = told(PARSING, SECTION).calls
    function = {"name": call.name, "arguments": call.arguments}
    text = rendered(
        model,
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": "See:",
            "tool_calls": [{"id": call.call_id, "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": call.call_id, "content": json.dumps("wet")},
    )
    written = f"See:{BEGIN}{_call('functions.weather:3')}{END}<|im_end|>"
    assert written in text
    assert text.endswith('## Return of functions.weather:3\n"wet"<|im_end|>')
