"""What stands before and behind a call stays two texts where an answer shows them as one."""

from typing import Any

import pytest

from serving.parsing import Parsing
from tests.serving.test_parsing import CODER, END, GLM, KIMI, OBJECT, TOOLS, V31, told

CALLS: dict[Any, str] = {
    "hermes": f"<tool_call>{OBJECT}</tool_call>",
    "deepseekv31": f"<｜tool▁calls▁begin｜>{V31}{END}<｜tool▁calls▁end｜>",
    "kimi_k2": f"{KIMI}<|tool_call_end|>",
    "glm45": GLM,
    "qwen3_coder": CODER,
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("between", ["", " ", "\n\n"])
def test_texts_with_a_call_between_them_are_on_lines_of_their_own(name: Any, between: str) -> None:
    parsing, call = Parsing(tool_calls=name, tools=TOOLS), CALLS[name]
    for parts, content in (
        (["One.", call, "Two.", call, call, "Three."], "One.\nTwo.\nThree."),
        (["One.", call, "<"], "One.\n<"),
        ([call, "Two.", call], "Two."),
        (["One.", call], "One."),
    ):
        assert told(parsing, between.join(parts)).content == content
