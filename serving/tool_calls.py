"""What models write as tool calls, read: one function for each way to write them."""

import json
from dataclasses import dataclass
from typing import Any, Final, NoReturn

_SPACE: Final = " \t\r\n"
_FENCE: Final = "```"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """arguments: JSON of an object."""

    name: str
    arguments: str


def json_calls(text: str) -> list[ToolCall]:
    """Objects of name and arguments, or parameters: one, several in a row, or a list of them.

    Raises ValueError when they are something else.
    """
    found: list[Any] = []
    for value in _values(text, separators=_SPACE + ";"):
        found += value if isinstance(value, list) else [value]
    if not found:
        raise ValueError("no call")
    return [_call(value) for value in found]


def mistral_calls(text: str) -> list[ToolCall]:
    """A list of such objects, or a name and its arguments: `name{...}`, `name[ARGS]{...}`.

    Some models put an id between: `name[CALL_ID]id[ARGS]{...}`.
    """
    text = text.strip()
    if text.startswith("["):
        return json_calls(text)
    name, brace, arguments = text.partition("{")
    name = name.removesuffix("[ARGS]").partition("[CALL_ID]")[0]
    return [_named(name, brace + arguments)]


def deepseek_call(text: str) -> list[ToolCall]:
    """`name<sep>{...}`, or `function<sep>name` and the arguments in a fence, as V3 has it."""
    head, separator, rest = text.strip().partition("<｜tool▁sep｜>")
    if not separator:
        raise ValueError("no separator")
    name, _, fenced = rest.partition("\n")
    fenced = fenced.strip()
    if head == "function" and fenced.startswith(_FENCE) and fenced.endswith(_FENCE):
        inner = fenced.removeprefix(_FENCE).removesuffix(_FENCE).removeprefix("json")
        return [_named(name, inner.strip())]
    return [_named(head, rest)]


def channel_call(name: str, text: str) -> list[ToolCall]:
    """Arguments alone, as they are written to a tool."""
    return [_named(name, text)]


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
    # Of 1e999, which is JSON, Python makes an infinity: a ValueError, too.
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    text.encode()  # a lone surrogate is a ValueError here, and none in the answer
    return ToolCall(name, text)


def _values(text: str, separators: str) -> list[Any]:
    """JSON values one behind the other. Raises ValueError, also for what is JSON in Python alone
    and for more levels than Python takes."""
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
