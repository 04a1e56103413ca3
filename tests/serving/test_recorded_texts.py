"""Every recorded text, prefix by prefix, through the detokenizer and through whole streams."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.generation import Tokens
from serving.prompt import Prompt
from serving.protocol import ChoiceAsk, Shown
from serving.tokenizer import Tokenizer
from tests.serving.streaming import Streaming
from transfer import wire

GOLDENS = Path(__file__).parents[1] / "goldens"
MODELS = sorted(path.parent.name for path in GOLDENS.glob("*/golden.json"))
TOKENIZER = Tokenizer.from_dir(GOLDENS / "tokenizer")
RUNS = (1, 2, 3, 5, 1000)  # tokens that are told at once


def _read(*path: str) -> Any:
    return json.loads(GOLDENS.joinpath(*path).read_text(encoding="utf-8"))


def recorded_streams(kind: str) -> list[tuple[str, list[int], dict[str, Any]]]:
    """(name, ids, what is recorded of them) of every stream."""
    streams = _read("tokenizer", "streams.json")["streams"]
    found = [s["keep_special"] if isinstance(s[kind], str) else s[kind] for s in streams]
    return [(s["name"], s["ids"], want) for s, want in zip(streams, found, strict=True)]


def recorded_texts(model: str) -> list[tuple[list[int], str]]:
    """(ids, text) of every continuation, and of the prompt that is a text."""
    prompts = _read(model, "golden.json")["prompts"]
    texts = [(prompt["greedy_ids"], prompt["greedy_text"]) for prompt in prompts]
    return [*texts, *((p["ids"], p["text"]) for p in prompts if p["name"] == "p130")]


def runs_of(ids: Sequence[int], size: int) -> list[list[int]]:
    return [list(ids[start : start + size]) for start in range(0, len(ids), size)]


def streamed(
    tokenizer: Tokenizer, runs: Sequence[Sequence[int]], interval: int = 1, **shown: Any
) -> list[str]:
    """The pieces of a stream that is told these runs; a stop string may end it."""
    sampling = wire.SamplingParams(max_new_tokens=1000)
    ask = ChoiceAsk(0, 0, "id", Prompt([1]), sampling, Shown(**shown))

    async def play() -> list[str]:
        run = Streaming([ask], tokenizer=tokenizer, interval=interval)
        sink = run.answer.sinks[0]
        for ids in runs:
            if not run.aborted:
                sink.on_tokens(Tokens(list(ids)))
        if not run.aborted:
            sink.on_end("length")
        await run.bench.stream.closed
        return run.texts()

    return asyncio.run(play())


def test_there_are_goldens() -> None:
    assert MODELS


@pytest.mark.parametrize("model", MODELS)
def test_each_prefix_of_a_golden_shows_what_stands_for_good(model: str) -> None:
    tokenizer = Tokenizer.from_dir(GOLDENS / model / "model")
    for ids, text in recorded_texts(model):
        for end in range(len(ids) + 1):
            for size in RUNS:
                stream = tokenizer.stream()
                shown = "".join(stream.push(run) for run in runs_of(ids[:end], size))
                assert text.startswith(shown)
                assert shown + stream.flush() == tokenizer.decode(ids[:end])
        assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("token_ids", [False, True])
def test_a_stream_of_a_golden_says_its_text(model: str, token_ids: bool) -> None:
    tokenizer = Tokenizer.from_dir(GOLDENS / model / "model")
    for ids, text in recorded_texts(model):
        for size in RUNS:
            for interval in (1, 4):
                runs = runs_of(ids, size)
                pieces = streamed(tokenizer, runs, interval, token_ids=token_ids)
                assert "".join(pieces) == text


@pytest.mark.parametrize("kind", ["keep_special", "skip_special"])
def test_each_prefix_of_a_recorded_stream_reads_as_recorded(kind: str) -> None:
    for name, ids, want in recorded_streams(kind):
        for end in range(1, len(ids) + 1):
            for size in RUNS:
                stream = TOKENIZER.stream(skip_special_tokens=kind == "skip_special")
                shown = "".join(stream.push(run) for run in runs_of(ids[:end], size))
                assert shown == "".join(want["pieces"][:end]), name
                assert shown + stream.flush() == want["prefix_texts"][end - 1], name


@pytest.mark.parametrize("kind", ["keep_special", "skip_special"])
def test_a_stream_shows_the_recorded_pieces_as_its_events(kind: str) -> None:
    for name, ids, want in recorded_streams(kind):
        skips = kind == "skip_special"
        pieces = streamed(TOKENIZER, runs_of(ids, 1), skip_special_tokens=skips)
        assert pieces == [text for text in [*want["pieces"], want["flush"]] if text], name
        for size in RUNS:
            for interval in (1, 4):
                runs = runs_of(ids, size)
                parts = streamed(TOKENIZER, runs, interval, skip_special_tokens=skips)
                assert "".join(parts) == want["text"], name


@st.composite
def cut_texts(draw: Any) -> tuple[list[int], tuple[str, ...]]:
    """Ids of a text, and stop strings that are in it across any tokens, or almost are."""
    text = draw(st.text(st.sampled_from("ab é世😀\n"), min_size=2, max_size=24))
    stops = []
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(text) - 1))
        end = draw(st.integers(start + 1, len(text)))
        stops.append(text[start:end] + draw(st.sampled_from(["", "", "x"])))
    return TOKENIZER.encode(text), tuple(stops)


@given(
    cut_texts(),
    st.lists(st.integers(1, 4), min_size=1, max_size=8),
    st.integers(1, 5),
    st.booleans(),
    st.booleans(),
)
@settings(max_examples=200)
def test_a_stop_string_across_tokens_never_leaks(
    text: tuple[list[int], tuple[str, ...]],
    cuts: list[int],
    interval: int,
    include_stop: bool,
    token_ids: bool,
) -> None:
    ids, stops = text
    whole = TOKENIZER.decode(ids)
    ends = [(whole.find(stop) + len(stop), -len(stop)) for stop in stops if stop in whole]
    if ends:
        end, minus_length = min(ends)  # the match that ends first, and of those the longest
        whole = whole[: end if include_stop else end + minus_length]
    runs: list[list[int]] = []
    rest = ids
    while rest:
        size = cuts[len(runs) % len(cuts)]
        runs.append(rest[:size])
        rest = rest[size:]
    pieces = streamed(
        TOKENIZER, runs, interval, stops=stops, include_stop=include_stop, token_ids=token_ids
    )
    assert "".join(pieces) == whole
