"""Reads from a request's fields which form its answer must have.

Names: OpenAI's response_format; SGLang's json_schema, regex, ebnf and structural_tag; vLLM's
guided_* and structured_outputs.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

import msgspec

from serving.errors import not_served, quoted
from serving.grammar import (
    SPACE,
    Form,
    grammar_rules,
    json_rules,
    quoted_terminal,
    regex_rules,
    wrong,
)
from serving.structural_tags import structural_tag_form
from serving.tokenizer import Tokenizer

JSON_FORMATS: Final = ("json_object", "json_schema")  # types of a response_format
_MAX_CHOICES = 1024


class JsonSchemaFormat(msgspec.Struct):
    """`json_schema` of a response_format. strict: refuse a schema that cannot be followed."""

    schema: dict[str, Any] | None = None
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct):
    """schema, strict: as SGLang, llama.cpp and Together have it, in place of json_schema.

    value: what Hugging Face's client makes of a schema, beside json_object.
    format, structures, triggers: of a structural tag.
    """

    type: str = "text"
    json_schema: JsonSchemaFormat | None = None
    schema: dict[str, Any] | None = None
    value: dict[str, Any] | None = None
    strict: bool | None = None
    format: Any = None
    structures: Any = None
    triggers: Any = None


class StructuredOutputs(msgspec.Struct):
    """As vLLM has it."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    # Of JSON alone.
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None  # not served


class FormFields(Protocol):
    """The fields that cannot go with a form."""

    ignore_eos: bool | None
    allowed_token_ids: list[int] | None


def form_of(
    fields: FormFields,
    min_tokens: int | None,
    eos_ids: Sequence[int],
    tokenizer: Tokenizer,
    min_name: str = "min_tokens",
) -> Form | None:
    """The form that one of the fields asks for. Raises ApiError for two, or for a bad one."""
    forms = [
        read(name, value, tokenizer)
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
    if fields.allowed_token_ids is not None:
        raise wrong("allowed_token_ids", f"cannot go with {form.name}, which says what may follow")
    if min_tokens:
        raise wrong(min_name, f"cannot go with {form.name}, which says where the text ends")
    if not eos_ids:
        raise wrong(form.name, "this model names no token that ends a text")


# --- one function for each way to say it ----------------------------------------------------------


def _schema(name: str, schema: str | dict[str, Any], _: Tokenizer) -> Form:
    return Form(name, json_rules(name, schema))


def _regex(name: str, regex: str, _: Tokenizer) -> Form:
    return Form(name, regex_rules(name, regex))


def _grammar(name: str, grammar: str, _: Tokenizer) -> Form:
    return Form(name, grammar_rules(name, grammar))


def _choice(name: str, choices: list[str], _: Tokenizer) -> Form:
    if not 0 < len(choices) <= _MAX_CHOICES or "" in choices:
        raise wrong(name, f"expected 1 to {_MAX_CHOICES} texts that are not empty")
    return Form(name, {"lark_grammar": "start: " + " | ".join(map(quoted_terminal, choices))})


def _response_format(name: str, asked: ResponseFormat, tokenizer: Tokenizer) -> Form | None:
    match asked.type:
        case "text":
            return None
        case "json_object" | "json_schema":
            return _json_format(name, asked)
        case "structural_tag":
            fields = ("format", "structures", "triggers")
            tag = {each: getattr(asked, each) for each in fields}
            return structural_tag_form(name, tag, tokenizer)
    known = "text, json_object, json_schema or structural_tag"
    raise wrong(f"{name}.type", f"{known}, got {quoted(asked.type)}")


def _json_format(name: str, asked: ResponseFormat) -> Form:
    said = [x for x in ("json_schema", "schema", "value") if getattr(asked, x) is not None]
    if len(said) > 1:
        raise wrong(f"{name}.{said[1]}", f"cannot go with {name}.{said[0]}")
    if asked.json_schema is not None or not said:
        given = asked.json_schema or JsonSchemaFormat()
        where, schema, strict = f"{name}.json_schema.schema", given.schema, given.strict
    else:
        where, schema, strict = f"{name}.{said[0]}", getattr(asked, said[0]), asked.strict
    if schema is not None:
        return Form(where, json_rules(where, schema, lenient=strict is not True))
    if asked.type == "json_schema":
        raise wrong(where, "is required")
    return Form(name, json_rules(name, {"type": "object"}))


def _structured_outputs(name: str, asked: StructuredOutputs, tokenizer: Tokenizer) -> Form | None:
    if asked.disable_additional_properties:
        raise not_served(f"{name}.disable_additional_properties")
    if asked.disable_any_whitespace and asked.whitespace_pattern:
        raise wrong(f"{name}.whitespace_pattern", "cannot go with disable_any_whitespace")
    space = "" if asked.disable_any_whitespace else asked.whitespace_pattern or SPACE
    schemas = {"json": asked.json, "json_object": {"type": "object"} if asked.json_object else None}
    forms = [
        Form(f"{name}.{option}", json_rules(f"{name}.{option}", schema, space=space))
        for option, schema in schemas.items()
        if schema is not None
    ]
    if space != SPACE and not forms:
        option = "whitespace_pattern" if space else "disable_any_whitespace"
        raise wrong(f"{name}.{option}", "is only for json and json_object beside it")
    forms += [
        read(f"{name}.{option}", value, tokenizer)
        for option, read in _OPTIONS.items()
        if (value := getattr(asked, option)) is not None
    ]
    if len(forms) > 1:
        raise wrong(forms[1].name, f"cannot go with {forms[0].name}")
    return forms[0] if forms else None


_OPTIONS: Final[Mapping[str, Callable[[str, Any, Tokenizer], Form]]] = {
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
    "structural_tag": structural_tag_form,
}
_READERS: Final[Mapping[str, Callable[[str, Any, Tokenizer], Form | None]]] = {
    "response_format": _response_format,
    "json_schema": _schema,
    "regex": _regex,
    "ebnf": _grammar,
    "structural_tag": structural_tag_form,
    "guided_json": _schema,
    "guided_regex": _regex,
    "guided_choice": _choice,
    "guided_grammar": _grammar,
    "structured_outputs": _structured_outputs,
}
