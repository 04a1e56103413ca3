"""The routes over a real socket: who may ask, what is refused, and that nothing is left behind."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from tests.recording import until
from tests.serving.live import EOS, MODEL_NAME, Live, letters, live_server, tokenizer_of_tests
from transfer import wire
from transfer.errors import Code

ASK = {"prompt": "Hi!", "max_tokens": 8}


def error_of(response: httpx.Response) -> dict[str, Any]:
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["type"]
    return error


async def start_stream(live: Live, body: Any) -> tuple[Any, httpx.Response, Any]:
    """A streamed answer that has begun: its context, response and lines."""
    context = live.http.stream("POST", "/v1/completions", json={**body, "stream": True})
    response = await context.__aenter__()
    return context, response, response.aiter_lines()


async def step_until_idle(live: Live) -> None:
    """Steps until no worker has a leg."""

    def step() -> bool:
        live.cluster.step()
        return not live.rooms

    await until(step)


# --- who may ask, and what ---


async def test_the_key_is_asked_everywhere_but_for_health_and_metrics() -> None:
    async with live_server(api_key="secret") as live:
        for path in ("/health", "/ping", "/metrics"):
            assert (await live.http.get(path)).status_code == 200
        for path in ("/v1/models", "/get_server_info", "/flush_cache", "/no_such_path"):
            assert (await live.http.get(path)).status_code == 401
        for path in ("/version", "/load", "/v1/loads", "/v1/models/", "/tokenizer_info"):
            assert (await live.http.get(path)).status_code == 401
        assert (await live.post("/reset_prefix_cache", {})).status_code == 401
        assert (await live.post("/ping", {})).status_code == 200
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
            response = await live.post("/v1/completions", ASK, **headers)
            assert response.status_code == 401
            assert error_of(response)["code"] == "invalid_api_key"
        response = await live.post("/v1/completions", ASK, Authorization="Bearer secret")
        assert response.status_code == 200
        info = await live.http.get("/server_info", headers={"Authorization": "bearer secret"})
        assert info.status_code == 200
        assert "secret" not in info.text


async def test_wrong_paths_methods_and_bodies_have_errors_of_one_shape() -> None:
    async with live_server(max_request_bytes=1000) as live:
        response = await live.http.get("/v1/nothing")
        assert response.status_code == 404
        assert "/v1/nothing" in error_of(response)["message"]
        response = await live.http.get("/v1/chat/completions")
        assert response.status_code == 405
        assert response.headers["allow"] == "POST"
        error_of(response)
        for body in (b"", b"{", b'"text"', b"\xff\xfe", b'{"prompt": "\\ud800"}'):
            response = await live.http.post("/v1/completions", content=body)
            assert response.status_code == 400
            error_of(response)

        async def chunks() -> Any:
            for _ in range(4):
                yield b" " * 500

        for content in (b" " * 2000, chunks()):
            response = await live.http.post("/v1/completions", content=content)
            assert response.status_code == 413
            error_of(response)
        assert (await live.post("/v1/completions", ASK)).status_code == 200


async def test_a_slash_too_many_leads_to_the_same_place_whatever_the_proxy_in_front_is() -> None:
    async with live_server() as live:
        response = await live.post("/v1/completions/?a=b%20c", ASK)
        assert response.status_code == 307
        assert response.headers["location"] == "../completions?a=b%20c"
        there = httpx.URL("https://proxy/llm/v1/completions/").join(response.headers["location"])
        assert str(there) == "https://proxy/llm/v1/completions?a=b%20c"
        assert (await live.http.get("/v1/models/")).status_code == 200
        assert (await live.post("/v1/models/", ASK)).status_code == 405
        for path in ("/", "/nothing/", "/v1/completions//"):
            assert (await live.post(path, ASK)).status_code == 404


async def test_another_model_is_not_found_whichever_way_it_is_named() -> None:
    """As at OpenAI: clients that fall back on a second model look for this error."""
    async with live_server() as live:
        messages = [{"role": "user", "content": "Hi!"}]
        for path, body in (
            ("/v1/completions", ASK),
            ("/v1/chat/completions", {"messages": messages}),
            ("/v1/responses", {"input": "Hi!"}),
            ("/tokenize", {"prompt": "a"}),
            ("/detokenize", {"tokens": [1]}),
            ("/v1/models/other", None),
        ):
            if body is None:
                response = await live.http.get(path)
            else:
                response = await live.post(path, {**body, "model": "other"})
            assert response.status_code == 404, path
            error = error_of(response)
            assert (error["type"], error["code"], error["param"]) == (
                "invalid_request_error",
                "model_not_found",
                "model",
            )
            assert "the model 'other' does not exist" in error["message"]


async def test_health_is_of_both_roles_and_requests_wait_for_the_one_that_is_gone() -> None:
    async with live_server() as live:
        assert (await live.http.get("/health")).status_code == 200
        assert (await live.http.get("/health_generate")).status_code == 200
        await live.cluster.decode[0].kill(unlist=True)
        await until(lambda: not live.dispatcher.cluster_ready())
        for path in ("/health", "/health_generate"):
            response = await live.http.get(path)
            assert response.status_code == 503
            assert response.headers["retry-after"]
            assert error_of(response)["message"] == "no decode worker takes work; try again"
        waiting = asyncio.create_task(live.post("/v1/completions", ASK))
        await until(lambda: live.dispatcher.num_running() == 1)
        response = await live.post("/v1/completions", {**ASK, "top_p": 3})
        assert response.status_code == 400, "what can never work does not wait"
        await live.cluster.decode[0].start()
        assert (await waiting).status_code == 200


async def test_before_the_first_pair_of_workers_a_request_is_refused_at_once() -> None:
    async with live_server(decodes=0) as live:
        for ask in (ASK, {**ASK, "stream": True}):
            response = await live.post("/v1/completions", ask)
            assert response.status_code == 503
            assert response.headers["retry-after"]
            assert error_of(response)["code"] == "not_ready"
            assert error_of(response)["message"] == "no decode worker takes work; try again"


async def test_a_worker_that_does_not_come_back_is_a_503_with_a_time_to_come_back() -> None:
    async with live_server(queue_timeout_s=0.05) as live:
        await live.cluster.prefill[0].kill(unlist=True)
        await until(lambda: not live.dispatcher.cluster_ready())
        for ask in (ASK, {**ASK, "stream": True}):
            response = await live.post("/v1/completions", ask)
            assert response.status_code == 503
            assert int(response.headers["retry-after"]) >= 1
            assert error_of(response)["code"] == "peer_lost"


async def test_those_who_wait_for_a_worker_count_and_the_next_ones_hear_429() -> None:
    async with live_server(max_inflight_requests=1, max_queued_requests=1) as live:
        await live.cluster.prefill[0].kill(unlist=True)
        await until(lambda: not live.dispatcher.cluster_ready())
        waiting = [asyncio.create_task(live.post("/v1/completions", ASK)) for _ in range(2)]
        await until(lambda: live.dispatcher.num_queued() == 1)
        response = await live.post("/v1/completions", ASK)
        assert response.status_code == 429
        assert int(response.headers["retry-after"]) >= 1
        await live.cluster.prefill[0].start()
        assert [r.status_code for r in await asyncio.gather(*waiting)] == [200, 200]


# --- load ---


async def test_more_than_the_queue_holds_is_a_429_with_a_time_to_come_back() -> None:
    async with live_server(auto_step=False, max_inflight_requests=1, max_queued_requests=1) as live:
        first = asyncio.create_task(live.post("/v1/completions", ASK))
        await live.cluster.submitted(1)
        second = asyncio.create_task(live.post("/v1/completions", ASK))
        await until(lambda: b"kvferry_num_queue_reqs 1.0" in live.dispatcher.metrics.render())
        response = await live.post("/v1/completions", ASK)
        assert response.status_code == 429
        assert int(response.headers["retry-after"]) >= 1
        assert error_of(response)["code"] == "queue_full"
        response = await live.post("/v1/completions", {**ASK, "n": 2})
        assert response.status_code == 400, "two can never be served at once here"
        await step_until_idle(live)
        assert (await first).status_code == 200
        await live.cluster.submitted(1)
        await step_until_idle(live)
        assert (await second).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_frees_everything_it_held(stream: bool) -> None:
    async with live_server(auto_step=False, max_inflight_requests=2) as live:
        body = {**ASK, "n": 2, "max_tokens": 100, "stream": stream}
        async with httpx.AsyncClient(base_url=live.url) as client:
            asking = asyncio.create_task(client.post("/v1/completions", json=body))
            await live.cluster.submitted(2)
            live.cluster.step()
            live.cluster.step()
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        await until(lambda: live.rooms == 0)
        # And its places are free for another.
        asking = asyncio.create_task(live.post("/v1/completions", {**ASK, "n": 2}))
        await live.cluster.submitted(2)
        await step_until_idle(live)
        assert (await asking).status_code == 200


# --- failures in the middle ---


async def test_a_preempted_stream_goes_on_as_if_nothing_had_been() -> None:
    async with live_server(auto_step=False) as live:
        asking = asyncio.create_task(live.events("/v1/completions", {**ASK, "stream": True}))
        (room,) = await live.cluster.submitted(1)
        for _ in range(3):
            live.cluster.step()
        live.cluster.decode[0].preempt(room)
        await until(lambda: room not in live.cluster.prefill[0].rooms)
        await live.cluster.submitted(1)
        await step_until_idle(live)
        events = await asking
        assert "".join(event["choices"][0]["text"] for event in events[:-1]) == letters(8)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_failure_before_the_first_token_is_a_status(stream: bool) -> None:
    async with live_server(auto_step=False) as live:
        asking = asyncio.create_task(live.post("/v1/completions", {**ASK, "stream": stream}))
        (room,) = await live.cluster.submitted(1)
        live.cluster.prefill[0].fail(room, Code.TOO_LONG, "does not fit the pool")
        response = await asking
        assert response.status_code == 400
        assert error_of(response)["message"] == "does not fit the pool"


async def test_a_failure_after_the_first_byte_is_the_last_event() -> None:
    async with live_server(auto_step=False) as live:
        shown = asyncio.Event()
        body = {**ASK, "stream": True}
        asking = asyncio.create_task(live.events("/v1/completions", body, shown.set))
        (room,) = await live.cluster.submitted(1)
        live.cluster.step()
        live.cluster.step()
        await until(shown.is_set)  # before the first byte the failure would be a status
        live.cluster.decode[0].fail(room, Code.INTERNAL, "it broke")
        events = await asking
        # Both tokens may come before the first is written, and then share an event.
        text = "".join(event["choices"][0]["text"] for event in events[:-1])
        assert text
        assert letters(26).startswith(text)
        assert events[-1]["error"]["message"] == "it broke"
        assert events[-1]["error"]["code"] == "internal"


async def test_a_request_past_its_deadline_is_a_504() -> None:
    async with live_server(auto_step=False, request_timeout_s=0.05) as live:
        response = await live.post("/v1/completions", ASK)
        assert response.status_code == 504
        assert error_of(response)["code"] == "deadline"
        await until(lambda: live.rooms == 0)


# --- drain ---


async def test_a_worker_told_to_drain_says_what_it_does_and_takes_nothing_more() -> None:
    async with live_server() as live:
        for began in (True, False):
            response = await live.post("/drain", {"worker_id": "decode-0"})
            assert response.status_code == 200
            assert response.json() == {
                "worker_id": "decode-0",
                "draining": True,
                "began": began,
                "rooms": 0,
                "drain_timeout_s": 30.0,
            }
        assert (await live.http.get("/health")).status_code == 503
        info = (await live.http.get("/get_server_info")).json()
        draining = {worker["worker_id"] for worker in info["workers"] if worker["draining"]}
        assert draining == {"decode-0"}


async def test_a_drain_of_nobody_is_refused_with_what_there_is() -> None:
    async with live_server() as live:
        response = await live.post("/drain", {"worker_id": "decode-7"})
        assert response.status_code == 404
        assert error_of(response)["param"] == "worker_id"
        assert "there are: decode-0, prefill-0" in error_of(response)["message"]
        assert (await live.post("/drain", {})).status_code == 400


# --- abort_request ---


async def test_an_aborted_request_ends_with_that_reason() -> None:
    async with live_server(auto_step=False) as live:
        body = {**ASK, "rid": "mine", "n": 2}
        whole = asyncio.create_task(live.post("/v1/completions", body))
        stream = asyncio.create_task(
            live.events("/v1/completions", {**ASK, "rid": "other", "stream": True})
        )
        await live.cluster.submitted(3)
        live.cluster.step()
        response = await live.post("/abort_request", {"rid": "nobody"})
        assert response.json()["aborted"] == 0
        response = await live.post("/abort_request", {"rid": "mine"})
        assert response.json()["aborted"] == 2
        choices = (await whole).json()["choices"]
        assert [choice["finish_reason"] for choice in choices] == ["abort", "abort"]
        await live.post("/abort_request", {"abort_all": True})
        events = await stream
        assert events[-2]["choices"][0]["finish_reason"] == "abort"
        await until(lambda: live.rooms == 0)
        assert (await live.post("/abort_request", {})).status_code == 400


async def test_a_request_that_waits_for_a_place_can_be_aborted_too() -> None:
    async with live_server(auto_step=False, max_inflight_requests=1) as live:
        first = asyncio.create_task(live.post("/v1/completions", ASK))
        await live.cluster.submitted(1)
        second = asyncio.create_task(live.post("/v1/completions", {**ASK, "rid": "mine"}))
        await until(lambda: b"kvferry_num_queue_reqs 1.0" in live.dispatcher.metrics.render())
        response = await live.post("/abort_request", {"rid": "mine"})
        assert response.json()["aborted"] == 1
        response = await second
        assert response.status_code == 400
        assert error_of(response)["code"] == "aborted"
        await step_until_idle(live)
        assert (await first).status_code == 200


# --- the other routes ---


async def test_the_model_is_listed() -> None:
    async with live_server() as live:
        (card,) = (await live.http.get("/v1/models")).json()["data"]
        assert (card["id"], card["object"], card["max_model_len"]) == (MODEL_NAME, "model", 512)
        assert (await live.http.get(f"/v1/models/{MODEL_NAME}")).json() == card
        info = (await live.http.get("/get_model_info")).json()
        assert info["is_generation"] is True
        assert info["served_model_name"] == MODEL_NAME


async def test_texts_and_ids_are_translated_as_the_tokenizer_does() -> None:
    tokenizer = tokenizer_of_tests()
    async with live_server() as live:
        response = await live.post("/tokenize", {"prompt": "Hello é!", "return_token_strs": True})
        data = response.json()
        assert data["tokens"] == tokenizer.encode("Hello é!")
        assert data["count"] == len(data["tokens"]) == len(data["token_strs"])
        assert data["max_model_len"] == 512
        back = (await live.post("/detokenize", {"tokens": data["tokens"]})).json()
        assert back["prompt"] == back["text"] == "Hello é!"
        data = (await live.post("/tokenize", {"prompt": ["a", "bc"]})).json()
        assert data["tokens"] == [tokenizer.encode("a"), tokenizer.encode("bc")]
        back = (await live.post("/detokenize", {"tokens": data["tokens"]})).json()
        assert back["text"] == ["a", "bc"]
        messages = [{"role": "user", "content": "Hello!"}]
        data = (await live.post("/tokenize", {"messages": messages})).json()
        rendered = tokenizer.apply_chat_template(messages)
        assert data["tokens"] == tokenizer.encode(rendered, add_special_tokens=False)
        shown = await live.post("/detokenize", {"tokens": [EOS]})
        assert shown.json()["text"] == "<|im_end|>"
        skipped = await live.post("/detokenize", {"tokens": [EOS], "skip_special_tokens": True})
        assert skipped.json()["text"] == ""
        assert (await live.post("/detokenize", {"tokens": []})).json()["text"] == ""
        many = await live.post("/detokenize", {"tokens": [64] * 5000})
        assert many.json()["text"] == "a" * 5000
        for path, body, param in (
            ("/tokenize", {}, "prompt"),
            ("/tokenize", {"prompt": "a", "messages": messages}, "prompt"),
            ("/detokenize", {}, "tokens"),
            ("/detokenize", {"tokens": [9999]}, "tokens"),
            ("/detokenize", {"tokens": [64] * 5000 + [9999]}, "tokens"),
            ("/detokenize", {"tokens": [[64] * 600_000] * 2}, "tokens"),
            ("/detokenize", {"tokens": "abc"}, "tokens"),
        ):
            response = await live.post(path, body)
            assert response.status_code == 400
            assert error_of(response)["param"] == param


async def test_the_cluster_shows_its_state_and_flushes_its_cache() -> None:
    async with live_server() as live:
        prompt = list(range(20))
        for expected in (0, 16, 16):
            data = (await live.post("/v1/completions", {**ASK, "prompt": prompt})).json()
            assert data["usage"]["prompt_tokens_details"]["cached_tokens"] == expected
        info = (await live.http.get("/get_server_info")).json()
        assert info["ready"] is True
        assert {worker["role"] for worker in info["workers"]} == {"prefill", "decode"}
        assert info["served_model_name"] == MODEL_NAME
        assert {load["role"] for load in (await live.http.get("/get_load")).json()} == {
            "prefill",
            "decode",
        }
        assert (await live.post("/flush_cache", {})).status_code == 200
        data = (await live.post("/v1/completions", {**ASK, "prompt": prompt})).json()
        assert data["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        metrics = (await live.http.get("/metrics")).text
        assert "kvferry_generation_tokens_total 32.0" in metrics
        assert 'kvferry_num_requests_total{finish_reason="length"} 4.0' in metrics


async def test_dictated_ranks_reach_both_workers_and_the_load_shows_every_rank() -> None:
    async with live_server(auto_step=False) as live:
        (prefill,), (decode,) = live.cluster.prefill, live.cluster.decode
        prefill.dp_size, decode.dp_size = 4, 2
        prefill.ranks = tuple(wire.Load(queued_tokens=at) for at in range(4))
        for worker in (prefill, decode):
            worker.announce()
        dp_size = live.dispatcher.dp_size  # the registry announces each worker separately
        await until(lambda: (dp_size("prefill"), dp_size("decode")) == (4, 2))
        loads = {load["role"]: load for load in (await live.http.get("/get_load")).json()}
        assert [rank["queued_tokens"] for rank in loads["prefill"]["ranks"]] == [0, 1, 2, 3]
        assert {role: load["dp_size"] for role, load in loads.items()} == {
            "prefill": 4,
            "decode": 2,
        }
        asks: dict[str, dict[str, Any]] = {
            "/v1/completions": {"prompt": "Hi!"},
            "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi!"}]},
            "/generate": {"text": "Hi!"},
        }
        for path, ask in asks.items():
            body = ask | {"routed_dp_rank": 1, "disagg_prefill_dp_rank": 3}
            asked = asyncio.create_task(live.post(path, body))
            (room,) = await live.cluster.submitted(1)
            for worker in (prefill, decode):
                submit = worker.rooms[room].submit
                assert (submit.disagg_prefill_dp_rank, submit.routed_dp_rank) == (3, 1)
            await step_until_idle(live)
            assert (await asked).status_code == 200
            response = await live.post(path, body | {"routed_dp_rank": 2})
            assert response.status_code == 400
            assert error_of(response)["param"] == "routed_dp_rank"
            header = "X-Data-Parallel-Rank"  # proxies send it, and it takes precedence
            asked = asyncio.create_task(live.post(path, body, **{header: "0"}))
            (room,) = await live.cluster.submitted(1)
            assert {w.rooms[room].submit.routed_dp_rank for w in (prefill, decode)} == {0}
            await step_until_idle(live)
            assert (await asked).status_code == 200
            for wrong in ("2", "-1", "x"):
                response = await live.post(path, body, **{header: wrong})
                assert (response.status_code, error_of(response)["param"]) == (400, header)


async def test_metrics_can_be_switched_off() -> None:
    async with live_server(enable_metrics=False) as live:
        assert (await live.http.get("/metrics")).status_code == 404


async def test_the_id_of_a_request_comes_back() -> None:
    async with live_server() as live:
        response = await live.post("/v1/completions", ASK, **{"X-Request-Id": "trace-7"})
        assert response.json()["id"] == response.headers["x-request-id"] == "trace-7"
        response = await live.post("/v1/completions", {**ASK, "rid": "été\n"})
        assert response.json()["id"] == "été\n"
        assert response.headers["x-request-id"] == "%C3%A9t%C3%A9%0A"
        for name in ("rid", "request_id"):
            response = await live.post("/v1/completions", {**ASK, name: "i" * 257})
            assert error_of(response)["param"] == name
        response = await live.post("/v1/completions", ASK, **{"X-Request-Id": "i" * 257})
        assert error_of(response)["param"] == "X-Request-Id"
        context, response, lines = await start_stream(live, {**ASK, "rid": "mine"})
        assert response.headers["x-request-id"] == "mine"
        assert response.headers["content-type"].startswith("text/event-stream")
        assert json.loads((await anext(lines)).removeprefix("data: "))["id"] == "mine"
        await context.__aexit__(None, None, None)


async def test_a_connection_serves_one_request_after_another() -> None:
    async with live_server() as live:
        for _ in range(3):
            events = await live.events("/v1/completions", {**ASK, "stream": True})
            assert events[-1] == "[DONE]"
            assert (await live.post("/v1/completions", ASK)).status_code == 200
        assert live.rooms == 0
