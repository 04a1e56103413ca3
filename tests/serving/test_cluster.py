"""The promises on a real system: the same tokens alone or in a crowd, nothing left behind.

One system serves the whole file: the demo model, decode pages for about three requests only, so
that a handful of them preempt each other.
"""

import asyncio
import json
import random
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, Literal

import httpx
import openai
import pydantic
import pytest

from serving.demo import demo_model_path
from serving.tokenizer import Tokenizer
from tests.cluster import Cluster, up, wait_until
from tests.served import CROWD, TEXTS, crowds, expected, jobs_of


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with up(*CROWD, "--tool-call-parser=hermes") as running:
        yield running


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_dir(demo_model_path())


def test_two_workers_of_one_host_share_memory_and_say_so(cluster: Cluster) -> None:
    cluster.generate([1, 2, 3], max_new_tokens=2)
    for role in ("prefill", "decode"):
        worker = cluster.worker(role)
        assert worker["config"]["disaggregation_transfer_backend"] == "auto"
        assert worker["counters"]["connections_shm"] in (1, 2)  # 2 where rooms overlapped
        assert "connections_tcp" not in worker["counters"]
    (told,) = cluster.worker("prefill")["transfers"]
    assert (told["backend"], told["num_bytes"] > 0, told["seconds"] > 0) == ("shm", True, True)
    metrics = cluster.http.get("/metrics").text
    assert f'kvferry_transfer_bytes_total{{backend="shm",peer="{told["peer"]}",' in metrics


def test_served_tokens_equal_those_of_one_process_alone_and_in_a_crowd(
    cluster: Cluster, tokenizer: Tokenizer
) -> None:
    jobs = jobs_of(tokenizer, 60)
    want = expected(jobs)
    crowds(cluster, jobs, want)
    # Again, one after the other: every prompt's prefix is cached now.
    alone = [cluster.generate(ids, **sampling) for ids, sampling in jobs[::5]]
    assert [answer["output_ids"] for answer in alone] == want[::5]
    assert any(answer["meta_info"]["cached_tokens"] > 0 for answer in alone)


def test_a_flushed_cache_holds_no_pages_and_changes_no_token(
    cluster: Cluster, tokenizer: Tokenizer
) -> None:
    ids = tokenizer.encode(TEXTS[2])
    warm = [cluster.generate(ids, temperature=0, max_new_tokens=8) for _ in range(2)][1]
    assert warm["meta_info"]["cached_tokens"] > 0
    cluster.settled()
    assert cluster.http.post("/flush_cache").status_code == 200
    assert cluster.worker("prefill")["pages_cached"] == 0
    cold = cluster.generate(ids, temperature=0, max_new_tokens=8)
    assert cold["meta_info"]["cached_tokens"] == 0
    assert cold["output_ids"] == warm["output_ids"]


async def test_pages_and_slots_return_after_any_mix_of_endings(
    cluster: Cluster, tokenizer: Tokenizer
) -> None:
    cluster.settled()
    cluster.http.post("/flush_cache")
    before = [(w["load"]["pages_free"], w["load"]["slots_free"]) for w in cluster.workers()]
    rng = random.Random(11)
    limits = httpx.Limits(max_connections=64)
    async with httpx.AsyncClient(base_url=cluster.url, timeout=60, limits=limits) as http:
        await asyncio.gather(*(_some_ending(http, rng, tokenizer, i) for i in range(48)))
    wait_until(lambda: all(worker["rooms"] == 0 for worker in cluster.workers()))
    cluster.http.post("/flush_cache")
    after = [(w["load"]["pages_free"], w["load"]["slots_free"]) for w in cluster.workers()]
    assert after == before
    assert all(worker["pages_held"] == 0 for worker in cluster.workers())


async def _some_ending(
    http: httpx.AsyncClient, rng: random.Random, tokenizer: Tokenizer, number: int
) -> None:
    """A stream that is read to its end, left, or aborted, after a random number of events."""
    text = TEXTS[number % len(TEXTS)]
    ending = rng.choice(["end", "leave", "abort"])
    leave_after = rng.randrange(0, 12)
    asked = rng.randrange(1, 40)
    body = {
        "input_ids": tokenizer.encode(text),
        "rid": f"mix-{number}",
        "stream": True,
        "sampling_params": {
            "max_new_tokens": asked,
            "temperature": 0.9,
            "ignore_eos": True,
        },
    }
    async with http.stream("POST", "/generate", json=body) as reply:
        assert reply.status_code == 200
        seen, last = 0, ""
        async for line in reply.aiter_lines():
            if not line.startswith("data:"):
                continue
            seen += 1
            if seen > leave_after and ending == "leave":
                return
            if seen > leave_after and ending == "abort":
                answer = await http.post("/abort_request", json={"rid": f"mix-{number}"})
                assert answer.status_code == 200
                ending = "aborted"
            if line != "data: [DONE]":
                last = line.removeprefix("data: ")
    meta = json.loads(last)["meta_info"]
    if ending != "aborted":
        assert meta["finish_reason"] == {"type": "length", "length": asked}
        assert meta["completion_tokens"] == asked


def test_a_killed_worker_is_a_pause_not_another_text(
    cluster: Cluster, tokenizer: Tokenizer
) -> None:
    held = {"regex": "([a-z]{1,9}[ .,]){200}"}
    for role, more in (("decode", held), ("prefill", {"ignore_eos": True})):
        sampling = {"temperature": 0.8, "sampling_seed": 5, "max_new_tokens": 200, **more}
        job = (tokenizer.encode(TEXTS[0]), sampling)
        (want,) = expected([job])
        epoch = cluster.worker(role)["epoch"]
        doomed, before = cluster.children()[role], len(cluster.log.read_text())
        assert cluster.stream(job[0], doomed.kill, **sampling) == want, role
        wait_until(lambda r=role, e=epoch: _epoch(cluster, r) > e, 120)  # type: ignore[misc]
        again = cluster.generate(job[0], **sampling)
        assert again["output_ids"] == want
        since = cluster.log.read_text()[before:]
        assert re.search(r"loaded (\d+)/\1 ", since), "its programs were compiled by its forerunner"
        assert "I compiled" not in since


def _epoch(cluster: Cluster, role: str) -> int:
    found = [worker["epoch"] for worker in cluster.workers() if worker["role"] == role]
    return max(found, default=0)


async def test_the_official_client_streams_a_chat(cluster: Cluster) -> None:
    async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none") as client:
        stream = await client.chat.completions.create(
            model=cluster.model,
            messages=[{"role": "user", "content": "Tell me about the ferry."}],
            max_tokens=20,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        whole = await client.chat.completions.create(
            model=cluster.model,
            messages=[{"role": "user", "content": "Tell me about the ferry."}],
            max_tokens=20,
            temperature=0,
        )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text
    assert text == whole.choices[0].message.content
    usage = chunks[-1].usage
    assert usage is not None
    assert whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens


class Sailing(pydantic.BaseModel):
    """What the official client turns into a schema, and what it parses an answer into."""

    harbour: Literal["north", "south"]
    days: Annotated[list[Literal["monday", "friday"]], pydantic.Field(min_length=1, max_length=2)]
    has_cars: bool


async def test_the_official_client_gets_objects_of_its_own_class(cluster: Cluster) -> None:
    ask: dict[str, Any] = {"model": cluster.model, "temperature": 1.0, "max_tokens": 200}
    ask["messages"] = [{"role": "user", "content": "When does the ferry leave?"}]
    async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none") as client:
        chats = client.chat.completions
        answers = await asyncio.gather(
            *(chats.parse(**ask, seed=seed, response_format=Sailing) for seed in range(8))
        )
        async with chats.stream(**ask, seed=3, response_format=Sailing) as stream:
            streamed = await stream.get_final_completion()
        tool = openai.pydantic_function_tool(Sailing, name="book")
        called = await chats.parse(**ask, seed=1, tools=[tool], tool_choice="required")
    found = [answer.choices[0].message.parsed for answer in answers]
    assert all(isinstance(sailing, Sailing) for sailing in found)
    assert len({str(sailing) for sailing in found}) > 1
    assert streamed.choices[0].message.parsed == found[3]
    (choice,) = called.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls is not None
    assert isinstance(choice.message.tool_calls[0].function.parsed_arguments, Sailing)
    for worker in cluster.settled():
        assert worker["counters"]["grammars"] >= 10
        assert worker["compiles_after_ready"] == 0


async def test_no_property_is_added_to_those_that_a_schema_lists(cluster: Cluster) -> None:
    listed = {"type": "object", "properties": {"harbour": {"enum": ["north", "south"]}}}
    ask: dict[str, Any] = {"model": cluster.model, "temperature": 1.5, "max_tokens": 80}
    ask["messages"] = [{"role": "user", "content": "When does the ferry leave?"}]

    async def objects(schema: dict[str, Any], kind: str) -> list[Any]:
        """The objects written for the schema; None for one that was cut off."""
        function: Any = {"name": "book", "parameters": schema}
        how: dict[str, Any] = {"response_format": {"type": "json_schema", "schema": schema}}
        if kind == "call":  # it is made whatever the response format
            how |= {"tools": [{"type": "function", "function": function}]}
            how |= {"tool_choice": "required", "parallel_tool_calls": False}
        async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none") as client:
            made = (client.chat.completions.create(**ask, **how, seed=seed) for seed in range(8))
            answers = [answer.choices[0] for answer in await asyncio.gather(*made)]
        texts = [
            answer.message.tool_calls[0].function.arguments
            if answer.message.tool_calls
            else answer.message.content or ""
            for answer in answers
        ]
        ended = [answer.finish_reason in ("stop", "tool_calls") for answer in answers]
        return [json.loads(text) if ok else None for text, ok in zip(texts, ended, strict=True)]

    for kind in ("text", "call"):
        closed = await objects(listed, kind)
        assert all(found is not None and found.keys() <= {"harbour"} for found in closed), closed
    # The same seeds, and a schema that allows other properties.
    opened = await objects(listed | {"additionalProperties": True}, "text")
    assert any(found is None or found.keys() - {"harbour"} for found in opened), opened
    cluster.settled()


async def test_answers_have_no_tokens_but_those_that_were_allowed(cluster: Cluster) -> None:
    allowed = [*range(300, 330), 1200]
    ask: dict[str, Any] = {"model": cluster.model, "max_tokens": 12, "n": 2, "seed": 3}
    only = {"allowed_token_ids": allowed, "return_token_ids": True, "min_tokens": 12}
    text = "The ferry"
    chat: Any = [{"role": "user", "content": "When does the ferry leave?"}]
    async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none") as client:
        texts, chats = client.completions, client.chat.completions
        whole = await texts.create(**ask, prompt=text, logprobs=2, extra_body=only)
        said = await chats.create(**ask, messages=chat, logprobs=True, extra_body=only)
        stream = await texts.create(**ask, prompt=text, stream=True, extra_body=only)
        pieces: list[list[int]] = [[], []]
        async for event in stream:
            for piece in event.choices:
                pieces[piece.index] += (piece.model_extra or {})["token_ids"]
        again = await texts.create(**ask, prompt=text, extra_body={"return_token_ids": True})
    found = [(choice.model_extra or {})["token_ids"] for choice in (*whole.choices, *said.choices)]
    assert all(len(ids) == 12 and {*ids} <= {*allowed} for ids in found)
    assert len({*found[0], *found[1]}) > 3
    assert pieces == found[:2]
    free = [(choice.model_extra or {})["token_ids"] for choice in again.choices]
    assert not any({*ids} <= {*allowed} for ids in free)
    # Logprobs are those of the network, so the likeliest tokens are seldom allowed.
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.top_logprobs is not None
    best = [max(top.values()) for top in logprobs.top_logprobs]
    assert any(own < top for own, top in zip(logprobs.token_logprobs, best, strict=True))
    for worker in cluster.settled():
        assert worker["compiles_after_ready"] == 0


async def test_responses_are_the_chats_that_they_ask_for(cluster: Cluster) -> None:
    question = "Tell me about the ferry."
    ask: dict[str, Any] = {"model": cluster.model, "temperature": 0}
    function: Any = openai.pydantic_function_tool(Sailing, name="book")["function"]
    tool: Any = {"type": "function", **function}
    async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none") as client:
        chat = await client.chat.completions.create(
            **ask, messages=[{"role": "user", "content": question}], max_tokens=20
        )
        whole = await client.responses.create(**ask, input=question, max_output_tokens=20)
        async with client.responses.stream(**ask, input=question, max_output_tokens=20) as stream:
            deltas = [
                event.delta async for event in stream if event.type == "response.output_text.delta"
            ]
        parsed = await client.responses.parse(**ask, input=question, text_format=Sailing)
        called = await client.responses.create(
            **ask, input=question, tools=[tool], tool_choice="required"
        )
    assert whole.output_text == chat.choices[0].message.content
    assert "".join(deltas) == whole.output_text
    assert chat.usage is not None
    assert whole.usage is not None
    assert whole.usage.input_tokens == chat.usage.prompt_tokens
    assert whole.usage.output_tokens == chat.usage.completion_tokens
    assert isinstance(parsed.output_parsed, Sailing)
    (call,) = called.output
    assert call.type == "function_call"
    Sailing.model_validate_json(call.arguments)
    cluster.settled()


def test_mixed_load_over_all_buckets_compiles_nothing(
    cluster: Cluster, tokenizer: Tokenizer
) -> None:
    ids = tokenizer.encode(TEXTS[3] * 12)

    def one(number: int) -> Any:
        return cluster.generate(
            ids[: 1 + 37 * number % 300],
            max_new_tokens=2 + number % 9,
            temperature=number % 3 / 2,
            top_p=0.9,
            repetition_penalty=1.0 + number % 2 / 5,
            return_logprob=number % 4 == 0,
            top_logprobs_num=3 if number % 4 == 0 else 0,
            logprob_start_len=0 if number % 8 == 0 else -1,
        )

    for crowd in (1, 2, 5, 8, 24):
        with ThreadPoolExecutor(crowd) as pool:
            list(pool.map(one, range(crowd)))
    workers = cluster.settled()
    assert [worker["compiles_after_ready"] for worker in workers] == [0] * len(workers)
    metrics = cluster.http.get("/metrics").text
    counted = [line for line in metrics.splitlines() if "compiles_after_ready_total{" in line]
    assert counted
    assert all(line.endswith(" 0.0") for line in counted)
