"""Streams of messages lend to the columns as those of chats do."""

from typing import Any

import pytest

from serving import plain_streams
from serving.messages_answers import MessagesAnswer
from serving.messages_fields import MessagesFields
from serving.parsing import Parsing
from serving.protocol import Request
from serving.tokenizer import Tokenizer
from tests.serving.live import EOS, FIRST_BYTE, LETTER_A, SECOND_BYTE
from tests.serving.stepped import DECODE, Crowd, begun
from tests.serving.streaming import TOKENIZER
from transfer import wire


@pytest.fixture(autouse=True)
def _any_crowd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_streams, "LEAST_STREAMS", 1)


def _answer(
    request: Request, tokenizer: Tokenizer, model_name: str, created: int
) -> MessagesAnswer:
    return MessagesAnswer(request, MessagesFields(max_tokens=99), tokenizer, model_name, Parsing())


def _thinking(
    request: Request, tokenizer: Tokenizer, model_name: str, created: int
) -> MessagesAnswer:
    fields, parsing = MessagesFields(max_tokens=99), Parsing("qwen3")
    return MessagesAnswer(request, fields, tokenizer, model_name, parsing)


async def _tell(crowd: Crowd, idx: int, token: int, finish: int = 0) -> None:
    await crowd.tell(DECODE, [(g.room, idx, token, finish) for g in crowd.generations])


def _texts(events: list[Any]) -> list[str]:
    return [event["delta"]["text"] for event in events if event["type"] == "content_block_delta"]


@pytest.mark.parametrize("last", [EOS, LETTER_A + 6], ids=["no text", "text"])
async def test_a_settled_message_lends_and_ends_as_it_began(last: int) -> None:
    crowd = await begun(spell=_answer)
    assert crowd.num_lent == 3
    (quote,) = TOKENIZER.encode('"', False)
    for idx, token in enumerate((FIRST_BYTE, SECOND_BYTE, quote), 4):
        await _tell(crowd, idx, token)
    assert crowd.num_lent == 3
    await _tell(crowd, 7, last, wire.STOP)
    for stream in crowd.streams:
        kinds = [event["type"] for event in stream.events]
        assert kinds[:2] == ["message_start", "content_block_start"]
        assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
        assert set(kinds[2:-3]) == {"content_block_delta"}
        assert "".join(_texts(stream.events)) == 'abcdé"' + ("" if last == EOS else "g")
        ending = stream.events[-2]
        assert ending["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
        assert ending["usage"]["output_tokens"] == 8


async def test_an_event_from_the_columns_is_one_of_the_stream_itself() -> None:
    crowd = await begun(spell=_answer)
    await _tell(crowd, 4, LETTER_A + 4)
    own, settled = (event for event in crowd.streams[0].events if _texts([event]) in (["a"], ["e"]))
    assert own | {"delta": None} == settled | {"delta": None}
    assert own["delta"]["type"] == settled["delta"]["type"] == "text_delta"


async def test_a_message_whose_text_is_parsed_keeps_its_stream() -> None:
    crowd = await begun(spell=_thinking)
    assert crowd.num_lent == 0
    assert [_texts(stream.events) for stream in crowd.streams] == [list("abcd")] * 3
