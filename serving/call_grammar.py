"""Builds the forms of answers that must be tool calls, or whose calls must fit their tools.

A model is held to what its own chat template writes, which serving/tool_calls.py reads. A marker is
named by its token id; only for a model that has no such token is it written as text.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from serving.conversation import function_name, named_functions
from serving.errors import bad_field, quoted
from serving.grammar import Form, Part, quoted_terminal, schema_rules, wrong
from serving.parsing import Parsing
from serving.tagged_text import CALL_FORMATS, CallFormat
from serving.tokenizer import Tokenizer
from transfer.wire import MAX_GRAMMAR_BYTES

_SPACE: Final = r"/[ \n]{0,4}/"
_NUMBER: Final = "/0|[1-9][0-9]{0,5}/"
_TEXT: Final = "/(?s:.*)/"
_MAX_TOOLS: Final = 512
_OTHER_TYPES: Final = ("array", "boolean", "integer", "null", "number", "string")

NO_PLACES: Final[Mapping[str, str]] = {}


class _Marks:
    """Writes a model's markers: each by its token's id, or as text if the model has none for it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._token_id = tokenizer.token_id

    def __call__(self, marker: str) -> str:
        token_id = self._token_id(marker)
        return quoted_terminal(marker) if token_id is None else f"<[{token_id}]>"

    def has(self, marker: str) -> bool:
        """Whether the model has a token for it."""
        return self._token_id(marker) is not None


def must_be_calls(tool_choice: str | Mapping[str, Any] | None) -> bool:
    """Whether the answer has to be a call. Raises ApiError for an invalid tool_choice."""
    if tool_choice in (None, "none", "auto"):
        return False
    return tool_choice == "required" or named_tool(tool_choice) is not None


def named_tool(tool_choice: str | Mapping[str, Any] | None) -> str | None:
    """The one tool that a choice names, if any. Raises ApiError for an invalid tool_choice."""
    if tool_choice == "required":
        return None
    name = function_name(tool_choice)
    if name is None:
        what = 'expected "none", "auto", "required", {"function": {"name": ...}} or allowed_tools'
        raise bad_field("tool_choice", f"{what}, got {quoted(tool_choice)}")
    return name


def thought_prefix(parsing: Parsing, tokenizer: Tokenizer) -> str:
    """Rules of what precedes the answer, which they name @answer; "" when nothing does."""
    mark = _Marks(tokenizer)
    if parsing.reasoning == "gpt-oss":
        return _harmony_prefix(parsing, mark)
    state = parsing.thought()
    tags = parsing.answer_tags
    answer_tag = f"({mark(tags.begin)} {_SPACE})?" if tags is not None else ""
    if state in ("none", "over"):
        return f"start: {answer_tag} @answer\n" if answer_tag and not parsing.begun else ""
    opens, closes = parsing.think_tags
    tag = mark(opens)
    begins = {"perhaps": f"({tag} thought)?", "unasked": f"({tag})? thought", "open": "thought"}
    if tokenizer.token_id(closes) is None:
        end = f'thought: inner {_SPACE}\ninner[suffix="{closes}"]: {_TEXT}'
    else:
        end = f"thought: {_TEXT} {mark(closes)} {_SPACE}"
    return f"start: {begins[state]} {answer_tag} @answer\n{end}\n"


def calls_form(
    parsing: Parsing,
    tools: Sequence[Mapping[str, Any]],
    only: str | None,
    tokenizer: Tokenizer,
    places: Mapping[str, str] = NO_PLACES,
) -> Form:
    """The form of an answer of calls alone. only: the one tool to call, once.

    places: by name of a function, the path of its parameters in the request. Raises ApiError for a
    bad schema.
    """
    name = "tool_choice"
    functions = named_functions(tools)
    if only is not None:
        functions = [function for function in functions if function["name"] == only]
        if not functions:
            raise bad_field(name, f"names {only!r}, which is not among the tools")
    if not functions:
        raise bad_field(name, "needs tools")
    parts = _parts(functions, places, "where one must be called")
    names = [function["name"] for function in functions]
    one = only is not None or parsing.one_call
    lines = _FORMATS[parsing.tool_calls](names, one, _Marks(tokenizer))
    return Form(name, {"lark_grammar": "\n".join(lines) + "\n"}, parts)


def strict_calls_form(
    parsing: Parsing,
    tools: Sequence[Mapping[str, Any]],
    tokenizer: Tokenizer,
    places: Mapping[str, str] = NO_PLACES,
) -> Form | None:
    """The form of an answer that may have calls: those of strict functions fit their parameters.

    None if no function is strict, or if only text says where a call begins or what its arguments
    are. places: as in calls_form. Raises ApiError for a bad schema of a strict function.
    """
    functions = named_functions(tools) if parsing.tools else []
    strict = [function["name"] for function in functions if function.get("strict") is True]
    if not strict:
        return None
    mark, one = _Marks(tokenizer), parsing.one_call
    names = [function["name"] for function in functions]
    if parsing.tool_calls == "gpt-oss":
        if "<|channel|>" not in tokenizer.markers:
            return None
        lines = _harmony_answer(names, mark)
    else:
        written = CALL_FORMATS[parsing.tool_calls]
        first = (*written.around, written.begin)[0]
        if written.untyped or written.bare or first not in tokenizer.markers:
            return None
        start, *rules = _FORMATS[parsing.tool_calls](names, one, mark)
        # Text may hold markers of other things, such as thoughts.
        others = {
            token_id
            for marker, token_id in tokenizer.markers.items()
            if marker not in written.markers
        }
        text = f"({_TEXT} <[{','.join(map(str, sorted(others)))}]>)* {_TEXT}" if others else _TEXT
        calls = start.replace("start", "calls", 1)
        lines = [f"start: (text calls){'?' if one else '*'} text", f"text: {text}", calls, *rules]
    parts = _strict_parts(functions, places, "where one is strict")
    name = places.get(strict[0], "tools").replace("parameters", "strict")
    rules_text = {"lark_grammar": "\n".join(lines) + "\n"}
    return Form(name, rules_text, parts, whole=parsing.tool_calls == "gpt-oss")


def calls_or_form(
    text: Form,
    parsing: Parsing,
    tools: Sequence[Mapping[str, Any]],
    tokenizer: Tokenizer,
    places: Mapping[str, str] = NO_PLACES,
) -> Form:
    """The form of an answer that is either calls alone, or a text of the form `text`.

    Only the arguments of strict functions have to fit their parameters. places: as in calls_form.
    Raises ApiError for a bad schema of a strict function.
    """
    functions, mark = named_functions(tools), _Marks(tokenizer)
    names = [function["name"] for function in functions]
    start, *rules = _FORMATS[parsing.tool_calls](names, parsing.one_call, mark)
    said = "@text"
    if parsing.tool_calls == "gpt-oss":
        said = f'{mark("<|channel|>")} "final" {mark("<|message|>")} @text'
    lines = [f"start: calls | {said}", start.replace("start", "calls", 1), *rules]
    parts = _strict_parts(functions, places, "beside a form")
    own = Part({"name": "text", **text.rules}, text.name)
    return Form(text.name, {"lark_grammar": "\n".join(lines) + "\n"}, (*parts, own))


def _strict_parts(
    functions: Sequence[Mapping[str, Any]], places: Mapping[str, str], where: str
) -> tuple[Part, ...]:
    """As _parts, but the arguments of a function that is not strict are any object."""
    held = [
        function if function.get("strict") is True else {"name": function["name"], "parameters": {}}
        for function in functions
    ]
    return _parts(held, places, where)


def _parts(
    functions: Sequence[Mapping[str, Any]], places: Mapping[str, str], where: str
) -> tuple[Part, ...]:
    """The arguments of each function, as args0 and so on. where: what sets the limits."""
    if len(functions) > _MAX_TOOLS:
        raise bad_field("tools", f"at most {_MAX_TOOLS} {where}, got {len(functions)}")
    parts = []
    left = MAX_GRAMMAR_BYTES  # for all tools together; reading stops where they exceed it
    for number, function in enumerate(functions):
        place = places.get(function["name"], "tools")
        rules = {"name": f"args{number}", **_arguments(function, place)}
        left -= len(json.dumps(rules))
        if left < 0:
            raise bad_field(
                "tools", f"at most {MAX_GRAMMAR_BYTES} characters of parameters {where}"
            )
        parts.append(Part(rules, place, function["name"]))
    return tuple(parts)


def _arguments(function: Mapping[str, Any], place: str) -> dict[str, Any]:
    """The rules of a function's arguments; lenient, unless the function is strict."""
    given = function.get("parameters")
    # Without parameters there are no arguments.
    schema = {"type": "object", **({"properties": {}} if given is None else given)}
    kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    if "object" in kinds:
        schema["type"] = "object"  # any other value would be no call
    elif kinds and all(kind in _OTHER_TYPES for kind in kinds):
        told = " or ".join(kinds)
        raise wrong(place, f"of {function['name']!r}: expected an object's schema, got {told}")
    try:
        return schema_rules(place, schema, lenient=function.get("strict") is not True)
    except (ValueError, TypeError, RecursionError) as error:
        raise wrong(place, f"of {function['name']!r}: {error}") from error


# --- formats --------------------------------------------------------------------------------------


def _tools(write: Callable[[str, str], str], names: Sequence[str]) -> list[str]:
    """A rule `tool` for any of the names. write(name, arguments): the rule of one."""
    rules = [f"tool{i}: {write(name, f'@args{i}')}" for i, name in enumerate(names)]
    return ["tool: " + " | ".join(f"tool{i}" for i in range(len(names))), *rules]


def _several(rule: str, between: str, one: bool) -> str:
    return rule if one else f"{rule} ({between} {rule})*".replace("  ", " ")


def _json_tool(arguments: str) -> Callable[[str, str], str]:
    def write(name: str, args: str) -> str:
        head = '{"name": ' + quoted_terminal(name) + f', "{arguments}": '
        return f'{quoted_terminal(head)} {args} "}}"'

    return write


def _hermes(names: Sequence[str], one: bool, mark: _Marks) -> list[str]:
    begin, end = mark("<tool_call>"), mark("</tool_call>")
    calls = [f"start: {_several('call', _NEWLINE, one)}", f'call: {begin} "\\n" tool "\\n" {end}']
    return calls + _tools(_json_tool("arguments"), names)


def _hunyuan(names: Sequence[str], one: bool, mark: _Marks) -> list[str]:
    begin, end = mark("<tool_calls>"), mark("</tool_calls>")
    listed = _several("tool", '", "', one)
    return [f'start: {begin} "[" {listed} "]" {end}', *_tools(_json_tool("arguments"), names)]


def _llama(names: Sequence[str], _: bool, __: _Marks) -> list[str]:
    return ["start: tool", *_tools(_json_tool("parameters"), names)]


def _mistral(names: Sequence[str], one: bool, mark: _Marks) -> list[str]:
    begin = mark("[TOOL_CALLS]")
    if not mark.has("[ARGS]"):
        listed = _several("tool", '", "', one)
        return [f'start: {begin} "[" {listed} "]"', *_tools(_json_tool("arguments"), names)]

    call_id = ""  # some models write one with each call
    if mark.has("[CALL_ID]"):
        call_id = f"({mark('[CALL_ID]')} /[a-zA-Z0-9]{{9}}/)?"

    def write(name: str, args: str) -> str:
        return f"{quoted_terminal(name)} {call_id} {mark('[ARGS]')} {args}"

    return [f"start: {_several('call', '', one)}", f"call: {begin} tool", *_tools(write, names)]


def _deepseek(fenced: bool) -> "_Format":
    def lines(names: Sequence[str], one: bool, mark: _Marks) -> list[str]:
        separator = mark("<｜tool▁sep｜>")

        def write(name: str, args: str) -> str:
            if fenced:
                head = quoted_terminal(f"{name}\n```json\n")
                return f'"function" {separator} {head} {args} "\\n```"'
            return f"{quoted_terminal(name)} {separator} {args}"

        calls = _several("call", _NEWLINE if fenced else "", one)
        return _section(CALL_FORMATS["deepseekv3"], calls, mark) + _tools(write, names)

    return lines


def _kimi(names: Sequence[str], one: bool, mark: _Marks) -> list[str]:
    """The model numbers its calls, counting from its first in the conversation."""

    def write(name: str, args: str) -> str:
        head = quoted_terminal(f"functions.{name}:")
        return f"{head} {_NUMBER} {mark('<|tool_call_argument_begin|>')} {args}"

    calls = _several("call", "", one)
    return _section(CALL_FORMATS["kimi_k2"], calls, mark) + _tools(write, names)


def _section(form: CallFormat, calls: str, mark: _Marks) -> list[str]:
    """Each call between two markers, and all calls between two more."""
    first, last = map(mark, form.around)
    return [f"start: {first} {calls} {last}", f"call: {mark(form.begin)} tool {mark(form.end)}"]


def _harmony(names: Sequence[str], _: bool, mark: _Marks) -> list[str]:
    """One message; the token that ends it ends the answer."""

    def write(name: str, args: str) -> str:
        header = quoted_terminal(f"commentary to=functions.{name} ")
        return f'{header} {mark("<|constrain|>")} "json" {mark("<|message|>")} {args}'

    return [f"start: {mark('<|channel|>')} tool", *_tools(write, names)]


def _harmony_answer(names: Sequence[str], mark: _Marks) -> list[str]:
    """Any messages, of which a call is the last. It names its tool before or after its channel."""
    channel, message = mark("<|channel|>"), mark("<|message|>")

    def write(name: str, args: str) -> str:
        to = f" to=functions.{name}"
        before = f'{quoted_terminal(to)} {channel} "commentary"'
        after = f"{channel} {quoted_terminal('commentary' + to)}"
        return f'({before} | {after}) " "? ({mark("<|constrain|>")}? "json")? {message} {args}'

    said = f'{channel} ("analysis" | "commentary" | "final") {message} {_TEXT}'
    again = _next_message(mark)
    return [f"start: (said {again})* (said | tool)", f"said: {said}", *_tools(write, names)]


def _next_message(mark: _Marks) -> str:
    """Ends a message and begins another."""
    return f'{mark("<|end|>")} {mark("<|start|>")} "assistant"'


_Format = Callable[[Sequence[str], bool, _Marks], list[str]]
_NEWLINE: Final = r'"\n"'
# Models whose own format has no JSON arguments are held to JSON, see serving/parsing.py.
_FORMATS: Final[Mapping[str, _Format]] = {
    "deepseekv3": _deepseek(fenced=True),
    "deepseekv31": _deepseek(fenced=False),
    "ernie45": _hermes,
    "glm45": _hermes,
    "glm47": _hermes,
    "gpt-oss": _harmony,
    "hermes": _hermes,
    "hunyuan_a13b": _hunyuan,
    "hy_v3": _hermes,
    "kimi_k2": _kimi,
    "llama3": _llama,
    "minimax-m2": _hermes,
    "mistral": _mistral,
    "qwen": _hermes,
    "qwen25": _hermes,
    "qwen3_coder": _hermes,
}


def _harmony_prefix(parsing: Parsing, mark: _Marks) -> str:
    """Messages of analysis, then the answer's; "" when the prompt has begun the answer."""
    if parsing.begun:
        return ""
    channel, message = mark("<|channel|>"), mark("<|message|>")
    thought = f'thought: {channel} "analysis" {message} {_TEXT} {_next_message(mark)}'
    if parsing.calls_are_formed:
        return f"start: thought* @answer\n{thought}\n"
    answer = f'{channel} "final" {message} @answer'
    return f"start: thought* {answer}\n{thought}\n"
