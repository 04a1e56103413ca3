"""POST /v1/responses where thoughts are asked for as summaries, by OpenAI's own client."""

from collections.abc import Sequence
from typing import Any

import openai
import pytest

from tests.serving.live import MODEL_NAME, live_server
from tests.serving.test_parsed_chats import ANSWER, writes
from tests.serving.test_responses import (
    ASK,
    EVENTS,
    PARSERS,
    TOOLS,
    client_of,
    events_of,
    without_ids,
)

THOUGHT = "They want é."
SUMMARY = [{"type": "summary_text", "text": THOUGHT}]
CONTENT = [{"type": "reasoning_text", "text": THOUGHT}]
SHORT: dict[str, Any] = {"reasoning": {"summary": "auto"}}


@pytest.mark.parametrize("name", ["summary", "generate_summary"])
@pytest.mark.parametrize("value", [None, "auto", "concise", "detailed"])
async def test_thoughts_are_the_summary_of_their_item_where_one_is_asked_for(
    name: str, value: str | None
) -> None:
    async with client_of(writes(ANSWER), **PARSERS) as responses:
        plain = (await responses.create(**ASK, tools=TOOLS)).to_dict()
        answer = (await responses.create(**ASK, tools=TOOLS, reasoning={name: value})).to_dict()
    assert answer["reasoning"] == {"effort": None, "summary": value}
    thought, *others = without_ids(answer["output"])
    summary, content = ([], CONTENT) if value is None else (SUMMARY, [])
    assert thought == {
        "type": "reasoning",
        "status": "completed",
        "summary": summary,
        "content": content,
    }
    assert others == without_ids(plain["output"])[1:]
    assert answer["usage"]["output_tokens_details"] == plain["usage"]["output_tokens_details"]


def put_together(events: Sequence[Any]) -> dict[str, Any]:
    """The first item, as its events spell it before the one that repeats the item whole."""
    added, *inner = events
    item: dict[str, Any] = added.item.to_dict()
    for event in inner:
        assert (event.item_id, event.summary_index) == (item["id"], 0)
        if event.type == "response.reasoning_summary_part.added":
            item["summary"].append(event.part.to_dict())
        elif event.type == "response.reasoning_summary_text.delta":
            item["summary"][0]["text"] += event.delta
        elif event.type == "response.reasoning_summary_text.done":
            assert event.text == item["summary"][0]["text"]
        else:
            assert event.type == "response.reasoning_summary_part.done"
            assert event.part.to_dict() == item["summary"][0]
    return item


@pytest.mark.parametrize("interval", [1, 50])
@pytest.mark.parametrize(("limit", "status"), [(None, "completed"), (8, "incomplete")])
async def test_a_stream_tells_the_summary_once_and_as_its_item_has_it(
    interval: int, limit: int | None, status: str
) -> None:
    body = ASK | SHORT | {"tools": TOOLS, "max_output_tokens": limit}
    async with client_of(writes(ANSWER), **PARSERS, stream_interval=interval) as responses:
        whole = (await responses.create(**body)).to_dict()
        async with responses.stream(**body) as stream:
            events = [event async for event in stream]
            final = events[-1].response.to_dict()
            if limit is None:
                assert (await stream.get_final_response()).to_dict() == final
    assert without_ids(final["output"][:1]) == without_ids(whole["output"][:1])
    told = [event for event in events if getattr(event, "output_index", None) == 0]
    kinds = [event.type.removeprefix("response.") for event in told]
    assert [kind for kind in kinds if kind != "reasoning_summary_text.delta"] == [
        "output_item.added",
        "reasoning_summary_part.added",
        "reasoning_summary_text.done",
        "reasoning_summary_part.done",
        "output_item.done",
    ]
    assert not any(event.type.startswith("response.reasoning_text") for event in events)
    item = put_together(told[:-1])
    assert item["summary"][0]["text"]
    assert told[-1].item.to_dict() == item | {"status": status} == final["output"][0]
    (done,) = (event for event in told if event.type.endswith("summary_part.done"))
    assert done.status == (None if limit is None else "incomplete")


async def test_the_events_of_a_summary_have_no_field_that_the_clients_types_lack() -> None:
    async with live_server(writes(ANSWER), **PARSERS) as live:
        events = await events_of(live, ASK | SHORT)
    for event in events:
        assert event.keys() <= type(EVENTS.validate_python(event)).model_fields.keys()


async def test_an_answer_with_a_summary_can_be_sent_back_as_it_came() -> None:
    used = []
    async with client_of(writes(ANSWER), **PARSERS) as responses:
        for asked in ({}, SHORT):
            first = await responses.create(**ASK, **asked)
            items = [{"role": "user", "content": "Weather?"}, *first.to_dict()["output"]]
            again = await responses.create(**ASK | {"input": items})
            used.append(again.usage.input_tokens)
    assert used[0] == used[1]


@pytest.mark.parametrize("name", ["summary", "generate_summary"])
@pytest.mark.parametrize("value", ["", "none", "full"])
async def test_another_kind_of_summary_is_refused(name: str, value: str) -> None:
    async with client_of() as responses:
        with pytest.raises(openai.BadRequestError) as caught:
            await responses.create(model=MODEL_NAME, input="a", reasoning={name: value})
    expected = f"reasoning.{name}: expected auto, concise or detailed, got '{value}'"
    assert isinstance(caught.value.body, dict)
    assert caught.value.body["message"] == expected
    assert caught.value.param == "reasoning"
