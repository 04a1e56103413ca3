"""Fields that would change the result and are not served are refused by name."""

import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from serving.errors import ApiError
from serving.protocol import Request
from serving.responses_api import ResponsesReader
from serving.responses_fields import read_responses
from tests.serving.live import live_server
from tests.serving.test_protocol import HELLO, chat, completion, generate, served

Read = Callable[..., Awaitable[Request]]


async def responses(**fields: Any) -> Request:
    body = json.dumps({"input": "Hi!", **fields}).encode()
    return await ResponsesReader(read_responses(body), served()).finish(None)


# A field, what is refused of it, and the values that change nothing.
OPENAI: list[tuple[str, Any, list[Any]]] = [
    ("thinking_token_budget", 100, [-1]),
    ("thinking_token_budget", 0, []),
    ("logprob_token_ids", [5], []),
    ("watermarking", True, [False]),
    ("repetition_detection", {"max_pattern_size": 3}, []),
    ("spaces_between_special_tokens", False, [True]),
    ("guided_whitespace_pattern", " ?", []),
    ("return_routed_experts", True, [False]),
    ("return_cached_tokens_details", True, [False]),
    ("return_flat_raw_output_top_logprobs", True, [False]),
    ("return_sampling_mask", True, [False]),
    ("return_spec_tokens_details", True, [False]),
    ("return_weight_versions", True, [False]),
    ("watermark", {"key": "k"}, [{}]),
    ("session_params", {"id": "s"}, [{}]),
    ("kv_transfer_params", {"do_remote_decode": True}, [{}]),
    ("ec_transfer_params", {"a": 1}, [{}]),
    ("vllm_xargs", {"a": 1}, [{}]),
]
CONVERSATION: list[tuple[str, Any, list[Any]]] = [
    ("verbosity", "low", ["medium"]),
    ("verbosity", "high", []),
    ("moderation", {"model": "omni-moderation-latest"}, []),
    ("task", "title", []),
    ("web_search_options", {}, []),
    ("functions", [{"name": "f"}], [[]]),
    ("function_call", {"name": "f"}, ["none", "auto"]),
    ("audio", {"voice": "alloy"}, []),
    ("modalities", ["text", "audio"], [[], ["text"]]),
    ("chat_template", "{{ messages }}", [""]),
]
CHAT: list[tuple[str, Any, list[Any]]] = [
    ("reasoning", {"max_tokens": 100}, [{}]),
    ("return_input_ids_in_sglext", True, [False]),
    ("return_output_ids_in_sglext", True, [False]),
]
RESPONSES: list[tuple[str, Any, list[Any]]] = [
    ("input_ids", [1, 2], [[]]),
    ("add_generation_prompt", False, [True]),
    ("include_reasoning", False, [True]),
    ("return_meta_info", True, [False]),
    ("continue_final_message", True, [False]),
    ("conversation", "conv_1", []),
    ("previous_input_messages", [{"role": "user"}], [[]]),
    ("enable_response_messages", True, [False]),
]
GENERATE: list[tuple[str, Any, list[Any]]] = [
    ("lora_id", "a", []),
    ("positional_embed_overrides", {"a": 1}, []),
    ("multi_item_delimiter_indices", [[1]], []),
    ("max_thinking_tokens", 0, []),
    ("require_reasoning", True, [False]),
    ("return_sampling_mask", True, [False]),
    ("return_flat_raw_top_logprobs", True, [False]),
    ("return_flat_raw_output_top_logprobs", True, [False]),
    ("watermark", {"key": "k"}, [{}]),
    ("return_routed_experts", True, [False]),
    ("return_indexer_topk", True, [False]),
    ("return_entropy", True, [False]),
    ("return_prompt_token_ids", True, [False]),
]
BY_ROUTE = [
    *((read, "return_prompt_text", True, [False]) for read in (completion, responses)),
    *((read, "return_prompt_token_ids", True, [False]) for read in (completion, responses)),
    *((read, *case) for read in (completion, chat, responses) for case in OPENAI),
    *((read, *case) for read in (chat, responses) for case in CONVERSATION),
    *((chat, *case) for case in CHAT),
    *((responses, *case) for case in RESPONSES),
    *((generate, *case) for case in GENERATE),
]


async def refused(read: Read, **fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        await read(**fields)
    assert (caught.value.status, caught.value.code) == (400, "unsupported_parameter")
    return caught.value


@pytest.mark.parametrize(("read", "field", "value", "neutral"), BY_ROUTE)
async def test_a_field_that_is_not_served_is_refused_unless_it_changes_nothing(
    read: Read, field: str, value: Any, neutral: list[Any]
) -> None:
    error = await refused(read, **{field: value})
    assert error.param == field
    assert field in error.message
    for harmless in (None, *neutral):
        await read(**{field: harmless})


@pytest.mark.parametrize("read", [completion, chat, responses, generate])
async def test_an_extra_key_separates_cached_prefixes_as_a_salt_does(read: Read) -> None:
    asked = [{}, {"cache_salt": "a"}, {"extra_key": "a"}, {"cache_salt": "a", "extra_key": "b"}]
    asked += [{"cache_salt": text} for text in ("\0a", "a\0b", "0:a", "1:ab", "1:a")]
    asked += [{"cache_salt": "a\0b", "extra_key": "c"}, {"cache_salt": "a", "extra_key": "b\0c"}]
    salts = [(await read(**fields)).cache_salt for fields in asked]
    assert salts[0] == ""
    assert len({*salts}) == len(asked)
    assert len((await read(cache_salt="a" * 1_000_000)).cache_salt) == len(salts[1])
    for nothing in ("", None):
        assert (await read(extra_key=nothing)).cache_salt == ""


@pytest.mark.parametrize("read", [completion, chat])
async def test_an_option_of_a_field_is_refused_by_both_names(read: Read) -> None:
    whole = {"structured_outputs": {"regex": "a"}, "stream_options": {}}
    for field, option, value in (
        ("structured_outputs", "disable_additional_properties", True),
        ("stream_options", "include_obfuscation", True),
    ):
        error = await refused(read, stream=True, **{field: {**whole[field], option: value}})
        assert error.param == field
        assert f"{field}.{option}" in error.message
        harmless = False if value is True else None
        await read(stream=True, **{field: {**whole[field], option: harmless}})


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_tokens", 5), ("seed", 1), ("logprobs", None), ("spaces", 1), ("stop_strs", ["a"])],
)
async def test_a_name_that_is_no_sampling_parameter_of_generate_is_refused(
    name: str, value: Any
) -> None:
    for params in ({name: value}, [{"temperature": 0, name: value}]):
        text = ["Hi!"] if isinstance(params, list) else "Hi!"
        error = await refused(generate, text=text, sampling_params=params)
        assert error.param == name
        assert "sampling_params" in error.message


async def test_a_sampling_parameter_of_generate_that_is_not_served_is_refused() -> None:
    for name, value, neutral in (
        ("beam_width", 4, 1),
        ("spaces_between_special_tokens", False, True),
        ("stop_regex", "a+", None),
        ("custom_params", {"a": 1}, {}),
    ):
        error = await refused(generate, sampling_params={name: value})
        assert error.param == name
        await generate(sampling_params={name: neutral})


async def test_a_long_name_is_not_repeated_as_the_field_at_fault() -> None:
    error = await refused(generate, sampling_params={"x" * 5000: 1})
    assert error.param == "sampling_params"
    assert len(error.message) < 1200


async def test_clients_read_which_field_it_was() -> None:
    bodies: list[tuple[str, dict[str, Any], str]] = [
        ("/v1/chat/completions", {"messages": HELLO, "verbosity": "low"}, "verbosity"),
        ("/v1/completions", {"prompt": "a", "logprob_token_ids": [5]}, "logprob_token_ids"),
        ("/generate", {"text": "a", "sampling_params": {"max_tokens": 5}}, "max_tokens"),
        ("/tokenize", {"messages": HELLO, "chat_template": "{{ messages }}"}, "chat_template"),
    ]
    async with live_server() as live:
        for path, body, param in bodies:
            response = await live.post(path, body)
            assert response.status_code == 400
            error = response.json()["error"]
            assert (error["param"], error["code"]) == (param, "unsupported_parameter")


async def test_top_logprobs_of_none_ask_for_nothing() -> None:
    for logprobs in (None, False):
        asked = await chat(logprobs=logprobs, top_logprobs=0)
        assert asked.choices[0].shown.num_logprobs == -1
    assert (await chat(logprobs=True, top_logprobs=0)).choices[0].shown.num_logprobs == 0
    for count in (1, -1):
        with pytest.raises(ApiError) as caught:
            await chat(top_logprobs=count)
        assert (caught.value.status, caught.value.param) == (400, "top_logprobs")
