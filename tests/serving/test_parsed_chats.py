"""Chats with reasoning and tool calls in fields of their own, over HTTP, by OpenAI's client."""

import asyncio
import contextlib
import json
import shutil
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from serving.tokenizer import Tokenizer
from tests.serving import live
from tests.serving.live import EOS, MODEL_NAME, MODEL_PATH, live_server, tokenizer_of_tests
from transfer.errors import Code

HELLO: list[Any] = [{"role": "user", "content": "Weather?"}]
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
]
CALL = '{"name": "weather", "arguments": {"city": "Zürich"}}'
ONE = f"<tool_call>\n{CALL}\n</tool_call>"
ANSWER = f"<think>\nThey want é.\n</think>\n\nOne moment.\n{ONE}\n{ONE}"


def writes(text: str) -> Any:
    """A network that answers every prompt with this text."""
    tokenizer = tokenizer_of_tests()
    script = [*tokenizer.encode(text, False), EOS]
    starts: dict[int, int] = {}

    def network(token_ids: Sequence[int]) -> int:
        # Prompts differ only in length here, and each is first seen without any of its answer.
        key = next((n for n in sorted(starts) if token_ids[n:] == script[: len(token_ids) - n]), -1)
        if key < 0:
            starts[len(token_ids)] = key = len(token_ids)
        return script[len(token_ids) - key]

    return network


@contextlib.asynccontextmanager
async def client_of(text: str, **config: Any) -> AsyncIterator[Any]:
    async with (
        live_server(writes(text), **config) as served,
        AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client.chat.completions


PARSERS = {"reasoning_parser": "qwen3", "tool_call_parser": "qwen"}


async def streamed(chats: Any, **more: Any) -> tuple[str, str, list[tuple[str, str]], list[str]]:
    """Reasoning, content, calls and finish reasons, put together as clients do."""
    reasoning = content = ""
    calls: list[tuple[str, str]] = []
    reasons = []
    stream = await chats.create(**{"model": MODEL_NAME, "messages": HELLO, "stream": True} | more)
    async for chunk in stream:
        (choice,) = chunk.choices
        reasoning += getattr(choice.delta, "reasoning_content", None) or ""
        content += choice.delta.content or ""
        for call in choice.delta.tool_calls or ():
            assert call.index == len(calls)
            assert call.id.startswith("call_")
            calls.append((call.function.name, call.function.arguments))
        if choice.finish_reason:
            reasons.append(choice.finish_reason)
    return reasoning, content, calls, reasons


@pytest.mark.parametrize("interval", [1, 3, 50])
async def test_both_kinds_of_answer_have_the_same_fields(interval: int) -> None:
    async with client_of(ANSWER, **PARSERS, stream_interval=interval) as chats:
        whole = await chats.create(model=MODEL_NAME, messages=HELLO, tools=TOOLS)
        (choice,) = whole.choices
        message = choice.message
        assert (message.reasoning_content, message.content) == ("They want é.", "One moment.")
        assert [call.type for call in message.tool_calls] == ["function"] * 2
        assert len({call.id for call in message.tool_calls}) == 2
        calls = [(call.function.name, call.function.arguments) for call in message.tool_calls]
        assert calls == [("weather", '{"city": "Zürich"}')] * 2
        assert choice.finish_reason == "tool_calls"
        found = await streamed(chats, tools=TOOLS)
        assert found == ("They want é.", "One moment.", calls, ["tool_calls"])


async def test_reasoning_has_the_name_that_the_server_was_told() -> None:
    """Clients of vLLM look for `reasoning` alone: its own benchmark counts no other deltas."""
    async with client_of(ANSWER, **PARSERS, reasoning_field="reasoning") as chats:
        asked: dict[str, Any] = {"model": MODEL_NAME, "messages": HELLO}
        (choice,) = (await chats.create(**asked)).choices
        assert choice.message.reasoning == "They want é."
        stream = await chats.create(**asked, stream=True)
        deltas = [chunk.choices[0].delta async for chunk in stream]
        assert "".join(getattr(delta, "reasoning", "") for delta in deltas) == "They want é."
        for part in (choice.message, *deltas):
            assert not hasattr(part, "reasoning_content")


async def test_calls_stay_text_without_tools_or_with_none_chosen() -> None:
    async with client_of(ANSWER, **PARSERS) as chats:
        content = f"One moment.\n{ONE}\n{ONE}"
        for more in ({}, {"tools": TOOLS, "tool_choice": "none"}):
            assert await streamed(chats, **more) == ("They want é.", content, [], ["stop"])
        (choice,) = (await chats.create(model=MODEL_NAME, messages=HELLO)).choices
        assert (choice.message.content, choice.message.tool_calls) == (content, None)


async def test_what_is_echoed_is_no_answer_to_parse() -> None:
    began: Any = [*HELLO, {"role": "assistant", "content": "{<think>Ye"}]
    asked = {"echo": True, "continue_final_message": True, "add_generation_prompt": False}
    for text, parsers in ((ANSWER, PARSERS), (CALL, {"tool_call_parser": "llama3"})):
        async with client_of(text, **parsers) as chats:
            more: dict[str, Any] = {"messages": began, "tools": TOOLS, "extra_body": asked}
            reasoning, content, calls, reasons = await streamed(chats, **more)
            (choice,) = (await chats.create(model=MODEL_NAME, **more)).choices
            message = choice.message
            assert content == message.content
            assert content.startswith("{<think>Ye")
            assert reasoning == (getattr(message, "reasoning_content", None) or "")
            assert len(message.tool_calls) == len(calls) == text.count("weather")
            assert reasons == [choice.finish_reason] == ["tool_calls"]


async def test_one_call_where_calls_may_not_be_parallel() -> None:
    async with client_of(ANSWER, **PARSERS) as chats:
        asked: dict[str, Any] = {"tools": TOOLS, "parallel_tool_calls": False}
        _, _, calls, _ = await streamed(chats, **asked)
        assert len(calls) == 1
        (choice,) = (await chats.create(model=MODEL_NAME, messages=HELLO, **asked)).choices
        assert len(choice.message.tool_calls) == 1


async def test_choices_logprobs_and_usage_are_those_of_all_tokens() -> None:
    async with client_of(ANSWER, **PARSERS) as chats:
        answer = await chats.create(
            model=MODEL_NAME, messages=HELLO, tools=TOOLS, n=2, logprobs=True
        )
        for choice in answer.choices:
            assert choice.message.content == "One moment."
            entries = choice.logprobs.content
            assert len(entries) * 2 == answer.usage.completion_tokens
        reasons, entries = [], 0
        stream = await chats.create(
            model=MODEL_NAME, messages=HELLO, tools=TOOLS, n=2, logprobs=True, stream=True
        )
        async for chunk in stream:
            for choice in chunk.choices:
                entries += len(choice.logprobs.content) if choice.logprobs else 0
                reasons += [choice.finish_reason] if choice.finish_reason else []
        assert reasons == ["tool_calls"] * 2
        assert entries == answer.usage.completion_tokens


@pytest.mark.parametrize("interval", [1, 50])
async def test_usage_tells_what_was_thought(interval: int) -> None:
    thought = len(tokenizer_of_tests().encode("They want é.", False))
    ask: dict[str, Any] = {"model": MODEL_NAME, "messages": HELLO, "tools": TOOLS, "n": 2}
    async with client_of(ANSWER, **PARSERS, stream_interval=interval) as chats:
        whole = await chats.create(**ask)
        assert whole.usage.completion_tokens_details.reasoning_tokens == 2 * thought
        options = {"include_usage": True}
        stream = await chats.create(**ask, stream=True, stream_options=options)
        *_, last = [chunk async for chunk in stream]
        assert last.usage.completion_tokens_details.reasoning_tokens == 2 * thought
    async with client_of(ANSWER, tool_call_parser="qwen") as chats:
        assert (await chats.create(**ask)).usage.completion_tokens_details is None


async def test_an_answer_that_is_cut_short_ends_by_length() -> None:
    async with client_of(ANSWER, **PARSERS) as chats:
        reasoning, content, calls, reasons = await streamed(chats, tools=TOOLS, max_tokens=8)
        assert "<think>" not in reasoning
        assert (content, calls, reasons) == ("", [], ["length"])


async def test_channels_have_their_markers_though_special_tokens_are_left_out() -> None:
    text = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.weather <|constrain|>json<|message|>{"city": "é"}'
    )
    parsers = {"reasoning_parser": "gpt-oss", "tool_call_parser": "gpt-oss"}
    async with client_of(text, **parsers) as chats:
        found = await streamed(chats, tools=TOOLS)
        assert found == ("Hm.", "", [("weather", '{"city": "é"}')], ["tool_calls"])


@pytest.mark.parametrize("stream", [False, True])
async def test_ids_of_calls_are_such_as_mistrals_chat_templates_take(stream: bool) -> None:
    text = "[TOOL_CALLS]weather{}[TOOL_CALLS]weather{}"
    async with client_of(text, tool_call_parser="mistral") as chats:
        asked: dict[str, Any] = {"model": MODEL_NAME, "messages": HELLO, "tools": TOOLS}
        if stream:
            chunks = [chunk async for chunk in await chats.create(**asked, stream=True)]
            calls = [call for x in chunks for call in x.choices[0].delta.tool_calls or ()]
        else:
            calls = (await chats.create(**asked)).choices[0].message.tool_calls
        ids = {call.id for call in calls}
        assert len(ids) == 2
        assert all(len(call_id) == 9 and call_id.isalnum() for call_id in ids)


async def test_arguments_without_quotes_get_their_types_from_the_requests_tools() -> None:
    pairs = "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>7</arg_value>\n" for key in ("number", "text")
    )
    text = f"<think>Hm.</think>\nOne moment.\n<tool_call>weather\n{pairs}</tool_call>"
    properties = {"number": {"type": "integer"}, "text": {"$ref": "#/$defs/Word"}}
    parameters = {"properties": properties, "$defs": {"Word": {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": parameters}}]
    async with client_of(text, reasoning_parser="glm45", tool_call_parser="glm45") as chats:
        calls = [("weather", '{"number": 7, "text": "7"}')]
        found = ("Hm.", "One moment.", calls, ["tool_calls"])
        assert await streamed(chats, tools=tools) == found


async def test_of_special_tokens_the_markers_are_shown_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(MODEL_PATH, tmp_path / "model")
    said = json.loads((folder / "tokenizer.json").read_text())
    for token in said["added_tokens"]:
        token["special"] = True  # as some of Hermes' models have it
    (folder / "tokenizer.json").write_text(json.dumps(said))
    monkeypatch.setattr(live, "tokenizer_of_tests", lambda: Tokenizer.from_dir(folder))
    found = ("They want é.", "One moment.", [("weather", '{"city": "Zürich"}')] * 2, ["tool_calls"])
    async with client_of(ANSWER, **PARSERS) as chats:
        _, content, _, _ = await streamed(chats)
        assert content == f"One moment.\n\n{CALL}\n\n\n{CALL}\n"
        assert await streamed(chats, tools=TOOLS) == found
        # The token that ends the answer is a special one as well.
        more = {"include_stop_str_in_output": True}
        assert await streamed(chats, tools=TOOLS, extra_body=more) == found


async def test_reasoning_stays_in_the_text_where_a_client_asks_for_it() -> None:
    thought = "<think>\nThey want é.\n</think>\n\nOne moment."
    more = {"extra_body": {"separate_reasoning": False}}
    async with client_of(ANSWER, **PARSERS) as chats:
        assert await streamed(chats, **more) == ("", ANSWER, [], ["stop"])
        calls = [("weather", '{"city": "Zürich"}')] * 2
        assert await streamed(chats, tools=TOOLS, **more) == ("", thought, calls, ["tool_calls"])
        for tools, content in (((), ANSWER), (TOOLS, thought)):
            asked: dict[str, Any] = {"model": MODEL_NAME, "messages": HELLO, "tools": tools}
            answer = await chats.create(**asked, **more)
            assert answer.choices[0].message.content == content
            assert not hasattr(answer.choices[0].message, "reasoning_content")
            assert answer.usage.completion_tokens_details is None


@pytest.mark.parametrize("text", [ANSWER, "<think>\nThey want é."])
async def test_reasoning_is_counted_and_left_out_where_a_client_asks_for_it(text: str) -> None:
    more: dict[str, Any] = {"tools": TOOLS, "extra_body": {"include_reasoning": False}}
    async with client_of(text, **PARSERS) as chats:
        thought, *shown = await streamed(chats, tools=TOOLS)
        assert thought
        assert await streamed(chats, **more) == ("", *shown)
        whole = [
            await chats.create(model=MODEL_NAME, messages=HELLO, **asked)
            for asked in ({"tools": TOOLS}, more)
        ]
    told, hidden = (answer.choices[0].message for answer in whole)
    assert (told.reasoning_content, hidden.reasoning_content) == (thought, None)
    assert (told.content, bool(told.tool_calls)) == (hidden.content, bool(hidden.tool_calls))
    counts = [answer.usage.completion_tokens_details.reasoning_tokens for answer in whole]
    assert counts[0] == counts[1] > 0


async def test_reasoning_cannot_be_left_out_of_a_text_that_has_it() -> None:
    both = {"include_reasoning": False, "separate_reasoning": False}
    async with client_of(ANSWER, **PARSERS) as chats:
        with pytest.raises(openai.BadRequestError, match="include_reasoning: cannot be false"):
            await chats.create(model=MODEL_NAME, messages=HELLO, extra_body=both)


async def grammar_asked_of_workers(path: str, asked: dict[str, Any], **config: Any) -> str:
    """The grammar with which a request of this body is submitted."""
    async with live_server(auto_step=False, **config) as live:
        asking = asyncio.create_task(live.post(path, asked))
        (room,) = await live.cluster.submitted(1)
        worker = live.cluster.prefill[0]
        grammar = worker.rooms[room].submit.sampling.grammar
        worker.fail(room, Code.TOO_LONG, "seen enough")
        assert (await asking).status_code == 400
    return grammar


async def test_a_thought_that_stays_in_the_text_may_precede_its_form() -> None:
    asked = {"messages": HELLO, "separate_reasoning": False, "regex": "said"}
    path, parser = "/v1/chat/completions", "qwen3"
    assert "thought" in await grammar_asked_of_workers(path, asked, reasoning_parser=parser)


async def test_reasoning_that_no_one_could_read_or_all_at_once_is_refused() -> None:
    harmony = {"reasoning_parser": "gpt-oss", "tool_call_parser": "gpt-oss"}
    for name, parsers in (("stream_reasoning", PARSERS), ("separate_reasoning", harmony)):
        async with client_of(ANSWER, **parsers) as chats:
            with pytest.raises(openai.BadRequestError, match=name):
                await chats.create(model=MODEL_NAME, messages=HELLO, extra_body={name: False})


async def test_without_parsers_all_is_text() -> None:
    async with client_of(ANSWER) as chats:
        (choice,) = (
            await chats.create(
                model=MODEL_NAME,
                messages=HELLO,
                tools=TOOLS,
                extra_body={"separate_reasoning": False},
            )
        ).choices
        assert (choice.message.content, choice.finish_reason) == (ANSWER, "stop")
        assert not hasattr(choice.message, "reasoning_content")
