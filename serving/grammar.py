"""Turns what a request says of its answer's form into a grammar that workers follow.

Names: OpenAI's response_format; SGLang's json_schema, regex and ebnf; vLLM's guided_* and
structured_outputs. A grammar is text in llguidance's format: JSON with one grammar, or with several
that name each other (guidance-ai/llguidance: docs/syntax.md).
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import llguidance
import msgspec
from llguidance.gbnf_to_lark import gbnf_to_lark

from serving.errors import ApiError, from_request_error, not_served, quoted
from serving.grammar_trial import GrammarTrial
from serving.schemas import prepare
from transfer.errors import Code, RequestError
from transfer.wire import MAX_GRAMMAR_BYTES

# Between two tokens of JSON; a model that may write space without limit sometimes never ends it.
_SPACE: Final = r" |\r?\n[ \t]{0,32}"
_MAX_CHOICES = 1024
_MAX_GBNF_CHARACTERS = 16 << 10  # read in Python, at some 3 us each
_GBNF_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
_GBNF_ESCAPE = re.compile(r"\\(?:\\|-|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8}))")
_REFUSED_OPTIONS = (
    "structural_tag",
    "whitespace_pattern",
    "disable_any_whitespace",
    "disable_additional_properties",
)


@dataclass(frozen=True, slots=True)
class Form:
    """What an answer has to look like. name: the field that says so; rules: one llguidance grammar.

    parts: grammars that the rules name.
    """

    name: str
    rules: Mapping[str, Any]
    parts: tuple["Part", ...] = ()

    @property
    def field(self) -> str:
        """The field's own name, which clients know."""
        return self.name.partition(".")[0]


@dataclass(frozen=True, slots=True)
class Part:
    """A named grammar. place: the path in the request that it is made from. owner: its function."""

    rules: Mapping[str, Any]
    place: str
    owner: str


class JsonSchemaFormat(msgspec.Struct):
    """`json_schema` of a response_format. strict: refuse a schema that cannot be followed."""

    schema: dict[str, Any] | None = None
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct):
    """schema, strict: as SGLang, llama.cpp and Together have it, in place of json_schema."""

    type: str = "text"
    json_schema: JsonSchemaFormat | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class StructuredOutputs(msgspec.Struct):
    """As vLLM has it."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    # Not served.
    structural_tag: Any = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None


class FormFields(Protocol):
    """The fields that cannot go with a form."""

    ignore_eos: bool | None


def form_of(
    fields: FormFields, min_tokens: int | None, eos_ids: Sequence[int], min_name: str = "min_tokens"
) -> Form | None:
    """The form that one of the fields asks for. Raises ApiError for two, or for a bad one."""
    forms = [
        read(name, value)
        for name, read in _READERS.items()
        if (value := getattr(fields, name, None)) is not None
    ]
    found = [form for form in forms if form is not None]
    if not found:
        return None
    if len(found) > 1:
        raise wrong(found[1].name, f"cannot go with {found[0].name}")
    check_end(found[0], fields, min_tokens, eos_ids, min_name)
    return found[0]


def check_end(
    form: Form,
    fields: FormFields,
    min_tokens: int | None,
    eos_ids: Sequence[int],
    min_name: str = "min_tokens",
) -> None:
    """Raises ApiError where the answer could not end when its form does."""
    if fields.ignore_eos:
        raise wrong("ignore_eos", f"cannot go with {form.name}, which says where the text ends")
    if min_tokens:
        raise wrong(min_name, f"cannot go with {form.name}, which says where the text ends")
    if not eos_ids:
        raise wrong(form.name, "this model names no token that ends a text")


async def grammar_text(form: Form, trial: GrammarTrial, prefix: str = "") -> str:
    """The grammar of an answer. prefix: rules of what precedes the form, which they name @answer.

    Raises ApiError: for a grammar that cannot be followed, naming the form's field; 429 when too
    many wait to be tried.
    """
    rules = [form.rules]
    if prefix:
        rules = [{"lark_grammar": prefix}, {"name": "answer", **form.rules}]
    text = _text([*rules, *(part.rules for part in form.parts)])
    _bound(form.name, text)
    try:
        fault = await trial.fault(text)
        if fault:
            raise await _blamed(form, fault, trial)
    except RequestError as error:
        if error.code is not Code.BAD_REQUEST:
            raise from_request_error(error) from error
        raise wrong(form.name, error.message) from error
    return text


async def _blamed(form: Form, fault: str, trial: GrammarTrial) -> ApiError:
    """The error for a fault: names the part that has it, found by bisection, else the form."""
    parts = form.parts
    while parts:
        half = parts[: (len(parts) + 1) // 2]
        own = await trial.fault(_any_of(half))
        if own and len(half) == 1:
            return wrong(half[0].place, f"of {half[0].owner!r}: {own}")
        parts = half if own else parts[len(half) :]
    return wrong(form.name, fault)


def _any_of(parts: Sequence[Part]) -> str:
    start = "start: " + " | ".join(f"@{part.rules['name']}" for part in parts)
    return _text([{"lark_grammar": start}, *(part.rules for part in parts)])


def _text(grammars: Sequence[Mapping[str, Any]]) -> str:
    """The grammars as JSON, in ASCII."""
    return json.dumps({"grammars": grammars})


def wrong(name: str, message: str) -> ApiError:
    """name: the path of a field; the error's param is its first name, or all if it has an index."""
    param = name if "[" in name else name.partition(".")[0]
    return ApiError(400, f"{name}: {message}", param, "invalid_value")


def schema_rules(name: str, schema: str | dict[str, Any], lenient: bool = False) -> dict[str, Any]:
    """The rules of a JSON schema. name: the path of the field that has it.

    lenient: leave out what llguidance does not support, as far as it only narrows the schema.
    Raises ApiError for a schema that is too long, ValueError for what is not a JSON object.
    """
    text = schema if isinstance(schema, str) else json.dumps(schema)
    _bound(name, text)
    document = json.loads(text)
    if isinstance(document, dict):
        options = document.get("x-guidance")  # llguidance's own options, which override ours
        if isinstance(options, dict):
            lenient = options.get("lenient", lenient) is True
        prepare(document, lenient)
    text = llguidance.LLMatcher.grammar_from_json_schema(
        json.dumps(document), defaults={"whitespace_pattern": _SPACE, "lenient": lenient}
    )
    return {"json_schema": json.loads(text)["grammars"][0]["json_schema"]}


# --- one function for each way to say it ----------------------------------------------------------


def _schema(name: str, schema: str | dict[str, Any], lenient: bool = False) -> Form:
    try:
        return Form(name, schema_rules(name, schema, lenient))
    except (ValueError, RecursionError) as error:
        raise wrong(name, f"expected a JSON schema: {error}") from error


def _bound(name: str, text: str, most: int = MAX_GRAMMAR_BYTES) -> None:
    if len(text) > most:
        raise wrong(name, f"at most {most} characters, got {len(text)}")


def _regex(name: str, regex: str) -> Form:
    _bound(name, regex)
    if (len(regex) - len(regex.rstrip("\\"))) % 2:  # llguidance would drop the last backslash
        raise wrong(name, "a backslash at its end escapes nothing")
    rules = json.loads(llguidance.LLMatcher.grammar_from_regex(regex))["grammars"][0]
    return Form(name, {"lark_grammar": rules["lark_grammar"]})


def _grammar(name: str, grammar: str) -> Form:
    """Lark, or GBNF, which begins at `root`."""
    _bound(name, grammar)
    if not _GBNF_RULE.search(grammar):
        return Form(name, {"lark_grammar": grammar})
    _bound(name, grammar, _MAX_GBNF_CHARACTERS)
    try:
        return Form(name, {"lark_grammar": gbnf_to_lark(_GBNF_ESCAPE.sub(_unescaped, grammar))})
    except Exception as error:  # gbnf_to_lark has no error type of its own
        raise wrong(name, f"expected a grammar: {error}") from error


def _unescaped(escape: re.Match[str]) -> str:
    """Rewrite an escape that gbnf_to_lark does not know or misreads as one that it reads right.

    It has no `\\-`, and drops the zeros before a code.
    """
    written = escape[0]
    if written == "\\\\":
        return written
    digits = escape[1] or escape[2]
    code = int(digits, 16) if digits else ord("-")
    return f"\\x{code:02x}" if code < 128 else chr(code)


def _choice(name: str, choices: list[str]) -> Form:
    if not 0 < len(choices) <= _MAX_CHOICES or "" in choices:
        raise wrong(name, f"expected 1 to {_MAX_CHOICES} texts that are not empty")
    return Form(name, {"lark_grammar": "start: " + " | ".join(map(quoted_terminal, choices))})


def quoted_terminal(text: str) -> str:
    """A text as a terminal of Lark, which takes no raw control characters."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _response_format(name: str, asked: ResponseFormat) -> Form | None:
    match asked.type:
        case "text":
            return None
        case "json_object" | "json_schema":
            return _json_format(name, asked)
    raise wrong(f"{name}.type", f"text, json_object or json_schema, got {quoted(asked.type)}")


def _json_format(name: str, asked: ResponseFormat) -> Form:
    where, given = f"{name}.json_schema.schema", asked.json_schema
    schema = None if given is None else given.schema
    strict = asked.strict if given is None else given.strict
    if asked.schema is not None:
        if given is not None:
            raise wrong(f"{name}.schema", f"cannot go with {name}.json_schema")
        where, schema = f"{name}.schema", asked.schema
    if schema is not None:
        return _schema(where, schema, lenient=strict is not True)
    if asked.type == "json_schema":
        raise wrong(where, "is required")
    return _schema(name, {"type": "object"})


def _structured_outputs(name: str, asked: StructuredOutputs) -> Form | None:
    for option in _REFUSED_OPTIONS:
        if getattr(asked, option) not in (None, False):
            raise not_served(f"{name}.{option}")
    forms = []
    if asked.json is not None:
        forms.append(_schema(f"{name}.json", asked.json))
    if asked.json_object:
        forms.append(_schema(f"{name}.json_object", {"type": "object"}))
    if asked.regex is not None:
        forms.append(_regex(f"{name}.regex", asked.regex))
    if asked.choice is not None:
        forms.append(_choice(f"{name}.choice", asked.choice))
    if asked.grammar is not None:
        forms.append(_grammar(f"{name}.grammar", asked.grammar))
    if len(forms) > 1:
        raise wrong(forms[1].name, f"cannot go with {forms[0].name}")
    return forms[0] if forms else None


_READERS: Final[Mapping[str, Callable[[str, Any], Form | None]]] = {
    "response_format": _response_format,
    "json_schema": _schema,
    "regex": _regex,
    "ebnf": _grammar,
    "guided_json": _schema,
    "guided_regex": _regex,
    "guided_choice": _choice,
    "guided_grammar": _grammar,
    "structured_outputs": _structured_outputs,
}
