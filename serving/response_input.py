"""Turns the items of a Responses request's `input` into the messages of a chat.

In a chat one turn of the assistant is one message, with its reasoning, text and calls; in `input`
each of these is an item of its own.
"""

from collections.abc import Sequence
from typing import Any

from serving.conversation import MAX_PARTS, text_at, text_of, text_part
from serving.errors import ApiError, bad_field, quoted, wrong_type


def messages_of_input(
    given: str | Sequence[dict[str, Any]], instructions: str | None
) -> list[dict[str, Any]]:
    """The messages of a conversation. Raises ApiError for an item that is unknown or malformed."""
    messages: list[dict[str, Any]] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    if isinstance(given, str):
        messages.append({"role": "user", "content": given})
        return messages
    _check_number(given)
    turn: dict[str, Any] | None = None  # the assistant's message, while its turn goes on
    for place, item in enumerate(given):
        where = f"input[{place}]"
        part = _assistants(item, where)
        if part is None:
            turn = None
            messages.append(_others(item, where))
            continue
        name, value = part
        if not value:  # reasoning without text, as from servers that encrypt theirs
            continue
        if turn is None or not _may_follow(name, turn):
            turn = {"role": "assistant"}
            messages.append(turn)
        turn.setdefault(name, []).extend([value] if name == "content" else value)
    return [_joined(message) for message in messages]


def _check_number(items: Sequence[dict[str, Any]]) -> None:
    """Raises ApiError for no items, or for too many items and parts.

    Checked before any item is looked at, and with the limit that holds for every chat.
    """
    if not items:
        raise bad_field("input", "must have at least one item")
    lists = (item.get(name) for item in items for name in ("content", "summary", "output"))
    count = len(items) + sum(len(parts) for parts in lists if isinstance(parts, list))
    if count > MAX_PARTS:
        raise bad_field("input", f"at most {MAX_PARTS} items and content parts, got {count}")


def _may_follow(name: str, turn: dict[str, Any]) -> bool:
    """Whether the field `name` still belongs to this turn, given what the turn already has.

    Calls always do; reasoning and text do unless the turn has text but no calls yet. What ends a
    turn otherwise is an item that is not the assistant's, such as the output of a call.
    """
    return name == "tool_calls" or "tool_calls" in turn or "content" not in turn


def _joined(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its reasoning as one text, and its content as one list of parts.

    The texts of several items are one part, on lines of their own, as a template may join parts
    without anything between them.
    """
    if "reasoning_content" in message:
        message["reasoning_content"] = "\n".join(message["reasoning_content"])
    if message["role"] == "assistant" and "content" in message:
        contents = message["content"]
        if len(contents) > 1:
            contents = [[text_part("\n".join(map(text_of, contents)), "")]]
        (message["content"],) = contents
    return message


def _assistants(item: dict[str, Any], where: str) -> tuple[str, list[Any]] | None:
    """For an item of the assistant: the message's field and what to add to it. Else None."""
    kind = item.get("type") or "message"
    if kind == "reasoning":
        name = "content" if item.get("content") else "summary"
        parts = _list(item, name, where)
        texts = [text_at(part, "text", f"{where}.{name}[{i}]") for i, part in enumerate(parts)]
        return "reasoning_content", [text for text in texts if text]
    if kind == "function_call":
        function = {name: text_at(item, name, where) for name in ("name", "arguments")}
        call_id = text_at(item, "call_id", where)
        return "tool_calls", [{"id": call_id, "type": "function", "function": function}]
    if kind == "message" and item.get("role") == "assistant":
        content = item.get("content")
        # A message without text is a turn all the same.
        return "content", _parts("" if content is None else content, f"{where}.content")
    return None


def _others(item: dict[str, Any], where: str) -> dict[str, Any]:
    kind = item.get("type") or "message"
    if kind == "function_call_output":
        call_id = text_at(item, "call_id", where)
        output = item.get("output")
        content = _content("" if output is None else output, f"{where}.output")
        return {"role": "tool", "tool_call_id": call_id, "content": content}
    if kind == "item_reference":
        how = "send the item itself, as clients do when they are given store: false"
        message = f"{where}: nothing is stored here that an 'item_reference' could name; {how}"
        raise ApiError(400, message, "input", "unsupported_parameter")
    if kind != "message":
        message = f"{where}: this server does not support items of type {quoted(kind)}"
        raise ApiError(400, message, "input", "unsupported_parameter")
    role, said = text_at(item, "role", where), item.get("content")
    if said is None and role != "user":
        said = ""
    return {"role": role, "content": _content(said, f"{where}.content")}


def _content(content: Any, where: str) -> str | list[dict[str, Any]]:
    """The content in the form it came in: some templates tell a text from a list of one text."""
    return content if isinstance(content, str) else _parts(content, where)


def _parts(content: Any, where: str) -> list[dict[str, Any]]:
    """The parts of a content, in the shape that chats give them."""
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
