"""truncate_prompt_tokens: which tokens of a prompt are left, what is refused, what answers show."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import processors

from serving.errors import ApiError
from serving.messages_fields import read_messages
from serving.tokenizer import Tokenizer
from tests.serving.live import LETTER_A, MODEL_PATH, letters, live_server
from tests.serving.test_protocol import HELLO, TOKENIZER, chat, completion, served
from tests.serving.test_refused_fields import refused, responses
from tests.serving.test_tokenizer import sentencepiece_like

WORDS = "the night ferry leaves at ten and comes back before the market opens "


@pytest.mark.parametrize("prompt", [WORDS, TOKENIZER.encode(WORDS)])
async def test_the_last_tokens_of_a_prompt_are_left(prompt: Any) -> None:
    ids = TOKENIZER.encode(WORDS)
    for most in (1, 5, len(ids) - 1, len(ids), len(ids) + 1):
        for given in (prompt, [prompt, prompt]):
            asked = await completion(prompt=given, truncate_prompt_tokens=most)
            assert [choice.prompt.ids for choice in asked.choices] == [ids[-most:]] * len(
                asked.choices
            )


async def test_the_last_tokens_of_a_rendered_chat_are_left() -> None:
    whole = (await chat()).choices[0].prompt.ids
    asked = (await chat(truncate_prompt_tokens=4)).choices[0]
    assert asked.prompt.ids == whole[-4:]
    assert asked.sampling.max_new_tokens == 512 - 4


async def test_minus_one_leaves_as_many_tokens_as_fit_before_the_output() -> None:
    ids, on = list(range(1, 200)), served(100)
    for fields, most in (
        ({}, 84),  # completions write 16 tokens
        ({"max_tokens": 30}, 70),
        ({"min_tokens": 20}, 80),
        ({"max_tokens": 0, "echo": True}, 99),
    ):
        if "min_tokens" in fields:
            fields |= {"max_tokens": 20}
        asked = await completion(on, prompt=ids, truncate_prompt_tokens=-1, **fields)
        assert asked.choices[0].prompt.ids == ids[-most:]
        assert asked.choices[0].sampling.max_new_tokens == 100 - most
    long = [{"role": "user", "content": WORDS * 20}]
    for fields, most in (({}, 99), ({"max_tokens": 30}, 70), ({"max_completion_tokens": 40}, 60)):
        asked = await chat(on, messages=long, truncate_prompt_tokens=-1, **fields)
        assert len(asked.choices[0].prompt.ids) == most
        assert asked.choices[0].sampling.max_new_tokens == 100 - most
    assert len((await chat(on, truncate_prompt_tokens=-1)).choices[0].prompt.ids) < 99


@pytest.mark.parametrize("read", [completion, chat])
async def test_what_no_prompt_can_be_cut_to_is_refused(read: Any) -> None:
    for fields, message in (
        ({"truncate_prompt_tokens": 0}, "must be -1 (as many as fit), or at least 1, got 0"),
        ({"truncate_prompt_tokens": -2}, "must be -1 (as many as fit), or at least 1, got -2"),
        ({"truncate_prompt_tokens": "5"}, "Expected int | null, got str"),
        (
            {"truncate_prompt_tokens": 83, "max_tokens": 18},
            "is 100 tokens, prompt and output together; 83 of the prompt before an output of 18",
        ),
    ):
        with pytest.raises(ApiError, match="truncate_prompt_tokens") as caught:
            await read(served(100), **fields)
        assert (caught.value.status, caught.value.param) == (400, "truncate_prompt_tokens")
        assert message in caught.value.message.replace("`", "")
    await read(served(100), truncate_prompt_tokens=82, max_tokens=18)
    with pytest.raises(ApiError) as caught:
        await read(served(100), truncate_prompt_tokens=1, max_tokens=100)
    assert caught.value.param == "max_tokens"


async def test_prompts_are_cut_from_the_left_and_only_where_other_servers_cut_them() -> None:
    for read in (completion, chat):
        error = await refused(read, truncate_prompt_tokens=2, truncation_side="right")
        assert error.param == "truncation_side"
        await read(truncate_prompt_tokens=2, truncation_side="left")
    assert (await refused(responses, truncate_prompt_tokens=5)).param == "truncate_prompt_tokens"
    body = {"messages": HELLO, "max_tokens": 5, "truncate_prompt_tokens": 5}
    with pytest.raises(ApiError, match="truncate_prompt_tokens"):
        read_messages(json.dumps(body).encode())


@pytest.mark.parametrize("name", ["tokenizer", "tiktoken"])
async def test_of_a_text_far_past_the_context_only_the_end_is_tokenized(name: str) -> None:
    encoded: list[int] = []

    class Counted(Tokenizer):
        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            encoded.append(len(text))
            return super().encode(text, add_special_tokens)

    folder = MODEL_PATH.parents[1] / name
    text = "".join(f"{number} ships, 渡轮 {'x' * (number % 50)}\n" for number in range(60_000))
    on = served()
    on.tokenizer = Counted.from_dir(folder)
    on.vocab_size = on.tokenizer.vocab_size
    asked = await completion(on, prompt=text, truncate_prompt_tokens=-1)
    assert sum(encoded) < 3 << 16
    assert asked.choices[0].prompt.ids == Tokenizer.from_dir(folder).encode(text)[-496:]


def test_the_end_of_a_text_has_enough_tokens_of_whatever_size() -> None:
    dense, sparse = "a1b2" * 30_000, " " * 200_000
    for text in (dense + sparse, sparse + dense, sparse, "short"):
        whole = TOKENIZER.encode(text)
        for enough in (1, 100, 3000, len(whole), 2 * len(whole)):
            end = TOKENIZER.end_of(text, enough)
            assert text.endswith(end)
            assert TOKENIZER.encode(end)[-enough:] == whole[-enough:]


@pytest.fixture
def begun(tmp_path: Path) -> Tokenizer:
    """A tokenizer that puts a special token before each text."""
    backend = sentencepiece_like()
    backend.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 1)])
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
    return Tokenizer.from_dir(tmp_path)


async def test_a_token_that_the_tokenizer_puts_in_front_stays_and_counts(begun: Tokenizer) -> None:
    on = served()
    on.tokenizer = begun
    ids = begun.encode("the cat")
    for most, left in ((1, [1]), (3, [1, *ids[-2:]]), (len(ids), ids)):
        asked = await completion(on, prompt="the cat", truncate_prompt_tokens=most, echo=True)
        assert asked.choices[0].prompt.ids == left
        assert asked.choices[0].prompt.text == begun.decode(left)
    for given in ({"prompt": ids}, {"prompt": "the cat", "add_special_tokens": False}):
        asked = await completion(on, **given, truncate_prompt_tokens=2)
        assert asked.choices[0].prompt.ids == ids[-2:]


async def test_answers_count_and_show_what_is_left_of_the_prompt() -> None:
    ids = TOKENIZER.encode(WORDS)
    ask = {"prompt": WORDS, "truncate_prompt_tokens": 4, "max_tokens": 3}
    shown = {"echo": True, "logprobs": 0, "return_token_ids": True}
    end = TOKENIZER.decode(ids[-4:], False)
    async with live_server() as live:
        answer = (await live.post("/v1/completions", ask | shown)).json()
        (choice,) = answer["choices"]
        assert choice["text"] == end + letters(3)
        assert choice["prompt_token_ids"] == ids[-4:]
        assert answer["usage"]["prompt_tokens"] == 4
        offsets = choice["logprobs"]["text_offset"]
        assert offsets[4:] == [len(end), len(end) + 1, len(end) + 2]
        events = await live.events("/v1/completions", ask | shown | {"stream": True})
        streamed = "".join(event["choices"][0]["text"] for event in events[:-1])
        assert streamed == choice["text"]
        # The network answers to the last token: it is still the last.
        letter = {"prompt": [5] * 600 + [LETTER_A], "truncate_prompt_tokens": -1, "max_tokens": 2}
        answer = (await live.post("/v1/completions", letter)).json()
        assert answer["choices"][0]["text"] == "bc"
        assert answer["usage"]["prompt_tokens"] == 510
        long = {"messages": [{"role": "user", "content": WORDS * 100}], "max_tokens": 2}
        assert (await live.post("/v1/chat/completions", long)).status_code == 400
        cut = long | {"truncate_prompt_tokens": 100}
        answer = (await live.post("/v1/chat/completions", cut)).json()
        assert answer["choices"][0]["message"]["content"] == letters(2)
        assert answer["usage"]["prompt_tokens"] == 100
