"""bad_words: how a word is spelled in tokens, and what is refused."""

import json
import threading
from typing import Any

import pytest

from serving import bad_words
from serving.errors import ApiError
from serving.messages_api import MessagesReader
from serving.messages_fields import read_messages
from serving.protocol import Request
from tests.serving.live import EOS
from tests.serving.test_protocol import HELLO, TOKENIZER, chat, completion, generate, served
from tests.serving.test_refused_fields import responses


async def messages(**fields: Any) -> Request:
    body = json.dumps({"messages": HELLO, "max_tokens": 9, **fields}).encode()
    return await MessagesReader(read_messages(body), served()).finish(None)


READS = [completion, chat, responses, messages]
CONVERSATIONS = [responses, messages]  # which have one choice


def ids(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.encode(text, add_special_tokens=False))


async def spelled(*words: str) -> set[tuple[int, ...]]:
    (choice,) = (await completion(bad_words=list(words))).choices
    return {*choice.sampling.bad_words}


async def test_a_word_is_forbidden_at_the_beginning_and_behind_a_space() -> None:
    assert len(ids("the")) > len(ids(" the"))
    assert await spelled("the") == {ids("the"), ids(" the")}
    assert len(ids("cat")) == len(ids(" cat"))
    assert await spelled(" cat", "cat") == {ids("cat"), ids(" cat")}


async def test_a_space_that_is_a_token_of_its_own_needs_no_second_sequence() -> None:
    assert ids(" é") == (*ids(" "), *ids("é"))
    assert await spelled("é") == {ids("é")}


async def test_white_space_in_front_that_is_no_single_space_is_forbidden_as_given() -> None:
    assert await spelled("\n") == {ids("\n")}
    assert await spelled("\n\ncat") == {ids("\n\ncat"), ids("cat"), ids(" cat")}


async def test_special_tokens_written_in_a_word_count_and_none_is_added() -> None:
    assert await spelled("<|im_end|>") == {(EOS,)}


@pytest.mark.parametrize("read", READS)
async def test_every_choice_of_every_route_has_the_sequences(read: Any) -> None:
    found = await read(bad_words=["é", "hello", "é"], n=1 if read in CONVERSATIONS else 3)
    for choice in found.choices:
        assert choice.sampling.bad_words == (ids("é"), ids("hello"), ids(" hello"))
    for same in (await read(bad_words=[]), await read(bad_words=None)):
        assert same.choices[0].sampling.bad_words == ()


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("ferry", "Expected `array | null`, got `str`"),
        ([5], "Expected `str`, got `int`"),
        (["a", ""], "bad_words: a word must not be empty"),
        (["é"] * 129, "bad_words: at most 128, got 129"),
        (["a" * 257], "bad_words: at most 256 characters in a word, got 257"),
        (["h" * 40], f"bad_words: '{'h' * 40}' has "),
        (
            [a + b for a in "bcdfghjklm" for b in "npqrstvwxz"],
            "bad_words: at most 128 sequences of tokens, got ",
        ),
    ],
)
async def test_words_that_cannot_be_served_are_refused(read: Any, words: Any, message: str) -> None:
    with pytest.raises(ApiError) as caught:
        await read(bad_words=words)
    assert (caught.value.status, caught.value.param) == (400, "bad_words")
    assert message in caught.value.message


async def test_a_word_of_tokens_that_the_model_does_not_have_is_refused() -> None:
    model = served()
    model.vocab_size = EOS
    with pytest.raises(ApiError, match=f"bad_words: '<.im_end.>' is token {EOS}, and the model"):
        await completion(model, bad_words=["a", "<|im_end|>"])


async def test_many_long_words_are_spelled_off_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads = []
    spell = bad_words._spellings

    def seen(words: Any, model: Any) -> Any:
        threads.append(threading.current_thread())
        return spell(words, model)

    monkeypatch.setattr(bad_words, "_spellings", seen)
    await completion(bad_words=["cat"])
    blanks = [" " * (128 + at) + "cat" for at in range(40)]
    await completion(bad_words=blanks)
    assert [each is threading.main_thread() for each in threads] == [True, False]


async def test_generate_has_no_such_field_as_in_sglang() -> None:
    with pytest.raises(ApiError, match="'bad_words' is no field of sampling_params"):
        await generate(sampling_params={"bad_words": ["a"]})
