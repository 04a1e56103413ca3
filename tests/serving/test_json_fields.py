"""Integers may be written as whole floats wherever an integer is read, and nowhere else."""

import json
from typing import Any

import pytest

from serving.errors import ApiError
from serving.openai_fields import read_chat, read_completion
from serving.sglang_api import read_generate
from tests.serving.live import letters, live_server
from tests.serving.test_protocol import HELLO, chat, completion, generate

INTEGERS = [
    "max_tokens",
    "min_tokens",
    "top_k",
    "n",
    "seed",
    "prompt_logprobs",
    "stream_interval",
    "routed_dp_rank",
    "disagg_prefill_dp_rank",
]


def sent(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


@pytest.mark.parametrize("body", [b"", b" \r\n"])
async def test_a_body_without_anything_is_called_empty(body: bytes) -> None:
    async with live_server() as live:
        for path in ("/v1/chat/completions", "/v1/responses", "/generate", "/tokenize", "/drain"):
            response = await live.http.post(path, content=body)
            error = response.json()["error"]
            assert (response.status_code, error["code"]) == (400, "invalid_json")
            assert error["message"] == "the body is empty: expected a JSON object"


@pytest.mark.parametrize("name", INTEGERS)
def test_a_whole_float_is_an_integer_to_both_openai_routes(name: str) -> None:
    for fields in (
        read_completion(sent(prompt="a", temperature=1.0, **{name: 2.0})),
        read_chat(sent(messages=[], temperature=1.0, **{name: 2.0})),
    ):
        value = getattr(fields, name)
        assert (value, type(value)) == (2, int)
        assert type(fields.temperature) is float


@pytest.mark.parametrize(
    ("given", "count"), [(True, 1), (False, None), (None, None), (0, 0), (2, 2), (2.0, 2)]
)
def test_logprobs_of_completions_may_be_those_of_a_chat(given: Any, count: int | None) -> None:
    asked = read_completion(sent(prompt="a", logprobs=given)).logprobs
    assert (asked, type(asked)) == (count, type(count))


@pytest.mark.parametrize("n", [b"1", b"1.0"])
async def test_what_no_float_holds_is_refused_within_a_field_too(n: bytes) -> None:
    """The answer to this repeated it as Infinity, which is no JSON."""
    schema = b'{"type": "object", "maximum": 1e999, "minimum": 1%b}' % (b"0" * 30)
    tool = b'{"type": "function", "name": "f", "parameters": %b}' % schema
    async with live_server() as live:
        body = b'{"input": "Hi!", "max_output_tokens": %b, "tools": [%b]}' % (n, tool)
        response = await live.http.post("/v1/responses", content=body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "tools")


@pytest.mark.parametrize("name", ["max_tokens", "top_k", "n", "seed", "prompt_logprobs"])
def test_no_other_integer_may_be_true(name: str) -> None:
    with pytest.raises(ApiError) as caught:
        read_completion(sent(prompt="a", **{name: True}))
    assert (caught.value.status, caught.value.param) == (400, name)


def test_so_it_is_in_lists_and_in_objects_within() -> None:
    fields = read_completion(sent(prompt=[1.0, 2], logprobs=3.0, stop_token_ids=[4.0], top_k=-1.0))
    assert repr((fields.prompt, fields.logprobs, fields.top_k)) == "([1, 2], 3, -1)"
    assert repr(fields.stop_token_ids) == "[4]"
    batch = read_generate(
        sent(
            input_ids=[[1.0], [2]],
            top_logprobs_num=2.0,
            logprob_start_len=[0.0, 1],
            sampling_params=[{"max_new_tokens": 4.0, "logit_bias": {"7": 1.0}}, {"n": 1e0}],
        )
    )
    assert repr((batch.input_ids, batch.top_logprobs_num)) == "([[1], [2]], 2)"
    assert repr(batch.logprob_start_len) == "[0, 1]"
    assert isinstance(batch.sampling_params, list)
    assert repr([params.max_new_tokens for params in batch.sampling_params]) == "[4, None]"
    assert batch.sampling_params[0].logit_bias == {7: 1.0}


def test_what_goes_to_the_template_stays_as_it_was_written() -> None:
    tools = [{"function": {"name": "f", "parameters": {"minimum": 1.0}}}]
    given = {"chat_template_kwargs": {"level": 5.0}, "tools": tools, "messages": [{"at": 2.0}]}
    fields = read_chat(sent(max_tokens=5.0, **given))
    assert fields.max_tokens == 5
    assert repr(fields.chat_template_kwargs) == "{'level': 5.0}"
    assert repr(fields.tools) == repr(tools)
    assert repr(fields.messages) == "[{'at': 2.0}]"


@pytest.mark.parametrize("read", [completion, chat])
@pytest.mark.parametrize("value", [5.5, 1e300, 2.0**53 + 2, "5", True])
async def test_no_other_value_is_an_integer(read: Any, value: Any) -> None:
    for more in ({}, {"seed": 1.0}):
        with pytest.raises(ApiError) as caught:
            await read(max_tokens=value, **more)
        assert (caught.value.status, caught.value.param) == (400, "max_tokens")
        assert caught.value.code == "invalid_type"
    with pytest.raises(ApiError) as caught:
        await generate(sampling_params={"max_new_tokens": 4.0, "n": value})
    assert (caught.value.status, caught.value.param) == (400, "sampling_params")


def test_a_second_fault_is_told_as_ever() -> None:
    for body, param, code in (
        (sent(max_tokens=5.0), "prompt", "missing_field"),
        (sent(prompt="a", max_tokens=5.0, stop=3), "stop", "invalid_type"),
        (sent(prompt="a", max_tokens=5.0)[:-1], None, "invalid_json"),
    ):
        with pytest.raises(ApiError) as caught:
            read_completion(body)
        assert (caught.value.param, caught.value.code) == (param, code)


def test_a_number_that_nothing_holds_is_refused_where_one_is_read_and_only_there() -> None:
    fields = read_completion(b'{"prompt": "a", "max_tokens": 5.0, "unknown": 1e999}')
    assert fields.max_tokens == 5
    for name in ("temperature", "max_tokens"):
        body = b'{"prompt": "a", "min_tokens": 1.0, "%s": 1e999}' % name.encode()
        with pytest.raises(ApiError, match="Number out of range") as caught:
            read_completion(body)
        assert (caught.value.param, caught.value.code) == (name, "invalid_type")


def test_of_a_list_without_end_nobody_looks_at_each_number() -> None:
    for prompt in ([1.0] * 16_385, [[1.0] * 200] * 200):
        with pytest.raises(ApiError) as caught:
            read_completion(sent(prompt=prompt, max_tokens=5.0))
        assert (caught.value.param, caught.value.code) == ("prompt", "invalid_type")
    assert read_completion(sent(prompt=[1.0] * 16_000, max_tokens=5.0)).prompt == [1] * 16_000


async def test_every_route_counts_with_whole_floats() -> None:
    params = {"max_new_tokens": 3.0, "temperature": 0.0, "top_k": 1.0}
    async with live_server() as live:
        answer = await live.post("/v1/completions", {"prompt": "Hi!", "max_tokens": 3.0, "n": 1.0})
        assert answer.json()["choices"][0]["text"] == letters(3)
        body = {"messages": HELLO, "max_completion_tokens": 3.0, "logprobs": True}
        answer = await live.post("/v1/chat/completions", {**body, "top_logprobs": 2.0})
        (choice,) = answer.json()["choices"]
        assert choice["message"]["content"] == letters(3)
        assert [len(token["top_logprobs"]) for token in choice["logprobs"]["content"]] == [2] * 3
        answer = await live.post("/generate", {"text": "Hi!", "sampling_params": params})
        assert answer.json()["text"] == letters(3)
        answer = await live.post("/detokenize", {"tokens": [64.0, 65]})
        assert answer.json()["text"] == "ab"
