"""Requests that get no tokens: what their clients read of it, and how they are counted."""

import asyncio
import threading
from typing import Any

import httpx
import pytest

import serving.choice
import serving.endpoints
from serving.conversation import named_functions
from serving.openai_answers import CompletionShape
from serving.tokenizer import Tokenizer
from tests.serving.live import live_server
from transfer.errors import Code

ASK = {"prompt": "Hi!", "max_tokens": 8}


def id_of(response: httpx.Response) -> str:
    assert response.json()["error"]["message"]
    return response.headers["x-request-id"]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_error_carries_the_id_of_its_request(stream: bool) -> None:
    async with live_server(auto_step=False) as live:
        ask = {**ASK, "stream": stream}
        for headers in ({}, {"X-Request-Id": "not-mine"}):
            asking = asyncio.create_task(
                live.post("/v1/completions", {**ask, "rid": "mine"}, **headers)
            )
            (room,) = await live.cluster.submitted(1)
            live.cluster.prefill[0].fail(room, Code.TOO_LONG, "does not fit the pool")
            assert id_of(await asking) == "mine"
            live.cluster.step()


async def test_an_error_that_comes_before_the_body_was_read_has_the_id_of_the_header() -> None:
    async with live_server(api_key="secret", max_request_bytes=1000) as live:
        key = {"Authorization": "Bearer secret"}
        refused = [
            ("/v1/completions", {**ASK, "top_p": 3}, key, 400),
            ("/generate", {"text": "x" * 1000}, key, 413),
            ("/tokenize", {}, key, 400),
            ("/no/such/path", {}, key, 404),
            ("/health", {}, key, 405),
            ("/v1/completions", ASK, {}, 401),
        ]
        for path, body, headers, status in refused:
            given = await live.post(path, body, **headers, **{"X-Request-Id": "trace-7"})
            assert given.status_code == status
            assert id_of(given) == "trace-7"
            made = [id_of(await live.post(path, body, **headers)) for _ in range(2)]
            assert all(made)
            assert made[0] != made[1]
        long = await live.post("/v1/completions", ASK, **key, **{"X-Request-Id": "i" * 257})
        assert id_of(long)
        assert id_of(long) != "i" * 257


@pytest.mark.parametrize("stream", [False, True])
async def test_each_request_answered_with_429_is_counted_once(stream: bool) -> None:
    limits: dict[str, Any] = {
        "max_inflight_requests": 2,
        "max_queued_requests": 0,
        "queue_timeout_s": 0.2,
    }
    async with live_server(auto_step=False, **limits) as live:

        def counted(count: int) -> bool:
            text = live.dispatcher.metrics.render().decode()
            return f"kvferry_requests_rejected_total {count}.0" in text

        ask = {**ASK, "stream": stream}
        full = asyncio.create_task(live.post("/v1/completions", {**ask, "n": 2}))
        rooms = await live.cluster.submitted(2)
        # There is no place, nor any to wait in.
        assert (await live.post("/v1/completions", ask)).status_code == 429
        assert counted(1)
        live.cluster.decode[0].refusals.extend([Code.QUEUE_FULL] * 1000)
        for room in rooms:
            live.cluster.decode[0].fail(room, Code.QUEUE_FULL, "no more of it")
        # A worker refused both of its choices until its time was over.
        assert (await full).status_code == 429
        assert counted(2)


def conversation(arguments: str) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": "look", "arguments": arguments}}
    asked = {"role": "user", "content": "Hello!"}
    return {"messages": [asked, {"role": "assistant", "tool_calls": [call]}], "max_tokens": 1}


async def test_arguments_of_a_call_that_no_text_can_hold_are_a_400_that_names_them() -> None:
    async with live_server() as live:
        for path in ("/v1/chat/completions", "/tokenize"):
            for lone in (r'{"x": "\ud800"}', r'{"\uDC00": [1]}', r'"\ud83d"'):
                response = await live.post(path, conversation(lone))
                assert response.status_code == 400
                error = response.json()["error"]
                assert error["param"] == "messages"
                assert error["message"].startswith("messages[1].tool_calls: expected arguments of")
            for fine in (r'{"x": "\ud83d\ude00"}', r'{"x": "\u00e9"}', ""):
                assert (await live.post(path, conversation(fine))).status_code == 200


MANY = "at most 16384 content parts and tool calls"


def parts(count: int) -> dict[str, Any]:
    half = [{"role": "user", "content": ["x"] * (count // 2)}] * 2
    return {"messages": half, "max_tokens": 1}


async def test_what_nobody_could_serve_is_refused_before_anybody_works_on_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    encode = Tokenizer.encode

    def some(self: Tokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
        assert len(text) <= 1 << 16, "the first part tells that it is too long"
        return encode(self, text, add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode", some)
    long = "a ship " * 1_000_000
    calls = conversation("{}")
    calls["messages"][1]["tool_calls"] *= 16_385
    kwargs = {str(i): 0 for i in range(16_385)}
    both = ("/tokenize", "/v1/chat/completions")
    async with live_server() as live:
        for paths, body, param, message in (
            (both[:1], {"prompt": long}, "prompt", "context length is 512"),
            (both[:1], {"prompt": ["a", long][::-1]}, "prompt", "context length is 512"),
            (both[:1], {"prompt": [""] * 16_385}, "prompt", "at most 16384 prompts, got 16385"),
            (both, {"messages": [{"role": "user", "content": long}]}, "messages", "is 512"),
            (both, {"messages": [{"role": "user", "content": ""}] * 513}, "messages", "is 512"),
            (both, parts(16_386), "messages", MANY),
            (both, calls, "messages", MANY),
            (both, {**parts(2), "tools": [{}] * 16_385}, "tools", "at most 16384, got 16385"),
            (both, {**parts(2), "documents": [{}] * 16_385}, "documents", "at most 16384"),
            (both, {**parts(2), "chat_template_kwargs": kwargs}, "chat_template_kwargs", "16385"),
            (both[1:], {**parts(2), "stop_token_ids": [5] * 17}, "stop_token_ids", "at most 16"),
        ):
            for path in paths:
                response = await live.post(path, body)
                assert response.status_code == 400
                error = response.json()["error"]
                assert error["param"] == param
                assert message in error["message"]


async def test_functions_that_only_a_namespace_tells_apart_are_refused() -> None:
    """A call has a name alone, so the client would be told of the wrong namespace."""
    get = {"type": "function", "name": "get"}
    crm, bills = ({"type": "namespace", "name": name, "tools": [get]} for name in ("crm", "bills"))
    async with live_server(tool_call_parser="hermes") as live:
        for tools in ([crm, bills], [crm, get], [get, crm]):
            response = await live.post("/v1/responses", {"input": "Hi!", "tools": tools})
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (400, "tools")
            assert "'get' is also the name of tools[0]" in error["message"]
        for tools in ([crm], [crm, crm], [get, {**bills, "tools": [{**get, "name": "pay"}]}]):
            response = await live.post("/v1/responses", {"input": "Hi!", "tools": tools})
            assert response.status_code == 200


@pytest.mark.parametrize("kind", [{}, {"type": None}, {"type": ["function"]}])
async def test_a_tool_of_a_response_without_a_type_is_not_left_out_unnoticed(
    kind: dict[str, Any],
) -> None:
    tool = {"name": "look"} | kind
    async with live_server(tool_call_parser="hermes") as live:
        for tools, where in (
            ([tool], "tools[0].type"),
            ([{"type": "namespace", "name": "n", "tools": [tool]}], "tools[0].tools[0].type"),
        ):
            response = await live.post("/v1/responses", {"input": "Hi!", "tools": tools})
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (400, "tools")
            assert error["message"].startswith(f"{where}: expected text, got ")


async def test_a_tool_that_is_no_function_is_a_400_that_says_why() -> None:
    function = {"name": "look"}
    async with live_server() as live:
        for tools, message in (
            ([{}], "tools[0].function: expected an object, got None"),
            (
                [{"function": function}, {"type": "function", "function": "look"}],
                "tools[1].function",
            ),
            ([{"function": {"name": 5}}], "tools[0].function.name: expected text, got 5"),
            ([{"function": function | {"parameters": 5}}], "parameters: expected an object, got 5"),
            ([{"function": function | {"strict": "yes"}}], "strict: expected a boolean, got 'yes'"),
        ):
            for path in ("/v1/chat/completions", "/tokenize"):
                response = await live.post(path, {**parts(2), "tools": tools})
                assert response.status_code == 400
                error = response.json()["error"]
                assert (error["param"], error["code"]) == ("tools", "invalid_type")
                assert message in error["message"]
        # Tools that other servers run themselves are left to the template.
        given = [{"function": function | {"parameters": None}}, {"type": "web_search"}]
        answer = await live.post("/v1/chat/completions", {**parts(2), "tools": given})
        assert answer.status_code == 200


async def test_tools_whose_calls_this_server_cannot_read_are_refused() -> None:
    function = {"type": "function", "function": {"name": "look"}}
    custom = {"type": "custom", "custom": {"name": "patch", "format": {"type": "text"}}}
    async with live_server() as live:
        for path in ("/v1/chat/completions", "/tokenize"):
            response = await live.post(path, {**parts(2), "tools": [function, custom]})
            assert response.status_code == 400
            error = response.json()["error"]
            assert (error["param"], error["code"]) == ("tools", "unsupported_parameter")
            assert error["message"].startswith("tools[1].type: ")


def test_a_tool_of_no_type_is_a_function() -> None:
    for tool in ({"function": {"name": "f"}}, {"type": None, "function": {"name": "f"}}):
        assert named_functions([tool]) == [{"name": "f"}]


@pytest.mark.parametrize("wrong", ["x" * 100_000, ["x"] * 100_000, {"x": [{}] * 100_000}])
async def test_an_error_tells_of_what_is_wrong_and_does_not_repeat_all_of_it(wrong: Any) -> None:
    called = conversation("no JSON")
    called["messages"][1]["tool_calls"][0]["function"]["name"] = wrong
    chat = "/v1/chat/completions"
    async with live_server() as live:
        for path, body in (
            (chat, {"messages": [{"role": wrong, "content": "Hi!"}]}),
            (chat, {"messages": [{"role": "user", "content": [{"type": wrong}]}]}),
            (chat, called),
            ("/v1/completions", {**ASK, "model": wrong}),
            ("/drain", {"worker_id": wrong}),
        ):
            response = await live.post(path, body)
            assert response.status_code in (400, 404)
            assert 0 < len(response.json()["error"]["message"]) < 1200


async def test_as_many_prompts_and_parts_as_may_be_are_tokenized() -> None:
    async with live_server(context_length=40_000) as live:
        given = await live.post("/tokenize", {"prompt": ["a"] * 16_384})
        assert given.json()["count"] == [1] * 16_384
        given = await live.post("/tokenize", parts(16_384))
        assert given.json()["count"] > 16_384


@pytest.mark.parametrize(
    ("path", "name"),
    [("/tokenize", "prompt"), ("/v1/completions", "prompt"), ("/generate", "text")],
)
async def test_the_loop_has_a_turn_after_each_of_many_short_texts(
    path: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = 0
    turns_of: list[int] = []
    encode = Tokenizer.encode

    def noted(self: Tokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
        turns_of.append(turns)
        return encode(self, text, add_special_tokens)

    async def turn() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    monkeypatch.setattr(Tokenizer, "encode", noted)
    async with live_server() as live:
        turning = asyncio.create_task(turn())
        assert (await live.post(path, {name: ["Hi!"] * 20})).status_code == 200
        turning.cancel()
        assert len(turns_of) == len(set(turns_of)) == 20


async def test_much_is_translated_beside_the_loop_and_apart_from_prompts_to_be_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads: list[str] = []
    encode, decode = Tokenizer.encode, Tokenizer.decode

    def noted_encode(self: Tokenizer, *args: Any) -> list[int]:
        threads.append(threading.current_thread().name)
        return encode(self, *args)

    def noted_decode(self: Tokenizer, *args: Any) -> str:
        threads.append(threading.current_thread().name)
        return decode(self, *args)

    monkeypatch.setattr(Tokenizer, "encode", noted_encode)
    monkeypatch.setattr(Tokenizer, "decode", noted_decode)
    async with live_server(context_length=10_000) as live:
        assert (await live.post("/tokenize", {"prompt": "a" * 5000})).status_code == 200
        assert (await live.post("/detokenize", {"tokens": [[64] * 5000]})).status_code == 200
        assert (await live.post("/detokenize", {"tokens": [[64] * 50] * 90})).status_code == 200
        assert len(threads) == 92
        assert {name.rpartition("_")[0] for name in threads} == {"admin-tokens"}
        assert (await live.post("/v1/completions", {"prompt": "a" * 5000})).status_code == 200
        assert not threads[-1].startswith(("admin-tokens", "MainThread"))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": [[7] * 100], "prompt_logprobs": 4}),
        ("/v1/completions", {"prompt": [[7] * 100], "echo": True, "logprobs": 4}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a " * 60}]}),
        ("/generate", {"input_ids": [7] * 100, "top_logprobs_num": 4}),
    ],
)
async def test_more_logprobs_of_prompts_than_one_answer_may_hold_are_refused(
    path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are kept and spelled for each choice: a small request could ask for gigabytes."""
    ask = {"max_tokens": 1, "n": 3} | body
    if path == "/generate":
        sampling = {"max_new_tokens": 1, "n": 3}
        ask = body | {"sampling_params": sampling, "return_logprob": True, "logprob_start_len": 0}
    elif "messages" in body:
        ask |= {"prompt_logprobs": 4}
    async with live_server() as live:
        monkeypatch.setattr(serving.choice, "MAX_PROMPT_LOGPROBS", 1000)
        response = await live.post(path, ask)
        assert response.status_code == 400
        assert "at most 1000" in response.json()["error"]["message"]
        monkeypatch.setattr(serving.choice, "MAX_PROMPT_LOGPROBS", 3000)
        assert (await live.post(path, ask)).status_code == 200


async def test_many_logprobs_are_spelled_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving.choice, "INLINE_LOGPROBS", 3)
    spell = CompletionShape.whole
    threads: list[threading.Thread] = []

    def noted(self: CompletionShape, *args: Any) -> dict[str, Any]:
        threads.append(threading.current_thread())
        return spell(self, *args)

    monkeypatch.setattr(CompletionShape, "whole", noted)
    async with live_server() as live:
        for count in (3, 4):
            ask = {"prompt": [7], "max_tokens": count, "logprobs": 0, "ignore_eos": True}
            answer = (await live.post("/v1/completions", ask)).json()
            assert len(answer["choices"][0]["logprobs"]["tokens"]) == count
    assert [thread is threading.main_thread() for thread in threads] == [True, False]
