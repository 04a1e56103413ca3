"""Schemas made ready for a grammar: what is closed, what stays open, and what is left out."""

import copy
import json
from typing import Any

import llguidance
import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from serving.errors import ApiError
from serving.forms import StructuredOutputs, form_of
from serving.grammar import schema_rules
from serving.protocol import SamplingFields
from serving.schemas import FORMATS, prepare
from tests.serving.live import EOS
from tests.serving.texts import Texts

TEXT = {"type": "string"}
PORT: dict[str, Any] = {"type": "object", "properties": {"port": TEXT}}
CLOSED = PORT | {"additionalProperties": False}


@pytest.fixture(scope="module")
def texts() -> Texts:
    return Texts()


def prepared(schema: dict[str, Any], lenient: bool = False) -> dict[str, Any]:
    schema = json.loads(json.dumps(schema))
    prepare(schema, lenient)
    return schema


def closed(schema: Any) -> Any:
    """The same schema, with each PORT object closed."""
    return json.loads(json.dumps(schema).replace(json.dumps(PORT), json.dumps(CLOSED)))


@pytest.mark.parametrize(
    "schema",
    [
        PORT,
        {"type": ["object", "null"], "properties": {}, "additionalProperties": False},
        {"type": "array", "items": PORT},
        {"prefixItems": [PORT, PORT], "items": PORT},
        {"additionalProperties": PORT},
        {"anyOf": [PORT, {"type": "null"}, True], "description": "d", "default": {}},
        {"allOf": [PORT], "title": "as pydantic has it"},
        {"$ref": "#/$defs/a~1b%20c", "$defs": {"a/b c": PORT}},
        {"$ref": "#/definitions/x", "definitions": {"x": PORT}, "$schema": "s", "$id": "i"},
        {"items": {"$ref": "#/components/0"}, "components": [PORT]},
        {"type": "array", "items": {"anyOf": [{"$ref": "#/$defs/x"}, PORT]}, "$defs": {"x": PORT}},
    ],
)
def test_objects_that_list_their_properties_are_closed(schema: dict[str, Any]) -> None:
    assert prepared(schema) == closed(schema)


def test_what_is_no_schema_is_as_it_was() -> None:
    values = {"enum": [PORT], "default": PORT, "examples": [PORT], "items": {"const": PORT}}
    assert prepared(values) == values


def test_a_property_may_be_called_properties() -> None:
    properties = {"properties": PORT, "required": PORT, "$ref": PORT, "allOf": PORT}
    found = prepared({"type": "object", "properties": properties, "required": ["required"]})
    assert found["properties"] == closed(properties)
    assert [*found["properties"]] == [*properties]
    assert found["additionalProperties"] is False


@pytest.mark.parametrize(
    "more",
    [
        {"additionalProperties": True},
        {"additionalProperties": {}},
        {"patternProperties": {"^x": {}}},
        {"propertyNames": {"maxLength": 3}},
        {"unevaluatedProperties": {"type": "null"}},
        {"required": ["port", "day"]},
        {"minProperties": 2, "required": ["port"]},
        {"allOf": [{"required": ["port"]}]},
        {"anyOf": [PORT, {"properties": {"day": PORT}}]},
        {"oneOf": [PORT]},
        {"$ref": "#/$defs/x", "$defs": {"x": PORT | {"items": PORT}}},
        {"if": PORT, "then": PORT},
        {"dependentSchemas": {"port": PORT}},
        {"enum": [{"port": "a", "day": 1}]},
    ],
)
@pytest.mark.parametrize("lenient", [False, True])
def test_what_needs_to_be_open_stays_open(more: dict[str, Any], lenient: bool) -> None:
    assert prepared(PORT | more, lenient) == PORT | more


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [PORT, {"properties": {"day": TEXT}}]},
        {"allOf": [PORT, {"$ref": "#/$defs/x"}], "$defs": {"x": PORT | {"items": PORT}}},
        {"allOf": [PORT], "required": ["day"]},
        {"allOf": [{"allOf": [PORT, PORT]}]},
        {"allOf": [{"$ref": "#/$defs/x"}, {"$ref": "#/$defs/y"}]}
        | {"$defs": {"x": {"items": PORT}, "y": {"$ref": "#/$defs/z"}, "z": PORT}},
        {"items": [{"$ref": "#/$defs/x"}, {"allOf": [{"$ref": "#/$defs/x"}, {}]}]}
        | {"$defs": {"x": PORT}},
        {"items": PORT, "anyOf": [{"items": PORT}]},
        {"items": PORT, "additionalProperties": {"$ref": "#anchor"}},
        {"items": PORT, "additionalProperties": {"$ref": "#/nowhere"}},
        {"items": {"$id": "other", "properties": {}}},
        {"patternProperties": {"^a": PORT, "b$": PORT}},
        {"oneOf": [PORT, {"properties": {"day": TEXT}}]},
    ],
)
def test_where_schemas_may_speak_of_one_value_all_are_open(schema: dict[str, Any]) -> None:
    assert prepared(schema) == schema


@pytest.mark.parametrize(
    ("counts", "required", "is_kept"),
    [
        ({"minProperties": 1}, [], True),
        ({"maxProperties": 1}, [], True),
        ({"minProperties": 2}, ["a"], True),
        ({"minProperties": 2}, ["a", "b", "c"], True),
        ({"minProperties": 2}, [], False),
        ({"maxProperties": 2}, [], False),
        ({"minProperties": 1, "maxProperties": 2}, [], False),
        ({"minProperties": 4}, [], False),
    ],
)
def test_counts_that_cannot_be_kept_make_nobody_add_properties(
    texts: Texts, counts: dict[str, Any], required: list[str], is_kept: bool
) -> None:
    schema = {"type": "object", "properties": {name: {"enum": [1]} for name in "abc"}}
    schema |= {"required": required, **counts}
    assert counts.items() <= prepared(schema).items()
    found = prepared(schema, lenient=True)
    assert (counts.items() <= found.items()) == is_kept
    grammar = json.dumps({"grammars": [schema_rules("x", schema, lenient=True)]})
    assert texts.takes(grammar, '{"a":1,"b":1,"c":1}') == ("maxProperties" not in found)


@pytest.mark.parametrize(
    ("counts", "required"),
    [
        ({"minProperties": 2, "maxProperties": 1}, []),
        ({"maxProperties": 0}, ["a"]),
        ({"maxProperties": 1}, ["a", "d"]),
    ],
)
def test_counts_that_no_object_has_are_kept(
    texts: Texts, counts: dict[str, Any], required: list[str]
) -> None:
    item = {"type": "object", "properties": {name: {"enum": [1]} for name in "abc"}}
    schema = {"type": "array", "items": item | {"required": required, **counts}}
    grammar = json.dumps({"grammars": [schema_rules("x", schema, lenient=True)]})
    assert texts.takes(grammar, "[]")
    assert not texts.takes(grammar, '[{"a":1,"d":1}]')
    assert not texts.takes(grammar, '[{"a":1,"b":1}]')


@pytest.mark.parametrize(
    ("one", "is_closed"),
    [
        (TEXT, True),
        (True, True),
        ({"anyOf": [{"$ref": "#/$defs/x"}, TEXT]}, True),
        ({"type": "array", "items": {"$ref": "#/$defs/x"}}, True),
        (PORT, True),
        ({"$ref": "#/$defs/x"}, False),
        ({"enum": []}, False),
        (False, False),
        (PORT | {"required": ["port"]}, False),
        ({"type": "array", "items": {"$ref": "#/$defs/x"}, "minItems": 1}, False),
    ],
)
def test_an_object_that_needs_what_it_may_not_have_stays_open(one: Any, is_closed: bool) -> None:
    schema = {"properties": {"a": one}, "minProperties": 1, "$defs": {"x": False}}
    assert ("additionalProperties" in prepared(schema)) == is_closed


def test_one_of_several_is_closed_where_any_of_them_will_do() -> None:
    assert prepared({"oneOf": [PORT, TEXT]}, lenient=True) == {"oneOf": [CLOSED, TEXT]}


def test_what_else_is_not_listed_may_be_ruled_out_by_another_name() -> None:
    assert prepared(PORT | {"unevaluatedProperties": False}) == CLOSED


def test_what_says_nothing_is_left_out_of_any_schema() -> None:
    plain = {"type": "object", "additionalProperties": TEXT}
    for names in (True, {}, {"type": "string"}, {"type": "string", "description": "d"}):
        assert prepared(plain | {"propertyNames": names}) == plain
    assert prepared({"items": TEXT | {"format": "int-or-so"}}) == {"items": TEXT}
    assert prepared({"type": "array", "uniqueItems": False}) == {"type": "array"}
    for said in ({"propertyNames": {"maxLength": 3}}, {"uniqueItems": True}, {"format": "uri"}):
        assert prepared(plain | said) == plain | said
    assert prepared({"const": {"format": "x"}}) == {"const": {"format": "x"}}


def test_formats_are_those_that_llguidance_knows(texts: Texts) -> None:
    standard = "date-time date time duration email idn-email hostname idn-hostname ipv4 ipv6 uri"
    more = "uri-reference iri iri-reference uuid uri-template json-pointer regex unknown int32 byte"
    for name in [*standard.split(), *more.split()]:
        grammar = json.dumps({"grammars": [{"json_schema": TEXT | {"format": name}}]})
        fault = llguidance.LLMatcher.validate_grammar(grammar, None)
        assert bool(fault) == (name not in FORMATS), (name, fault)


@pytest.mark.parametrize(
    ("pattern", "is_kept"),
    [
        ("^[a-z]+$", True),
        (r"^\$\^\(\?=\\$", True),
        (r"[(?=^$\]]x", True),
        (r"(?:a|(?P<n>b))(?i)", True),
        (r"\\b", True),
        ("[", True),
        ("(?=a)b", False),
        ("a(?!b)", False),
        ("(?<=a)b", False),
        ("(?<!a)b", False),
        (r"(a)\1", False),
        (r"\bword\b", False),
        ("^$|^a$", True),
        ("^(?:a|b)$|c$|^d", True),
        ("(^a$)", False),
        ("a$b", False),
        (r"\|^a", False),
    ],
)
def test_patterns_that_look_around_are_left_out_where_nobody_is_strict(
    pattern: str, is_kept: bool
) -> None:
    schema = {"properties": {"pattern": TEXT | {"pattern": pattern}}, "required": ["pattern"]}
    assert prepared(schema)["properties"] == schema["properties"]
    kept = schema["properties"] if is_kept else {"pattern": TEXT}
    assert prepared(schema, lenient=True)["properties"] == kept


def test_a_pattern_with_an_anchored_alternative_holds_in_a_lenient_schema(texts: Texts) -> None:
    # As the AI SDK's z.base64() writes it.
    base64 = "^$|^(?:[0-9a-zA-Z+/]{4})*(?:(?:[0-9a-zA-Z+/]{2}==)|(?:[0-9a-zA-Z+/]{3}=))?$"
    schema = TEXT | {"pattern": base64}
    grammar = json.dumps({"grammars": [schema_rules("a", schema, lenient=True)]})
    for text, fits in (("", True), ("Zm9v", True), ("Zm8=", True), ("Zm9", False), (" the", False)):
        assert texts.takes(grammar, json.dumps(text)) == fits


@pytest.mark.parametrize(
    ("bounds", "kept"),
    [
        ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, {"maximum": 2**63 - 1}),
        ({"type": ["integer", "null"], "exclusiveMaximum": 2**64}, {"exclusiveMaximum": 2**64}),
        ({"type": "number", "minimum": -3.4e38, "maximum": 3.4e38}, {}),
        ({"exclusiveMinimum": -1e300, "exclusiveMaximum": 1e300}, {}),
        ({"type": "number", "maximum": 9e18}, {"maximum": 9e18}),
        ({"type": "integer", "minimum": 0, "exclusiveMinimum": False}, None),
        ({"minimum": None, "maximum": "9"}, None),
    ],
)
def test_bounds_that_llguidance_has_no_bits_for_are_left_out_where_nobody_is_strict(
    texts: Texts, bounds: dict[str, Any], kept: dict[str, Any] | None
) -> None:
    assert prepared(bounds) == bounds
    found = prepared(bounds, lenient=True)
    if kept is None:
        assert found == bounds
        return
    types = {"type": bounds["type"]} if "type" in bounds else {}
    assert found == types | kept
    grammar = json.dumps({"grammars": [schema_rules("a", bounds, lenient=True)]})
    assert texts.takes(grammar, "123456789")


def test_a_long_pattern_and_a_deep_or_knotted_schema_take_no_time() -> None:
    assert prepared({"pattern": "[" * 100_000}, lenient=True) == {"pattern": "[" * 100_000}
    deep: dict[str, Any] = {}
    for _ in range(50_000):  # `prepare` does not recurse, whatever may read it later
        deep = {"properties": {"a": deep}}
    prepare(deep, lenient=False)
    assert deep["properties"]["a"]["additionalProperties"] is False
    for _ in range(50_000):
        deep = {"anyOf": [deep]}
    prepare(root := {"properties": {"a": deep}, "minProperties": 1}, lenient=False)
    assert "additionalProperties" not in root
    many = [f"p{i}" for i in range(20_000)]  # a search of all `required` for each takes seconds
    wide: dict[str, Any] = {"properties": {n: {} for n in many}, "required": many[::-1]}
    prepare(wide, lenient=False)
    assert wide["additionalProperties"] is False
    names = [f"s{i}" for i in range(300)]
    knot = {"anyOf": [{"$ref": f"#/$defs/{name}"} for name in names]}
    schema = {"$ref": "#/$defs/s0", "$defs": {name: copy.deepcopy(knot) for name in names}}
    assert prepared(schema) == schema


NAMES = st.sampled_from(["a", "b"])
PLAIN: st.SearchStrategy[Any] = st.sampled_from([{}, {"type": "null"}, {"enum": [0, True]}])
LEAVES: st.SearchStrategy[Any] = PLAIN | st.just({"$ref": "#/$defs/x"})


def _more(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    objects = st.fixed_dictionaries(
        {"type": st.just("object")},
        optional={
            "properties": st.dictionaries(NAMES, inner, max_size=2),
            "required": st.lists(NAMES, max_size=2, unique=True),
            "additionalProperties": st.booleans() | inner,
            "minProperties": st.integers(0, 2),
            "maxProperties": st.integers(0, 2),
            "anyOf": st.lists(inner, min_size=1, max_size=2),
        },
    )
    several = st.lists(inner, min_size=1, max_size=2)
    return st.one_of(
        objects,
        objects,
        *(st.builds(lambda many, how=how: {how: many}, several) for how in ("anyOf", "allOf")),
        st.builds(lambda item: {"type": "array", "items": item, "maxItems": 1}, inner),
    )


SCHEMAS = st.builds(
    lambda root, x: {**root, "$defs": {"x": x}},
    st.recursive(LEAVES, _more, max_leaves=6),
    st.recursive(PLAIN, _more, max_leaves=3),
)


NOTHING = {"$defs": {"x": {"allOf": [{"type": "null"}, {"type": "object"}]}}}
OF_NOTHING = {"type": "object", "properties": {"a": {"$ref": "#/$defs/x"}}, "minProperties": 1}


@example(schema={"items": OF_NOTHING | {"maxProperties": 0}, "type": "array"} | NOTHING, seed=0)
@example(schema=OF_NOTHING | NOTHING, seed=0)
@settings(max_examples=60, deadline=None)
@given(schema=SCHEMAS, seed=st.integers(0, 9))
def test_what_a_prepared_schema_takes_is_taken_by_the_original(
    texts: Texts, schema: dict[str, Any], seed: int
) -> None:
    original = json.dumps({"grammars": [{"json_schema": schema}]})
    if llguidance.LLMatcher.validate_grammar(original, None):
        return
    for lenient in (False, True):
        ready = json.dumps({"grammars": [schema_rules("x", schema, lenient)]})
        ids = texts.drawn_ids(ready, seed, most=60)  # it can be followed
        assert texts.matcher(original).validate_tokens(ids) == len(ids)


# --- space ----------------------------------------------------------------------------------------


class Asking(SamplingFields):
    structured_outputs: StructuredOutputs | None = None


def rules_of(texts: Texts, **options: Any) -> str:
    """The grammar of structured_outputs with these options."""
    asked = Asking(structured_outputs=msgspec.convert(options, StructuredOutputs))
    form = form_of(asked, None, [EOS], texts.tokenizer)
    assert form is not None
    return json.dumps({"grammars": [form.rules]})


@pytest.mark.parametrize(
    "what", [{"json": PORT}, {"json": json.dumps(PORT)}, {"json_object": True}]
)
@pytest.mark.parametrize(
    ("option", "taken"),
    [
        ({}, [True, True, True, False]),
        ({"disable_any_whitespace": False, "whitespace_pattern": ""}, [True, True, True, False]),
        ({"disable_any_whitespace": True}, [True, False, False, False]),
        ({"whitespace_pattern": " ?"}, [True, True, False, False]),
        ({"whitespace_pattern": r"[\n ]*"}, [True, True, True, True]),
    ],
)
def test_a_request_may_say_which_space_stands_between_tokens_of_json(
    texts: Texts, what: dict[str, Any], option: dict[str, Any], taken: list[bool]
) -> None:
    grammar = rules_of(texts, **what, **option)
    spaces = ["", " ", "\n  ", "\n\n\n"]
    found = [texts.takes(grammar, f'{{"port":{space}"north quay"{space}}}') for space in spaces]
    assert found == taken


def test_space_that_is_said_twice_or_of_no_json_is_refused(texts: Texts) -> None:
    for options, name in (
        ({"json": PORT, "whitespace_pattern": " ", "disable_any_whitespace": True}, "whitespace_p"),
        ({"regex": "a", "whitespace_pattern": " "}, "whitespace_pattern: is only for json"),
        ({"choice": ["a"], "disable_any_whitespace": True}, "disable_any_whitespace: is only for"),
    ):
        with pytest.raises(ApiError, match=f"structured_outputs.{name}") as caught:
            rules_of(texts, **options)
        assert (caught.value.status, caught.value.param) == (400, "structured_outputs")
