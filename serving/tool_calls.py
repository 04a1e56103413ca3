"""Parses the tool calls that models write: one function for each way of writing them."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, NoReturn

# For each tool, by name, the JSON types of its parameters, by name.
Tools = Mapping[str, Mapping[str, frozenset[str]]]

_SPACE: Final = " \t\r\n"
HY_SUFFIX: Final = ":opensource"  # of the name of every tag that Hy3 writes
_FENCE: Final = "```"
_MOST_PARTS: Final = 20_000  # of a tool's schema; a larger one gives no types
_NUMBER_BEHIND: Final = re.compile(r":[0-9]+\Z")
_QUOTES: Final = _SPACE + "\"'"
# The JSON types of a value, by its Python type.
_KINDS: Final[Mapping[type, set[str]]] = {
    str: {"string"},
    bool: {"boolean"},
    int: {"integer", "number"},
    float: {"number"},
    list: {"array"},
    dict: {"object"},
    type(None): {"null"},
}


@dataclass(frozen=True, slots=True)
class ToolCall:
    """arguments: an object as JSON. call_id: the id that the model gave the call, if it did."""

    name: str
    arguments: str
    call_id: str = ""


def parameter_types(schema: Any) -> dict[str, frozenset[str]]:
    """The types of a tool's parameters, as far as its schema says; docs/api.md lists the keywords.

    Empty for a schema that is too large.
    """
    left = [_MOST_PARTS]
    try:
        parts = list(_parts(schema, schema, left))
        properties = {
            name: said
            for part in parts
            if isinstance(part.get("properties"), dict)
            for name, said in part["properties"].items()
        }
        return {name: _types_of(said, schema, left) for name, said in properties.items()}
    except ValueError:
        return {}


def _types_of(said: Any, root: Any, left: list[int]) -> frozenset[str]:
    kinds: set[str] = set()
    for part in _parts(said, root, left):
        told, values = part.get("type"), part.get("enum")
        kinds.update(x for x in (told if isinstance(told, list) else [told]) if isinstance(x, str))
        if told is None:
            values = values if isinstance(values, list) else []
            const = [part["const"]] if "const" in part else []
            kinds.update(kind for x in values + const for kind in _KINDS.get(type(x), ()))
    return frozenset(kinds)


def _parts(said: Any, root: Any, left: list[int]) -> Iterator[dict[str, Any]]:
    """A schema and all that it refers to or combines. left: how many more; ValueError beyond."""
    seen: set[int] = set()
    waiting = [said]
    while waiting:
        one = waiting.pop()
        if not isinstance(one, dict) or id(one) in seen:
            continue
        seen.add(id(one))
        left[0] -= 1
        if left[0] < 0:
            raise ValueError("too many parts")
        yield one
        for name in ("anyOf", "oneOf", "allOf", "enum"):
            more = one.get(name)
            if isinstance(more, list):
                left[0] -= len(more)
                waiting += more if name != "enum" else []
        if isinstance(one.get("$ref"), str):
            waiting.append(_named_by(one["$ref"], root))


def _named_by(pointer: str, root: Any) -> Any:
    """What `#/...` refers to in a schema; None if there is nothing."""
    first, *keys = pointer.split("/")
    found = root if first == "#" else None
    for key in keys:
        key = key.replace("~1", "/").replace("~0", "~")
        found = found.get(key) if isinstance(found, dict) else None
    return found


def json_calls(text: str) -> list[ToolCall]:
    """Objects with a name and arguments (or parameters): one, several in a row, or a list of them.

    Raises ValueError for anything else.
    """
    found: list[Any] = []
    for value in _values(text, separators=_SPACE + ";"):
        found += value if isinstance(value, list) else [value]
    if not found:
        raise ValueError("no call")
    return [_call(value) for value in found]


def mistral_calls(text: str) -> list[ToolCall]:
    """As `json_calls`, or a name and its arguments: `name{...}`, `name[ARGS]{...}`.

    Some models put an id between them: `name[CALL_ID]id[ARGS]{...}`.
    """
    text = text.strip()
    if text.startswith("["):
        return json_calls(text)
    name, brace, arguments = text.partition("{")
    name = name.removesuffix("[ARGS]").partition("[CALL_ID]")[0]
    return [_named(name, brace + arguments)]


def deepseek_call(text: str) -> list[ToolCall]:
    """`name<sep>{...}`, or, as V3 writes it, `function<sep>name` and the arguments in a fence."""
    head, separator, rest = text.strip().partition("<｜tool▁sep｜>")
    if not separator:
        raise ValueError("no separator")
    name, _, fenced = rest.partition("\n")
    fenced = fenced.strip()
    if head == "function" and fenced.startswith(_FENCE) and fenced.endswith(_FENCE):
        inner = fenced.removeprefix(_FENCE).removesuffix(_FENCE).removeprefix("json")
        return [_named(name, inner.strip())]
    return [_named(head, rest)]


def kimi_call(text: str) -> list[ToolCall]:
    """`functions.NAME:NUMBER`, which is the call's id, then a marker and the arguments.

    Models sometimes omit one end of the id. The id is kept as it came, because their chat templates
    print it again, and also next to the tool's answer.
    """
    call_id, separator, arguments = text.partition("<|tool_call_argument_begin|>")
    if not separator:
        raise ValueError("no separator")
    call_id = call_id.strip()
    name = _NUMBER_BEHIND.sub("", call_id.removeprefix("functions."))
    return [replace(_named(name, arguments), call_id=call_id)]


def channel_call(name: str, text: str) -> list[ToolCall]:
    """A call whose text is only the arguments; the tool's name is given."""
    return [_named(name, text)]


def glm_call(text: str, tools: Tools) -> list[ToolCall]:
    """A name, then pairs of `<arg_key>` and `<arg_value>`, with or without line breaks between."""
    at = text.find("<arg_key>")
    at = len(text) if at < 0 else at
    return _call_of_pairs(text[:at], text[at:], tools, "")


def hy_call(text: str, tools: Tools) -> list[ToolCall]:
    """As GLM's, with a tag of its own behind the name, and more in each tag."""
    name, sep, pairs = text.partition(f"<tool_sep{HY_SUFFIX}>")
    if not sep:
        raise ValueError(f"no <tool_sep{HY_SUFFIX}>")
    return _call_of_pairs(name, pairs, tools, HY_SUFFIX)


def _call_of_pairs(name: str, pairs: str, tools: Tools, kind: str) -> list[ToolCall]:
    """The call of a name and of pairs. kind: what the name of each tag ends with."""
    name, arguments, at = name.strip(), {}, 0
    while (at := _space_over(pairs, at)) < len(pairs):
        key, at = _between(pairs, at, f"<arg_key{kind}>", f"</arg_key{kind}>")
        at = _space_over(pairs, at)
        value, at = _between(pairs, at, f"<arg_value{kind}>", f"</arg_value{kind}>")
        arguments[key.strip()] = _typed(value, _types(tools, name, key.strip()))
    return [_call({"name": name, "arguments": arguments})]


def qwen_coder_calls(text: str, tools: Tools) -> list[ToolCall]:
    """`<function=NAME>`, each argument after `<parameter=NAME>`, on lines of its own.

    Models sometimes omit the end of an argument.
    """
    return _tagged_calls(text, tools, _QWEN_CODER)


def minimax_calls(text: str, tools: Tools) -> list[ToolCall]:
    """Calls as `<invoke name="NAME">`, each argument after `<parameter name="NAME">`."""
    return _tagged_calls(text, tools, _MINIMAX)


@dataclass(frozen=True, slots=True)
class _Tags:
    """The tags of a format in which names are part of the tags.

    call, parameter: what stands before a name. end: ends a call. value: matches what ends a value.
    around: stripped once from either side of a value.
    """

    call: str
    parameter: str
    end: str
    value: re.Pattern[str]
    around: str


_PARAMETER_END: Final = "</parameter>"
_QWEN_CODER: Final = _Tags(
    "<function=",
    "<parameter=",
    "</function>",
    re.compile(rf"{_PARAMETER_END}|(?=<parameter=)|(?=</function>)"),
    "\n",
)
_MINIMAX: Final = _Tags(
    "<invoke name=", "<parameter name=", "</invoke>", re.compile(_PARAMETER_END), ""
)


def _tagged_calls(text: str, tools: Tools, tags: _Tags) -> list[ToolCall]:
    found, at = [], _space_over(text, 0)
    while at < len(text):
        tool, at = _between(text, at, tags.call, ">")
        tool = tool.strip(_QUOTES)
        arguments: dict[str, Any] = {}
        while not text.startswith(tags.end, at := _space_over(text, at)):
            name, at = _between(text, at, tags.parameter, ">")
            name = name.strip(_QUOTES)
            if "<" in name:
                raise ValueError("a name without an end")
            over = tags.value.search(text, at)
            if over is None:
                raise ValueError("a value without an end")
            value = text[at : over.start()].removeprefix(tags.around).removesuffix(tags.around)
            arguments[name] = _typed(value, _types(tools, tool, name))
            at = over.end()
        found.append(_call({"name": tool, "arguments": arguments}))
        at = _space_over(text, at + len(tags.end))
    if not found:
        raise ValueError("no call")
    return found


def _space_over(text: str, at: int) -> int:
    while at < len(text) and text[at] in _SPACE:
        at += 1
    return at


def _between(text: str, at: int, begin: str, end: str) -> tuple[str, int]:
    """The text between two tags, and where the second ends; the first has to begin at `at`."""
    if not text.startswith(begin, at):
        raise ValueError(f"no {begin}")
    first = at + len(begin)
    last = text.find(end, first)
    if last < 0:
        raise ValueError(f"no {end}")
    return text[first:last], last + len(end)


def _types(tools: Tools, tool: str, parameter: str) -> frozenset[str]:
    return tools.get(tool, {}).get(parameter, frozenset())


def _typed(text: str, kinds: frozenset[str]) -> Any:
    """A value that is written without quotes, as one of these types, or else as text.

    If no types are known, the value is read as the JSON it looks like.
    """
    if kinds == {"string"}:
        return text
    try:
        (value,) = _values(text, separators=_SPACE)
    except ValueError:
        lower = text.strip().lower()
        if "boolean" in kinds and lower in ("true", "false"):  # as Python writes them
            return lower == "true"
        is_null = text == "None" or ("string" not in kinds and lower in ("none", ""))
        return None if "null" in kinds and is_null else text
    if "string" in kinds and (isinstance(value, str) or not kinds & _KINDS[type(value)]):
        return text
    return value


def _named(name: str, arguments: str) -> ToolCall:
    values = _values(arguments, separators=_SPACE)
    if len(values) != 1:
        raise ValueError("not one value")
    return _call({"name": name.strip(), "arguments": values[0]})


def _call(value: Any) -> ToolCall:
    if not isinstance(value, dict):
        raise ValueError("no object")
    name, arguments = value.get("name"), value.get("arguments", value.get("parameters"))
    if arguments is None:  # a tool that takes none
        arguments = {}
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise ValueError("no name, or arguments that are no object")
    # Python reads 1e999, which is valid JSON, as infinity: dumps raises ValueError for that.
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    text.encode()  # raises ValueError for a lone surrogate, so that none gets into the answer
    return ToolCall(name, text)


def _values(text: str, separators: str) -> list[Any]:
    """JSON values in a row.

    Raises ValueError, also for what only Python takes for JSON (such as NaN), and for values nested
    too deeply for Python.
    """
    values = []
    at = 0
    while at < len(text):
        if text[at] in separators:
            at += 1
            continue
        try:
            value, at = _DECODER.raw_decode(text, at)
        except RecursionError as error:
            raise ValueError("too many levels") from error
        values.append(value)
    return values


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


_DECODER: Final = json.JSONDecoder(parse_constant=_refuse)
