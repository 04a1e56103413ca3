"""The fields of POST /v1/responses, and the chat that they ask for.

Field names and meanings: OpenAI's API reference. Beside them SGLang's and vLLM's parameters of
sampling, as in chats. Nothing is kept between two requests: a conversation comes whole with each.
"""

from typing import Any

import msgspec

from serving.errors import ApiError, bad_field, not_served
from serving.grammar import JsonSchemaFormat, ResponseFormat
from serving.json_fields import read_json, refuse, refuse_unless
from serving.openai_fields import ChatFields
from serving.protocol import SamplingFields
from serving.response_input import messages_of_input

LOGPROBS = "message.output_text.logprobs"
# The other is how a client without a store on our side gets back what was thought; it does anyway.
_INCLUDED = frozenset({LOGPROBS, "reasoning.encrypted_content"})


class ReasoningOptions(msgspec.Struct):
    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class TextFormat(msgspec.Struct):
    type: str = "text"
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct):
    format: TextFormat | None = None
    verbosity: Any = None


class StreamOptions(msgspec.Struct):
    include_obfuscation: bool | None = None


class ResponsesFields(SamplingFields, kw_only=True):
    """POST /v1/responses."""

    input: str | list[dict[str, Any]] | None = None
    model: str | None = None
    instructions: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_output_tokens: int | None = None
    min_tokens: int | None = None
    seed: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    truncation: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    rid: str | None = None
    request_id: str | None = None
    cache_salt: str | None = None
    routed_dp_rank: int | None = None
    data_parallel_rank: int | None = None
    disagg_prefill_dp_rank: int | None = None
    # Shown again in the answer, and nothing else.
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    # Of no consequence here: nothing is stored, and no tool is the server's own.
    store: bool | None = None
    max_tool_calls: int | None = None
    service_tier: str | None = None
    # Not served.
    background: bool | None = None
    conversation: Any = None
    context_management: Any = None
    moderation: Any = None
    previous_response_id: str | None = None
    prompt: Any = None


_REFUSED = (
    "background",
    "conversation",
    "context_management",
    "moderation",
    "previous_response_id",
    "prompt",
)
_REFUSED_UNLESS = {"n": 1, "truncation": "disabled"}

_responses = msgspec.json.Decoder(ResponsesFields)


def read_responses(body: bytes) -> ResponsesFields:
    """The body's fields, those checked that need no model. Raises ApiError."""
    fields = read_json(_responses, body)
    refuse(fields, _REFUSED)
    refuse_unless(fields, _REFUSED_UNLESS)
    if fields.input is None:
        raise ApiError(400, "input: this field is required", "input", "missing_field")
    if fields.stream_options is not None and not fields.stream:
        raise bad_field("stream_options", "is allowed only with stream")
    if fields.stream_options is not None and fields.stream_options.include_obfuscation:
        raise not_served("stream_options.include_obfuscation")
    for name in fields.include or ():
        if name not in _INCLUDED:
            raise not_served(f"include.{name}")
    reasoning = fields.reasoning or ReasoningOptions()
    for name in ("summary", "generate_summary"):
        if getattr(reasoning, name) not in (None, "auto"):  # auto: as detailed as there is
            raise not_served(f"reasoning.{name}")
    if fields.text is not None and fields.text.verbosity not in (None, "medium"):
        raise not_served("text.verbosity")
    return fields


def chat_of(fields: ResponsesFields) -> ChatFields:
    """The chat that is asked for. Raises ApiError for what no chat has."""
    wants_logprobs = LOGPROBS in (fields.include or ()) or bool(fields.top_logprobs)
    assert fields.input is not None, "it was read"
    return ChatFields(
        **{name: getattr(fields, name) for name in SamplingFields.__struct_fields__},
        model=fields.model,
        messages=messages_of_input(fields.input, fields.instructions),
        stream=fields.stream,
        max_completion_tokens=fields.max_output_tokens,
        min_tokens=fields.min_tokens,
        seed=fields.seed,
        tools=None if fields.tools is None else [_tool(tool) for tool in fields.tools],
        tool_choice=_tool_choice(fields.tool_choice),
        parallel_tool_calls=fields.parallel_tool_calls,
        reasoning_effort=None if fields.reasoning is None else fields.reasoning.effort,
        response_format=_response_format(fields.text),
        logprobs=wants_logprobs,
        top_logprobs=fields.top_logprobs,
        chat_template_kwargs=fields.chat_template_kwargs,
        rid=fields.rid,
        request_id=fields.request_id,
        cache_salt=fields.cache_salt,
        routed_dp_rank=fields.routed_dp_rank,
        data_parallel_rank=fields.data_parallel_rank,
        disagg_prefill_dp_rank=fields.disagg_prefill_dp_rank,
    )


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    """A function, with what it is in an object of its own."""
    kind = tool.get("type")
    if kind != "function":
        raise ApiError(
            400,
            f"tools: this server has no tool of its own, so it takes functions only, got {kind!r}",
            "tools",
            "unsupported_parameter",
        )
    function = {name: value for name, value in tool.items() if name != "type" and value is not None}
    return {"type": "function", "function": function}


def _tool_choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") != "function":
        raise not_served("tool_choice")
    return {"type": "function", "function": {"name": choice.get("name")}}


def _response_format(text: TextOptions | None) -> ResponseFormat | None:
    given = None if text is None else text.format
    if given is None:
        return None
    if given.type != "json_schema":
        return ResponseFormat(given.type)
    schema = JsonSchemaFormat(given.schema, given.name, given.description, given.strict)
    return ResponseFormat(given.type, schema)
