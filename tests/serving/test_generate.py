"""POST /generate answers in SGLang's shapes."""

import itertools
from typing import Any

import pytest

from serving import sglang_api
from tests.fakes import logprob_of, top_of
from tests.serving.live import EOS, LETTER_A, letters, live_server

IDS = [LETTER_A + i for i in range(26)]


def params(**fields: Any) -> dict[str, Any]:
    return {"max_new_tokens": 4, "temperature": 0, **fields}


async def test_one_text_has_one_answer() -> None:
    async with live_server() as live:
        body = {"text": "Hi!", "sampling_params": params(), "rid": "mine"}
        answer = (await live.post("/generate", body)).json()
        meta = answer["meta_info"]
        assert answer["text"] == letters(4)
        assert answer["output_ids"] == IDS[:4]
        assert meta["id"] == "mine"
        assert meta["finish_reason"] == {"type": "length", "length": 4}
        assert (meta["prompt_tokens"], meta["completion_tokens"]) == (3, 4)
        assert meta["cached_tokens"] == 0
        assert meta["e2e_latency"] > 0
        assert "output_token_logprobs" not in meta
        answer = (await live.post("/generate", {"input_ids": [1, 2], "sampling_params": {}})).json()
        assert answer["meta_info"]["prompt_tokens"] == 2
        assert answer["text"] == letters(26)
        assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": EOS}


async def test_a_batch_or_several_choices_have_a_list() -> None:
    async with live_server() as live:
        answers = (
            await live.post(
                "/generate",
                {
                    "input_ids": [[1, 2], [3]],
                    "sampling_params": [params(n=2), params(n=2, max_new_tokens=2)],
                },
            )
        ).json()
        assert [answer["text"] for answer in answers] == ["abcd", "abcd", "ab", "ab"]
        assert [answer["meta_info"]["prompt_tokens"] for answer in answers] == [2, 2, 1, 1]
        answers = (await live.post("/generate", {"text": ["Hi!"], "sampling_params": {}})).json()
        assert len(answers) == 1


async def test_a_prompt_counts_once_in_the_timeline_however_many_choices_it_has() -> None:
    async with live_server() as live:
        body = {"input_ids": [[1, 2], [3]], "sampling_params": params(n=2), "rid": ["a", "b"]}
        assert len((await live.post("/generate", body)).json()) == 4
        told = (await live.http.get("/requests/a/timeline")).json()
        assert [choice["prompt_tokens"] for choice in told["choices"]] == [2, 2, 1, 1]
        assert told["prompt_tokens"] == 3


async def test_a_stop_is_named_with_what_matched() -> None:
    async with live_server() as live:
        for stop, shown, matched in (
            ({"stop": "de"}, "abc", "de"),
            ({"stop": ["x", "d"], "no_stop_trim": True}, "abcd", "d"),
            ({"stop_token_ids": [IDS[2]]}, "ab", IDS[2]),
            ({"stop_token_ids": [IDS[2]], "no_stop_trim": True}, "abc", IDS[2]),
            ({"stop": "b", "min_new_tokens": 5}, letters(26), EOS),
        ):
            body = {"text": "Hi!", "sampling_params": params(max_new_tokens=40, **stop)}
            answer = (await live.post("/generate", body)).json()
            assert answer["text"] == shown
            assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": matched}


async def test_logprobs_are_triples() -> None:
    async with live_server() as live:
        body = {
            "text": "Hi!",
            "sampling_params": params(max_new_tokens=2),
            "return_logprob": True,
            "logprob_start_len": 0,
            "top_logprobs_num": 2,
            "return_text_in_logprobs": True,
        }
        meta = (await live.post("/generate", body)).json()["meta_info"]
        assert meta["output_token_logprobs"] == [
            [logprob_of(IDS[0]), IDS[0], "a"],
            [logprob_of(IDS[1]), IDS[1], "b"],
        ]
        assert meta["output_top_logprobs"][0] == [
            [value, token_id, text]
            for (token_id, value), text in zip(top_of(IDS[0])[:2], "ab", strict=True)
        ]
        assert meta["input_token_logprobs"] == [
            [None, 39, "H"],
            [logprob_of(72), 72, "i"],
            [logprob_of(0), 0, "!"],
        ]
        assert meta["input_top_logprobs"][0] is None
        body |= {"logprob_start_len": 2, "return_text_in_logprobs": False}
        meta = (await live.post("/generate", body)).json()["meta_info"]
        assert meta["input_token_logprobs"] == [[logprob_of(0), 0, None]]
        body["logprob_start_len"] = 3  # the whole prompt is before it
        meta = (await live.post("/generate", body)).json()["meta_info"]
        assert meta["input_token_logprobs"] == []
        del body["logprob_start_len"]
        meta = (await live.post("/generate", body)).json()["meta_info"]
        assert meta["input_token_logprobs"] == []


async def test_no_new_tokens_may_be_asked_to_score_a_prompt() -> None:
    async with live_server() as live:
        body = {
            "input_ids": [1, 2, 3],
            "sampling_params": {"max_new_tokens": 0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        whole = (await live.post("/generate", body)).json()
        streamed, done = await live.events("/generate", {**body, "stream": True})
        assert done == "[DONE]"
        for answer in (whole, streamed):
            meta = answer["meta_info"]
            assert (answer["text"], answer["output_ids"]) == ("", [])
            assert meta["completion_tokens"] == 0
            assert meta["finish_reason"] == {"type": "length", "length": 0}
            assert [token_id for _, token_id, _ in meta["input_token_logprobs"]] == [1, 2, 3]
            assert meta["output_token_logprobs"] == []


async def test_many_logprobs_of_a_prompt_come_with_the_last_event_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sglang_api, "INLINE_LOGPROBS", 5)
    async with live_server() as live:
        asked = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}
        body = {"text": "Hi!", "sampling_params": params(), "stream": True, **asked}
        *events, done = await live.events("/generate", body)
        assert done == "[DONE]"
        whole = (await live.post("/generate", {**body, "stream": False})).json()
        metas = [event["meta_info"] for event in events]
        names = "input_token_logprobs", "input_top_logprobs"
        assert len(metas) > 1
        assert not any(name in meta for meta in metas[:-1] for name in names)
        assert [metas[-1][name] for name in names] == [whole["meta_info"][name] for name in names]


async def test_events_repeat_everything_so_far() -> None:
    async with live_server() as live:
        asked = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}
        body = {"text": "Hi!", "sampling_params": params(), "stream": True, **asked}
        events = await live.events("/generate", body)
        assert events[-1] == "[DONE]"
        assert events[0]["text"].startswith("a")  # others may have overtaken the first token
        for before, after in itertools.pairwise(events[:-1]):
            assert after["text"].startswith(before["text"])
            assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
        whole = (await live.post("/generate", {**body, "stream": False})).json()
        last = events[-2]
        assert (last["text"], last["output_ids"]) == (whole["text"], whole["output_ids"])
        assert events[0]["meta_info"]["finish_reason"] is None
        assert last["meta_info"]["finish_reason"] == whole["meta_info"]["finish_reason"]
        assert last["meta_info"]["completion_tokens"] == 4
        assert len(last["meta_info"]["output_token_logprobs"]) == 4
        for name in ("output_token_logprobs", "output_top_logprobs"):
            for before, after in itertools.pairwise(events[:-1]):
                told = before["meta_info"][name]
                assert after["meta_info"][name][: len(told)] == told
            assert last["meta_info"][name] == whole["meta_info"][name]
        for name in ("input_token_logprobs", "input_top_logprobs"):
            assert len(whole["meta_info"][name]) == 3
            for event in events[:-1]:
                assert event["meta_info"][name] == whole["meta_info"][name]


async def test_events_of_a_batch_carry_an_index_and_intervals_hold() -> None:
    async with live_server() as live:
        sampling = params(max_new_tokens=9, stream_interval=4)
        body = {"text": ["Hi!", "Ho!"], "sampling_params": sampling, "stream": True}
        events = await live.events("/generate", body)
        for index in (0, 1):
            texts = [event["text"] for event in events[:-1] if event["index"] == index]
            # Decode's first tokens may overtake prefill's, and then leave with it.
            assert [letters(len(text)) for text in texts] == texts
            assert texts[-1] == letters(9)
            assert all(len(b) - len(a) >= 4 for a, b in itertools.pairwise(texts[:-1]))


@pytest.mark.parametrize("second", [2, 0, None])
async def test_prompts_of_a_batch_that_ask_for_different_intervals_are_refused(
    second: int | None,
) -> None:
    async with live_server() as live:
        sampling = [params(stream_interval=4), params(stream_interval=second)]
        response = await live.post("/generate", {"text": ["a", "b"], "sampling_params": sampling})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "stream_interval"


async def test_a_bad_field_is_a_400_that_names_it() -> None:
    async with live_server() as live:
        response = await live.post("/generate", {"text": "a", "sampling_params": {"top_p": 9}})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "top_p"


@pytest.mark.parametrize(
    ("path", "name"), [("/v1/completions", "prompt"), ("/generate", "input_ids")]
)
async def test_more_than_can_be_served_is_refused_before_each_item_is_looked_at(
    path: str, name: str
) -> None:
    async with live_server(max_inflight_requests=4) as live:
        for given, code in (
            ([1 << 40] * 512, "context_length_exceeded"),
            ([[-1]] * 5, "invalid_value"),
        ):
            response = await live.post(path, {name: given})
            assert response.status_code == 400
            error = response.json()["error"]
            assert (error["param"], error["code"]) == (name, code)
            assert "512 tokens" in error["message"] or "at most 4 are served" in error["message"]
