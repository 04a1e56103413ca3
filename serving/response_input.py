"""The items of a response's `input`, as messages of a chat.

Of one turn of the assistant a chat has one message, with what was thought, said and called; here
each of these is an item of its own.
"""

from collections.abc import Sequence
from typing import Any

from serving.conversation import MAX_PARTS, text_part
from serving.errors import ApiError, bad_field, quoted, wrong_type


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
    _check_number(given)
    turn: dict[str, Any] | None = None  # the assistant's that goes on
    for place, item in enumerate(given):
        where = f"input[{place}]"
        part = _assistants(item, where)
        if part is None:
            turn = None
            messages.append(_others(item, where))
            continue
        name, value = part
        if not value:  # a thought that is not told, as others encrypt theirs
            continue
        if turn is None or not _may_follow(name, turn):
            turn = {"role": "assistant"}
            messages.append(turn)
        turn.setdefault(name, []).extend(value)
    return [_joined(message) for message in messages]


def _check_number(items: Sequence[dict[str, Any]]) -> None:
    """Before any of them is looked at: what they become is counted as that of every chat."""
    if not items:
        raise bad_field("input", "must have at least one item")
    lists = (item.get(name) for item in items for name in ("content", "summary", "output"))
    count = len(items) + sum(len(parts) for parts in lists if isinstance(parts, list))
    if count > MAX_PARTS:
        raise bad_field("input", f"at most {MAX_PARTS} items and content parts, got {count}")


def _may_follow(name: str, turn: dict[str, Any]) -> bool:
    """Whether it is of one turn with what that has: all is, up to the outputs of its calls."""
    return name == "tool_calls" or "tool_calls" in turn or "content" not in turn


def _joined(message: dict[str, Any]) -> dict[str, Any]:
    """A turn's thoughts as the one text that templates take."""
    if "reasoning_content" in message:
        message["reasoning_content"] = "\n".join(message["reasoning_content"])
    return message


def _assistants(item: dict[str, Any], where: str) -> tuple[str, list[Any]] | None:
    """A field of the assistant's message, and what it gets; None for an item of others."""
    kind = item.get("type") or "message"
    if kind == "reasoning":
        name = "content" if item.get("content") else "summary"
        parts = _list(item, name, where)
        texts = [_field(part, "text", f"{where}.{name}[{i}]") for i, part in enumerate(parts)]
        return "reasoning_content", [text for text in texts if text]
    if kind == "function_call":
        function = {name: _field(item, name, where) for name in ("name", "arguments")}
        call_id = _field(item, "call_id", where)
        return "tool_calls", [{"id": call_id, "type": "function", "function": function}]
    if kind == "message" and item.get("role") == "assistant":
        content = item.get("content")
        # Without text it is a turn all the same.
        return "content", _parts("" if content is None else content, f"{where}.content")
    return None


def _others(item: dict[str, Any], where: str) -> dict[str, Any]:
    kind = item.get("type") or "message"
    if kind == "function_call_output":
        call_id = _field(item, "call_id", where)
        content = _content(item.get("output"), f"{where}.output")
        return {"role": "tool", "tool_call_id": call_id, "content": content}
    if kind != "message":
        message = f"{where}: this server does not support items of type {quoted(kind)}"
        raise ApiError(400, message, "input", "unsupported_parameter")
    role = _field(item, "role", where)
    return {"role": role, "content": _content(item.get("content"), f"{where}.content")}


def _content(content: Any, where: str) -> str | list[dict[str, Any]]:
    """As it came: some templates tell a text from a list of one."""
    return content if isinstance(content, str) else _parts(content, where)


def _parts(content: Any, where: str) -> list[dict[str, Any]]:
    """Parts of a text in the shape of a chat's."""
    if isinstance(content, str):
        return [text_part(content, where)]
    if not isinstance(content, list):
        raise wrong_type(where, f"text or a list, got {quoted(content)}")
    return [text_part(part, f"{where}[{i}]") for i, part in enumerate(content)]


def _list(item: dict[str, Any], name: str, where: str) -> list[Any]:
    value = item.get(name) or []
    if not isinstance(value, list):
        raise wrong_type(f"{where}.{name}", f"a list, got {quoted(value)}")
    return value


def _field(item: Any, name: str, where: str) -> str:
    value = item.get(name) if isinstance(item, dict) else None
    if not isinstance(value, str):
        raise wrong_type(f"{where}.{name}", f"text, got {quoted(value)}")
    return value
