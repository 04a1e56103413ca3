"""Calls whose strings hold the marker at which calls end, as code about tool calls does."""

from typing import Any

import pytest

from serving.parsing import Parsing
from serving.tool_calls import ToolCall
from tests.serving.test_parsing import CALL, END, KIMI, OBJECT, TOOLS, V31, Read, pieces_told

KIMI_END = "<|tool_call_end|>"


@pytest.mark.parametrize(
    ("name", "text", "marker"),
    [
        ("hermes", '<tool_call>{"name": "weather", "arguments": @}</tool_call>', "</tool_call>"),
        ("llama3", '{"name": "weather", "parameters": @}', "<|python_tag|>"),
        ("mistral", "[TOOL_CALLS]weather[ARGS]@", "[TOOL_CALLS]"),
        ("deepseekv31", V31.replace('{"city": "Zürich"}', "@") + END, END),
        ("kimi_k2", KIMI.replace('{"city": "Zürich"}', "@") + KIMI_END, KIMI_END),
    ],
)
def test_a_marker_in_a_string_of_a_call_ends_no_call(name: Any, text: str, marker: str) -> None:
    arguments = f'{{"city": "\\\\\\"{marker}", "at": "{marker * 2}\\n"}}'
    parsing = Parsing(tool_calls=name, tools=TOOLS)
    whole = text.replace("@", arguments)
    call_id = "functions.weather:0" if name == "kimi_k2" else ""
    calls = (ToolCall("weather", arguments, call_id),)
    for cut in range(len(whole)):
        assert pieces_told(parsing, [whole[:cut], whole[cut:]]) == Read("", "", calls)
    assert pieces_told(parsing, list(whole)) == Read("", "", calls)


def test_a_string_without_an_end_takes_no_later_line_into_its_call() -> None:
    parsing = Parsing(tool_calls="hermes", tools=TOOLS)
    call = f"<tool_call>\n{OBJECT}\n</tool_call>"
    for bad in ('{"name": "wea}', '{"name": "wea}\n', '{"a": "b\nc"}', '{"a": "\\\n"}'):
        text = f"<tool_call>{bad}</tool_call>\n{call}"
        for pieces in ([text], list(text)):
            read = pieces_told(parsing, pieces)
            assert read.calls == (CALL,)
            assert read.content.rstrip() == f"<tool_call>{bad}</tool_call>"
