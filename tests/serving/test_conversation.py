"""Conversations as each kind of chat template takes them."""

import asyncio
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from model.config import ModelConfig
from serving import conversation
from serving.config import ServeConfig
from serving.conversation import (
    PromptFields,
    allowed_tools,
    messages_of,
    render,
    render_prompt,
)
from serving.errors import ApiError
from serving.openai_api import ChatReader
from serving.openai_fields import read_chat
from serving.protocol import ServedModel
from serving.tokenizer import CallForm, Tokenizer
from tests.serving.live import MODEL_PATH

GOLDENS = Path(__file__).parents[1] / "goldens" / "tokenizer"
ASKS_FOR_CALLS = "m.tool_calls is defined"
ASKS_FOR_NULL = "m.content is none"
PRINTS_JSON = "(m.tool_calls[0].function.arguments | tojson)"
JOINS = "m.tool_calls[0].function.arguments"
PRINTS_PYTHON = "(m.tool_calls[0].function.arguments | string)"


def _template(asks: str, arguments: str) -> str:
    call = "'[' + m.role + '>' + m.tool_calls[0].function.name + " + arguments + " + ']'"
    text = "'[' + m.role + ']' + m.content"
    body = f"{{% if {asks} %}}{{{{ {call} }}}}{{% else %}}{{{{ {text} }}}}{{% endif %}}"
    return f"{{% for m in messages %}}{body}{{% endfor %}}"


def served(folder: Path, template: Any) -> ServedModel:
    shutil.copy(GOLDENS / "tokenizer.json", folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    config = ServeConfig(registry_address="127.0.0.1:1", model_path=MODEL_PATH)
    model_config = ModelConfig.from_dir(MODEL_PATH)
    return ServedModel(Tokenizer.from_dir(folder), config, model_config, lambda: 512)


def _prompt(model: ServedModel, arguments: Any, content: Any = None) -> str:
    function = {"name": "f", "arguments": arguments}
    call = {"id": "1", "type": "function", "function": function}
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": content, "tool_calls": [call]},
        {"role": "tool", "content": "b", "tool_call_id": "1"},
    ]
    fields = read_chat(json.dumps({"messages": messages}).encode())
    return render(model, messages_of(fields, model), fields)


@pytest.mark.parametrize(
    ("asks", "arguments", "form"),
    [
        (ASKS_FOR_CALLS, PRINTS_JSON, CallForm("", False)),
        (ASKS_FOR_NULL, PRINTS_JSON, CallForm(None, False)),
        (ASKS_FOR_CALLS, JOINS, CallForm("", True)),
        (ASKS_FOR_CALLS, PRINTS_PYTHON, CallForm("", True)),
        (ASKS_FOR_NULL, JOINS, CallForm(None, True)),
    ],
)
def test_a_call_is_printed_by_every_template_that_prints_calls(
    asks: str, arguments: str, form: CallForm, tmp_path: Path
) -> None:
    model = served(tmp_path, _template(asks, arguments))
    assert [habits.call_form for habits in model.tokenizer.habits] == [form, form]
    for given in ('{"x": "é"}', {"x": "é"}):
        assert _prompt(model, given) == '[user]a[assistant>f{"x": "é"}][tool]b'
    for content in (None, "", [], [{"type": "text", "text": ""}]):
        assert _prompt(model, "", content) == "[user]a[assistant>f{}][tool]b"


@pytest.mark.parametrize("option", ["echo", "continue_final_message"])
async def test_an_answer_may_follow_calls_beside_null(option: str, tmp_path: Path) -> None:
    model = served(tmp_path, _template(ASKS_FOR_NULL, PRINTS_JSON))
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    last = {"role": "assistant", "content": None, "tool_calls": [call]}
    asked = {"messages": [{"role": "user", "content": "a"}, last], option: True, "max_tokens": 1}
    reader = ChatReader(read_chat(json.dumps(asked).encode()), model)
    if option == "echo":
        assert (await reader.finish(None)).choices[0].prompt.text == ""
    else:
        with pytest.raises(ApiError, match="continue_final_message"):
            await reader.finish(None)


def test_a_template_without_calls_gets_the_usual_form(tmp_path: Path) -> None:
    model = served(tmp_path, _template("false", JOINS))
    assert model.tokenizer.habits[0].call_form == CallForm("", False)
    assert _prompt(model, '{"x": 1}') == "[user]a[assistant][tool]b"


@pytest.mark.parametrize("turn", [{"content": None}, {}, {"content": None, "tool_calls": None}])
def test_an_answer_without_text_is_an_empty_turn(turn: dict[str, Any], tmp_path: Path) -> None:
    for asks in (ASKS_FOR_CALLS, ASKS_FOR_NULL):
        model = served(tmp_path, _template(f"m.tool_calls and {asks}", PRINTS_JSON))
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", **turn}]
        fields = read_chat(json.dumps({"messages": messages}).encode())
        assert render(model, messages_of(fields, model), fields) == "[user]a[assistant]"


@pytest.mark.parametrize("role", ["tool", "system", "developer"])
def test_who_had_nothing_to_say_has_an_empty_turn(role: str, tmp_path: Path) -> None:
    model = served(tmp_path, _template(ASKS_FOR_CALLS, PRINTS_JSON))
    for turn in ({"role": role}, {"role": role, "content": None}):
        assert rendered(model, {"role": "user", "content": "a"}, turn) == f"[user]a[{role}]"


@pytest.mark.parametrize(
    ("turn", "said"),
    [
        ({"role": "user", "content": None}, r"messages\[0\].content: expected text, got null"),
        (
            {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}},
            r"messages\[0\].function_call: unsupported; expected tool_calls",
        ),
    ],
)
def test_a_turn_without_anything_in_it_is_refused(
    turn: dict[str, Any], said: str, tmp_path: Path
) -> None:
    model = served(tmp_path, _template(ASKS_FOR_CALLS, PRINTS_JSON))
    with pytest.raises(ApiError, match=said):
        rendered(model, turn)


@pytest.mark.parametrize("content", [None, "", "b"])
def test_an_older_form_of_a_call_beside_calls_is_left_out(
    content: str | None, tmp_path: Path
) -> None:
    """A client that holds both forms of one call sends both back."""
    function = {"name": "f", "arguments": "{}"}
    call = {"id": "1", "type": "function", "function": function}
    answer = {"role": "assistant", "content": content, "tool_calls": [call]}
    model = served(tmp_path, _template(ASKS_FOR_CALLS, PRINTS_JSON))
    assert rendered(model, answer | {"function_call": function}) == rendered(model, answer)
    with pytest.raises(ApiError, match=r"messages\[0\].function_call: unsupported"):
        rendered(model, {"role": "assistant", "content": "b", "function_call": function})


@pytest.mark.parametrize("function", [{}, {"arguments": None}, {"arguments": ""}])
def test_a_call_without_arguments_has_none_of_them(
    function: dict[str, Any], tmp_path: Path
) -> None:
    calls = [{"id": "1", "type": "function", "function": {"name": "f", **function}}]
    answer = {"role": "assistant", "tool_calls": calls}
    for arguments in (PRINTS_JSON, JOINS):
        model = served(tmp_path, _template(ASKS_FOR_CALLS, arguments))
        assert rendered(model, answer) == "[assistant>f{}]"


def test_text_that_an_answer_had_as_a_part_comes_back_as_one(tmp_path: Path) -> None:
    model = served(tmp_path, _template(ASKS_FOR_CALLS, PRINTS_JSON))
    parts = [{"type": "output_text", "text": "b", "annotations": []}]
    assert rendered(model, {"role": "assistant", "content": parts}) == "[assistant]b"


def rendered(model: ServedModel, *messages: dict[str, Any], **asked: Any) -> str:
    fields = read_chat(json.dumps({"messages": messages, **asked}).encode())
    return render(model, messages_of(fields, model), fields)


@pytest.mark.parametrize("role", ["assistant", "user"])
def test_a_refusal_is_text_as_any_other_part(role: str, tmp_path: Path) -> None:
    model = served(tmp_path, _template(ASKS_FOR_CALLS, PRINTS_JSON))
    parts = [{"type": "text", "text": "Sorry."}, {"type": "refusal", "refusal": "No."}]
    assert rendered(model, {"role": role, "content": parts}) == f"[{role}]Sorry.\nNo."
    for wrong in ({"type": "refusal"}, {"type": "refusal", "refusal": 1, "text": "No."}):
        where = r"messages\[0\].content\[0\].refusal: expected text"
        with pytest.raises(ApiError, match=where):
            rendered(model, {"role": role, "content": [wrong]})


@pytest.mark.parametrize("content", [None, ""])
def test_a_refusal_stands_in_for_an_answer_s_text(content: str | None, tmp_path: Path) -> None:
    model = served(tmp_path, _template(ASKS_FOR_CALLS, PRINTS_JSON))
    turn = {"role": "assistant", "content": content}
    assert rendered(model, {**turn, "refusal": "No."}) == "[assistant]No."
    assert rendered(model, {**turn, "refusal": None}) == "[assistant]"
    assert rendered(model, {**turn, "content": "Yes.", "refusal": "No."}) == "[assistant]Yes."
    with pytest.raises(ApiError, match=r"messages\[0\].refusal: expected text, got 1"):
        rendered(model, {**turn, "refusal": 1})


@pytest.mark.parametrize("calls", [None, []])
def test_an_answer_comes_back_as_a_client_holds_it_with_null_in_what_it_has_not(
    calls: list[Any] | None, tmp_path: Path
) -> None:
    """Templates count the calls of a message that has the field."""
    test = "m.tool_calls is defined or 'audio' in m"
    model = served(tmp_path, _template(test, "(m.tool_calls | length | string)"))
    answer = {"role": "assistant", "content": "b", "tool_calls": calls, "audio": None}
    assert rendered(model, {"role": "user", "content": "a"}, answer) == "[user]a[assistant]b"


def test_a_call_beside_an_empty_text_is_a_call(tmp_path: Path) -> None:
    """A client that joins the pieces of a stream sends it back like this."""
    model = served(tmp_path, _template(ASKS_FOR_NULL, PRINTS_JSON))
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    assert rendered(model, {"role": "user", "content": "a"}, answer) == "[user]a[assistant>f{}]"


ROLES = ("user", "system", "developer", "assistant", "tool")
PARTS = [{"type": "text", "text": text} for text in ("a", "b")]
JOINED = "(m.content if m.content is string else m.content | map(attribute='text') | join)"


@pytest.mark.parametrize("taken", ROLES)
def test_parts_are_one_text_where_a_template_takes_those_of_others(
    taken: str, tmp_path: Path
) -> None:
    by_parts = _printing(f"({JOINED} if m.role == '{taken}' else '' + m.content)")
    listed = [{"name": "default", "template": by_parts}]
    listed += [{"name": "tool_use", "template": _printing("m.content")}]
    model = served(tmp_path, listed)
    for role in ROLES:
        said = {"role": role, "content": PARTS}
        expected = "ab" if role == taken else "a\nb"  # ab: the template was given parts
        assert rendered(model, said) == f"[{role}]{expected}"
        assert rendered(model, said, tools=[_tool("f")]) == f"[{role}]a\nb"
        for empty in ([], [{"type": "text", "text": ""}]):
            assert rendered(model, {"role": role, "content": empty}) == f"[{role}]"


@pytest.mark.parametrize(
    ("role", "only"),
    [
        ("system", "loop.first"),
        ("system", "not loop.first"),
        ("assistant", "not m.tool_calls"),
        ("assistant", "m.tool_calls"),
    ],
)
def test_parts_are_one_text_where_a_template_takes_them_in_some_places_alone(
    role: str, only: str, tmp_path: Path
) -> None:
    model = served(tmp_path, _printing(f"({JOINED} if {only} else '' + m.content)"))
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    asked = {"role": "user", "content": "x"}
    for said in ({}, {"tool_calls": [call]}) if role == "assistant" else ({},):
        turn = {"role": role, "content": PARTS, **said}
        assert rendered(model, turn, asked, turn) == f"[{role}]a\nb[user]x[{role}]a\nb"


def test_parts_of_a_role_that_a_template_leaves_out_elsewhere_are_its_own(tmp_path: Path) -> None:
    """As MiniMax's does: of systems it prints the first."""
    left_out = "m.role == 'system' and not loop.first"
    model = served(tmp_path, _printing(f"('' if {left_out} else {JOINED})"))
    turn = {"role": "system", "content": PARTS}
    assert rendered(model, turn, {"role": "user", "content": "x"}, turn).startswith("[system]ab[")


def test_a_developer_s_parts_are_those_of_a_system_where_it_speaks_as_one(tmp_path: Path) -> None:
    refused = "raise_exception('who?') if m.role == 'developer'"
    model = served(tmp_path, _printing(f"({refused} else {JOINED})"))
    assert rendered(model, {"role": "developer", "content": PARTS}) == "[system]ab"


def test_an_answer_that_goes_on_is_one_text(tmp_path: Path) -> None:
    model = served(tmp_path, _printing(JOINED))
    turns = ({"role": "user", "content": PARTS}, {"role": "assistant", "content": PARTS})
    assert rendered(model, *turns) == "[user]ab[assistant]ab"
    assert rendered(model, *turns, continue_final_message=True) == "[user]ab[assistant]a\nb"


def test_no_part_is_lost_where_a_template_prints_the_first_alone(tmp_path: Path) -> None:
    first = "(m.content if m.content is string else m.content[0].text)"
    model = served(tmp_path, _printing(first))
    asked = {"role": "user", "content": [{"type": "text", "text": text} for text in ("a", "b")]}
    assert rendered(model, asked) == "[user]a\nb"


def _printing(content: str) -> str:
    """A template that prints the role of each message and this expression of it."""
    return f"{{% for m in messages %}}{{{{ '[' + m.role + ']' + {content} }}}}{{% endfor %}}"


@pytest.mark.parametrize(
    ("test", "role"),
    [
        ("m.role in ('system', 'user')", "system"),
        ("m.role != 'developer' or raise_exception('who?')", "system"),
        ("true", "developer"),
    ],
)
def test_what_a_developer_says_is_in_the_prompt(test: str, role: str, tmp_path: Path) -> None:
    shown = "{{ '[' + m.role + ']' + m.content }}"
    model = served(tmp_path, f"{{% for m in messages if {test} %}}{shown}{{% endfor %}}")
    said = {"role": "developer", "content": "RULES"}
    assert rendered(model, said, {"role": "user", "content": "a"}) == f"[{role}]RULES[user]a"


@pytest.mark.parametrize("rest", ["raise_exception('not first')", "''"])
@pytest.mark.parametrize("second", ["system", "developer"])
def test_instructions_are_one_message_where_a_template_takes_no_second(
    second: str, rest: str, tmp_path: Path
) -> None:
    """Agents send their own and their user's; some templates refuse the second, some drop it."""
    shown = "'[' + m.role + ']' + m.content"
    test = "loop.first or m.role == 'user'"
    first = f"{{% for m in messages %}}{{{{ {shown} if {test} else {rest} }}}}{{% endfor %}}"
    listed = [{"name": "default", "template": first}]
    listed += [{"name": "tool_use", "template": _printing(JOINED)}]
    model = served(tmp_path, listed)
    said = ({"role": "system", "content": "A"}, {"role": second, "content": PARTS})
    asked = {"role": "user", "content": "c"}
    assert rendered(model, *said, asked) == "[system]A\n\na\nb[user]c"
    assert rendered(model, *said, asked, tools=[_tool("f")]) == f"[system]A[{second}]ab[user]c"


def test_a_chat_with_tools_is_written_for_the_template_that_it_has(tmp_path: Path) -> None:
    """Templates may differ in how they print a call, and in whether they know developers."""
    no_developer = "m.role == 'developer' %}{% elif "
    templates = {
        "default": _template(ASKS_FOR_CALLS, PRINTS_JSON),
        "tool_use": _template(no_developer + ASKS_FOR_CALLS, JOINS),
    }
    listed = [{"name": name, "template": text} for name, text in templates.items()]
    model = served(tmp_path, listed)
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    said = {"role": "developer", "content": "RULES"}
    turns = (said, {"role": "assistant", "content": None, "tool_calls": [call]})
    without = '[developer]RULES[assistant>f{"x": 1}]'
    assert rendered(model, *turns) == without
    assert rendered(model, *turns, tools=[_tool("f")], tool_choice="none") == without
    assert rendered(model, *turns, tools=[_tool("f")]) == '[system]RULES[assistant>f{"x": 1}]'


def test_what_was_thought_before_a_call_has_the_name_that_gpt_oss_knows(tmp_path: Path) -> None:
    shown = "{{ '[' + m.role + ']' + (m.thinking or '') + m.content }}"
    model = served(tmp_path, f"{{% for m in messages %}}{shown}{{% endfor %}}")
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    turn = {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [call]}
    assert rendered(model, turn) == "[assistant]"
    model.config = replace(model.config, reasoning_parser="gpt-oss", tool_call_parser="gpt-oss")
    assert rendered(model, turn) == "[assistant]Hm."
    assert rendered(model, {**turn, "thinking": ""}) == "[assistant]Hm."
    assert rendered(model, {**turn, "content": "b"}) == "[assistant]b"


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
def test_a_thought_comes_back_by_whichever_name_its_client_has_for_it(
    name: str, tmp_path: Path
) -> None:
    shown = "{{ '[' + m.role + ']' + (m.reasoning_content or '') + '|' + m.content }}"
    model = served(tmp_path, f"{{% for m in messages %}}{shown}{{% endfor %}}")
    turn = {"role": "assistant", "content": "b", "reasoning_content": None}
    assert rendered(model, {**turn, name: "Hm."}) == "[assistant]Hm.|b"
    assert rendered(model, {"role": "user", "content": "b", name: "Hm."}).endswith("|b")
    assert rendered(model, {**turn, "reasoning": {"effort": "low"}}) == "[assistant]|b"
    both = {**turn, "reasoning": "older", "reasoning_content": "Hm."}
    assert rendered(model, both) == "[assistant]Hm.|b"
    for empty in ("reasoning_content", "thinking", "reasoning"):
        told = {"role": "assistant", "content": "b", empty: ""}
        assert rendered(model, {**told, name: "Hm."}) == "[assistant]Hm.|b"
    names = "{{ messages[0].keys() | list }}"
    plain = served(tmp_path, names)
    nothing = {"role": "assistant", "content": "b", name: ""}
    assert rendered(plain, nothing) == str(["role", "content", name])


async def test_a_long_conversation_is_rendered_beside_the_event_loop(tmp_path: Path) -> None:
    """For every message the template looks at all that follow, as GPT-OSS's does after calls."""
    template = (
        "{% for m in messages %}{% for n in messages[loop.index:] %}{% endfor %}x{% endfor %}"
    )
    model = served(tmp_path, template)
    model.context_length = lambda: 10_000  # type: ignore[method-assign]
    asked = {"messages": [{"role": "user", "content": "a"}] * 2000}
    fields = read_chat(json.dumps(asked).encode())
    making = asyncio.create_task(render_prompt(model, messages_of(fields, model), fields))
    turns = 0
    while not making.done():
        turns += 1
        await asyncio.sleep(0)
    assert await making == "x" * 2000
    assert turns > 10


FOR_EVER = (
    "{% for m in messages %}{% for a in messages %}{% for b in messages %}{{ b.role }}"
    "{% endfor %}{% endfor %}{% endfor %}"
)


def _long(model: ServedModel) -> tuple[list[dict[str, Any]], PromptFields]:
    asked = {"messages": [{"role": "user", "content": "a"}] * 1000}
    fields = read_chat(json.dumps(asked).encode())
    model.context_length = lambda: 10_000  # type: ignore[method-assign]
    return messages_of(fields, model), fields


async def test_a_client_that_leaves_stops_its_template(tmp_path: Path) -> None:
    """Otherwise others would wait for their conversations until it ends, in half an hour."""
    model = served(tmp_path, FOR_EVER)
    making = asyncio.create_task(render_prompt(model, *_long(model)))
    await asyncio.sleep(0.05)
    making.cancel()
    async with asyncio.timeout(20):
        await model.templates.run(int)


async def test_a_template_that_takes_too_long_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversation, "_MAX_RENDER_S", 0.05)
    model = served(tmp_path, FOR_EVER)
    async with asyncio.timeout(20):
        with pytest.raises(ApiError, match="takes too long for a conversation like this"):
            await render_prompt(model, *_long(model))


async def test_a_template_that_refuses_a_long_conversation_is_told_of(tmp_path: Path) -> None:
    model = served(tmp_path, "{{ raise_exception('no more than one') }}")
    fields = read_chat(json.dumps({"messages": [{"role": "user", "content": "a"}] * 40}).encode())
    with pytest.raises(ApiError, match="no more than one"):
        await render_prompt(model, messages_of(fields, model), fields)


def _tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def _allowing(mode: str, *names: str) -> dict[str, Any]:
    tools = [_tool(name) for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize(
    ("choice", "names", "mode"),
    [
        (_allowing("auto", "b"), ["b"], "auto"),
        (_allowing("required", "c", "a", "nobody"), ["a", "c"], "required"),
        (_allowing("auto"), None, "auto"),
        ("auto", ["a", "b", "c"], "auto"),
        (_tool("a"), ["a", "b", "c"], _tool("a")),
        (None, ["a", "b", "c"], None),
    ],
)
def test_of_the_tools_those_are_offered_that_are_allowed(
    choice: Any, names: list[str] | None, mode: Any
) -> None:
    asked = {"messages": [], "tools": [_tool(name) for name in "abc"], "tool_choice": choice}
    tools, left = allowed_tools(read_chat(json.dumps(asked).encode()))
    assert left == mode
    assert names == (None if tools is None else [tool["function"]["name"] for tool in tools])


@pytest.mark.parametrize(
    "wrong",
    [{"mode": "none"}, {"tools": None}, {"tools": [{"name": "a"}]}, {"tools": [{"function": {}}]}],
)
def test_allowed_tools_of_another_form_are_refused(wrong: dict[str, Any]) -> None:
    choice = _allowing("auto", "a")
    choice["allowed_tools"] |= wrong
    asked = {"messages": [], "tools": [_tool("a")], "tool_choice": choice}
    with pytest.raises(ApiError, match=r"tool_choice: expected .*allowed_tools") as caught:
        allowed_tools(read_chat(json.dumps(asked).encode()))
    assert caught.value.param == "tool_choice"


def test_a_chat_and_its_prompt_have_the_allowed_tools_alone(tmp_path: Path) -> None:
    template = "{% for t in tools %}{{ t.function.name }} {% endfor %}{{ messages[0].content }}"
    model = served(tmp_path, template)
    asked = {
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [_tool("a"), _tool("b")],
        "tool_choice": _allowing("auto", "b"),
    }
    reader = ChatReader(read_chat(json.dumps(asked).encode()), model)
    request = asyncio.run(reader.finish(None))
    assert model.tokenizer.decode(request.choices[0].prompt.ids) == "b hi"
