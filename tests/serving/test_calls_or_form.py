"""Answers with a response format, where the model may call tools instead."""

import json
from typing import Any

import pytest

from serving.call_grammar import calls_form, calls_or_form, thought_prefix
from serving.forms import form_of
from serving.grammar import grammar_text
from serving.openai_fields import read_chat
from serving.tagged_text import CALL_FORMATS
from tests.serving.live import MODEL_NAME, MODEL_PATH
from tests.serving.test_grammar import MARKERS
from tests.serving.test_must_call import FLAT_TOOLS, FORMATS, SAID, TOOLS
from tests.serving.test_parsed_chats import (
    HELLO,
    ONE,
    client_of,
    grammar_asked_of_workers,
    streamed,
)
from tests.serving.test_responses import ASK
from tests.serving.test_strict_calls import TOOLS as STRICT_TOOLS
from tests.serving.test_strict_calls import call_of, parsing_of
from tests.serving.texts import Texts, Untried

SAYS = '{"said": "x"}'
MARKED = [*(name for name, form in CALL_FORMATS.items() if not form.bare), "gpt-oss"]
CALLS = [("weather", '{"city": "Zürich"}')]


@pytest.fixture(scope="module")
def texts() -> Texts:
    return Texts(MARKERS)


async def grammar_of(texts: Texts, name: Any, **how: Any) -> str:
    parsing = parsing_of(name, may_call=True, **how)
    asked = {"messages": HELLO, "response_format": FORMATS[0]}
    said = form_of(read_chat(json.dumps(asked).encode()), None, [1019], texts.tokenizer)
    assert said is not None
    form = calls_or_form(said, parsing, STRICT_TOOLS, texts.tokenizer)
    return await grammar_text(form, Untried(MODEL_PATH), thought_prefix(parsing, texts.tokenizer))


@pytest.mark.parametrize("name", MARKED)
async def test_an_answer_is_of_the_form_or_it_is_calls(texts: Texts, name: Any) -> None:
    grammar = await grammar_of(texts, name)
    says = f"<|channel|>final<|message|>{SAYS}" if name == "gpt-oss" else SAYS
    assert texts.takes(grammar, says)
    assert not texts.takes(grammar, says.replace("said", "told"))
    assert not texts.takes(grammar, f"Well. {says}")
    form = calls_form(parsing_of(name, must_call=True), STRICT_TOOLS, None, texts.tokenizer)
    calls = await grammar_text(form, Untried(MODEL_PATH))
    for seed in range(3):
        assert texts.takes(grammar, texts.drawn(calls, seed))


@pytest.mark.parametrize(
    ("text", "right"),
    [
        (call_of("ferry_times", '{"day": 2}'), True),
        (call_of("ferry_times", '{"day": 3}'), False),
        (call_of("weather", '{"any": ["thing"]}'), True),
        (call_of("tides", "{}"), False),
        (f"<think>\nWhich?</think>\n\n{SAYS}", True),
        ("<think>\nWhich?</think>\n\n" + call_of("weather", "{}"), True),
        (SAYS + call_of("weather", "{}"), False),
    ],
)
async def test_only_strict_tools_have_parameters_to_follow(
    texts: Texts, text: str, right: bool
) -> None:
    assert texts.takes(await grammar_of(texts, "qwen", reasoning="qwen3"), text) == right


@pytest.mark.parametrize("parser", ["qwen", "glm45"])
@pytest.mark.parametrize(("text", "found"), [(ONE, ("", CALLS)), (SAYS, (SAYS, []))])
async def test_clients_get_what_the_model_chose(parser: str, text: str, found: Any) -> None:
    content, calls = found
    async with client_of(text, tool_call_parser=parser) as chats:
        asked: dict[str, Any] = {"tools": TOOLS, "response_format": FORMATS[0]}
        (choice,) = (await chats.create(model=MODEL_NAME, messages=HELLO, **asked)).choices
        assert (choice.message.content or "") == content
        told = [
            (call.function.name, call.function.arguments)
            for call in choice.message.tool_calls or ()
        ]
        assert told == calls
        reasons = ["tool_calls" if calls else "stop"]
        assert await streamed(chats, **asked) == ("", content, calls, reasons)


CHAT = {"messages": HELLO, "tools": TOOLS, "response_format": FORMATS[0]}
FORM = {"format": {"type": "json_schema", "name": "said", "schema": SAID}}


@pytest.mark.parametrize(
    ("path", "asked", "parser", "may_call"),
    [
        ("chat/completions", CHAT, "qwen", True),
        ("responses", ASK | {"tools": FLAT_TOOLS, "text": FORM}, "qwen", True),
        ("chat/completions", CHAT, "llama3", False),  # its calls begin as other JSON does
        ("chat/completions", CHAT, "none", False),
        ("chat/completions", CHAT | {"tools": []}, "qwen", False),
        ("chat/completions", CHAT | {"tool_choice": "none"}, "qwen", False),
        ("chat/completions", CHAT | {"response_format": None, "regex": "said"}, "qwen", False),
        ("chat/completions", CHAT | {"continue_final_message": True}, "qwen", False),
    ],
)
async def test_tools_may_be_called_beside_a_format_that_a_client_asks_for(
    path: str, asked: dict[str, Any], parser: str, may_call: bool
) -> None:
    grammar = await grammar_asked_of_workers(f"/v1/{path}", asked, tool_call_parser=parser)
    assert "said" in grammar
    assert ("weather" in grammar) == may_call
