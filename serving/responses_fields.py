"""The fields of POST /v1/responses, and the chat request that they amount to.

Field names and meanings: OpenAI's API reference, and SGLang's and vLLM's sampling parameters as in
chats. Nothing is kept between requests: each has to bring its whole conversation.
"""

from collections.abc import Iterator
from typing import Any

import msgspec

from serving.conversation import check_function, text_at
from serving.errors import ApiError, bad_field, missing_field, not_served, quoted, wrong_type
from serving.forms import JsonSchemaFormat, ResponseFormat
from serving.grammar import wrong
from serving.json_fields import NotServed, read_json
from serving.openai_fields import ChatFields, ConversationFields, check_as_chat
from serving.response_input import messages_of_input

LOGPROBS = "message.output_text.logprobs"
# Accepted in `include` without effect. They ask for outputs of tools that this server does not
# have, or for encrypted reasoning, by which clients get reasoning back from servers that store
# nothing; here reasoning comes in plain text.
_BRING_NOTHING = frozenset(
    {
        "code_interpreter_call.outputs",
        "computer_call_output.output.image_url",
        "file_search_call.results",
        "message.input_image.image_url",
        "reasoning.encrypted_content",
        "web_search_call.action.sources",
        "web_search_call.results",
    }
)


class ReasoningOptions(msgspec.Struct):
    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None

    @property
    def any_summary(self) -> str | None:
        """The summary that is asked for, by its name of today or its older one."""
        return self.generate_summary if self.summary is None else self.summary


class TextFormat(msgspec.Struct):
    type: str = "text"
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct):
    format: TextFormat | None = None
    verbosity: Any = None


class ResponsesFields(ConversationFields, kw_only=True):
    """POST /v1/responses."""

    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    include: list[str] | None = None
    truncation: str | None = None
    # Repeated in the answer, and otherwise unused.
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    # Without effect here: nothing is stored, and the server has no tools of its own.
    store: bool | None = None
    max_tool_calls: int | None = None
    service_tier: str | None = None
    background: NotServed[bool] = None
    conversation: NotServed[Any] = None
    context_management: NotServed[Any] = None
    previous_response_id: NotServed[str] = None
    prompt: NotServed[Any] = None
    previous_input_messages: NotServed[Any] = None
    enable_response_messages: NotServed[Any] = None
    # Names that chats have for fields which have other names here: refused, naming those.
    logprobs: Any = None
    max_completion_tokens: Any = None
    messages: Any = None
    reasoning_effort: Any = None


# By the names that chats have for them.
OWN_NAMES = {
    "logprobs": f"include: {LOGPROBS}",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
}
_responses = msgspec.json.Decoder(ResponsesFields)


def read_responses(body: bytes) -> ResponsesFields:
    """Parse the body and check what can be checked without a model. Raises ApiError."""
    fields = read_json(_responses, body)
    check_as_chat(fields, OWN_NAMES)
    if fields.input is None:
        raise missing_field("input")
    if fields.truncation not in (None, "auto", "disabled"):
        what = f'expected "auto" or "disabled", got {quoted(fields.truncation)}'
        raise bad_field("truncation", what)
    for name in fields.include or ():
        if name != LOGPROBS and name not in _BRING_NOTHING:
            raise not_served(f"include.{name}")
    if fields.text is not None and fields.text.verbosity not in (None, "medium"):
        raise not_served("text.verbosity")
    for name in ("summary", "generate_summary"):
        summary = getattr(fields.reasoning, name, None)
        if summary not in (None, "auto", "concise", "detailed"):
            what = f"expected auto, concise or detailed, got {quoted(summary)}"
            raise wrong(f"reasoning.{name}", what)
    return fields


def chat_of(fields: ResponsesFields) -> ChatFields:
    """The chat request that these fields amount to. Raises ApiError for what no chat can have."""
    _check_namespaces(fields)
    wants_logprobs = LOGPROBS in (fields.include or ()) or bool(fields.top_logprobs)
    assert fields.input is not None, "it was read"
    own = {"tools", "tool_choice", *OWN_NAMES}
    shared = (name for name in ConversationFields.__struct_fields__ if name not in own)
    return ChatFields(
        **{name: getattr(fields, name) for name in shared},
        messages=messages_of_input(fields.input, fields.instructions),
        max_completion_tokens=fields.max_output_tokens,
        tools=[_chats_tool(function) for function, _ in functions_of(fields)] or None,
        tool_choice=_tool_choice(fields.tool_choice),
        reasoning_effort=None if fields.reasoning is None else fields.reasoning.effort,
        response_format=_response_format(fields.text),
        logprobs=wants_logprobs,
    )


def functions_of(fields: ResponsesFields) -> Iterator[tuple[dict[str, Any], str]]:
    """The functions that the model is offered, each with its namespace or "".

    Agents list tools that a server may have beside their own functions, and `custom` ones. This
    server has none of these, and ignores them. Raises ApiError for a function that is malformed.
    """
    allowed = _allowed(fields.tool_choice)
    for function, namespace, _ in _all_functions(fields):
        if allowed is None or function["name"] in allowed:
            yield function, namespace


def places_of_parameters(fields: ResponsesFields) -> dict[str, str]:
    """For each function, by name: the path of its parameters in the request."""
    return {
        function["name"]: f"{where}.parameters" for function, _, where in _all_functions(fields)
    }


def _allowed(choice: str | dict[str, Any] | None) -> frozenset[str] | None:
    """Names of the tools that may be called; None where all may."""
    if not (isinstance(choice, dict) and choice.get("type") == "allowed_tools"):
        return None
    tools = choice.get("tools")
    if not isinstance(tools, list) or choice.get("mode") not in ("auto", "required"):
        what = 'expected {"type": "allowed_tools", "mode": "auto" or "required", "tools": [...]}'
        raise bad_field("tool_choice", f"{what}, got {quoted(choice)}")
    named = (tool.get("name") for tool in tools if isinstance(tool, dict))
    return frozenset(name for name in named if isinstance(name, str))


def _all_functions(fields: ResponsesFields) -> Iterator[tuple[dict[str, Any], str, str]]:
    """All functions of the request, each with its namespace or "", and its path."""
    for place, tool in enumerate(fields.tools or ()):
        where = f"tools[{place}]"
        kind = text_at(tool, "type", where)  # a function without it would be left out unnoticed
        if kind == "function":
            check_function(tool, where)
            yield tool, "", where
        elif kind == "namespace":
            inner = tool.get("tools")
            if not isinstance(inner, list):
                raise wrong_type(f"{where}.tools", f"a list, got {quoted(inner)}")
            for i, one in enumerate(inner):
                path = f"{where}.tools[{i}]"
                if text_at(one, "type", path) == "function":
                    check_function(one, path)
                    yield one, text_at(tool, "name", where), path


def _check_namespaces(fields: ResponsesFields) -> None:
    """Raises ApiError for functions of one name in different namespaces.

    The model is shown, and writes, the name alone: its call could be given the wrong namespace.
    """
    known: dict[str, tuple[str, str]] = {}
    for function, namespace, where in _all_functions(fields):
        other, first = known.setdefault(function["name"], (namespace, where))
        if other != namespace:
            what = f"{quoted(function['name'])} is also the name of {first}, in another namespace"
            why = "this server tells functions apart by name alone"
            raise ApiError(400, f"{where}.name: {what}; {why}", "tools", "unsupported_parameter")


def _chats_tool(function: dict[str, Any]) -> dict[str, Any]:
    """The function as a tool of a chat, which holds it in an object of its own."""
    inner = {name: value for name, value in function.items() if value is not None}
    del inner["type"]
    return {"type": "function", "function": inner}


def _tool_choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if choice in (None, "none", "auto", "required"):
        return choice
    if isinstance(choice, dict) and _allowed(choice) is not None:
        mode: str = choice["mode"]
        return mode
    if isinstance(choice, dict) and choice.get("type") not in (None, "function"):
        raise not_served("tool_choice")
    name = choice.get("name") if isinstance(choice, dict) else None
    if not isinstance(name, str):
        what = 'expected "none", "auto", "required" or {"type": "function", "name": ...}'
        raise bad_field("tool_choice", f"{what}, got {quoted(choice)}")
    return {"type": "function", "function": {"name": name}}


def _response_format(text: TextOptions | None) -> ResponseFormat | None:
    given = None if text is None else text.format
    if given is None:
        return None
    if given.type == "structural_tag":  # its fields are not OpenAI's; they may stand beside `text`
        raise wrong("text.format.type", "text, json_object or json_schema, got 'structural_tag'")
    if given.type != "json_schema":
        return ResponseFormat(given.type, schema=given.schema, strict=given.strict)
    schema = JsonSchemaFormat(given.schema, given.name, given.description, given.strict)
    return ResponseFormat(given.type, schema)
