"""Reasoning and tool calls come out of every format the same, however the text is cut."""

import json
from itertools import groupby
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.config import ServeConfig
from serving.marked_text import Said, Thought, Told
from serving.parsing import Parsing
from serving.tagged_text import CALL_FORMATS
from serving.tool_calls import ToolCall, Tools, parameter_types
from tests.serving.live import MODEL_PATH
from transfer.errors import ConfigError

TOOLS: Tools = {
    "weather": parameter_types(
        {
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "dry": {"type": ["boolean", "null"]},
                "at": {"anyOf": [{"type": "string"}, {"type": "number"}]},
                "where": {"type": "object"},
                "kind": {"enum": ["long", 2]},
                "odd": True,
                "note": {"type": ["string", "null"]},
                "size": {"anyOf": [{"$ref": "#/$defs/Size"}, {"type": "null"}]},
                "named": {"const": "1"},
                "whole": {"allOf": [{"$ref": "#/$defs/Size"}], "default": "1"},
            },
            "$defs": {"Size": {"enum": ["1", "2"], "type": "string"}},
        }
    ),
    "ferry_times": {},
}
CALL = ToolCall("weather", '{"city": "Zürich"}')
OTHER = ToolCall("ferry_times", "{}")
OBJECT = '{"name": "weather", "arguments": {"city": "Zürich"}}'
OTHER_OBJECT = '{"name": "ferry_times", "arguments": {}}'
V3 = '<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{"city": "Zürich"}\n```'
V31 = '<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Zürich"}'
END = "<｜tool▁call▁end｜>"
GLM = "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Zürich</arg_value>\n</tool_call>"
PARAMETER = "<parameter=city>\nZürich\n</parameter>"
CODER = f"<tool_call>\n<function=weather>\n{PARAMETER}\n</function>\n</tool_call>"
M2, M2_END = "<minimax:tool_call>", "</minimax:tool_call>"
KIMI = '<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{"city": "Zürich"}'
MINIMAX = '<invoke name="weather">\n<parameter name="city">Zürich</parameter>\n</invoke>'


class Read(NamedTuple):
    """What was read out of a text, each kind put together."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[ToolCall, ...] = ()


def parts_of(parsing: Parsing, pieces: list[str]) -> list[Any]:
    """The parts in their order, neighbouring texts of one kind joined."""
    parser = parsing.parser()
    told = [*map(parser.feed, pieces), parser.finish()]
    parts: list[Any] = []
    for kind, same in groupby((part for each in told for part in each.parts), type):
        alike: list[Any] = list(same)
        is_text = kind in (Thought, Said)
        parts += [kind("".join([part.text for part in alike]))] if is_text else alike
    return parts


def pieces_told(parsing: Parsing, pieces: list[str]) -> Read:
    return read_of(parts_of(parsing, pieces))


def read_of(parts: list[Any]) -> Read:
    told = Told(parts)
    return Read(told.reasoning, told.content, tuple(told.calls))


def told(parsing: Parsing, text: str) -> Read:
    """Read the text whole; character by character must give the same."""
    assert parts_of(parsing, list(text)) == parts_of(parsing, [text])
    return pieces_told(parsing, [text])


QWEN3 = Parsing("qwen3")
R1 = Parsing("deepseek-r1")
THINKS_ON = Parsing("qwen3", prompt="<|im_start|>assistant\n<think>\n")
GLM_ALONE = Parsing(tool_calls="glm45", tools=TOOLS)
CODER_ALONE = Parsing(tool_calls="qwen3_coder", tools=TOOLS)
MINIMAX_ALONE = Parsing(tool_calls="minimax-m2", tools=TOOLS)
HARMONY = Parsing("gpt-oss", "gpt-oss", TOOLS, prompt="<|start|>assistant")


@pytest.mark.parametrize(
    ("parsing", "text", "reasoning", "content"),
    [
        (QWEN3, "<think>\nHm.\n</think>\n\nYes.", "Hm.", "Yes."),
        (QWEN3, "\n<think>\n\n</think>\n\nYes.\n", "", "Yes.\n"),
        (QWEN3, "  Yes <think> no </think>.", "", "  Yes <think> no </think>."),
        (QWEN3, "<thin", "", "<thin"),
        (QWEN3, "<think>a</think> <think>b</think>", "a", "<think>b</think>"),
        (QWEN3, "<think>a < b, </thin", "a < b, </thin", ""),
        (QWEN3, "<think>Cut \n", "Cut", ""),
        (QWEN3, "<think>After <think> we go on.</think>Yes.", "After <think> we go on.", "Yes."),
        (QWEN3, " \n", "", " \n"),
        (THINKS_ON, "Hm.\n</think>\n\nYes.", "Hm.", "Yes."),
        (R1, "Hm.\n</think>\n\nYes.", "Hm.", "Yes."),
        (R1, "<think>\nHm.</think>Yes.", "Hm.", "Yes."),
        (Parsing("deepseek-r1", prompt="<think>\n\n</think>\n\n"), "Yes.", "", "Yes."),
        (Parsing("deepseek-v3", prompt="<|Assistant|></think>"), "Yes.", "", "Yes."),
        (Parsing("qwen3", begun="<think>\nHm"), "m.\n</think>\n\nYes.", "m.", "Yes."),
        (Parsing("qwen3", begun="<think>Hm.</think>Ye"), "s.", "", "s."),
        (Parsing("deepseek-r1", begun="<think>Hm.</think>Ye"), "s.", "", "s."),
        (Parsing("deepseek-r1", begun="Hm"), "m.</think>Yes.", "m.", "Yes."),
        (Parsing("deepseek-v3", prompt="<|Assistant|><think>"), "Hm.</think>Yes.", "Hm.", "Yes."),
        (Parsing("qwen3-thinking"), "Hm.</think>Yes.", "Hm.", "Yes."),
        (Parsing("glm45"), "\n<think>Hm.</think>\nYes.", "Hm.", "Yes."),
        (Parsing("glm45", prompt="<|assistant|>\n<think></think>"), "Yes.", "", "Yes."),
        (Parsing("minimax", prompt="]~b]ai\n<think>\n"), "Hm.\n</think>\n\nYes.", "Hm.", "Yes."),
    ],
)
def test_thoughts(parsing: Parsing, text: str, reasoning: str, content: str) -> None:
    assert told(parsing, text) == Read(reasoning, content)


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [
        ("qwen", f"<tool_call>\n{OBJECT}\n</tool_call>", "", [CALL]),
        ("qwen25", f"<tool_call>{OBJECT}</tool_call>", "", [CALL]),
        (
            "hermes",
            f"See:\n<tool_call>\n{OBJECT}\n</tool_call>\n<tool_call>\n{OTHER_OBJECT}\n</tool_call>",
            "See:",
            [CALL, OTHER],
        ),
        ("hermes", '<tool_call>{"name": "ferry_times"}</tool_call>', "", [OTHER]),
        ("llama3", '{"name": "ferry_times", "parameters": null}', "", [OTHER]),
        ("hermes", f"<tool_call>\n{OBJECT}", "", [CALL]),  # the end was a token that ends the text
        ("llama3", OBJECT.replace("arguments", "parameters"), "", [CALL]),
        ("llama3", f"<|python_tag|>{OBJECT}; {OTHER_OBJECT}", "", [CALL, OTHER]),
        ("llama3", f"{OBJECT}<|python_tag|>{OTHER_OBJECT}", "", [CALL, OTHER]),
        ("llama3", 'Look: {"name": 1}', 'Look: {"name": 1}', []),
        ("mistral", f"[TOOL_CALLS][{OBJECT}, {OTHER_OBJECT}]", "", [CALL, OTHER]),
        ("mistral", '[TOOL_CALLS]weather[ARGS]{"city": "Zürich"}', "", [CALL]),
        ("mistral", '[TOOL_CALLS]weather[CALL_ID]a1B2c3D4e[ARGS]{"city": "Zürich"}', "", [CALL]),
        ("mistral", "Yes. [TOOL_CALLS]ferry_times{}[TOOL_CALLS]ferry_times{}", "Yes.", [OTHER] * 2),
        (
            "deepseekv3",
            f"<｜tool▁calls▁begin｜>{V3}{END}\n{V3}{END}<｜tool▁calls▁end｜>",
            "",
            [CALL, CALL],
        ),
        ("deepseekv31", f"Yes.<｜tool▁calls▁begin｜>{V31}{END}", "Yes.", [CALL]),
        ("glm45", f"Yes.\n{GLM}\n<tool_call>ferry_times\n</tool_call>", "Yes.", [CALL, OTHER]),
        ("glm47", GLM.replace("\n", ""), "", [CALL]),
        ("glm45", "<tool_call>ferry_times</tool_call>", "", [OTHER]),
        ("qwen3_coder", f"{CODER}\n{CODER}", "", [CALL, CALL]),
        ("qwen3_coder", CODER.replace("\n", ""), "", [CALL]),
        ("minimax-m2", f"{M2}\n{MINIMAX}\n{MINIMAX}\n{M2_END}", "", [CALL, CALL]),
    ],
)  # fmt: skip
def test_calls(name: Any, text: str, content: str, calls: list[ToolCall]) -> None:
    assert told(Parsing(tool_calls=name, tools=TOOLS), text) == Read("", content, tuple(calls))


def test_thoughts_come_before_calls() -> None:
    parsing = Parsing("qwen3", "qwen", TOOLS)
    text = (
        f"<think>\n<tool_call> would do\n</think>\n\nOne moment.\n<tool_call>{OBJECT}</tool_call>\n"
    )
    assert told(parsing, text) == Read("<tool_call> would do", "One moment.", (CALL,))


NO_CALLS = [
    "not JSON",
    "",
    "[]",
    '{"name": "weather", "arguments": [1]}',
    '{"name": "weather", "arguments": ""}',
    '{"name": 7, "arguments": {}}',
    '{"name": "weather", "arguments": {"a": NaN}}',
    '{"name": "weather", "arguments": {"a": 1e999}}',
    '{"name": "weather", "arguments": {"a": "\\ud800"}}',
    '{"name": "weather", "arguments": {"a": ' + "9" * 5000 + "}}",
    '{"name": "weather", "arguments": {"a": ' + "[" * 50_000,
    '{"name": "of_nobody", "arguments": {}}',
    OBJECT + " and more",
]


@pytest.mark.parametrize("between", NO_CALLS)
def test_what_is_no_call_stays_text(between: str) -> None:
    text = f"Well \n<tool_call>{between}</tool_call>\n. "
    parsed = pieces_told(Parsing(tool_calls="hermes", tools=TOOLS), [text])
    assert parsed == Read("", text)


@pytest.mark.parametrize(("name", "form"), CALL_FORMATS.items())
@pytest.mark.parametrize("between", NO_CALLS)
def test_no_format_takes_what_is_no_call(name: Any, form: Any, between: str) -> None:
    parsed = pieces_told(Parsing(tool_calls=name, tools=TOOLS), [form.begin, between, form.end])
    assert not parsed.calls
    assert parsed.content == form.begin + between + form.end


NEXT = "<|start|>assistant<|channel|>"
SEVERAL = (
    f"<|channel|>analysis<|message|>a<|end|>{NEXT}analysis<|message|>b"
    f"{NEXT}commentary<|message|>One moment.<|end|>"
    f"{NEXT}commentary to=functions.weather <|constrain|>json<|message|>"
    '{"city": "Zürich"}<|call|>'
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.",
            Read("Hm.", "Yes."),
        ),
        ("<|channel|>final <|constrain|>json<|message|>{}<|return|>", Read("", "{}")),
        (SEVERAL, Read("a\nb", "One moment.", (CALL,))),
        (
            " to=functions.ferry_times<|channel|>commentary json<|message|>{}",
            Read("", "", (OTHER,)),
        ),
        ("<|channel|>commentary to=ferry_times<|message|>{}", Read("", "", (OTHER,))),
        ("<|channel|>commentary to=functions.weather<|message|>{", Read("", "{")),
        ("<|channel|>commentary to=functions.of_nobody<|message|>{}", Read("", "{}")),
        ("<|channel|>commentary to=browser.open<|message|>{}", Read("", "{}")),
        ("<|channel|>analy", Read()),
        ("<|channel|>", Read()),
        ("<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>", Read("Hm.")),
        ("<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant", Read("Hm.")),
        ("What another model writes.", Read("", "What another model writes.")),
        ("<|channel|>final<|message|>a <|en", Read("", "a <|en")),
    ],
)
def test_channels(text: str, expected: Read) -> None:
    assert told(HARMONY, text) == expected


def _written(name: str, parameter: str, value: str) -> str:
    if name.startswith("glm"):
        pair = f"<arg_key>{parameter}</arg_key>\n<arg_value>{value}</arg_value>"
        return f"<tool_call>weather\n{pair}\n</tool_call>"
    if name == "qwen3_coder":
        one = f"<parameter={parameter}>\n{value}\n</parameter>"
        return f"<tool_call>\n<function=weather>\n{one}\n</function>\n</tool_call>"
    one = f'<parameter name="{parameter}">{value}</parameter>'
    return f'<minimax:tool_call>\n<invoke name="weather">\n{one}\n</invoke>\n</minimax:tool_call>'


@pytest.mark.parametrize("name", ["glm45", "qwen3_coder", "minimax-m2"])
@pytest.mark.parametrize(
    ("parameter", "value", "read"),
    [
        ("city", "12", "12"),
        ("city", '"Zürich"', '"Zürich"'),
        ("city", "  two\n\nlines  ", "  two\n\nlines  "),
        ("city", "", ""),
        ("days", "12", 12),
        ("days", " 12 ", 12),
        ("days", "twelve", "twelve"),
        ("days", "1 2", "1 2"),
        ("dry", "true", True),
        ("dry", "True", True),
        ("dry", "False", False),
        ("dry", "null", None),
        ("dry", "None", None),
        ("dry", "perhaps", "perhaps"),
        ("at", "8.5", 8.5),
        ("at", "noon", "noon"),
        ("at", "true", "true"),
        ("at", '"noon"', '"noon"'),
        ("where", '{"lat": [47.4]}', {"lat": [47.4]}),
        ("kind", "2", 2),
        ("kind", "long", "long"),
        ("note", "", ""),
        ("note", "none", "none"),
        ("note", "null", None),
        ("note", "None", None),
        ("size", "1", "1"),
        ("size", "none", "none"),
        ("named", "1", "1"),
        ("whole", "1", "1"),
        ("days", "", ""),
        ("dry", "", None),
        ("odd", "[1, 2]", [1, 2]),
        ("odd", "a word", "a word"),
        ("unknown", "3", 3),
        ("unknown", "NaN", "NaN"),
        ("days", "1e999", None),
        ("city", "a lone \ud800", None),
    ],
)
def test_values_without_quotes_have_the_types_of_their_tool(
    name: Any, parameter: str, value: str, read: Any
) -> None:
    text = _written(name, parameter, value)
    found = told(Parsing(tool_calls=name, tools=TOOLS), text)
    if value in ("1e999", "a lone \ud800"):  # what no JSON holds
        assert found == Read("", text)
    else:
        (call,) = found.calls
        assert (call.name, json.loads(call.arguments)) == ("weather", {parameter: read})


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("glm45", GLM.replace("weather", "nobody")),
        ("glm45", GLM.replace("</arg_key>", "")),
        ("glm45", GLM.replace("<arg_value>", "")),
        ("glm45", GLM.replace("</arg_value>", "</arg_value> and")),
        ("glm45", "<tool_call></tool_call>"),
        ("qwen3_coder", CODER.replace("<function=weather>", "")),
        ("qwen3_coder", CODER.replace("</function>", "")),
        ("qwen3_coder", CODER.replace("</function>", "</function> and")),
        ("qwen3_coder", CODER.replace("<parameter=city>", "<parameter=city")),
        ("minimax-m2", "<minimax:tool_call>\n</minimax:tool_call>"),
        ("minimax-m2", f"<minimax:tool_call>{MINIMAX} and</minimax:tool_call>"),
        ("minimax-m2", f"<minimax:tool_call>{MINIMAX[:-9]}</minimax:tool_call>"),
    ],
)
def test_tags_that_are_no_call_stay_text(name: Any, text: str) -> None:
    assert told(Parsing(tool_calls=name, tools=TOOLS), text) == Read("", text)


def test_types_are_found_wherever_a_schema_has_them() -> None:
    tool = {
        "$ref": "#/$defs/Ask",
        "allOf": [{"properties": {"b": {"$ref": "#/$defs/a~1b"}}}],
        "$defs": {
            "Ask": {"properties": {"a": {"$ref": "#/$defs/Loop"}, "c": {"$ref": "elsewhere#/x"}}},
            "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}, {"type": "number"}]},
            "a/b": {"type": "boolean"},
        },
    }
    found = {name: set(kinds) for name, kinds in parameter_types(tool).items()}
    assert found == {"a": {"number"}, "b": {"boolean"}, "c": set()}


@pytest.mark.parametrize(
    "schema", [None, [], "x", {"properties": 1}, {"properties": {}, "anyOf": {}}, {"$ref": "#/x"}]
)
def test_a_schema_that_says_nothing_names_no_types(schema: Any) -> None:
    assert parameter_types(schema) == {}


@pytest.mark.timeout(60)
def test_a_schema_is_looked_at_for_so_long_and_no_longer() -> None:
    many = {"anyOf": [{"type": "string"}] * 30_000}
    assert parameter_types({"properties": {"a": many}}) == {}
    each = {str(i): {"$ref": "#/$defs/Many"} for i in range(1000)}
    many = {"anyOf": [{"type": "string"}] * 1000}
    assert parameter_types({"properties": each, "$defs": {"Many": many}}) == {}


@pytest.mark.parametrize(
    "cut", ["fer", "ferry_times", "weather\n<arg_key>city</arg_key>", GLM[11:-12]]
)
def test_a_call_of_glm_that_was_cut_is_none(cut: str) -> None:
    parsing = Parsing(tool_calls="glm45", tools={**TOOLS, "fer": {}})
    assert told(parsing, f"<tool_call>{cut}") == Read("", f"<tool_call>{cut}")


def test_qwen_coder_may_leave_the_end_of_an_argument_out() -> None:
    text = CODER.replace("</parameter>", "<parameter=days>\n2")
    call = ToolCall("weather", '{"city": "Zürich", "days": 2}')
    assert told(CODER_ALONE, text) == Read("", "", (call,))
    both = CODER.replace("</function>", "</function><function=ferry_times></function>")
    assert told(CODER_ALONE, both) == Read("", "", (CALL, OTHER))


def test_qwen_coder_may_leave_the_beginning_of_a_call_out() -> None:
    call = CODER.removeprefix("<tool_call>\n")
    assert told(CODER_ALONE, f"See:\n\n{call}") == Read("", "See:", (CALL,))
    bare = call.removesuffix("\n</tool_call>")
    assert told(CODER_ALONE, bare) == Read("", "", (CALL,))
    assert told(CODER_ALONE, "a <function=f> b") == Read("", "a <function=f> b")


@pytest.mark.parametrize("value", ["a\n", "\n", " a "])
def test_a_value_of_minimax_is_all_that_is_between_its_tags(value: str) -> None:
    (call,) = told(MINIMAX_ALONE, _written("minimax-m2", "city", value)).calls
    assert json.loads(call.arguments) == {"city": value}


@pytest.mark.parametrize("name", ["glm45", "glm47", "qwen3_coder", "minimax-m2"])
def test_who_must_call_is_read_as_json(name: Any) -> None:
    parsing = Parsing(tool_calls=name, tools=TOOLS, must_call=True)
    assert told(parsing, f"<tool_call>\n{OBJECT}\n</tool_call>") == Read("", "", (CALL,))


def test_a_prompt_may_have_begun_the_message() -> None:
    prompt = "<|start|>user<|message|>Hi<|end|><|start|>assistant<|channel|>final<|message|>Ye"
    assert told(Parsing("gpt-oss", "gpt-oss", TOOLS, prompt=prompt), "s.") == Read("", "s.")


NAMES: list[Any] = list(CALL_FORMATS)
PARSINGS = [
    *(Parsing("qwen3", name, TOOLS) for name in NAMES),
    *(Parsing("none", name, TOOLS) for name in NAMES),
    Parsing("kimi_k2", "kimi_k2", TOOLS),
    QWEN3,
    R1,
    HARMONY,
]
PARTS = st.sampled_from(
    [
        "<think>", "</think>", "<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]",
        "<｜tool▁calls▁begin｜>", V3, V31, END, "<|start|>", "<|channel|>", "analysis", "final",
        " to=functions.weather", "<|message|>", "<|end|>", "<|call|>", OBJECT, OTHER_OBJECT,
        "{", "}", '"', "\\", '{"city": 1}', "a", " ", "\n", "<", "<|", "[TOOL", ";", GLM, CODER,
        MINIMAX,
        "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "weather", "<function=weather>",
        "<minimax:tool_call>", "</minimax:tool_call>", "<parameter=city>", "</parameter>",
        "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", KIMI, "<|tool_call_end|>",
    ]
)  # fmt: skip


@given(st.sampled_from(PARSINGS), st.lists(PARTS, max_size=12), st.data())
@settings(max_examples=400)
def test_cuts_change_nothing_and_nothing_is_lost(
    parsing: Parsing, parts: list[str], data: st.DataObject
) -> None:
    text = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    parts_whole = parts_of(parsing, [text])
    assert parts_of(parsing, pieces) == parts_whole
    whole = read_of(parts_whole)
    for call in whole.calls:
        assert call.name in TOOLS
        assert isinstance(json.loads(call.arguments), dict)
    if parsing.reasoning == "none" and not whole.calls and "calls" not in text:
        assert whole == Read("", text)
    # What is told, calls aside, is in the text, in order.
    for shown in (whole.reasoning, whole.content):
        rest = iter(text + "\n" * 12)
        assert all(character in rest for character in shown.replace("\n", ""))


SPACE = " " * 100_000
LONG = [
    (HARMONY, "<|end|>", ""),
    (HARMONY, "<|channel|>final<|message|>a<|end|>", ""),
    (R1, "<think>", ""),
    (Parsing(tool_calls="deepseekv3", tools=TOOLS), "<｜tool▁calls▁begin｜>", ""),
    (Parsing(tool_calls="deepseekv3", tools=TOOLS), "", V3.replace("{", SPACE + "x") + END),
    (Parsing(tool_calls="hermes", tools=TOOLS), "a<tool_call></tool_call>", ""),
    (Parsing(tool_calls="hermes", tools=TOOLS), " " * 50, "a"),
    (Parsing(tool_calls="hermes", tools=TOOLS), "a" * 50, "<tool_call>"),
    (Parsing(tool_calls="hermes", tools=TOOLS), "</tool_call>", '<tool_call>"'),
    (GLM_ALONE, "<arg_key>", "<tool_call>weather"),
    (GLM_ALONE, "<arg_key>city</arg_key><arg_value>a</arg_value>", "<tool_call>weather"),
    (GLM_ALONE, "<tool_call></tool_call>", ""),
    (CODER_ALONE, "<parameter=city>", "<tool_call><function=weather>"),
    (CODER_ALONE, "<parameter=city>\na\n</parameter>\n", "<tool_call><function=weather>"),
    (MINIMAX_ALONE, MINIMAX, "<minimax:tool_call>"),
    (MINIMAX_ALONE, '<invoke name="weather">', "<minimax:tool_call>"),
    (Parsing("kimi_k2", "kimi_k2", TOOLS), "<|tool_calls_section_end|>", "<think>"),
    (Parsing(tool_calls="kimi_k2", tools=TOOLS), KIMI.replace("{", SPACE[:50] + "x"), ""),
]


@pytest.mark.timeout(60)  # linear time takes a second, quadratic time more than this
@pytest.mark.parametrize(("parsing", "part", "begin"), LONG)
def test_time_grows_as_the_text_does(parsing: Parsing, part: str, begin: str) -> None:
    texts = [begin, *[part] * 100_000]
    assert pieces_told(parsing, texts) == pieces_told(parsing, ["".join(texts)])


@pytest.mark.parametrize(
    ("reasoning", "calls"), [("gpt-oss", "none"), ("none", "gpt-oss"), ("gpt-oss", "hermes")]
)
def test_gpt_oss_is_one_format_for_both(reasoning: Any, calls: Any) -> None:
    with pytest.raises(ConfigError, match="give it to both") as refused:
        ServeConfig(MODEL_PATH, "r:1", reasoning_parser=reasoning, tool_call_parser=calls)
    assert f"got {reasoning} and {calls}" in str(refused.value)
