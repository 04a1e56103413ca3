"""Chats by token ids, as SGLang's clients ask for them: input_ids, prompt_token_ids, meta_info."""

from typing import Any

import pytest

from tests.serving.live import live_server
from tests.serving.test_parsed_chats import ANSWER, HELLO, PARSERS, TOOLS, writes

CHAT = "/v1/chat/completions"


@pytest.mark.parametrize("ending", [{"max_tokens": 5}, {"stop": "ef"}, {"stop_token_ids": [70]}])
@pytest.mark.parametrize("top", [0, 2])
async def test_a_choice_tells_of_its_tokens_what_generate_does(
    ending: dict[str, Any], top: int
) -> None:
    shown = {"return_meta_info": True, "return_prompt_token_ids": True}
    asked: dict[str, Any] = {"messages": HELLO, "n": 2, "seed": 3, "max_tokens": 50, **ending}
    async with live_server() as live:
        (ids,) = {
            tuple(choice["prompt_token_ids"])
            for choice in (await live.post(CHAT, asked | shown)).json()["choices"]
        }
        logprobs = {"logprobs": True, "top_logprobs": top}
        answer = (await live.post(CHAT, asked | shown | logprobs)).json()
        sampling = {"max_new_tokens": asked["max_tokens"], **ending, "n": 2, "sampling_seed": 3}
        sampling.pop("max_tokens", None)
        native = await live.post(
            "/generate",
            {
                "input_ids": [*ids],
                "sampling_params": sampling,
                "return_logprob": True,
                "top_logprobs_num": top,
                "return_text_in_logprobs": True,
            },
        )
    assert answer["usage"]["prompt_tokens"] == len(ids)
    for choice, item in zip(answer["choices"], native.json(), strict=True):
        told, wanted = choice["meta_info"], item["meta_info"]
        assert told.pop("id") == answer["id"]
        for name in ("id", "e2e_latency", "input_token_logprobs", "input_top_logprobs"):
            wanted.pop(name, None)
        cached = told.pop("cached_tokens"), wanted.pop("cached_tokens")
        assert all(isinstance(count, int) for count in cached)
        assert told == wanted
        assert [entry[1] for entry in told["output_token_logprobs"]] == item["output_ids"]
        assert len(told["output_token_logprobs"]) == told["completion_tokens"] > 3


async def test_thoughts_and_calls_are_among_the_tokens_that_are_told() -> None:
    asked = {"messages": HELLO, "tools": TOOLS, "logprobs": True, "return_meta_info": True}
    parsers: dict[str, Any] = PARSERS
    async with live_server(writes(ANSWER), **parsers) as live:
        (choice,) = (await live.post(CHAT, asked)).json()["choices"]
        off = {"return_meta_info": False}
        (plain,) = (await live.post(CHAT, asked | off)).json()["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["meta_info"]["finish_reason"]["type"] == "stop"
    texts = [text for _, _, text in choice["meta_info"]["output_token_logprobs"]]
    assert "".join(texts).startswith(ANSWER[:20])
    assert not {"meta_info", "prompt_token_ids"} & plain.keys()


async def test_streams_have_no_such_fields_and_refuse_them() -> None:
    async with live_server() as live:
        for name in ("return_meta_info", "return_prompt_token_ids"):
            response = await live.post(CHAT, {"messages": HELLO, "stream": True, name: True})
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (400, name)
            off = {"messages": HELLO, "stream": True, "max_tokens": 1, name: False}
            assert (await live.events(CHAT, off))[-1] == "[DONE]"


async def test_ids_in_place_of_the_rendered_messages_are_the_prompt() -> None:
    shown = {"return_prompt_token_ids": True, "return_prompt_text": True, "max_tokens": 5}
    async with live_server(reasoning_parser="qwen3") as live:
        rendered = (await live.post(CHAT, {"messages": HELLO} | shown)).json()
        ids = rendered["choices"][0]["prompt_token_ids"]
        asked = {"messages": [{"role": "user", "content": "Other."}], "input_ids": ids}
        given = (await live.post(CHAT, asked | shown)).json()
        assert given["prompt_text"] == rendered["prompt_text"]
        assert given["choices"] == rendered["choices"]
        # What the parser knows of the prompt is what the ids say.
        begun = [*ids, *live.tokenizer.encode("<think>\n", False)]
        (choice,) = (await live.post(CHAT, asked | shown | {"input_ids": begun})).json()["choices"]
        assert choice["message"]["reasoning_content"] == "abcde"
        cut = {"truncate_prompt_tokens": 2, "input_ids": [1] * 600 + ids}
        (choice,) = (await live.post(CHAT, asked | shown | cut)).json()["choices"]
        assert choice["prompt_token_ids"] == ids[-2:]
        empty = (await live.post(CHAT, {"messages": HELLO, "input_ids": []} | shown)).json()
        assert empty["choices"] == rendered["choices"]
        events = await live.events(CHAT, asked | {"stream": True, "max_tokens": 5})
        texts = [event["choices"][0]["delta"].get("content") or "" for event in events[:-1]]
        assert "".join(texts) == rendered["choices"][0]["message"]["content"] == "abcde"


@pytest.mark.parametrize("ids", [[1024], [-1], ["a"], [1] * 512])
async def test_ids_that_are_no_prompt_are_refused(ids: list[Any]) -> None:
    async with live_server() as live:
        response = await live.post(CHAT, {"messages": HELLO, "input_ids": ids})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "input_ids")
        alone = await live.post(CHAT, {"input_ids": [1]})
        assert (alone.status_code, alone.json()["error"]["param"]) == (400, "messages")
