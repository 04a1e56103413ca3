"""OpenAI's own client against the server: what users of it may rely on.

By default the server is this repository's on a fake cluster. With KVFERRY_TEST_URL (and, where
they differ from the defaults, KVFERRY_TEST_MODEL and KVFERRY_TEST_KEY) the same suite runs against
a server that is already up; checks that need the fake cluster's alphabet are then left out.
"""

import dataclasses
import os
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from tests.serving.live import MODEL_NAME, alphabet, letters, live_server

# One server for the whole suite.
pytestmark = pytest.mark.asyncio(loop_scope="module")

KEY = "a-key"
PROMPT = "1, 2, 3: "
HELLO: list = [{"role": "user", "content": "Hello!"}]


@dataclasses.dataclass
class Api:
    """A server, as a client sees it."""

    client: Any  # AsyncOpenAI; its overloads do not fit arguments that a test collects
    model: str
    is_fake: bool

    def same(self, text: str | None, expected: str) -> None:
        """The fake cluster's text is known; another server's must only be there."""
        assert text == expected if self.is_fake else text is not None


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def api() -> AsyncIterator[Api]:
    url = os.environ.get("KVFERRY_TEST_URL")
    if url:
        key = os.environ.get("KVFERRY_TEST_KEY", "none")
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
            model = os.environ.get("KVFERRY_TEST_MODEL") or (await client.models.list()).data[0].id
            yield Api(client, model, is_fake=False)
        return
    async with live_server(alphabet, api_key=KEY) as live:
        base_url = f"{live.url}/v1"
        async with AsyncOpenAI(base_url=base_url, api_key=KEY, max_retries=0) as client:
            yield Api(client, MODEL_NAME, is_fake=True)


async def test_the_model_is_there(api: Api) -> None:
    models = (await api.client.models.list()).data
    assert api.model in [model.id for model in models]
    assert (await api.client.models.retrieve(api.model)).id == api.model


async def test_a_chat_is_answered(api: Api) -> None:
    answer = await api.client.chat.completions.create(
        model=api.model, messages=HELLO, max_completion_tokens=5, temperature=0
    )
    (choice,) = answer.choices
    assert answer.object == "chat.completion"
    assert choice.message.role == "assistant"
    assert choice.finish_reason in ("length", "stop")
    api.same(choice.message.content, letters(5))
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.completion_tokens <= 5


async def test_a_prediction_of_the_answer_does_not_change_it(api: Api) -> None:
    ask: dict[str, Any] = {"model": api.model, "messages": HELLO, "max_tokens": 5, "temperature": 0}
    plain = await api.client.chat.completions.create(**ask)
    prediction = {"type": "content", "content": "edcba"}
    predicted = await api.client.chat.completions.create(**ask, prediction=prediction)
    assert predicted.choices[0].message == plain.choices[0].message


async def test_a_streamed_chat_is_the_whole_one_in_pieces(api: Api) -> None:
    ask = {"model": api.model, "messages": HELLO, "max_tokens": 12, "temperature": 0, "seed": 1}
    whole = await api.client.chat.completions.create(**ask)
    stream = await api.client.chat.completions.create(
        **ask, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(choice.delta.content or "" for c in chunks for choice in c.choices)
    assert text == whole.choices[0].message.content
    reasons = [choice.finish_reason for c in chunks for choice in c.choices]
    assert [reason for reason in reasons if reason] == [whole.choices[0].finish_reason]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])


@pytest.mark.parametrize("continuous", [None, True])
@pytest.mark.parametrize("last", [None, False, True])
async def test_usage_is_where_it_was_asked_for(
    api: Api, last: bool | None, continuous: bool | None
) -> None:
    asked = {"include_usage": last, "continuous_usage_stats": continuous}
    stream = await api.client.completions.create(
        model=api.model,
        prompt="Hi!",
        max_tokens=3,
        stream=True,
        extra_body={"stream_options": asked},
    )
    chunks = [chunk async for chunk in stream]
    assert [bool(chunk.choices) for chunk in chunks].count(False) == bool(last)
    within = [chunk.usage is not None for chunk in chunks if chunk.choices]
    assert within == [bool(continuous)] * len(within)


async def test_chat_logprobs_have_a_token_its_bytes_and_the_best_others(api: Api) -> None:
    answer = await api.client.chat.completions.create(
        model=api.model,
        messages=HELLO,
        max_tokens=4,
        temperature=0,
        logprobs=True,
        top_logprobs=3,
    )
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens
    for item in content:
        assert item.logprob <= 0
        assert item.bytes is not None
        assert len(item.top_logprobs) == 3
        values = [top.logprob for top in item.top_logprobs]
        assert values == sorted(values, reverse=True)
        assert item.top_logprobs[0].token == item.token, "greedy takes the best"
    if api.is_fake:
        assert [item.token for item in content] == list(letters(4))
        assert [item.bytes for item in content] == [[ord(c)] for c in letters(4)]


async def test_streamed_logprobs_are_the_whole_ones(api: Api) -> None:
    ask = {
        "model": api.model,
        "messages": HELLO,
        "max_tokens": 4,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 2,
    }
    whole = await api.client.chat.completions.create(**ask)
    streamed: list[Any] = []
    async for chunk in await api.client.chat.completions.create(**ask, stream=True):
        for choice in chunk.choices:
            streamed += choice.logprobs.content if choice.logprobs else []
    expected = [item.token for item in whole.choices[0].logprobs.content]
    assert [item.token for item in streamed] == expected


async def test_several_choices_come_whole_and_streamed(api: Api) -> None:
    ask = {"model": api.model, "messages": HELLO, "max_tokens": 6, "n": 3, "temperature": 0}
    whole = await api.client.chat.completions.create(**ask)
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in whole.choices}) == 1
    assert whole.usage.completion_tokens <= 18
    one = await api.client.chat.completions.create(**{**ask, "n": 1})
    assert whole.usage.prompt_tokens == one.usage.prompt_tokens
    texts = ["", "", ""]
    reasons = {}
    async for chunk in await api.client.chat.completions.create(**ask, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    assert texts == [choice.message.content for choice in whole.choices]
    assert sorted(reasons) == [0, 1, 2]


async def test_a_completion_is_answered_whole_and_streamed(api: Api) -> None:
    ask = {"model": api.model, "prompt": PROMPT, "max_tokens": 7, "temperature": 0}
    whole = await api.client.completions.create(**ask)
    assert whole.object == "text_completion"
    api.same(whole.choices[0].text, letters(7))
    text = ""
    async for chunk in await api.client.completions.create(**ask, stream=True):
        text += chunk.choices[0].text
    assert text == whole.choices[0].text


async def test_a_completion_takes_texts_ids_and_batches_of_them(api: Api) -> None:
    ask = {"model": api.model, "max_tokens": 3, "temperature": 0}
    for prompt, count in ((["a b", "c d "], 2), ([40, 41, 42], 1), ([[40, 41], [42]], 2)):
        answer = await api.client.completions.create(**ask, prompt=prompt, n=2)
        assert [choice.index for choice in answer.choices] == list(range(2 * count))
        assert answer.usage.completion_tokens <= 3 * 2 * count
    answer = await api.client.completions.create(**ask, prompt=[40, 41, 42])
    assert answer.usage.prompt_tokens == 3


async def test_echo_repeats_the_prompt_with_its_logprobs(api: Api) -> None:
    ask = {"model": api.model, "prompt": PROMPT, "temperature": 0, "echo": True, "logprobs": 2}
    answer = await api.client.completions.create(**ask, max_tokens=3)
    (choice,) = answer.choices
    assert choice.text.startswith(PROMPT)
    api.same(choice.text, PROMPT + letters(3))
    shape = choice.logprobs
    length = answer.usage.total_tokens
    assert len(shape.tokens) == len(shape.token_logprobs) == length
    assert len(shape.top_logprobs) == len(shape.text_offset) == length
    assert shape.token_logprobs[0] is None
    assert all(value <= 0 for value in shape.token_logprobs[1:])
    assert shape.text_offset[0] == 0
    if api.is_fake:
        assert "".join(shape.tokens) == choice.text
        assert shape.text_offset == [len("".join(shape.tokens[:i])) for i in range(length)]
    text = ""
    tokens: list[str] = []
    stream = await api.client.completions.create(**ask, max_tokens=3, stream=True)
    async for chunk in stream:
        text += chunk.choices[0].text
        tokens += chunk.choices[0].logprobs.tokens if chunk.choices[0].logprobs else []
    assert (text, tokens) == (choice.text, shape.tokens)


async def test_no_tokens_at_all_may_be_asked_to_score_a_prompt(api: Api) -> None:
    answer = await api.client.completions.create(
        model=api.model, prompt=PROMPT, max_tokens=0, echo=True, logprobs=1
    )
    assert answer.choices[0].text == PROMPT
    assert answer.usage.completion_tokens == 0
    assert len(answer.choices[0].logprobs.tokens) == answer.usage.prompt_tokens


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_ends_the_text_before_it(api: Api, stream: bool) -> None:
    ask = {"model": api.model, "prompt": PROMPT, "max_tokens": 20, "temperature": 0, "seed": 3}
    full = (await api.client.completions.create(**ask)).choices[0].text
    stop = full[4:6]
    if not stop:
        pytest.skip("this model's text is too short to stop in")
    if stream:
        text, reason = "", None
        async for chunk in await api.client.completions.create(**ask, stop=stop, stream=True):
            text += chunk.choices[0].text
            reason = chunk.choices[0].finish_reason or reason
    else:
        (choice,) = (await api.client.completions.create(**ask, stop=[stop, "\0"])).choices
        text, reason = choice.text, choice.finish_reason
    assert reason == "stop"
    assert text == full[: full.find(stop)]


async def test_the_end_token_ends_the_text_unless_it_is_ignored(api: Api) -> None:
    if not api.is_fake:
        pytest.skip("only the alphabet is known to end")
    answer = await api.client.completions.create(model=api.model, prompt=PROMPT, max_tokens=40)
    assert answer.choices[0].text == letters(26)
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == 27
    answer = await api.client.completions.create(
        model=api.model, prompt=PROMPT, max_tokens=40, extra_body={"ignore_eos": True}
    )
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].text == letters(26) + letters(13)
    assert answer.usage.completion_tokens == 40


async def test_a_final_message_can_be_continued(api: Api) -> None:
    answer = await api.client.chat.completions.create(
        model=api.model,
        messages=[*HELLO, {"role": "assistant", "content": "abc"}],
        max_tokens=3,
        temperature=0,
        extra_body={
            "continue_final_message": True,
            "add_generation_prompt": False,
            "echo": True,
        },
    )
    content = answer.choices[0].message.content
    assert content.startswith("abc")
    api.same(content, letters(6))


async def test_token_ids_and_prompt_logprobs_come_when_asked(api: Api) -> None:
    extra = {"return_token_ids": True, "prompt_logprobs": 1}
    answer = await api.client.completions.create(
        model=api.model, prompt=PROMPT, max_tokens=3, temperature=0, extra_body=extra
    )
    choice = answer.choices[0].model_dump()
    assert len(choice["token_ids"]) == answer.usage.completion_tokens
    assert len(choice["prompt_token_ids"]) == answer.usage.prompt_tokens
    assert len(choice["prompt_logprobs"]) == answer.usage.prompt_tokens
    assert choice["prompt_logprobs"][0] is None
    for token_id, position in zip(
        choice["prompt_token_ids"][1:], choice["prompt_logprobs"][1:], strict=True
    ):
        assert position[str(token_id)]["logprob"] <= 0
    streamed: list[int] = []
    stream = await api.client.chat.completions.create(
        model=api.model, messages=HELLO, max_tokens=3, stream=True, extra_body=extra
    )
    first: Any = None
    async for chunk in stream:
        first = first or chunk.model_dump()
        streamed += chunk.choices[0].model_dump()["token_ids"]
    assert len(streamed) <= 3
    assert len(first["prompt_token_ids"]) == len(first["prompt_logprobs"])


async def test_a_chat_shows_the_text_that_its_template_made_when_asked(api: Api) -> None:
    ask: dict[str, Any] = {"model": api.model, "messages": HELLO, "max_tokens": 2, "n": 2}
    extra = {"return_prompt_text": True, "return_token_ids": True}
    answer = (await api.client.chat.completions.create(**ask, extra_body=extra)).model_dump()
    text = answer["prompt_text"]
    assert "Hello!" in text
    assert len(text) > len("Hello!")
    assert len(answer["choices"]) == 2
    stream = await api.client.chat.completions.create(**ask, stream=True, extra_body=extra)
    found: list[list[Any]] = [[], []]
    async for chunk in stream:
        for choice in chunk.choices:
            found[choice.index].append((chunk.model_extra or {}).get("prompt_text"))
    for texts in found:
        assert texts == [text, *[None] * (len(texts) - 1)]
        assert len(texts) > 1
    plain = await api.client.chat.completions.create(**ask)
    assert "prompt_text" not in plain.model_dump()
    # It is the text of which the prompt's tokens are made.
    ask |= {"n": 1, "extra_body": {"return_token_ids": True, "add_special_tokens": False}}
    chat = (await api.client.chat.completions.create(**ask)).model_dump()
    del ask["messages"]
    same = (await api.client.completions.create(**ask, prompt=text)).model_dump()
    assert same["choices"][0]["prompt_token_ids"] == chat["prompt_token_ids"]


async def test_an_echo_with_more_logprobs_adds_none_to_those_of_the_prompt(api: Api) -> None:
    extra = {"prompt_logprobs": 1}
    answer = await api.client.completions.create(
        model=api.model, prompt=PROMPT, max_tokens=3, echo=True, logprobs=4, extra_body=extra
    )
    choice = answer.choices[0].model_dump()
    for position, echoed in zip(
        choice["prompt_logprobs"][1:], choice["logprobs"]["top_logprobs"][1:], strict=False
    ):
        assert len(position) in (1, 2)  # the best one, and the prompt's own
        assert len(echoed) > 2


async def test_the_tokens_of_an_input_are_counted_as_the_answer_counts_them(api: Api) -> None:
    function = {"type": "function", "name": "tide", "parameters": {"type": "object"}}
    ask: dict[str, Any] = {
        "model": api.model,
        "input": HELLO,
        "instructions": "Be brief.",
        "tools": [function],
    }
    answer = await api.client.responses.create(**ask, max_output_tokens=1)
    counted = await api.client.responses.input_tokens.count(**ask)
    assert (counted.object, counted.input_tokens) == (
        "response.input_tokens",
        answer.usage.input_tokens,
    )
    shorter = await api.client.responses.input_tokens.count(**{**ask, "instructions": "Be"})
    assert shorter.input_tokens < counted.input_tokens
    with pytest.raises(openai.BadRequestError) as caught:
        await api.client.responses.input_tokens.count(**ask, previous_response_id="resp_1")
    assert caught.value.param == "previous_response_id"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"messages": []}, "messages"),
        ({"max_tokens": 10_000_000}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"top_logprobs": 4}, "top_logprobs"),
        ({"stop": [""]}, "stop"),
    ],
)
async def test_a_bad_request_is_one_to_the_client_too(
    api: Api, fields: dict[str, object], param: str
) -> None:
    ask = {"model": api.model, "messages": HELLO, **fields}
    with pytest.raises(openai.BadRequestError) as caught:
        await api.client.chat.completions.create(**ask)
    assert caught.value.param == param
    assert param in caught.value.message


async def test_a_wrong_key_and_a_wrong_path_have_errors_of_their_own(api: Api) -> None:
    if api.is_fake:
        with pytest.raises(openai.AuthenticationError):
            await api.client.with_options(api_key="wrong").models.list()
    with pytest.raises(openai.NotFoundError):
        await api.client.models.retrieve("no-such-model")
    with pytest.raises(openai.NotFoundError) as caught:
        await api.client.chat.completions.create(model="no-such-model", messages=HELLO)
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.NotFoundError):
        await api.client.embeddings.create(model=api.model, input="a")
