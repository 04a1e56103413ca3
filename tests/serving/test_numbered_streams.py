"""Streams with numbered events lend to the columns too, and know afterwards what was said."""

import tracemalloc
from typing import Any

import pytest

from serving import plain_streams
from serving.json_bytes import spelled
from serving.parsing import Parsing
from serving.protocol import Request
from serving.responses_answers import ResponsesAnswer
from serving.responses_fields import ResponsesFields
from serving.tokenizer import Tokenizer
from tests.serving.live import EOS, FIRST_BYTE, LETTER_A, SECOND_BYTE
from tests.serving.stepped import DECODE, Crowd, begun
from tests.serving.streaming import TOKENIZER, Streaming, asked, response_answer
from transfer import wire


@pytest.fixture(autouse=True)
def _any_crowd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_streams, "LEAST_STREAMS", 1)


def _thinking(
    request: Request, tokenizer: Tokenizer, model_name: str, created: int
) -> ResponsesAnswer:
    fields, parsing = ResponsesFields(input="Hi"), Parsing("qwen3")
    return ResponsesAnswer(request, fields, tokenizer, model_name, created, parsing)


def _texts(events: list[Any]) -> list[str]:
    return [event["delta"] for event in events if event["type"] == "response.output_text.delta"]


def _events(stream: Streaming) -> list[Any]:
    """All events of a stream, checked to be numbered from 0 on."""
    found = [event for event in stream.events if event != "[DONE]"]
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


async def _tell(crowd: Crowd, idx: int, token: int, finish: int = 0) -> None:
    await crowd.tell(DECODE, [(g.room, idx, token, finish) for g in crowd.generations])


async def test_a_settled_response_lends_and_its_events_are_numbered_on() -> None:
    crowd = await begun(spell=response_answer)
    assert crowd.num_lent == 3
    for idx in range(4, 7):
        await _tell(crowd, idx, LETTER_A + idx)
    assert [_texts(_events(stream)) for stream in crowd.streams] == [list("abcdefg")] * 3
    assert crowd.num_lent == 3


@pytest.mark.parametrize("last", [EOS, LETTER_A + 6], ids=["no text", "text"])
async def test_the_end_repeats_all_that_was_said_wherever_it_was_written(last: int) -> None:
    crowd = await begun(spell=response_answer)
    await _tell(crowd, 4, FIRST_BYTE)
    await _tell(crowd, 5, SECOND_BYTE)
    await _tell(crowd, 6, last, wire.STOP)
    said = "abcdé" if last == EOS else "abcdég"
    for stream in crowd.streams:
        events = _events(stream)
        assert "".join(_texts(events)) == said
        done = next(event for event in events if event["type"] == "response.output_text.done")
        assert done["text"] == said
        assert events[-1]["type"] == "response.completed"
        (item,) = events[-1]["response"]["output"]
        assert item["content"][0]["text"] == said
        assert events[-1]["response"]["usage"]["output_tokens"] == 7


async def test_a_slow_client_takes_its_response_back_and_lends_again() -> None:
    crowd = await begun(spell=response_answer)
    slow = crowd.streams[0]
    slow.bench.wire.free.clear()
    await _tell(crowd, 4, LETTER_A + 4)
    await _tell(crowd, 5, LETTER_A + 5)
    assert crowd.num_lent == 2
    slow.bench.wire.free.set()
    for idx in (6, 7, 8):
        await _tell(crowd, idx, LETTER_A + idx)
    assert crowd.num_lent == 3
    await _tell(crowd, 9, LETTER_A + 9, wire.LENGTH)
    for stream in crowd.streams:
        events = _events(stream)
        assert "".join(_texts(events)) == "abcdefghij"
        assert events[-1]["response"]["output"][0]["content"][0]["text"] == "abcdefghij"
        assert events[-1]["type"] == "response.incomplete"


async def test_text_that_json_escapes_is_repeated_as_it_was() -> None:
    crowd = await begun(spell=response_answer)
    (quote,) = TOKENIZER.encode('"', False)
    await _tell(crowd, 4, quote)
    await _tell(crowd, 5, EOS, wire.STOP)
    for stream in crowd.streams:
        assert _events(stream)[-1]["response"]["output"][0]["content"][0]["text"] == 'abcd"'


async def test_a_response_whose_text_is_parsed_keeps_its_stream() -> None:
    crowd = await begun(spell=_thinking)
    assert crowd.num_lent == 0
    assert [_texts(_events(stream)) for stream in crowd.streams] == [list("abcd")] * 3


async def test_a_response_with_logprobs_has_no_frame() -> None:
    stream = Streaming([asked(num_logprobs=2)], spell=response_answer)
    (choice,) = stream.choices
    stream.spelling.opening(choice)
    assert stream.spelling.frame(choice) is None


def test_what_is_kept_as_json_takes_no_more_memory_than_it_is_long() -> None:
    tracemalloc.start()
    try:
        kept = [spelled("text") for _ in range(100)]
        size = tracemalloc.get_traced_memory()[0] / len(kept)
    finally:
        tracemalloc.stop()
    assert size < 500
