"""What a request says of the form of its answer, as a grammar that workers follow.

Names: OpenAI's response_format; SGLang's json_schema, regex and ebnf; vLLM's guided_* and
structured_outputs. A grammar is a text of llguidance's: JSON with one grammar, or several that name
each other (guidance-ai/llguidance: docs/syntax.md).
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
from transfer.errors import Code, RequestError
from transfer.wire import MAX_GRAMMAR_BYTES

# Between two tokens of JSON: a model that may write any space writes nothing else, sometimes.
_SPACE: Final = r" |\r?\n[ \t]{0,32}"
_MAX_CHOICES = 1024
_MAX_GBNF_CHARACTERS = 16 << 10  # which Python reads, some 3 us each
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
    parts: tuple[Mapping[str, Any], ...] = ()


class JsonSchemaFormat(msgspec.Struct):
    """`json_schema` of a response_format. strict: it always is."""

    schema: dict[str, Any] | None = None
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct):
    type: str = "text"
    json_schema: JsonSchemaFormat | None = None


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
    """What goes with no form."""

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
    """The grammar of an answer that begins as `prefix` has it, which may name @answer.

    Raises ApiError: for one that cannot be followed, naming the form's field; 429 where too many
    wait to be tried.
    """
    rules = [form.rules]
    if prefix:
        rules = [{"lark_grammar": prefix}, {"name": "answer", **form.rules}]
    text = json.dumps({"grammars": [*rules, *form.parts]})  # of ASCII alone
    _bound(form.name, text)
    try:
        fault = await trial.fault(text)
    except RequestError as error:
        if error.code is not Code.BAD_REQUEST:
            raise from_request_error(error) from error
        fault = error.message
    if fault:
        raise wrong(form.name, fault)
    return text


def wrong(name: str, message: str) -> ApiError:
    """name: of a field, or of one inside it, whose own name clients know."""
    return ApiError(400, f"{name}: {message}", name.partition(".")[0], "invalid_value")


def schema_rules(name: str, schema: str | dict[str, Any]) -> dict[str, Any]:
    """name: whose schema. Raises ApiError for a long one, ValueError for what is no JSON object."""
    text = schema if isinstance(schema, str) else json.dumps(schema)
    _bound(name, text)
    text = llguidance.LLMatcher.grammar_from_json_schema(
        text, defaults={"whitespace_pattern": _SPACE}
    )
    return {"json_schema": json.loads(text)["grammars"][0]["json_schema"]}


# --- one function for each way to say it ----------------------------------------------------------


def _schema(name: str, schema: str | dict[str, Any]) -> Form:
    try:
        return Form(name, schema_rules(name, schema))
    except (ValueError, RecursionError) as error:
        raise wrong(name, f"expected a JSON schema: {error}") from error


def _bound(name: str, text: str, most: int = MAX_GRAMMAR_BYTES) -> None:
    if len(text) > most:
        raise wrong(name, f"at most {most} characters, got {len(text)}")


def _regex(name: str, regex: str) -> Form:
    _bound(name, regex)
    if (len(regex) - len(regex.rstrip("\\"))) % 2:  # llguidance would leave it out
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
    except Exception as error:  # the reader has no errors of its own
        raise wrong(name, f"expected a grammar: {error}") from error


def _unescaped(escape: re.Match[str]) -> str:
    """What the reader does not know, or takes for another character, as what it knows.

    It has no `\\-`, and leaves out the zeros before a code.
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
    """A text as Lark has it, which takes no control character as it is."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _response_format(name: str, asked: ResponseFormat) -> Form | None:
    match asked.type:
        case "text":
            return None
        case "json_object":
            return _schema(name, {"type": "object"})
        case "json_schema":
            if asked.json_schema is None or asked.json_schema.schema is None:
                raise wrong(f"{name}.json_schema.schema", "is required")
            return _schema(name, asked.json_schema.schema)
    raise wrong(f"{name}.type", f"text, json_object or json_schema, got {quoted(asked.type)}")


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
