"""The fields of OpenAI's requests, chat and completions, with what vLLM and SGLang add to them.

Field names and meanings: OpenAI's API reference; vLLM's and SGLang's extra parameters of the
OpenAI-compatible server.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from serving.errors import bad_field, missing_field, not_served
from serving.forms import ResponseFormat, StructuredOutputs
from serving.json_fields import NotServed, read_json, refuse, refuse_unless
from serving.protocol import SamplingFields


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None  # not served


class ChatReasoning(msgspec.Struct):
    """`reasoning` of a chat, as OpenRouter's clients send it."""

    effort: str | None = None
    enabled: bool | None = None
    exclude: bool | None = None
    max_tokens: int | None = None  # not served


class OpenAIFields(SamplingFields, kw_only=True):
    """The fields that chats and completions share."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    seed: int | None = None
    echo: bool | None = None
    prompt_logprobs: int | None = None
    include_stop_str_in_output: bool | None = None
    add_special_tokens: bool | None = None
    return_prompt_text: bool | None = None  # of chats alone, as is the next
    return_prompt_token_ids: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    rid: str | None = None
    request_id: str | None = None
    cache_salt: str | None = None
    extra_key: str | None = None
    routed_dp_rank: int | None = None
    data_parallel_rank: int | None = None
    disagg_prefill_dp_rank: int | None = None
    best_of: int | None = None
    response_format: ResponseFormat | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None
    bad_words: list[str] | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Any = None  # see REFUSED_UNLESS
    thinking_token_budget: Any = None  # the same
    use_beam_search: NotServed[bool] = None
    logits_processors: NotServed[Any] = None
    prompt_embeds: NotServed[Any] = None
    lora_path: NotServed[Any] = None
    custom_logit_processor: NotServed[Any] = None
    return_hidden_states: NotServed[bool] = None
    return_routed_experts: NotServed[Any] = None
    return_cached_tokens_details: NotServed[Any] = None
    return_flat_raw_output_top_logprobs: NotServed[Any] = None
    return_sampling_mask: NotServed[Any] = None
    return_spec_tokens_details: NotServed[Any] = None
    return_weight_versions: NotServed[Any] = None
    logprob_token_ids: NotServed[Any] = None
    watermark: NotServed[Any] = None
    watermarking: NotServed[Any] = None
    repetition_detection: NotServed[Any] = None
    guided_whitespace_pattern: NotServed[Any] = None
    session_params: NotServed[Any] = None
    kv_transfer_params: NotServed[Any] = None
    ec_transfer_params: NotServed[Any] = None
    vllm_xargs: NotServed[Any] = None


# Refused unless they have this value, which changes nothing. A budget of -1 is no bound; 0 would be
# no thought. From the left tokens are cut off in any case.
REFUSED_UNLESS = {"thinking_token_budget": -1, "truncation_side": "left"}


class CompletionFields(OpenAIFields, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | bool | None = None
    suffix: NotServed[str] = None


class ConversationFields(OpenAIFields, kw_only=True):
    """The fields that chats and responses share."""

    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    parallel_tool_calls: bool | None = None
    separate_reasoning: bool | None = None
    stream_reasoning: bool | None = None
    include_reasoning: bool | None = None
    return_meta_info: bool | None = None
    input_ids: list[int] | None = None
    top_logprobs: int | None = None
    # Served only with a value that changes nothing: see check_conversation.
    function_call: Any = None
    modalities: list[str] | None = None
    web_search_options: Any = None
    verbosity: Any = None
    functions: NotServed[Any] = None
    audio: NotServed[Any] = None
    chat_template: NotServed[str] = None
    moderation: NotServed[Any] = None
    task: NotServed[Any] = None


class ChatFields(ConversationFields, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]] | None = None
    reasoning_effort: str | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    reasoning: ChatReasoning | None = None
    return_input_ids_in_sglext: NotServed[Any] = None
    return_output_ids_in_sglext: NotServed[Any] = None


_OF_CHATS_ALONE = (
    "continue_final_message",
    "echo",
    "input_ids",
    "prompt_logprobs",
    "return_meta_info",
    "return_prompt_text",
    "return_prompt_token_ids",
    "return_token_ids",
    "return_tokens_as_token_ids",
    "truncate_prompt_tokens",
)
_CONVERSATION_REFUSED_UNLESS = {"verbosity": "medium"}

_completions = msgspec.json.Decoder(CompletionFields)
_chats = msgspec.json.Decoder(ChatFields)


def check_conversation(fields: ConversationFields) -> None:
    """Raises ApiError for a value that no conversation may have, or that is not served."""
    _check_shared(fields)
    if fields.web_search_options is not None:  # {} asks for a search as well
        raise not_served("web_search_options")
    refuse_unless(fields, _CONVERSATION_REFUSED_UNLESS)
    if fields.modalities not in (None, [], ["text"]):
        raise not_served("modalities")
    if fields.function_call not in (None, "none", "auto"):
        raise not_served("function_call")


def check_as_chat(fields: ConversationFields, own_names: Mapping[str, str]) -> None:
    """As check_conversation, for another API whose requests become chats; see also own_names.py.

    own_names: the API's names of fields, by those that chats have for them, which it refuses.
    """
    check_conversation(fields)
    refuse(fields, _OF_CHATS_ALONE)
    refuse_unless(fields, {"add_generation_prompt": True, "include_reasoning": True, "n": 1})
    for name, own_name in own_names.items():
        if getattr(fields, name) is not None:
            raise bad_field(name, f"is called {own_name} here", "unsupported_parameter")


def read_completion(body: bytes) -> CompletionFields:
    """Parse the body and check what can be checked without a model. Raises ApiError."""
    fields = read_json(_completions, body)
    _check_shared(fields)
    refuse(fields, ("return_prompt_text", "return_prompt_token_ids"))
    if isinstance(fields.logprobs, bool):  # as in chats
        fields.logprobs = 1 if fields.logprobs else None
    return fields


def read_chat(body: bytes) -> ChatFields:
    """Parse the body and check what can be checked without a model. Raises ApiError."""
    fields = read_json(_chats, body)
    check_conversation(fields)
    if fields.reasoning is not None:
        _take_reasoning(fields, fields.reasoning)
    if fields.messages is None:
        raise missing_field("messages")
    if fields.stream:  # there are no such events in SGLang
        refuse(fields, ("return_meta_info", "return_prompt_token_ids"))
    if fields.top_logprobs and not fields.logprobs:
        raise bad_field("top_logprobs", "needs logprobs to be true")
    return fields


def _take_reasoning(fields: ChatFields, asked: ChatReasoning) -> None:
    """Set what chats have for each thing that is asked. Raises ApiError for what none has."""
    if asked.max_tokens is not None:
        raise not_served("reasoning.max_tokens")
    for name, value in (
        ("reasoning_effort", asked.effort),
        ("include_reasoning", None if asked.exclude is None else not asked.exclude),
    ):
        if value is not None and getattr(fields, name) not in (None, value):
            raise bad_field("reasoning", f"says something else than {name}")
        if value is not None:
            setattr(fields, name, value)
    if asked.enabled is not None and fields.reasoning_effort is None:
        switches = {"enable_thinking": asked.enabled, "thinking": asked.enabled}
        fields.chat_template_kwargs = switches | (fields.chat_template_kwargs or {})


def _check_shared(fields: OpenAIFields) -> None:
    """Raises ApiError for a field or value that no route serves."""
    refuse(fields)
    refuse_unless(fields, REFUSED_UNLESS)
    if fields.best_of is not None and fields.best_of != (fields.n or 1):
        raise not_served("best_of")
    if fields.stream_options is not None and not fields.stream:
        raise bad_field("stream_options", "is allowed only with stream")
    if fields.stream_options is not None and fields.stream_options.include_obfuscation:
        raise not_served("stream_options.include_obfuscation")
