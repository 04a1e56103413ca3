"""Structural tags: which texts they take, with tokens for their markers and without."""

import json
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import llguidance
import pytest
from tokenizers import AddedToken

from model.tokenizer_files import read_tokenizer
from serving.errors import ApiError
from serving.forms import form_of
from serving.grammar import Form, grammar_text
from serving.grammar_trial import GrammarTrial
from serving.openai_fields import ChatFields, CompletionFields
from serving.protocol import SamplingFields
from serving.sglang_api import GenerateSampling
from serving.structural_tags import structural_tag_form
from serving.tokenizer import Tokenizer
from tests.serving.live import EOS, MODEL_PATH
from tests.serving.test_grammar import PLAIN, fields_of
from tests.serving.texts import Texts, Untried

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
}
HOUR = {"type": "object", "properties": {"hour": {"type": "integer"}}, "required": ["hour"]}
STRUCTURES: list[dict[str, Any]] = [
    {"begin": "<function=weather>", "schema": CITY, "end": "</function>"},
    {"begin": "<function=time>", "schema": HOUR, "end": "</function>"},
]
FIRST_VERSION = {"type": "structural_tag", "structures": STRUCTURES, "triggers": ["<function="]}
MARKERS = ("<tool_call>", "</tool_call>", "<|channel|>")
WEATHER = '<function=weather>{"city": "Rome"}</function>'
TIME = '<function=time>{"hour": 3}</function>'


@pytest.fixture(scope="module")
def trial() -> Iterator[GrammarTrial]:
    with closing(GrammarTrial(MODEL_PATH)) as trial:
        yield trial


@pytest.fixture(scope="module", params=["special tokens", "tokens", "text"])
def either(request: pytest.FixtureRequest) -> Texts:
    """Models that have the markers as tokens of their own, and one that spells them."""
    special = request.param == "special tokens"
    return Texts(() if request.param == "text" else MARKERS, special)


@pytest.fixture(scope="module")
def spelling() -> Texts:
    return Texts()


async def grammar_of(texts: Texts, asked: Any) -> str:
    form = structural_tag_form("structural_tag", asked, texts.tokenizer)
    return await grammar_text(form, Untried(MODEL_PATH))


async def takes(texts: Texts, asked: Any, text: str) -> bool:
    return texts.takes(await grammar_of(texts, asked), text)


def tag_of(form: Any) -> dict[str, Any]:
    return {"type": "structural_tag", "format": form}


def const(value: str) -> dict[str, str]:
    return {"type": "const_string", "value": value}


def tag(begin: str, content: Any, end: Any) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def schema(of: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": of}


ANY_TEXT = {"type": "any_text"}
TAGS = [tag(each["begin"], schema(each["schema"]), each["end"]) for each in STRUCTURES]
TRIGGERED = {"type": "triggered_tags", "triggers": ["<function="], "tags": TAGS}
SEPARATED = {"type": "tags_with_separator", "tags": TAGS, "separator": ", "}


# --- free text and tags ---------------------------------------------------------------------------


@pytest.mark.parametrize("asked", [FIRST_VERSION, tag_of(TRIGGERED)], ids=["first", "format"])
@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("", True),
        ("No function is needed: 1 < 2.", True),
        (f"I look.\n{WEATHER} And then?\n{TIME}{TIME} Done <b>.", True),
        ("<function", True),
        ("<function=", False),
        ("<function=weather>", False),
        ('<function=weather>{"town": "Rome"}</function>', False),
        ('<function=weather>{"city": "Rome"}', False),
        ('<function=weather>{"city": "Rome"} </function>', False),
        ("<function=date>{}</function>", False),
        (f"{WEATHER} <function=time>[]</function>", False),
    ],
)
async def test_text_is_free_until_a_trigger_and_after_the_end_of_its_tag(
    spelling: Texts, asked: Any, text: str, right: bool
) -> None:
    assert await takes(spelling, asked, text) == right


@pytest.mark.parametrize(
    ("form", "at_least_one", "stop_after_first", "right", "wrong"),
    [
        (TRIGGERED, False, False, ["x", f"x {WEATHER} y {TIME} z"], []),
        (TRIGGERED, True, False, [WEATHER, f"{TIME} x {WEATHER} y"], ["x", f"x {WEATHER}"]),
        (TRIGGERED, False, True, ["x", f"x {WEATHER}"], [f"x {WEATHER} y", f"{TIME}{TIME}"]),
        (TRIGGERED, True, True, [WEATHER, TIME], ["", "x", f"x {WEATHER}", f"{TIME} x", TIME * 2]),
        # With a separator there is nothing else between the tags.
        (SEPARATED, False, False, ["", WEATHER, f"{TIME}, {WEATHER}, {TIME}"], ["x", TIME * 2]),
        (SEPARATED, True, False, [WEATHER, f"{TIME}, {TIME}"], ["", f"{TIME}, "]),
        (SEPARATED, False, True, ["", TIME], [f"{TIME}, {TIME}"]),
        (SEPARATED, True, True, [TIME], ["", f"{TIME}, {TIME}"]),
    ],
)
async def test_a_tag_can_be_demanded_and_be_the_last(
    spelling: Texts,
    form: Any,
    at_least_one: bool,
    stop_after_first: bool,
    right: list[str],
    wrong: list[str],
) -> None:
    how = {"at_least_one": at_least_one, "stop_after_first": stop_after_first}
    grammar = await grammar_of(spelling, tag_of(form | how))
    assert all(spelling.takes(grammar, text) for text in right)
    assert not any(spelling.takes(grammar, text) for text in wrong)


async def test_markers_are_tokens_where_the_model_has_them(either: Texts) -> None:
    call = tag('<tool_call>\n{"name": "weather", "arguments": ', schema(CITY), "}\n</tool_call>")
    form = {"type": "triggered_tags", "triggers": ["<tool_call>"], "tags": [call]}
    grammar = await grammar_of(either, tag_of(form))
    made = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    for text in ("x", made, f"x {made}\n{made} y"):
        assert either.takes(grammar, text), text
    for text in ("<tool_call>", "<tool_call>x</tool_call>", made.removesuffix("</tool_call>")):
        assert not either.takes(grammar, text), text


async def test_random_texts_hold_tags_as_they_were_asked_for(either: Texts) -> None:
    calls = [
        tag(f"<tool_call>{name} ", {"type": "regex", "pattern": "[0-9]{1,3}"}, "</tool_call>")
        for name in ("up", "down")
    ]
    form = {"type": "triggered_tags", "triggers": ["<tool_call>"], "tags": calls}
    grammar = await grammar_of(either, tag_of(form | {"at_least_one": True}))
    for seed in range(5):
        text = either.drawn(grammar, seed)
        first, *_ = text.split("</tool_call>")
        name, number = first.removeprefix("<tool_call>").split(" ")
        assert name in ("up", "down")
        assert number.isdecimal()
        assert len(number) <= 3


async def test_a_tag_in_free_text_may_hold_free_text_itself(either: Texts) -> None:
    """The end of a tag ends the text in it where it first appears, also after a line of text."""
    for end in ("</tool_call>", "\n</tool_call>", "</tool_call>\n"):
        form = {
            "type": "triggered_tags",
            "triggers": ["<note"],
            "tags": [tag("<note>", ANY_TEXT, end)],
        }
        grammar = await grammar_of(either, tag_of(form))
        assert either.takes(grammar, f"a <note>b\nc{end} d <note>{end}")
        assert not either.takes(grammar, "a <note>b")


async def test_free_text_may_hold_tokens_that_are_shown_and_end_nothing() -> None:
    call = tag("<tool_call>", ANY_TEXT, "</tool_call>")
    form = {"type": "triggered_tags", "triggers": ["<tool_call>"], "tags": [call]}
    for special in (False, True):
        texts = Texts(MARKERS, special)
        for text in ("a<|channel|>b", "a <tool_call>b<|channel|>c</tool_call>"):
            assert await takes(texts, tag_of(form), text) != special
        assert not await takes(texts, tag_of(form), "a <tool_call>b")
        excluding = tag_of(form | {"excludes": ["<|channel|>"]})
        assert await takes(texts, excluding, "ab")
        assert not await takes(texts, excluding, "a<|channel|>b")


async def test_free_text_can_leave_texts_out(either: Texts) -> None:
    form = TRIGGERED | {"excludes": ["red", "blue", "<tool_call>"]}
    grammar = await grammar_of(either, tag_of(form))
    assert either.takes(grammar, f"re d {WEATHER} green")
    for text in ("red", f"{WEATHER} a blue sea", f"tired {WEATHER}"):
        assert not either.takes(grammar, text), text
    thought = tag("<b>", {"type": "any_text", "excludes": ["no"]}, "</b>")
    grammar = await grammar_of(either, tag_of(thought))
    assert either.takes(grammar, "<b>yes</b>")
    assert not either.takes(grammar, "<b>no</b>")


# --- other formats --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "right", "wrong"),
    [
        (const('a "b"\n'), ['a "b"\n'], ["", "a"]),
        (schema({"type": "integer"}), ["12"], ["x"]),
        (schema({}), ["12", "{}"], ["x"]),
        ({"type": "regex", "pattern": "a|b"}, ["a", "b"], ["ab"]),
        ({"type": "grammar", "grammar": 'root ::= "x"+'}, ["x", "xx"], [""]),
        (ANY_TEXT, ["", "x\ny"], []),
        ({"type": "sequence", "elements": [const("a"), const("b")]}, ["ab"], ["a", "b"]),
        ({"type": "sequence", "elements": [const("a"), ANY_TEXT]}, ["a", "ab"], ["b"]),
        ({"type": "or", "elements": [const("a"), const("b")]}, ["a", "b"], ["ab"]),
        ({"type": "optional", "content": const("a")}, ["", "a"], ["aa"]),
        ({"type": "star", "content": const("a")}, ["", "a", "aa"], ["b"]),
        ({"type": "plus", "content": const("a")}, ["a", "aa"], [""]),
        ({"type": "repeat", "min": 1, "max": 2, "content": const("a")}, ["a", "aa"], ["", "aaa"]),
        ({"type": "repeat", "min": 2, "max": -1, "content": const("a")}, ["aa", "aaaa"], ["a"]),
        (tag("<a>", ANY_TEXT, ["</a>", "."]), ["<a>x</a>", "<a>x."], ["<a>x", "<a>x.y</a>"]),
        (tag("<a>", ANY_TEXT, ""), ["<a>", "<a>x"], ["x"]),
        (tag("", const("x"), "!"), ["x!"], ["x"]),
        (
            tag("<a>", {"type": "or", "elements": [const("1"), ANY_TEXT]}, "</a>"),
            ["<a>1</a>", "<a>2</a>"],
            ["<a>1"],
        ),
        (
            tag("<a>", {"type": "optional", "content": ANY_TEXT}, "</a>"),
            ["<a></a>", "<a>x</a>"],
            ["<a>"],
        ),
        (
            tag("<a>", tag("<b>", ANY_TEXT, ""), "</a>"),
            ["<a><b>x</a>"],
            ["<a>x</a>", "<a><b>x</a></a>"],
        ),
        (
            tag("<all>", TRIGGERED, "</all>"),
            ["<all></all>", f"<all>x {WEATHER} y</all>"],
            ["<all>", f"<all>{WEATHER}", "<all><function=</all>"],
        ),
        (
            {"type": "sequence", "elements": [tag("<think>", ANY_TEXT, "</think>"), TRIGGERED]},
            ["<think>hm</think>", f"<think>{TIME}</think> x {TIME}"],
            ["x", "<think>", "<think></think><function=x"],
        ),
    ],
    ids=lambda value: value.get("type", "") if isinstance(value, dict) else "",
)
async def test_each_format_takes_its_texts_alone(
    spelling: Texts, form: Any, right: list[str], wrong: list[str]
) -> None:
    grammar = await grammar_of(spelling, tag_of(form))
    assert [text for text in right if not spelling.takes(grammar, text)] == []
    assert [text for text in wrong if spelling.takes(grammar, text)] == []


@pytest.mark.parametrize("kind", [ChatFields, CompletionFields, SamplingFields, GenerateSampling])
@pytest.mark.parametrize("asked", [FIRST_VERSION, json.dumps(tag_of(TRIGGERED))])
async def test_all_routes_take_it_as_an_object_and_as_its_text(
    spelling: Texts, trial: GrammarTrial, kind: Any, asked: Any
) -> None:
    form = form_of(fields_of(kind, structural_tag=asked), None, [EOS], PLAIN)
    assert isinstance(form, Form)
    grammar = await grammar_text(form, trial)
    assert spelling.takes(grammar, f"x {TIME}")
    assert not spelling.takes(grammar, "<function=x")


@pytest.mark.parametrize(
    "given",
    [
        {"response_format": FIRST_VERSION},
        {"response_format": tag_of(TRIGGERED)},
        {"structured_outputs": {"structural_tag": json.dumps(FIRST_VERSION)}},
        {"structured_outputs": {"structural_tag": tag_of(TRIGGERED)}},
    ],
)
async def test_it_may_stand_where_openais_and_vllms_clients_put_it(
    spelling: Texts, trial: GrammarTrial, given: Any
) -> None:
    form = form_of(fields_of(ChatFields, **given), None, [EOS], PLAIN)
    assert isinstance(form, Form)
    assert spelling.takes(await grammar_text(form, trial), WEATHER)


async def test_a_form_that_cannot_end_costs_no_more_than_others(
    spelling: Texts, trial: GrammarTrial
) -> None:
    """After /x+/ no "x" ever comes. What must come next for ever is not written ahead of its time:
    that would not return, in a worker that serves others."""
    elements = [{"type": "regex", "pattern": each} for each in ("[0-9]{3}", "x+")]
    asked = tag_of({"type": "sequence", "elements": [*elements, const("x")]})
    for form in (
        structural_tag_form("structural_tag", asked, PLAIN),
        form_of(fields_of(ChatFields, ebnf='start: /x+/ "x"'), None, [EOS], PLAIN),
    ):
        assert isinstance(form, Form)
        grammar = await grammar_text(form, trial)
        assert "no_forcing" in grammar
        *ids, last = spelling.drawn_ids(grammar, seed=0, most=20)
        assert len(ids) == 19
        assert last != EOS


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "place", "why"),
    [
        ("{", "structural_tag", "truncated"),
        ("[]", "structural_tag", "Expected `object`"),
        ({}, "structural_tag", "either format, or structures and triggers"),
        (FIRST_VERSION | tag_of(ANY_TEXT), "structural_tag", "either format"),
        ({"structures": STRUCTURES}, "structural_tag", "structures and triggers"),
        ({"type": "text", "format": ANY_TEXT}, "structural_tag", "text"),
        (tag_of({"type": "dispatch"}), "structural_tag", "'dispatch'"),
        (tag_of(ANY_TEXT | {"max_tokens": 5}), "structural_tag", "`max_tokens`"),
        (tag_of(schema({}) | {"style": "qwen_xml"}), "structural_tag", "'qwen_xml'"),
        (tag_of(tag("<a>", ANY_TEXT, {"type": "token"})), "structural_tag", "end"),
        (tag_of(const("")), "structural_tag.format.value", "not empty"),
        (tag_of({"type": "or", "elements": []}), "structural_tag.format.elements", "at least one"),
        (
            tag_of({"type": "sequence", "elements": [const("a"), schema({"type": "x"})]}),
            "structural_tag.format.elements[1].json_schema",
            "x",
        ),
        (
            tag_of({"type": "sequence", "elements": [ANY_TEXT, const("a")]}),
            "structural_tag.format.elements[0]",
            "nothing comes between",
        ),
        (
            tag_of({"type": "plus", "content": ANY_TEXT}),
            "structural_tag.format.content",
            "free text",
        ),
        (
            tag_of({"type": "repeat", "min": 2, "max": 1, "content": const("a")}),
            "structural_tag.format",
            "min",
        ),
        (
            tag_of({"type": "repeat", "min": 0, "max": 0, "content": const("a")}),
            "structural_tag.format",
            "min",
        ),
        (tag_of({"type": "regex", "pattern": "a\\"}), "structural_tag.format.pattern", "backslash"),
        (tag_of({"type": "regex", "pattern": "("}), "structural_tag.format.pattern", ""),
        (tag_of(tag("<a>", const("x"), ["", "x"])), "structural_tag.format.end", "not empty"),
        (
            tag_of(TRIGGERED | {"triggers": ["<function=", "<x"]}),
            "structural_tag.format.triggers",
            "no tag begins with '<x'",
        ),
        (
            tag_of(TRIGGERED | {"triggers": ["<function=", "<func"]}),
            "structural_tag.format.tags[0].begin",
            "one of the triggers",
        ),
        (
            tag_of(TRIGGERED | {"triggers": [], "tags": []}),
            "structural_tag.format.triggers",
            "at least one",
        ),
        (
            FIRST_VERSION | {"triggers": ["<tool="]},
            "structural_tag.structures[0].begin",
            "one of the triggers",
        ),
        (
            FIRST_VERSION | {"structures": [STRUCTURES[0] | {"schema": {"type": "x"}}]},
            "structural_tag.structures[0].schema",
            "x",
        ),
    ],
)
async def test_what_cannot_be_followed_is_refused_by_its_place(
    trial: GrammarTrial, asked: Any, place: str, why: str
) -> None:
    async def followed() -> None:
        await grammar_text(structural_tag_form("structural_tag", asked, PLAIN), trial)

    with pytest.raises(ApiError) as refused:
        await followed()
    assert refused.value.status == 400
    assert refused.value.message.startswith(f"{place}: "), refused.value.message
    assert why in refused.value.message
    assert refused.value.param in (place, "structural_tag")


@pytest.mark.parametrize("trigger", ["<|chan", "<|channel|>comm", "x<|channel|>comm"])
def test_a_trigger_ends_with_a_token_or_has_none(trigger: str) -> None:
    """After such a token free text would have to go on, which holds no token of that kind."""
    begin = f"{trigger[: trigger.index('<')]}<|channel|>commentary"
    form = {"type": "triggered_tags", "triggers": [trigger], "tags": [tag(begin, ANY_TEXT, "!")]}
    with pytest.raises(ApiError, match=r"must end with '<\|channel\|>', a token of this model"):
        structural_tag_form("structural_tag", tag_of(form), Texts(MARKERS).tokenizer)
    structural_tag_form("structural_tag", tag_of(form), PLAIN)


def test_a_tag_that_is_too_much_is_refused() -> None:
    many = {"type": "or", "elements": [schema({})] * 513}
    with pytest.raises(ApiError, match="at most 512 schemas"):
        structural_tag_form("structural_tag", tag_of(many), PLAIN)
    wide = {"type": "or", "elements": [schema({"const": "x" * 70_000})] * 2}
    with pytest.raises(ApiError, match="131072 characters"):
        structural_tag_form("structural_tag", tag_of(wide), PLAIN)
    deep: Any = const("x")
    for _ in range(3000):
        deep = {"type": "star", "content": deep}
    with pytest.raises(ApiError, match=r"nested too deeply|recursion"):
        structural_tag_form("structural_tag", tag_of(deep), PLAIN)


@pytest.mark.parametrize("content", [ANY_TEXT, {"type": "optional", "content": const("x")}])
def test_many_ends_of_many_formats_are_too_much(content: Any) -> None:
    """Each of a thousand formats would name each of a thousand ends."""
    many = {"type": "or", "elements": [content] * 1000}
    asked = tag_of(tag("<a>", many, [f"<{number}>" for number in range(1000)]))
    with pytest.raises(ApiError, match="structural_tag: it is too long, or has too many ends"):
        structural_tag_form("structural_tag", asked, PLAIN)


def test_the_rules_of_all_grammars_count_together() -> None:
    """Each may have so many, but to convert them takes a tenth of a second."""
    one = {"type": "grammar", "grammar": 'root ::= "a"\n' + 'b ::= "c"\n' * 300}
    structural_tag_form("structural_tag", tag_of(one), PLAIN)
    many = {"type": "sequence", "elements": [one] * 4}
    with pytest.raises(ApiError, match="structural_tag: it is too long"):
        structural_tag_form("structural_tag", tag_of(many), PLAIN)


def test_much_that_may_be_a_token_is_too_much() -> None:
    texts = Texts(tuple(f"<m{number}>" for number in range(500)))
    for form in (ANY_TEXT | {"excludes": ["<m" * 40_000]}, const("<m" * 40_000)):
        with pytest.raises(ApiError, match="structural_tag: it is too long"):
            structural_tag_form("structural_tag", tag_of(form), texts.tokenizer)


def test_many_tags_of_many_triggers_are_too_much() -> None:
    names = [f"<{number}>" for number in range(2000)]
    tags = [tag(name, const("x"), "") for name in names]
    form = {"type": "triggered_tags", "triggers": names, "tags": tags}
    with pytest.raises(ApiError, match="structural_tag: it is too long"):
        structural_tag_form("structural_tag", tag_of(form), PLAIN)


async def test_the_tokens_that_free_text_may_hold_are_written_once() -> None:
    """Some models have a thousand tokens that are shown and end nothing."""
    texts = Texts(tuple(f"<m{number}>" for number in range(1000)), special=False)
    tags = [tag(f"<f{number}>", ANY_TEXT, f"</f{number}>") for number in range(50)]
    form = {"type": "triggered_tags", "triggers": ["<f"], "tags": tags}
    grammar = await grammar_of(texts, tag_of(form))
    assert texts.takes(grammar, "a<m1>b<f7>c<m2></f7>d<m3>")


async def test_repeated_ends_do_not_make_a_grammar_grow_with_its_depth() -> None:
    deep: Any = ANY_TEXT
    for _ in range(20):
        deep = {"type": "or", "elements": [const("x"), {"type": "optional", "content": deep}]}
    asked = tag_of(tag("<a>", deep, "b" * 1000))
    form = structural_tag_form("structural_tag", asked, PLAIN)
    assert len(json.dumps(form.rules)) < 6000


# --- markers --------------------------------------------------------------------------------------


def test_markers_are_the_tokens_that_llguidance_takes_no_text_for() -> None:
    backend = read_tokenizer(MODEL_PATH).backend
    contents = ("<a>", "<a b>", "<>", "[x]", " <a>", "<a", "a|>", "<｜x｜>")
    backend.add_tokens([AddedToken(each, special=False, normalized=False) for each in contents])
    backend.add_special_tokens([AddedToken("[y]", special=True), AddedToken("z", special=True)])
    tokenizer = Tokenizer(backend, {}, {}, is_byte_level=True)
    theirs = llguidance.LLTokenizer(backend.to_str(), tokenizer.vocab_size, [EOS])
    names = {*contents, "[y]", "z"}
    for token_id in range(tokenizer.vocab_size):
        text = backend.id_to_token(token_id)
        if text in names:
            assert theirs.is_special_token(token_id) == (text in tokenizer.markers), text
