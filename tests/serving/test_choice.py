"""What text a choice's tokens show: stops, special tokens, characters in halves."""

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.generation import Tokens
from serving.prompt import Prompt
from serving.tokenizer import Tokenizer
from tests.serving.live import EOS, FIRST_BYTE, LETTER_A, SECOND_BYTE
from tests.serving.streaming import LETTERS, TOKENIZER, Streaming, asked
from tests.serving.test_tokenizer import sentencepiece_like


async def test_a_stop_string_ends_the_choice_and_aborts_its_generation() -> None:
    run = Streaming([asked(stops=("cd", "xyz")), asked(1)])
    first, second = run.answer.sinks
    first.on_tokens(Tokens([LETTERS[0]]))
    first.on_tokens(Tokens(LETTERS[1:3]))
    assert run.texts() == ["a", "b"], "c may be the start of cd"
    second.on_tokens(Tokens([LETTERS[25]]))
    first.on_tokens(Tokens(LETTERS[3:6]))
    assert run.aborted == [(first.generation, "stop")]
    assert run.texts() == ["a", "b"]
    assert not run.bench.stream.closed.done()
    second.on_end("length")
    await run.bench.stream.closed
    ends = [e["choices"][0] for e in run.events[:-1] if e["choices"][0]["finish_reason"]]
    assert [(end["index"], end["finish_reason"], end["stop_reason"]) for end in ends] == [
        (0, "stop", "cd"),
        (1, "length", None),
    ]
    assert run.choices[0].num_tokens == 4, "the token that completed the match counts, later not"


async def test_text_held_back_for_a_stop_string_comes_at_the_end() -> None:
    run = Streaming([asked(stops=("cx",))])
    sink = run.answer.sinks[0]
    for token_id in LETTERS[:3]:
        sink.on_tokens(Tokens([token_id]))
    sink.on_end("length")
    assert "".join(run.texts()) == "abc"


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        ({}, "a"),
        ({"include_stop": True}, "a&"),
        ({"stops": ("zz",)}, "a"),
    ],
)
async def test_a_stop_token_that_is_no_special_one_shows_only_when_asked(
    shown: dict[str, Any], expected: str
) -> None:
    run = Streaming([asked(stop_ids=frozenset({5}), **shown)])
    sink = run.answer.sinks[0]
    sink.on_tokens(Tokens([LETTER_A]))
    sink.on_tokens(Tokens([5]))
    sink.on_end("stop")
    assert "".join(run.texts()) == expected
    assert run.choices[0].num_tokens == 2
    assert run.events[-2]["choices"][0]["stop_reason"] == 5


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        ({}, "a"),
        ({"skip_special_tokens": False}, "a"),
        ({"skip_special_tokens": False, "include_stop": True}, "a<|im_end|>"),
    ],
)
async def test_the_end_token_shows_only_when_all_ask_for_it(
    shown: dict[str, Any], expected: str
) -> None:
    run = Streaming([asked(**shown)])
    sink = run.answer.sinks[0]
    sink.on_tokens(Tokens([LETTER_A]))
    sink.on_tokens(Tokens([EOS]))
    sink.on_end("stop")
    assert "".join(run.texts()) == expected
    assert run.events[-2]["choices"][0]["stop_reason"] is None


async def test_halves_of_a_character_make_no_event() -> None:
    run = Streaming([asked()], is_chat=False)
    sink = run.answer.sinks[0]
    sink.on_tokens(Tokens([FIRST_BYTE]))
    assert run.texts() == []
    sink.on_tokens(Tokens([SECOND_BYTE]))
    sink.on_tokens(Tokens([FIRST_BYTE]))
    sink.on_end("length")
    assert run.texts() == ["é", "\N{REPLACEMENT CHARACTER}"]
    assert run.events[-2]["choices"][0]["finish_reason"] == "length"


@given(
    ids=st.lists(st.integers(0, 1023), min_size=1, max_size=40),
    cuts=st.lists(st.integers(1, 5), min_size=40, max_size=40),
    stops=st.lists(st.text("abc", min_size=1, max_size=3), max_size=2),
    interval=st.integers(1, 5),
    detailed=st.booleans(),
)
@settings(max_examples=100)
def test_streams_of_any_cut_join_into_the_whole_text(
    ids: list[int], cuts: list[int], stops: list[str], interval: int, detailed: bool
) -> None:
    ids = [token_id for token_id in ids if token_id not in (EOS, 5)] or [LETTER_A]

    async def play() -> str:
        ask = asked(stops=tuple(stops), token_ids=detailed)
        run = Streaming([ask], interval=interval, is_chat=False)
        start = 0
        for cut in cuts:
            if start < len(ids) and not run.aborted:
                run.answer.sinks[0].on_tokens(Tokens(ids[start : start + cut]))
            start += cut
        if not run.aborted:
            run.answer.sinks[0].on_end("length")
        await run.bench.stream.closed
        return "".join(run.texts())

    whole = TOKENIZER.decode(ids)
    ends = [whole.find(stop) + len(stop) for stop in stops if stop in whole]
    if ends:
        # The match that ends first, and of those the longest.
        end = min(ends)
        stop = max((s for s in stops if whole[:end].endswith(s)), key=len)
        whole = whole[: end - len(stop)]
    assert asyncio.run(play()) == whole


async def test_a_first_word_keeps_the_space_before_it_where_tokens_have_no_bytes() -> None:
    """A SentencePiece vocabulary, whose decoder takes a text's first space away."""
    backend = sentencepiece_like()
    tokenizer = Tokenizer(backend, {"eos_token": "</s>"}, {}, False)
    prompt = Prompt(backend.encode("a cat,").ids, "a cat,")
    for stops, shown in (((), " the"), ((" the",), "")):
        run = Streaming([asked(prompt=prompt, stops=stops)], tokenizer=tokenizer, is_chat=False)
        sink = run.answer.sinks[0]
        sink.on_tokens(Tokens([tokenizer.token_id("▁the") or 0]))
        sink.on_end("length")
        await run.bench.stream.closed
        assert "".join(run.texts()) == shown
