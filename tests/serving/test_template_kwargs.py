"""Variables of a chat template: the server's, those of an effort, and the request's."""

import json
from pathlib import Path
from typing import Any

import pytest

from model.config import ModelConfig
from serving.config import ServeConfig
from serving.errors import ApiError
from serving.openai_api import ChatReader
from serving.openai_fields import read_chat
from serving.protocol import ServedModel
from tests.serving.live import MODEL_PATH
from tests.serving.test_conversation import rendered, served
from transfer.errors import ConfigError

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


def _config(kwargs: str) -> ServeConfig:
    return ServeConfig(MODEL_PATH, "127.0.0.1:1", default_chat_template_kwargs=kwargs)


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({}, "a|low|no thought"),
        ({"reasoning_effort": "high"}, "a|high|thought"),
        ({"chat_template_kwargs": {"enable_thinking": True}}, "a|low"),
        ({"chat_template_kwargs": {"reasoning_effort": "mid"}}, "a|mid|no thought"),
    ],
)
def test_what_a_request_says_takes_precedence_over_the_servers_variables(
    asked: dict[str, Any], text: str, tmp_path: Path
) -> None:
    config = _config(json.dumps({"enable_thinking": False, "reasoning_effort": "low"}))
    tokenizer = served(tmp_path, TEMPLATE).tokenizer
    model = ServedModel(tokenizer, config, ModelConfig.from_dir(MODEL_PATH), lambda: 512)
    assert rendered(model, HELLO, **asked) == text


@pytest.mark.parametrize(
    "wrong", ["enable_thinking", "[1]", "null", "{", '{"messages": []}', '{"self": 1}']
)
def test_variables_that_no_template_could_take_stop_the_start(wrong: str) -> None:
    with pytest.raises(ConfigError, match="--default-chat-template-kwargs: "):
        _config(wrong)


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({"reasoning": None}, "a|"),
        ({"reasoning": {}}, "a|"),
        ({"reasoning": {"effort": "high"}}, "a|high|thought"),
        ({"reasoning": {"effort": "high"}, "reasoning_effort": "high"}, "a|high|thought"),
        ({"reasoning": {"effort": "none", "enabled": True}}, "a|none|no thought"),
        ({"reasoning": {"enabled": True}, "reasoning_effort": "none"}, "a|none|no thought"),
        ({"reasoning": {"enabled": True, "summary": "auto"}}, "a||thought"),
        ({"reasoning": {"enabled": False, "exclude": True}}, "a||no thought"),
        (
            {"reasoning": {"enabled": False}, "chat_template_kwargs": {"enable_thinking": True}},
            "a|",
        ),
    ],
)
async def test_reasoning_asks_for_what_other_fields_of_a_chat_ask_for(
    asked: dict[str, Any], text: str, tmp_path: Path
) -> None:
    model = served(tmp_path, TEMPLATE)
    body = json.dumps({"messages": [HELLO], **asked}).encode()
    reader = ChatReader(read_chat(body), model)
    request = await reader.finish(None)
    assert model.tokenizer.decode(request.choices[0].prompt.ids) == text
    assert reader.parsing.shows_reasoning is ("exclude" not in (asked["reasoning"] or {}))


def test_reasoning_that_contradicts_another_field_is_refused() -> None:
    for reasoning, other, value in (
        ({"effort": "high"}, "reasoning_effort", "low"),
        ({"exclude": True}, "include_reasoning", True),
    ):
        body = json.dumps({"messages": [HELLO], "reasoning": reasoning, other: value}).encode()
        with pytest.raises(ApiError, match=f"says something else than {other}") as caught:
            read_chat(body)
        assert (caught.value.status, caught.value.param) == (400, "reasoning")
