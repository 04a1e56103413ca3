"""Turns the messages of Anthropic's API, which are made of blocks, into the messages of a chat.

In a chat the results of calls are messages of their own; here they are blocks of the user's
messages. Calls and thoughts, which are fields of a chat's message, are blocks of the assistant's.
"""

from collections.abc import Sequence
from typing import Any

from serving.conversation import MAX_PARTS, text_at, text_part
from serving.errors import bad_field, quoted, wrong_type

# Anthropic's command-line client begins its system prompt with a block that differs from request to
# request. With it, no two requests would share a cached prefix.
_BILLING = "x-anthropic-billing-header"


def messages_of_blocks(
    given: Sequence[dict[str, Any]], system: str | list[Any] | None
) -> list[dict[str, Any]]:
    """The messages of a conversation. Raises ApiError for a block that is unknown or malformed."""
    _check_number(given, system)
    messages: list[dict[str, Any]] = []
    instructions = _content(system or "", "system")
    if isinstance(instructions, list):
        instructions = [part for part in instructions if not part["text"].startswith(_BILLING)]
    if instructions:
        messages.append({"role": "system", "content": instructions})
    for place, message in enumerate(given):
        where = f"messages[{place}]"
        role, content = message.get("role"), message.get("content")
        if content is None and role != "user":
            content = ""  # as in chats: an answer without text that comes back
        if role == "assistant":
            messages.append(_assistants(content, f"{where}.content"))
        elif role == "user":
            messages += _users(content, f"{where}.content")
        elif role == "system":
            messages.append({"role": role, "content": _content(content, f"{where}.content")})
        else:
            raise wrong_type(
                f"{where}.role", f"'user', 'assistant' or 'system', got {quoted(role)}"
            )
    return messages


def _check_number(given: Sequence[dict[str, Any]], system: str | list[Any] | None) -> None:
    """Raises ApiError for too many messages and blocks, before any of them is looked at."""
    contents = [message.get("content") for message in given]
    lists = [content for content in [*contents, system] if isinstance(content, list)]
    results = [block.get("content") for x in lists for block in x if isinstance(block, dict)]
    lists += [content for content in results if isinstance(content, list)]
    count = len(given) + sum(map(len, lists))
    if count > MAX_PARTS:
        raise bad_field("messages", f"at most {MAX_PARTS} messages and blocks, got {count}")


def _users(content: Any, where: str) -> list[dict[str, Any]]:
    """A user's message: each result of a call becomes a message, and so do the blocks between."""
    if isinstance(content, str):
        return [{"role": "user", "content": content}]
    messages: list[dict[str, Any]] = []
    for block, path in _blocks(content, where):
        if _kind(block) == "tool_result":
            result = block.get("content")
            text = _content("" if result is None else result, f"{path}.content")
            call_id = text_at(block, "tool_use_id", path)
            messages.append({"role": "tool", "tool_call_id": call_id, "content": text})
            continue
        if not messages or messages[-1]["role"] != "user":
            messages.append({"role": "user", "content": []})
        messages[-1]["content"].append(text_part(block, path))
    return messages or [{"role": "user", "content": ""}]


def _assistants(content: Any, where: str) -> dict[str, Any]:
    """An assistant's message.

    Its texts are one text, on lines of their own: a template may join parts without anything
    between them.
    """
    if isinstance(content, str):
        return {"role": "assistant", "content": content}
    thoughts, texts, calls = [], [], []
    for block, path in _blocks(content, where):
        kind = _kind(block)
        if kind == "thinking":
            thoughts.append(text_at(block, "thinking", path))
        elif kind == "redacted_thinking":
            pass  # encrypted by another server
        elif kind == "tool_use":
            calls.append(_call(block, path))
        else:
            texts.append(text_part(block, path)["text"])
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    if thought := "\n".join(filter(None, thoughts)):
        message["reasoning_content"] = thought
    if calls:
        message["tool_calls"] = calls
    return message


def _call(block: dict[str, Any], where: str) -> dict[str, Any]:
    arguments = block.get("input")
    if not isinstance(arguments, dict):
        raise wrong_type(f"{where}.input", f"an object, got {quoted(arguments)}")
    function = {"name": text_at(block, "name", where), "arguments": arguments}
    return {"id": text_at(block, "id", where), "type": "function", "function": function}


def _content(content: Any, where: str) -> str | list[dict[str, Any]]:
    """A content of text alone, in the form it came in: some templates tell text from a list."""
    if isinstance(content, str):
        return content
    return [text_part(block, path) for block, path in _blocks(content, where)]


def _blocks(content: Any, where: str) -> list[tuple[Any, str]]:
    """The blocks of a content, each with its path."""
    if not isinstance(content, list):
        raise wrong_type(where, f"text or a list, got {quoted(content)}")
    return [(block, f"{where}[{i}]") for i, block in enumerate(content)]


def _kind(block: Any) -> Any:
    return block.get("type") if isinstance(block, dict) else None
