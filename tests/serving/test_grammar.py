"""The forms that requests ask of an answer: which texts may follow, and what is refused."""

import json
from collections.abc import Iterator
from typing import Any

import llguidance
import msgspec
import pytest

from model.tokenizer_files import read_tokenizer
from serving.call_grammar import calls_form, thought_prefix
from serving.errors import ApiError
from serving.forms import check_end, form_of
from serving.grammar import Form, grammar_text
from serving.grammar_trial import GrammarTrial
from serving.json_fields import read_json
from serving.openai_fields import ChatFields, CompletionFields
from serving.parsing import Parsing
from serving.protocol import SamplingFields
from serving.sglang_api import GenerateSampling
from serving.tagged_text import CALL_FORMATS
from serving.tokenizer import Tokenizer
from serving.tool_calls import Tools
from tests.serving.live import EOS, MODEL_PATH
from tests.serving.texts import Texts, Untried

EOS_IDS = (EOS,)
SCHEMA = {
    "type": "object",
    "properties": {"port": {"enum": ["north", "südlich"]}, "boats": {"type": "boolean"}},
    "required": ["port", "boats"],
    "additionalProperties": False,
}
RIGHT = '{"port": "südlich", "boats": true}'
MARKERS = (
    *(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
    ),
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    *("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    *("<｜tool▁sep｜>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>"),
    *("<tool_calls>", "</tool_calls>"),
    *("<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|constrain|>", "<|call|>"),
)


@pytest.fixture(scope="module")
def texts() -> Texts:
    return Texts()


@pytest.fixture(scope="module", params=["tokens", "text"])
def either(request: pytest.FixtureRequest) -> Texts:
    """A model that has markers as tokens of their own, and one that spells them."""
    return Texts(MARKERS if request.param == "tokens" else ())


PLAIN = Texts().tokenizer
TRIAL = GrammarTrial(MODEL_PATH)


@pytest.fixture(scope="module", autouse=True)
def no_process_is_left() -> Iterator[None]:
    yield
    TRIAL.close()


async def text_of(form: Form, prefix: str = "", trial: GrammarTrial = TRIAL) -> str:
    return await grammar_text(form, trial, prefix)


def fields_of(kind: Any, **given: Any) -> Any:
    needed = {"prompt": "x"} if kind is CompletionFields else {}
    body = needed | given
    return read_json(msgspec.json.Decoder(kind), json.dumps(body).encode())


def form_asked(kind: Any = ChatFields, **given: Any) -> Form:
    form = form_of(fields_of(kind, **given), None, EOS_IDS, PLAIN)
    assert form is not None
    return form


# --- ways to ask --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "right", "bad"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
            RIGHT,
            '{"port": "west", "boats": true}',
        ),
        ({"response_format": {"type": "json_object"}}, '{"a": [1, {"b": null}]}', "[1]"),
        ({"json_schema": json.dumps(SCHEMA)}, RIGHT, "{}"),
        ({"json_schema": SCHEMA}, '{"port":"north","boats":false}', '{"port":"north"}'),
        ({"guided_json": SCHEMA}, '{\n  "port": "north",\n  "boats": false\n}', RIGHT + " x"),
        ({"structured_outputs": {"json": SCHEMA}}, RIGHT, "null"),
        ({"structured_outputs": {"json_object": True}}, "{}", "1"),
        ({"regex": "[0-9]{3}/[ab]+"}, "123/ab", "12/ab"),
        ({"guided_regex": "é?x"}, "éx", "ée"),
        ({"guided_regex": "a\\\\"}, "a\\", "a"),
        ({"structured_outputs": {"regex": "a|b"}}, "b", "ab"),
        ({"guided_choice": ["north", "north pier", 'a "b"\n']}, 'a "b"\n', "south"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes", "yesno"),
        ({"guided_choice": ["a\x7f\x01\t"]}, "a\x7f\x01\t", "a"),
        ({"ebnf": 'root ::= "a" tail\ntail ::= [0-9]* | "!"'}, "a42", "b"),
        ({"ebnf": 'start: "a" B\nB: /[0-9]+/'}, "a42", "a"),
        ({"ebnf": r'root ::= "caf\u00e9ab"'}, "caféab", "caf\ue9ab"),
        ({"ebnf": r'root ::= "a\u002cb" "\U0001F600"'}, "a,b😀", "ab😀"),
        ({"ebnf": r"root ::= [\u0400-\u04ff]+"}, "да", "da"),
        ({"ebnf": r"root ::= [a-z\-]+"}, "a-b", "a_b"),
        ({"ebnf": r'root ::= "\\u00e9" "\""'}, r"\u00e9" + '"', 'é"'),
        ({"ebnf": '?start: a\n?a: "x"'}, "x", "y"),
        ({"guided_grammar": 'start: "x"'}, "x", "y"),
        ({"structured_outputs": {"grammar": 'start: "x"'}}, "x", ""),
    ],
)
async def test_each_way_to_ask_takes_its_texts_alone(
    texts: Texts, given: dict[str, Any], right: str, bad: str
) -> None:
    grammar = await text_of(form_asked(**given))
    assert texts.takes(grammar, right)
    assert not texts.takes(grammar, bad)


@pytest.mark.parametrize("kind", [ChatFields, CompletionFields, GenerateSampling])
def test_all_routes_know_sglangs_names(kind: Any) -> None:
    for given in ({"regex": "a"}, {"json_schema": "{}"}, {"ebnf": 'start: "a"'}):
        assert form_asked(kind, **given).name == next(iter(given))


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"response_format": {"type": "text"}},
        {"response_format": None, "regex": None, "guided_json": None},
        {"structured_outputs": {}},
    ],
)
def test_a_request_may_ask_for_no_form(given: dict[str, Any]) -> None:
    assert form_of(fields_of(ChatFields, **given), 5, (), PLAIN) is None


async def test_json_has_little_space_between_its_tokens(texts: Texts) -> None:
    grammar = await text_of(form_asked(json_schema=SCHEMA))
    assert not texts.takes(grammar, RIGHT.replace(": ", ":  "))
    assert not texts.takes(grammar, RIGHT.replace(", ", ",\n\n"))


BEYOND = {"schema": {"not": {"type": "string"}}}
LIKE_SCHEMA: list[dict[str, Any]] = [
    {"type": "json_schema", "json_schema": {"schema": SCHEMA}},
    {"type": "json_schema", "schema": SCHEMA},
    {"type": "json_schema", "schema": SCHEMA, "json_schema": None},
    {"type": "json_object", "schema": SCHEMA},
    {"type": "json_object", "json_schema": {"schema": SCHEMA}},
    {"type": "json_object", "value": SCHEMA},
]


@pytest.mark.parametrize("asked", LIKE_SCHEMA)
def test_a_schema_may_stand_in_a_response_format_itself(asked: dict[str, Any]) -> None:
    first = form_asked(response_format=LIKE_SCHEMA[0])
    assert form_asked(response_format=asked).rules == first.rules


@pytest.mark.parametrize(("strict", "is_followed"), [(None, True), (False, True), (True, False)])
async def test_what_only_narrows_is_left_out_where_nobody_is_strict(
    texts: Texts, strict: bool | None, is_followed: bool
) -> None:
    schema = {"properties": {"a": {"type": "array", "uniqueItems": True, "maxItems": 2}}}
    asked = {"json_schema": {"schema": {"type": "object", **schema}, "strict": strict}}
    form = form_asked(response_format={"type": "json_schema", **asked})
    if is_followed:
        grammar = await text_of(form)
        assert texts.takes(grammar, '{"a": [1, 1]}')
        assert not texts.takes(grammar, '{"a": [1, 1, 1]}')
    else:
        with pytest.raises(ApiError, match="uniqueItems"):
            await text_of(form)


async def test_options_of_a_schema_are_those_of_its_grammar(texts: Texts) -> None:
    loose = {"x-guidance": {"lenient": True, "whitespace_pattern": ""}, **BEYOND["schema"]}
    grammar = await text_of(form_asked(guided_json=loose))
    assert texts.takes(grammar, "[1,2]")
    assert not texts.takes(grammar, "[1, 2]")


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"regex": "(a"}, "regex: "),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"regex": "a\\"}, "regex: a backslash"),
        ({"regex": r"(a)\1"}, "regex: "),
        ({"json_schema": "no json"}, "expected a JSON schema"),
        ({"json_schema": "[1]"}, "json_schema: "),
        ({"json_schema": {"type": "foo"}}, "json_schema: Invalid type"),
        ({"json_schema": {"$ref": "#/nowhere"}}, "json_schema: "),
        ({"json_schema": {"$ref": "http://127.0.0.1/x.json"}}, "json_schema: "),
        ({"json_schema": {"$ref": "#"}}, "json_schema: no text that this model can write"),
        ({"ebnf": "start: start /a/"}, "ebnf: no text that this model can write"),
        ({"json_schema": {"type": "string", "pattern": "(?=x)"}}, "json_schema: "),
        ({"json_schema": {"type": "integer", "minimum": 3, "maximum": 2}}, "json_schema: "),
        ({"guided_json": {"not": {"type": "string"}}}, "guided_json: "),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_object", "schema": {"type": "foo"}}}, "schema: Inv"),
        ({"response_format": {"type": "json_object", "value": {"type": "foo"}}}, "value: Inv"),
        (
            {"response_format": {"type": "json_schema", "json_schema": BEYOND | {"strict": True}}},
            'response_format.json_schema.schema: Unimplemented keys: ["not"]',
        ),
        (
            {"response_format": {"type": "json_schema", **BEYOND, "strict": True}},
            "response_format.schema: Unimplemented",
        ),
        (
            {"response_format": {"type": "json_schema", "schema": {}, "json_schema": BEYOND}},
            "response_format.schema: cannot go with response_format.json_schema",
        ),
        ({"structured_outputs": {"json": BEYOND["schema"]}}, "structured_outputs.json: Unimp"),
        ({"response_format": {"type": "x"}}, "response_format.type"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "cannot go with"),
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"json": {}, "whitespace_pattern": "("}}, "unclosed group"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a", ""]}, "guided_choice"),
        ({"guided_choice": ["a"] * 2000}, "guided_choice"),
        ({"ebnf": "start: nobody"}, "ebnf: "),
        ({"ebnf": "\n" * 100_000}, "ebnf: "),
        ({"ebnf": r'root ::= "\ud800"'}, "ebnf: "),
        ({"ebnf": r'root ::= "\UFFFFFFFF"'}, "ebnf: "),
        ({"ebnf": r'root ::= "\q"'}, "ebnf: "),
        ({"ebnf": 'other ::= "a"'}, "ebnf: "),
        ({"ebnf": 'root ::= start\nstart ::= "x"'}, "Rule 'start' already exists"),
        ({"ebnf": "root ::= " + "(" * 9000}, "ebnf: "),
        ({"ebnf": 'root ::= "' + "a" * 20_000 + '"'}, "at most"),
        ({"ebnf": 'root ::= "a"\n' + 'a ::= "b"\n' * 1000}, "at most 209 rules in 10013"),
        ({"regex": "a" * 200_000}, "at most"),
        ({"json_schema": "[" * 5000}, "expected a JSON schema"),
        ({"json_schema": '{"const": "\\ud800"}'}, "json_schema: "),
        ({"ebnf": ""}, "ebnf: "),
        ({"ebnf": "%import common.NOTHING\nstart: NOTHING"}, "ebnf: "),
        ({"regex": "a", "guided_choice": ["b"]}, "cannot go with regex"),
        ({"regex": "a", "ignore_eos": True}, "ignore_eos: cannot go with regex"),
    ],
)
async def test_what_cannot_be_followed_is_refused_by_name(
    given: dict[str, Any], words: str
) -> None:
    with pytest.raises(ApiError) as caught:
        await text_of(form_asked(**given))
    assert caught.value.status == 400
    assert words in caught.value.message
    assert caught.value.param in given


def test_an_answer_must_be_able_to_end_with_its_form() -> None:
    form = form_asked(regex="a")
    for ignore_eos, tokens, ends, param in (
        (True, 0, EOS_IDS, "ignore_eos"),
        (False, 3, EOS_IDS, "min_new_tokens"),
        (None, 0, (), "regex"),
    ):
        fields = SamplingFields(ignore_eos=ignore_eos)
        with pytest.raises(ApiError) as caught:
            check_end(form, fields, tokens, ends, "min_new_tokens")
        assert caught.value.param == param


NESTED: dict[str, Any] = {"type": "string"}
for _ in range(400):
    NESTED = {"type": "object", "properties": {"a": NESTED}, "required": ["a"]}


@pytest.mark.parametrize(
    "schema",
    [
        NESTED,
        {"enum": ["x" * 100 + str(number) for number in range(2000)]},
        {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(6000)}},
        {"allOf": [{"anyOf": [{"properties": {f"a{n}": {}}} for n in range(8)]}] * 8},
    ],
)
async def test_a_grammar_that_takes_too_much_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as caught:
        await text_of(form_asked(json_schema=json.dumps(schema)))
    assert caught.value.param == "json_schema"


# --- thoughts -------------------------------------------------------------------------------------

OPEN, OVER = "<think>\n", "<think>\n\n</think>\n\n"


@pytest.mark.parametrize(
    ("parsing", "right", "bad"),
    [
        (Parsing("none"), RIGHT, f"<think>Hm.</think>{RIGHT}"),
        (Parsing("qwen3"), RIGHT, f"Hm.</think>{RIGHT}"),
        (Parsing("qwen3"), f"<think>\nHm {{.\n</think>\n\n{RIGHT}", f"<think>Hm.{RIGHT}"),
        (Parsing("qwen3", prompt=OPEN), f"Hm.</think>\n{RIGHT}", RIGHT),
        (Parsing("qwen3", prompt=OVER), RIGHT, f"<think>Hm.</think>{RIGHT}"),
        (Parsing("deepseek-r1"), f"Hm.</think>{RIGHT}", RIGHT),
        (Parsing("kimi_k2"), f"<think>Hm.</think>{RIGHT}", f"<think>Hm.{RIGHT}"),
        (Parsing("kimi_k2", prompt="<think>"), f"Hm.</think>{RIGHT}", RIGHT),
        (Parsing("kimi_k2", prompt="<think></think>"), RIGHT, f"<think>Hm.</think>{RIGHT}"),
        (Parsing("deepseek-v3", begun="<think>Hm.</think>"), RIGHT, f"a</think>{RIGHT}"),
    ],
)
async def test_a_thought_may_come_first_where_the_model_thinks(
    texts: Texts, parsing: Parsing, right: str, bad: str
) -> None:
    prefix = thought_prefix(parsing, texts.tokenizer)
    grammar = await text_of(form_asked(json_schema=SCHEMA), prefix)
    assert texts.takes(grammar, right)
    assert not texts.takes(grammar, bad)


async def test_a_model_that_spells_its_tags_may_think_too() -> None:
    files = read_tokenizer(MODEL_PATH)
    spelled = files.backend.to_str().replace("<think>", "<other>").replace("</think>", "</other>")
    tokenizer = Tokenizer(type(files.backend).from_str(spelled), {}, {}, is_byte_level=True)
    assert tokenizer.token_id("</think>") is None
    matcher = llguidance.LLMatcher(
        llguidance.LLTokenizer(spelled, tokenizer.vocab_size, [EOS]),
        await text_of(form_asked(json_schema=SCHEMA), thought_prefix(Parsing("qwen3"), tokenizer)),
    )
    ids = tokenizer.encode(f"<think>Hm </thin.</think>\n{RIGHT}", False)
    assert all(matcher.consume_token(token_id) for token_id in [*ids, EOS])


async def test_gpt_oss_answers_in_its_final_channel() -> None:
    marked = Texts(MARKERS)
    prefix = thought_prefix(Parsing("gpt-oss", "gpt-oss"), marked.tokenizer)
    grammar = await text_of(form_asked(json_schema=SCHEMA), prefix, Untried(MODEL_PATH))
    final = f"<|channel|>final<|message|>{RIGHT}"
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    assert marked.takes(grammar, final)
    assert marked.takes(grammar, thought + thought + final)
    assert not marked.takes(grammar, RIGHT)
    assert not marked.takes(grammar, f"<|channel|>commentary<|message|>{RIGHT}")


# --- tool calls -----------------------------------------------------------------------------------

TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}},
    {
        "type": "function",
        "function": {
            "name": "ferry_times",
            "parameters": {
                "type": "object",
                "properties": {"day": {"$ref": "#/$defs/day"}},
                "required": ["day"],
                "additionalProperties": False,
                "$defs": {"day": {"enum": [1, 2]}},
            },
        },
    },
]
NAMES: Tools = {"weather": {}, "ferry_times": {}}


@pytest.mark.parametrize("name", [*CALL_FORMATS, "gpt-oss"])
@pytest.mark.parametrize("only", [None, "ferry_times"])
async def test_calls_that_must_be_made_are_read_as_they_are_written(
    either: Texts, name: Any, only: str | None
) -> None:
    if name == "gpt-oss":
        either = Texts(MARKERS)  # its channels are always tokens
    reasoning: Any = "gpt-oss" if name == "gpt-oss" else "qwen3"
    parsing = Parsing(reasoning, name, NAMES, must_call=True, prompt="<|start|>assistant")
    form = calls_form(parsing, TOOLS, only, either.tokenizer)
    prefix = thought_prefix(parsing, either.tokenizer)
    grammar = await text_of(form, prefix, Untried(MODEL_PATH))
    called = set()
    for seed in range(12):
        text = either.drawn(grammar, seed)
        parser = parsing.parser()
        told = parser.feed(text) + parser.finish()
        assert told.calls, text
        assert not told.content.strip(), text
        called |= {call.name for call in told.calls}
        for call in told.calls:
            arguments = json.loads(call.arguments)
            assert set(arguments) == ({"day"} if call.name == "ferry_times" else {"port", "boats"})
        assert only is None or len(told.calls) == 1
    assert called == ({only} if only else set(NAMES))


async def test_one_call_is_made_where_no_more_are_wanted(either: Texts) -> None:
    parsing = Parsing("none", "hermes", NAMES, one_call=True, must_call=True)
    grammar = await text_of(calls_form(parsing, TOOLS, None, either.tokenizer))
    one = f'<tool_call>\n{{"name": "weather", "arguments": {RIGHT}}}\n</tool_call>'
    assert either.takes(grammar, one)
    assert not either.takes(grammar, f"{one}\n{one}")


async def test_a_call_of_kimi_has_a_number_that_the_model_chooses(either: Texts) -> None:
    parsing = Parsing("none", "kimi_k2", NAMES, must_call=True)
    grammar = await text_of(
        calls_form(parsing, TOOLS, None, either.tokenizer), "", Untried(MODEL_PATH)
    )
    begin, end = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
    argument = "<|tool_call_argument_begin|>"

    def call(named: str) -> str:
        return f"<|tool_call_begin|>{named}{argument}{RIGHT}<|tool_call_end|>"

    several = "".join(map(call, ("functions.weather:9", "functions.weather:10")))
    assert either.takes(grammar, f"{begin}{several}{end}")
    for named in ("weather:0", "functions.weather", "functions.weather:01", "functions.other:0"):
        assert not either.takes(grammar, f"{begin}{call(named)}{end}")
    assert not either.takes(grammar, several)


@pytest.mark.parametrize(
    ("tools", "only", "param"),
    [
        ([], None, "tool_choice"),
        (TOOLS, "nobody", "tool_choice"),
        ([{"type": "web_search"}], None, "tool_choice"),
        ([{"type": "function"}], None, "tools"),
        (TOOLS * 300, None, "tools"),
        ([{"function": {"name": "x", "parameters": [1]}}], None, "tools"),
        ([{"function": {"name": "x", "parameters": "no json"}}], None, "tools"),
        ([{"function": {"name": "x", "parameters": {"type": "string"}}}], None, "tools"),
        ([{"function": {"name": "x", "parameters": {"type": ["array", "null"]}}}], None, "tools"),
    ],
)
def test_tools_that_cannot_be_called_are_refused(
    texts: Texts, tools: list[dict[str, Any]], only: str | None, param: str
) -> None:
    parsing = Parsing("none", "hermes", NAMES, must_call=True)
    with pytest.raises(ApiError) as caught:
        calls_form(parsing, tools, only, texts.tokenizer)
    assert (caught.value.status, caught.value.param) == (400, param)


async def test_a_tool_may_have_any_name_and_no_parameters(texts: Texts) -> None:
    tools = [{"function": {"name": 'say "é"\n'}}]
    parsing = Parsing("none", "hermes", {'say "é"\n': {}}, must_call=True)
    grammar = await text_of(calls_form(parsing, tools, None, texts.tokenizer))
    call = json.dumps({"name": 'say "é"\n', "arguments": {}}, ensure_ascii=False)
    assert texts.takes(grammar, f"<tool_call>\n{call}\n</tool_call>")


async def test_a_tool_without_parameters_has_no_arguments(texts: Texts) -> None:
    for function in ({"name": "now"}, {"name": "now", "parameters": None}):
        parsing = Parsing("none", "llama3", {"now": {}}, must_call=True)
        grammar = await text_of(
            calls_form(parsing, [{"function": function}], None, texts.tokenizer)
        )
        assert texts.takes(grammar, '{"name": "now", "parameters": {}}')
        assert not texts.takes(grammar, '{"name": "now", "parameters": {"a": 1}}')


async def test_of_many_tools_the_one_that_cannot_be_followed_is_named(texts: Texts) -> None:
    parameters = {"type": "object", "properties": {"a": {"not": {"type": "string"}}}}
    for bad, number in ((0, 1), (0, 4), (3, 4), (4, 5), (5, 7)):
        tools: list[dict[str, Any]] = [
            {"function": {"name": f"t{i}", "strict": i == bad, "parameters": parameters}}
            for i in range(number)
        ]
        places = {f"t{i}": f"tools[{i}].function.parameters" for i in range(number)}
        parsing = Parsing("none", "hermes", {}, must_call=True)
        form = calls_form(parsing, tools, None, texts.tokenizer, places)
        with pytest.raises(ApiError) as caught:
            await text_of(form)
        assert caught.value.param == f"tools[{bad}].function.parameters"
        assert f"'t{bad}': Unimplemented keys" in caught.value.message
        tools[bad]["function"]["strict"] = False
        assert await text_of(calls_form(parsing, tools, None, texts.tokenizer, places))


async def test_tools_that_are_too_much_together_are_refused_together(texts: Texts) -> None:
    words = {"enum": ["x" * 100 + str(number) for number in range(700)]}
    tools = [
        {"function": {"name": f"t{i}", "parameters": {"properties": {"a": words}}}}
        for i in range(2)
    ]
    parsing = Parsing("none", "hermes", {}, must_call=True)
    with pytest.raises(ApiError, match="characters of parameters") as caught:
        calls_form(parsing, tools, None, texts.tokenizer)
    assert caught.value.param == "tools"
    assert await text_of(calls_form(parsing, tools, "t1", texts.tokenizer))
