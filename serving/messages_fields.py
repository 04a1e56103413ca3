"""The fields of POST /v1/messages, and the chat request that they amount to.

Field names and meanings: Anthropic's API reference, and SGLang's and vLLM's sampling parameters as
in chats.
"""

from typing import Any

import msgspec

from serving.conversation import check_function
from serving.errors import ApiError, bad_field, missing_field, not_served, quoted, wrong_type
from serving.forms import JsonSchemaFormat, ResponseFormat
from serving.json_fields import NotServed, read_json, refuse
from serving.message_input import messages_of_blocks
from serving.openai_fields import ChatFields, ConversationFields, check_as_chat


class Thinking(msgspec.Struct):
    """budget_tokens: clients have to send one, and nothing here bounds thoughts alone."""

    type: str
    budget_tokens: int | None = None
    display: str | None = None


class OutputFormat(msgspec.Struct):
    type: str
    schema: dict[str, Any] | None = None


class OutputConfig(msgspec.Struct):
    effort: str | None = None
    format: OutputFormat | None = None
    task_budget: Any = None  # not served


class MessagesFields(ConversationFields, kw_only=True):
    """POST /v1/messages and /v1/messages/count_tokens."""

    messages: list[dict[str, Any]] | None = None
    system: str | list[Any] | None = None
    stop_sequences: list[str] | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # the older name of output_config.format
    context_management: dict[str, Any] | None = None
    compaction: NotServed[Any] = None
    container: NotServed[Any] = None
    fallbacks: NotServed[Any] = None
    mcp_servers: NotServed[Any] = None
    thread: Any = None  # see read_count
    logprobs: NotServed[Any] = None
    # Names that chats have for fields which have other names here: refused, naming those.
    max_completion_tokens: Any = None
    reasoning: Any = None
    reasoning_effort: Any = None


# By the names that chats have for them.
OWN_NAMES = {
    "max_completion_tokens": "max_tokens",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "reasoning": "thinking",
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
    "stop": "stop_sequences",
}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_messages = msgspec.json.Decoder(MessagesFields)


def read_messages(body: bytes) -> MessagesFields:
    """Parse the body and check what can be checked without a model. Raises ApiError."""
    fields = read_count(body)
    if fields.max_tokens is None:
        raise missing_field("max_tokens")
    return fields


def read_count(body: bytes) -> MessagesFields:
    """As read_messages; where tokens are only counted, there need not be a max_tokens."""
    fields = read_json(_messages, body)
    if fields.thread:
        what = "this server keeps no conversations"
        raise bad_field("thread", what, "thread_unsupported_request")
    check_as_chat(fields, OWN_NAMES)
    refuse(fields, ("top_logprobs",))
    if fields.messages is None:
        raise missing_field("messages")
    thinking, config = fields.thinking, fields.output_config
    if thinking is not None:
        if thinking.type not in ("enabled", "adaptive", "disabled"):
            raise not_served(f"thinking.type {quoted(thinking.type)}")
        if thinking.display not in (None, "summarized", "omitted"):
            raise not_served(f"thinking.display {quoted(thinking.display)}")
    if config is not None:
        if config.task_budget is not None:
            raise not_served("output_config.task_budget")
        if config.format is not None and fields.output_format is not None:
            raise bad_field("output_format", "cannot go with output_config.format")
    _check_context_management(fields.context_management)
    return fields


def chat_of(fields: MessagesFields) -> ChatFields:
    """The chat request that these fields amount to. Raises ApiError for what no chat can have."""
    assert fields.messages is not None, "it was read"
    choice, one_call = _tool_choice(fields.tool_choice)
    own = {"tools", "tool_choice", "chat_template_kwargs", "continue_final_message", *OWN_NAMES}
    shared = (name for name in ConversationFields.__struct_fields__ if name not in own)
    messages = messages_of_blocks(fields.messages, fields.system)
    tools = [_chats_tool(tool, f"tools[{i}]") for i, tool in enumerate(fields.tools or ())]
    return ChatFields(
        **{name: getattr(fields, name) for name in shared},
        messages=messages,
        stop=fields.stop_sequences,
        tools=tools or None,
        tool_choice=choice,
        parallel_tool_calls=False if one_call else None,
        reasoning_effort=None if fields.output_config is None else fields.output_config.effort,
        chat_template_kwargs=_template_kwargs(fields),
        response_format=_response_format(fields),
        continue_final_message=_is_begun(messages) or None,
    )


def format_name(fields: MessagesFields) -> str:
    """What the request calls the field with the form of its answer."""
    return "output_config.format" if fields.output_format is None else "output_format"


def _check_context_management(given: dict[str, Any] | None) -> None:
    """Raises ApiError for edits that change the conversation. Agents ask for one that does not."""
    edits = (given or {}).get("edits") or []
    for edit in edits if isinstance(edits, list) else [edits]:
        match edit:
            case {"type": "clear_thinking_20251015", "keep": "all"}:
                continue
        raise not_served("context_management")


def _is_begun(messages: list[dict[str, Any]]) -> bool:
    """Whether the last message is the beginning of the answer."""
    last = messages[-1] if messages else {"role": ""}
    return last["role"] == "assistant" and bool(last["content"]) and "tool_calls" not in last


def _template_kwargs(fields: MessagesFields) -> dict[str, Any] | None:
    """What the chat template is given, under the names by which templates turn thinking on."""
    if fields.thinking is None:
        return fields.chat_template_kwargs
    thinks = fields.thinking.type != "disabled"
    return {"enable_thinking": thinks, "thinking": thinks, **(fields.chat_template_kwargs or {})}


def _chats_tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        message = f"{where}.type: this server has no tool {quoted(tool['type'])}"
        raise ApiError(400, message, "tools", "unsupported_parameter")
    for name, neutral in (("defer_loading", False), ("allowed_callers", ["direct"])):
        if tool.get(name) not in (None, neutral):
            raise not_served(f"{where}.{name}")
    if tool.get("input_examples"):
        raise not_served(f"{where}.input_examples")
    schema = tool.get("input_schema")
    if not isinstance(schema, dict):
        raise wrong_type(f"{where}.input_schema", f"an object, got {quoted(schema)}")
    function = {name: tool.get(name) for name in ("name", "description", "strict")}
    check_function(function, where)
    function = {name: value for name, value in function.items() if value is not None}
    return {"type": "function", "function": {**function, "parameters": schema}}


def _tool_choice(choice: Any) -> tuple[str | dict[str, Any] | None, bool]:
    """The choice as a chat has it, and whether only one call may be made."""
    if choice is None:
        return None, False
    kind = choice.get("type") if isinstance(choice, dict) else None
    one_call = choice.get("disable_parallel_tool_use") if isinstance(choice, dict) else None
    if not isinstance(one_call, bool | None):
        where = "tool_choice.disable_parallel_tool_use"
        raise wrong_type(where, f"a boolean, got {quoted(one_call)}")
    if kind == "tool" and isinstance(choice.get("name"), str):
        return {"type": "function", "function": {"name": choice["name"]}}, bool(one_call)
    if not isinstance(kind, str) or kind not in _CHOICES:
        what = 'expected {"type": "auto", "any" or "none"} or {"type": "tool", "name": ...}'
        raise bad_field("tool_choice", f"{what}, got {quoted(choice)}")
    return _CHOICES[kind], bool(one_call)


def _response_format(fields: MessagesFields) -> ResponseFormat | None:
    config = fields.output_config
    given = fields.output_format or (None if config is None else config.format)
    if given is None:
        return None
    if given.type != "json_schema":
        raise not_served(f"{format_name(fields)}.type {quoted(given.type)}")
    return ResponseFormat("json_schema", JsonSchemaFormat(given.schema, strict=True))
