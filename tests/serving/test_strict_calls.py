"""Answers that may have calls: those of strict functions fit their parameters."""

import asyncio
from contextlib import closing
from typing import Any

import pytest

from serving.call_grammar import calls_form, strict_calls_form, thought_prefix
from serving.errors import ApiError
from serving.grammar import grammar_text
from serving.grammar_trial import GrammarTrial
from serving.parsing import Parsing, tools_of
from serving.tagged_text import CALL_FORMATS
from tests.serving.live import MODEL_NAME, MODEL_PATH, live_server
from tests.serving.test_grammar import MARKERS
from tests.serving.test_parsed_chats import HELLO
from tests.serving.test_responses import ASK
from tests.serving.texts import Texts, Untried
from transfer.errors import Code

DAY = {"type": "object", "properties": {"day": {"enum": [1, 2]}}, "required": ["day"]}
STRICT = {"name": "ferry_times", "parameters": DAY, "strict": True}
LOOSE = {"name": "weather", "parameters": DAY}
TOOLS: list[dict[str, Any]] = [{"type": "function", "function": each} for each in (STRICT, LOOSE)]
HELD = [name for name, form in CALL_FORMATS.items() if not (form.untyped or form.bare)]


PLACES = {"ferry_times": "tools[0].function.parameters"}


@pytest.fixture(scope="module")
def texts() -> Texts:
    """A model with the markers of all formats; its tags are no special tokens."""
    return Texts(MARKERS)


def parsing_of(name: Any, reasoning: Any = "none", **how: Any) -> Parsing:
    reasoning = "gpt-oss" if name == "gpt-oss" else reasoning
    return Parsing(reasoning, name, tools_of([STRICT, LOOSE], name), **how)


async def grammar_of(texts: Texts, name: Any, **how: Any) -> str:
    parsing = parsing_of(name, **how)
    form = strict_calls_form(parsing, TOOLS, texts.tokenizer)
    assert form is not None
    prefix = "" if form.whole else thought_prefix(parsing, texts.tokenizer)
    return await grammar_text(form, Untried(MODEL_PATH), prefix)


@pytest.mark.parametrize("name", [*HELD, "gpt-oss"])
async def test_calls_are_as_the_model_writes_them_with_the_arguments_of_their_tool(
    texts: Texts, name: Any
) -> None:
    grammar = await grammar_of(texts, name)
    for days, right in (([1, 2], True), ([3, 4], False)):
        schema = DAY | {"properties": {"day": {"enum": days}}}
        tools = [{"type": "function", "function": STRICT | {"parameters": schema}}]
        form = calls_form(parsing_of(name, must_call=True), tools, None, texts.tokenizer)
        calls = await grammar_text(form, Untried(MODEL_PATH))
        for seed in range(5):
            text = texts.drawn(calls, seed)
            if name != "gpt-oss":
                text = f"I look. {text}"
            assert texts.takes(grammar, text) == right, text


def call_of(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


RIGHT = call_of("ferry_times", '{"day": 2}')


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("No tool is needed.", True),
        ("", True),
        (f"I look.\n{RIGHT}\n{RIGHT}\nDone.", True),
        (call_of("weather", '{"any": ["thing"]}'), True),
        (f"<think>\nWhich day?</think>\n\n{RIGHT}", True),
        (f"<|channel|>{RIGHT}<|message|>", True),  # tokens of other formats
        (call_of("ferry_times", '{"day": 3}'), False),
        (call_of("weather", "[]"), False),
        (call_of("tides", "{}"), False),
        ("<tool_call>never mind", False),
        ("</tool_call>", False),
    ],
)
async def test_text_is_free_until_a_call_begins(texts: Texts, text: str, right: bool) -> None:
    for reasoning in ("none", "qwen3"):
        grammar = await grammar_of(texts, "qwen", reasoning=reasoning)
        assert texts.takes(grammar, text) == right, reasoning


async def test_arguments_are_an_object_whatever_else_their_schema_takes(texts: Texts) -> None:
    function = STRICT | {"parameters": DAY | {"type": ["null", "object"]}}
    tools = [{"type": "function", "function": function}]
    form = strict_calls_form(parsing_of("qwen"), tools, texts.tokenizer)
    grammar = await grammar_text(form, Untried(MODEL_PATH))
    assert texts.takes(grammar, RIGHT)
    assert not texts.takes(grammar, call_of("ferry_times", "null"))


async def test_one_call_is_made_where_no_more_are_wanted(texts: Texts) -> None:
    grammar = await grammar_of(texts, "hermes", one_call=True)
    assert texts.takes(grammar, f"x {RIGHT} y")
    assert not texts.takes(grammar, f"{RIGHT}{RIGHT}")


async def test_a_call_of_mistral_may_have_an_id_where_the_model_has_a_token_for_it() -> None:
    call = '[TOOL_CALLS]ferry_times{}[ARGS]{{"day": 1}}'
    with_id, without = call.format("[CALL_ID]a1B2c3D4e"), call.format("")
    texts = Texts((*MARKERS, "[CALL_ID]"))
    grammar = await grammar_of(texts, "mistral")
    assert texts.takes(grammar, f"I look.{with_id}{without}")
    assert not texts.takes(grammar, call.format("[CALL_ID]"))
    assert "CALL_ID" not in await grammar_of(Texts(MARKERS), "mistral")


async def test_gpt_oss_may_think_and_speak_before_it_calls(texts: Texts) -> None:
    grammar = await grammar_of(texts, "gpt-oss")
    again = "<|end|><|start|>assistant"
    thought = f"<|channel|>analysis<|message|>Which day?{again}"
    spoken = f"<|channel|>commentary<|message|>I look.{again}"
    header = "<|channel|>commentary to=functions.ferry_times <|constrain|>json<|message|>"
    for before in ("", thought, thought + spoken + thought):
        assert texts.takes(grammar, before + header + '{"day": 1}')
        assert texts.takes(grammar, f"{before}<|channel|>final<|message|>None runs.")
        assert not texts.takes(grammar, before + header + '{"day": 3}')
    assert not texts.takes(grammar, "<|channel|>analysis to=functions.ferry_times<|message|>{}")
    for header in (
        " to=functions.ferry_times<|channel|>commentary <|constrain|>json<|message|>",
        " to=functions.ferry_times<|channel|>commentary json<|message|>",
        "<|channel|>commentary to=functions.ferry_times<|message|>",
    ):
        text = f'{thought}{header}{{"day": 1}}'
        parser = parsing_of("gpt-oss", prompt="<|start|>assistant").parser()
        told = parser.feed(text) + parser.finish()
        assert [call.arguments for call in told.calls] == ['{"day": 1}']
        assert texts.takes(grammar, text)
        assert not texts.takes(grammar, text.replace("1", "3"))
    assert texts.takes(grammar, thought + "<|channel|>commentary<|message|>None runs.")


@pytest.mark.parametrize(
    ("name", "tools", "markers"),
    [
        ("qwen", [LOOSE, STRICT | {"strict": False}], ()),
        ("qwen", [], ()),
        ("none", [], ()),
        ("kimi_k2", [STRICT], ()),
        ("glm45", [STRICT], ()),
        ("qwen3_coder", [STRICT], ()),
        ("llama3", [STRICT], MARKERS),
        ("gpt-oss", [STRICT], ()),
    ],
)
def test_an_answer_is_free_where_nothing_is_strict_or_nothing_marks_a_call(
    name: Any, tools: list[Any], markers: tuple[str, ...]
) -> None:
    texts = Texts(markers)
    parsing = Parsing("none", name, tools_of(tools, name))
    listed = [{"type": "function", "function": each} for each in tools]
    assert strict_calls_form(parsing, listed, texts.tokenizer) is None


async def test_only_the_schema_of_a_strict_function_must_be_one_that_can_be_followed(
    texts: Texts,
) -> None:
    bad = {"type": "object", "properties": {"a": {"type": "x"}}}
    loose = {"type": "function", "function": LOOSE | {"parameters": bad}}
    strict = {"type": "function", "function": STRICT | {"parameters": bad}}
    tokenizer = Texts().tokenizer

    async def tried(tools: list[Any]) -> None:
        form = strict_calls_form(parsing_of("qwen"), tools, tokenizer, PLACES)
        assert form is not None
        with closing(GrammarTrial(MODEL_PATH)) as trial:
            await grammar_text(form, trial)

    await tried([TOOLS[0], loose])
    with pytest.raises(ApiError, match=r"^tools\[0\].function.parameters: of 'ferry_times'"):
        await tried([strict, TOOLS[1]])


# --- through the API ------------------------------------------------------------------------------


CHAT = {"model": MODEL_NAME, "messages": HELLO, "tools": TOOLS}
RESPONSE = ASK | {"tools": [{"type": "function"} | each for each in (STRICT, LOOSE)]}
PARSERS: dict[str, Any] = {"reasoning_parser": "qwen3", "tool_call_parser": "qwen"}


@pytest.mark.parametrize(
    ("path", "body", "held"),
    [
        ("/v1/chat/completions", CHAT, True),
        ("/v1/responses", RESPONSE, True),
        ("/v1/chat/completions", CHAT | {"tool_choice": "none"}, False),
        ("/v1/chat/completions", CHAT | {"tools": TOOLS[1:]}, False),
        (
            "/v1/chat/completions",
            CHAT
            | {"messages": [*HELLO, {"role": "assistant", "content": "I"}]}
            | {"continue_final_message": True, "add_generation_prompt": False},
            False,
        ),
    ],
)
async def test_a_grammar_goes_along_where_a_tool_that_may_be_called_is_strict(
    path: str, body: dict[str, Any], held: bool
) -> None:
    async with live_server(auto_step=False, **PARSERS) as live:
        asking = asyncio.create_task(live.post(path, body))
        (room,) = await live.cluster.submitted(1)
        worker = live.cluster.prefill[0]
        grammar = worker.rooms[room].submit.sampling.grammar
        assert ("ferry_times" in grammar) == held
        worker.fail(room, Code.TOO_LONG, "seen enough")
        assert (await asking).status_code == 400


async def test_a_form_that_is_asked_for_comes_before_the_calls() -> None:
    async with live_server(auto_step=False, **PARSERS) as live:
        asking = asyncio.create_task(live.post("/v1/chat/completions", CHAT | {"regex": "said"}))
        (room,) = await live.cluster.submitted(1)
        worker = live.cluster.prefill[0]
        assert "ferry_times" not in worker.rooms[room].submit.sampling.grammar
        worker.fail(room, Code.TOO_LONG, "seen enough")
        assert (await asking).status_code == 400


@pytest.mark.parametrize("field", [{"ignore_eos": True}, {"min_tokens": 3}])
async def test_what_a_strict_tool_cannot_go_with_is_named(field: dict[str, Any]) -> None:
    async with live_server(**PARSERS) as live:
        for path, body, place in (
            ("/v1/chat/completions", CHAT, "tools[0].function.strict"),
            ("/v1/responses", RESPONSE, "tools[0].strict"),
        ):
            refused = await live.post(path, body | field)
            assert refused.status_code == 400
            (name,) = field
            message = refused.json()["error"]["message"]
            assert message == f"{name}: cannot go with {place}, which says where the text ends"
