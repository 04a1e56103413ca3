"""What SGLang's clients read of a chat's tokens: meta_info and prompt_token_ids of each choice."""

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
