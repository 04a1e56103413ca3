"""The items of a response's `input`, as messages of a chat.

Of one turn of the assistant a chat has one message, with what was thought, said and called; here
each of these is an item of its own.
"""

from collections.abc import Sequence
from typing import Any

from serving.errors import ApiError, bad_field, quoted

_ORDER = ("reasoning_content", "content", "tool_calls")  # within one turn
_TEXTS = {"input_text": "text", "output_text": "text", "refusal": "refusal"}  # the field with it


def messages_of_input(
    given: str | Sequence[dict[str, Any]], instructions: str | None
) -> list[dict[str, Any]]:
    """The messages of a conversation. Raises ApiError for what is no item, or has no text."""
    messages: list[dict[str, Any]] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    if isinstance(given, str):
        messages.append({"role": "user", "content": given})
        return messages
    if not given:
        raise bad_field("input", "must have at least one item")
    turn: dict[str, Any] = {}  # the assistant's that goes on; empty where none does
    for place, item in enumerate(given):
        where = f"input[{place}]"
        part = _assistants(item, where)
        if part is None:
            turn = {}
            messages.append(_others(item, where))
            continue
        name, value = part
        if not turn or not _may_follow(name, turn):
            turn = {"role": "assistant"}
            messages.append(turn)
        if name == "tool_calls":
            turn.setdefault(name, []).append(value)
        else:
            turn[name] = value
    return messages


def _may_follow(name: str, turn: dict[str, Any]) -> bool:
    """Whether one turn has this after what it has."""
    has = max(_ORDER.index(field) for field in turn if field != "role")
    return _ORDER.index(name) > has or name == "tool_calls"


def _assistants(item: dict[str, Any], where: str) -> tuple[str, Any] | None:
    """A field of the assistant's message, and what it gets; None for an item of others."""
    kind = item.get("type") or "message"
    if kind == "reasoning":
        parts = _list(item, "content", where) or _list(item, "summary", where)
        texts = [_field(part, "text", f"{where}.content[{i}]") for i, part in enumerate(parts)]
        return "reasoning_content", "\n".join(texts)
    if kind == "function_call":
        function = {name: _field(item, name, where) for name in ("name", "arguments")}
        call_id = _field(item, "call_id", where)
        return "tool_calls", {"id": call_id, "type": "function", "function": function}
    if kind == "message" and item.get("role") == "assistant":
        return "content", _content(item.get("content"), where)
    return None


def _others(item: dict[str, Any], where: str) -> dict[str, Any]:
    kind = item.get("type") or "message"
    if kind == "function_call_output":
        return {
            "role": "tool",
            "tool_call_id": _field(item, "call_id", where),
            "content": _content(item.get("output"), f"{where}.output"),
        }
    if kind != "message":
        message = f"{where}: this server does not support items of type {quoted(kind)}"
        raise ApiError(400, message, "input", "unsupported_parameter")
    return {"role": _field(item, "role", where), "content": _content(item.get("content"), where)}


def _content(content: Any, where: str) -> str | list[dict[str, Any]]:
    """A text, or parts of one in the shape of a chat's."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _wrong_type(where, f"content as text or a list, got {quoted(content)}")
    return [_part(part, f"{where}.content[{i}]") for i, part in enumerate(content)]


def _part(part: Any, where: str) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in _TEXTS:
        message = f"{where}: this server takes text only, got {quoted(kind or type(part).__name__)}"
        raise ApiError(400, message, "input", "unsupported_parameter")
    return {"type": "text", "text": _field(part, _TEXTS[kind], where)}


def _list(item: dict[str, Any], name: str, where: str) -> list[Any]:
    value = item.get(name) or []
    if not isinstance(value, list):
        raise _wrong_type(f"{where}.{name}", f"a list, got {quoted(value)}")
    return value


def _field(item: Any, name: str, where: str) -> str:
    value = item.get(name) if isinstance(item, dict) else None
    if not isinstance(value, str):
        raise _wrong_type(f"{where}.{name}", f"text, got {quoted(value)}")
    return value


def _wrong_type(where: str, expected: str) -> ApiError:
    return ApiError(400, f"{where}: expected {expected}", "input", "invalid_type")
