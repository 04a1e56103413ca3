"""Makes grammars that workers follow, from schemas, regular expressions and grammars of requests.

A grammar is text in llguidance's format: JSON with one grammar, or with several that name each
other (guidance-ai/llguidance: docs/syntax.md).
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import llguidance
from llguidance.gbnf_to_lark import gbnf_to_lark

from serving.errors import ApiError, from_request_error, without_frames
from serving.grammar_trial import GrammarTrial
from serving.schemas import prepare
from transfer.errors import Code, RequestError
from transfer.wire import MAX_GRAMMAR_BYTES

# Between two tokens of JSON; a model that may write space without limit sometimes never ends it.
SPACE: Final = r" |\r?\n[ \t]{0,32}"
_MAX_GBNF_CHARACTERS = 16 << 10  # read in Python, at some 3 us each
MAX_GBNF_WORK: Final = 2 << 20  # a quarter of a second; see gbnf_work
_GBNF_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
# Where only one text can come next, llguidance writes it ahead, at once. It has no bound: after
# /x+/ that "x" should follow, it would write for ever, in a worker's only thread. One grammar that
# forbids it does so for all that it is sent with.
_UNFORCED: Final = {
    "name": "unforced",
    "lark_grammar": '%llguidance {"no_forcing": true}\nstart: ""',
}
_GBNF_ESCAPE = re.compile(r"\\(?:\\|-|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8}))")


@dataclass(frozen=True, slots=True)
class Form:
    """What an answer has to look like. name: the field that says so; rules: one llguidance grammar.

    parts: grammars that the rules name. whole: it describes the thoughts before the answer, too.
    """

    name: str
    rules: Mapping[str, Any]
    parts: tuple["Part", ...] = ()
    whole: bool = False

    @property
    def field(self) -> str:
        """The field's own name, which clients know."""
        return self.name.partition(".")[0]


@dataclass(frozen=True, slots=True)
class Part:
    """A named grammar. place: the path in the request that it is made from.

    owner: the function whose arguments it describes, if any.
    """

    rules: Mapping[str, Any]
    place: str
    owner: str = ""


async def grammar_text(form: Form | None, trial: GrammarTrial, prefix: str = "") -> str:
    """The grammar of an answer; "" if it has no form.

    prefix: rules of what precedes the form, which they name @answer. Raises ApiError: for a
    grammar that cannot be followed, naming the form's field; 429 when too many wait to be tried.
    """
    if form is None:
        return ""
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
        raise wrong(form.name, error.message) from without_frames(error)
    return text


async def _blamed(form: Form, fault: str, trial: GrammarTrial) -> ApiError:
    """The error for a fault: names the part that has it, found by bisection, else the form."""
    parts = form.parts
    while parts:
        half = parts[: (len(parts) + 1) // 2]
        own = await trial.fault(_any_of(half))
        if own and len(half) == 1:
            owner = half[0].owner
            return wrong(half[0].place, f"of {owner!r}: {own}" if owner else own)
        parts = half if own else parts[len(half) :]
    return wrong(form.name, fault)


def _any_of(parts: Sequence[Part]) -> str:
    start = "start: " + " | ".join(f"@{part.rules['name']}" for part in parts)
    return _text([{"lark_grammar": start}, *(part.rules for part in parts)])


def _text(grammars: Sequence[Mapping[str, Any]]) -> str:
    """The grammars as JSON, in ASCII."""
    return json.dumps({"grammars": [*grammars, _UNFORCED]})


def wrong(name: str, message: str) -> ApiError:
    """name: the path of a field; the error's param is its first name, or all if it has an index."""
    param = name if "[" in name else name.partition(".")[0]
    return ApiError(400, f"{name}: {message}", param, "invalid_value")


def schema_rules(
    name: str, schema: str | dict[str, Any], lenient: bool = False, space: str = SPACE
) -> dict[str, Any]:
    """The rules of a JSON schema. name: the path of the field that has it.

    lenient: leave out what llguidance does not support, as far as it only narrows the schema.
    space: a regular expression of what may stand between two tokens of JSON.
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
        json.dumps(document), defaults={"whitespace_pattern": space, "lenient": lenient}
    )
    return {"json_schema": json.loads(text)["grammars"][0]["json_schema"]}


def json_rules(
    name: str, schema: str | dict[str, Any], lenient: bool = False, space: str = SPACE
) -> dict[str, Any]:
    """What schema_rules gives. Raises ApiError for all that is wrong."""
    try:
        return schema_rules(name, schema, lenient, space)
    except (ValueError, RecursionError) as error:
        raise wrong(name, f"expected a JSON schema: {error}") from error


def _bound(name: str, text: str, most: int = MAX_GRAMMAR_BYTES) -> None:
    if len(text) > most:
        raise wrong(name, f"at most {most} characters, got {len(text)}")


def regex_rules(name: str, regex: str) -> dict[str, Any]:
    """The rules of a regular expression. name: the path of its field. Raises ApiError."""
    _bound(name, regex)
    if (len(regex) - len(regex.rstrip("\\"))) % 2:  # llguidance would drop the last backslash
        raise wrong(name, "a backslash at its end escapes nothing")
    rules = json.loads(llguidance.LLMatcher.grammar_from_regex(regex))["grammars"][0]
    return {"lark_grammar": rules["lark_grammar"]}


def grammar_rules(name: str, grammar: str) -> dict[str, Any]:
    """The rules of a grammar in Lark, or in GBNF, which begins at `root`. Raises ApiError."""
    _bound(name, grammar)
    if not _GBNF_RULE.search(grammar):
        return {"lark_grammar": grammar}
    _bound(name, grammar, _MAX_GBNF_CHARACTERS)
    if (work := gbnf_work(grammar)) > MAX_GBNF_WORK:
        most, got = MAX_GBNF_WORK // len(grammar), work // len(grammar)
        raise wrong(name, f"at most {most} rules in {len(grammar)} characters, got {got}")
    try:
        return {"lark_grammar": gbnf_to_lark(_GBNF_ESCAPE.sub(_unescaped, grammar))}
    except Exception as error:  # gbnf_to_lark has no error type of its own
        raise wrong(name, f"expected a grammar: {error}") from error


def gbnf_work(grammar: str) -> int:
    """What it may cost to convert a grammar: characters times rules in GBNF, nothing in Lark.

    The conversion looks through all rules again for each one that it finds to be a terminal.
    """
    return len(grammar) * grammar.count("::=") if _GBNF_RULE.search(grammar) else 0


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


def quoted_terminal(text: str) -> str:
    """A text as a terminal of Lark, which takes no raw control characters."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
