"""The effort that a request asks for, as each kind of chat template knows it."""

from pathlib import Path
from typing import Any

import pytest

from tests.serving.test_conversation import rendered, served

# Qwen and GLM turn thinking off by the one name, DeepSeek turns it on by the other.
TEMPLATE = (
    "{{ messages[0].content }}|{{ reasoning_effort }}"
    "{% if enable_thinking is defined and not enable_thinking %}|no thought{% endif %}"
    "{% if thinking is defined and thinking %}|thought{% endif %}"
)
HELLO = {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({}, "a|"),
        ({"reasoning_effort": None}, "a|"),
        ({"reasoning_effort": "none"}, "a|none|no thought"),
        ({"reasoning_effort": "high"}, "a|high|thought"),
        (
            {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
            "a|none",
        ),
        (
            {"reasoning_effort": "high", "chat_template_kwargs": {"thinking": False}},
            "a|high",
        ),
    ],
)
def test_an_effort_turns_thinking_on_and_none_turns_it_off(
    asked: dict[str, Any], text: str, tmp_path: Path
) -> None:
    assert rendered(served(tmp_path, TEMPLATE), HELLO, **asked) == text
