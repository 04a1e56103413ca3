"""Turns the messages of a request into the text of a prompt."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from serving.errors import ApiError, bad_field
from serving.protocol import ServedModel
from serving.tokenizer import ChatTemplateError

# Variables of the chat template that are fields of their own, or ours to give.
RESERVED_KWARGS = frozenset(
    {"messages", "tools", "add_generation_prompt", "continue_final_message", "self", "documents"}
)


class ConversationFields(Protocol):
    """What makes the prompt of a conversation, as chat and tokenize requests have it."""

    messages: list[dict[str, Any]] | None
    tools: list[dict[str, Any]] | None
    tool_choice: str | dict[str, Any] | None
    chat_template_kwargs: dict[str, Any] | None
    reasoning_effort: str | None
    documents: list[dict[str, Any]] | None
    add_generation_prompt: bool | None
    continue_final_message: bool | None


def messages_of(fields: ConversationFields) -> list[dict[str, Any]]:
    """The messages as templates expect them. Raises ApiError."""
    if not fields.messages:
        raise bad_field("messages", "must have at least one message")
    if fields.add_generation_prompt and fields.continue_final_message:
        raise bad_field("continue_final_message", "cannot go with add_generation_prompt")
    wrong = RESERVED_KWARGS & (fields.chat_template_kwargs or {}).keys()
    if wrong:
        raise bad_field("chat_template_kwargs", f"must not set {', '.join(sorted(wrong))}")
    return [_message(message, i) for i, message in enumerate(fields.messages)]


def render(
    model: ServedModel, messages: Sequence[Mapping[str, Any]], fields: ConversationFields
) -> str:
    """The prompt of a conversation. Raises ApiError with the template's own words."""
    kwargs = dict(fields.chat_template_kwargs or {})
    if fields.reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", fields.reasoning_effort)
    if fields.documents is not None:
        kwargs["documents"] = fields.documents
    try:
        return model.tokenizer.apply_chat_template(
            messages,
            None if fields.tool_choice == "none" else fields.tools or None,
            fields.add_generation_prompt is not False,
            fields.continue_final_message is True,
            **kwargs,
        )
    except ChatTemplateError as error:
        raise bad_field("messages", str(error)) from error


def _message(message: dict[str, Any], place: int) -> dict[str, Any]:
    """A message as templates expect it: content as one text, tool arguments as objects."""
    where = f"messages[{place}]"
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise ApiError(400, f"{where}.role: expected a role's name, got {role!r}", "messages")
    content = message.get("content")
    if isinstance(content, list):
        content = "\n".join(
            _part_text(part, f"{where}.content[{i}]") for i, part in enumerate(content)
        )
    elif content is None and message.get("tool_calls"):
        content = ""
    elif not isinstance(content, str):
        kind = type(content).__name__ if content is not None else "null"
        raise ApiError(
            400, f"{where}.content: expected text, got {kind}", "messages", "invalid_type"
        )
    message = {**message, "content": content}
    if message.get("tool_calls"):
        message["tool_calls"] = [_tool_call(call, where) for call in message["tool_calls"]]
    return message


def _part_text(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in ("text", "input_text"):
        message = f"{where}: this server takes text only, got {kind or type(part).__name__!r}"
        raise ApiError(400, message, "messages", "unsupported_parameter")
    text = part.get("text")
    if not isinstance(text, str):
        raise ApiError(400, f"{where}.text: expected text", "messages", "invalid_type")
    return text


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise ApiError(400, f"{where}.tool_calls: expected functions", "messages", "invalid_type")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError as error:
            message = f"{where}.tool_calls: arguments of {function.get('name')!r} are no JSON"
            raise ApiError(400, message, "messages") from error
    return {**call, "function": {**function, "arguments": arguments}}
