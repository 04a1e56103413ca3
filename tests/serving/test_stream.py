"""Events leave in order, a slow client costs only itself, the fast path spells as the plain one."""

import asyncio

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.chat import ChatCompletionChunk

from serving.choice import Choice, Piece
from serving.errors import ApiError, bad_field
from serving.event_stream import EventStream, SlowClient
from serving.generation import Tokens
from serving.json_bytes import dumps
from serving.openai_answers import chat_answer, completion_answer
from serving.prompt import Prompt
from serving.protocol import Request
from serving.tokenizer import Tokenizer
from tests.recording import until
from tests.serving.live import EOS, FIRST_BYTE, LETTER_A, SECOND_BYTE
from tests.serving.plain import cleaned
from tests.serving.streaming import LETTERS, TIMEOUT_S, TOKENIZER, Bench, Streaming, asked
from tests.serving.test_tokenizer import sentencepiece_like
from transfer.errors import Code, RequestError


async def test_what_is_written_in_one_turn_leaves_at_its_end_in_one_write_each() -> None:
    one, other = Bench(), Bench()
    other.stream = EventStream(
        other.wire.send, other.wire.send, None, [], one.outbox, other.timers, 9, 9
    )
    for text in (b"a", b"b"):
        one.stream.write(text)
        other.stream.write(text, last=text == b"b")
    assert one.wire.messages == other.wire.messages == []
    await asyncio.sleep(0)
    assert one.wire.bodies == other.wire.bodies == [b"ab"]
    await other.stream.closed


async def test_a_write_has_left_when_its_turn_is_over() -> None:
    bench = Bench()
    bench.write(b"one")
    assert [message["type"] for message in bench.wire.messages] == [
        "http.response.start",
        "http.response.body",
    ]
    bench.write(b"two")
    bench.write(b"end", last=True)
    assert bench.wire.bodies == [b"one", b"two", b"end"]
    assert [m.get("more_body") for m in bench.wire.messages] == [None, True, True, False]
    await bench.stream.closed
    bench.write(b"late")
    assert len(bench.wire.bodies) == 3
    assert bench.timers.num_set == 0


async def test_events_that_repeat_others_take_their_places_while_those_wait() -> None:
    bench = Bench(max_unread_bytes=30)
    bench.write(b"0: a,", repeats=0)
    bench.wire.free.clear()
    bench.write(b"0: ab,", repeats=0)  # in the server's hands
    for text in (b"a,", b"ab,", b"abc,"):
        bench.write(b"1: " + text, repeats=1)
        bench.write(b"0: ab" + text, repeats=0)
    bench.write(b"other,")
    bench.write(b"1: abcd,", repeats=1)
    assert bench.stream._unread_bytes == len(b"0: ab,1: abcd,0: ababc,other,")
    assert bench.timers.num_set == 0
    bench.write(b"1: " + b"x" * 9, repeats=1)
    assert bench.timers.num_set == 1, "what is left counts against the buffer"
    bench.wire.takes_one = True
    bench.wire.free.set()
    await until(lambda: len(bench.wire.bodies) == 2)
    bench.wire.free.set()
    await until(lambda: len(bench.wire.bodies) == 3)
    assert bench.wire.bodies[1:] == [b"0: ab,", b"1: xxxxxxxxx0: ababc,other,"]
    assert bench.timers.num_set == 0
    bench.write(b"0: c,", repeats=0)  # waits in the wire
    bench.write(b"1: d,", repeats=1)
    bench.write(b"0: cd,", repeats=0)
    bench.write(b"1: de,end", last=True, repeats=1)
    bench.wire.takes_one = False
    bench.wire.free.set()
    await bench.stream.closed
    assert bench.wire.bodies[3:] == [b"0: c,", b"0: cd,1: de,end"]
    assert bench.stream._unread_bytes == 0


async def test_a_choice_that_is_always_behind_another_has_its_turn_too() -> None:
    bench = Bench(max_unread_bytes=1 << 30)
    bench.write(b"begin")
    bench.wire.takes_one = True
    bench.wire.free.clear()
    bench.write(b"wait")
    while len(bench.wire.bodies) < 5:
        for choice in range(3):
            bench.write(bytes([choice]) * 70_000, repeats=choice)
        bench.wire.free.set()
        await until(lambda: not bench.wire.free.is_set())  # it took one
    assert [body[0] for body in bench.wire.bodies[2:]] == [0, 1, 2]
    bench.stream.close()


async def test_what_a_slow_client_keeps_waiting_leaves_merged_and_in_order() -> None:
    bench = Bench()
    bench.write(b"one,")
    bench.wire.free.clear()
    for text in (b"two,", b"three,", b"four,"):
        bench.write(text)
    await asyncio.sleep(0)
    assert bench.wire.bodies == [b"one,"]
    bench.wire.free.set()
    await until(lambda: len(bench.wire.bodies) == 3)
    assert bench.wire.bodies == [b"one,", b"two,", b"three,four,"]
    bench.write(b"five,")
    bench.write(b"six", last=True)
    await bench.stream.closed
    assert b"".join(bench.wire.bodies) == b"one,two,three,four,five,six"
    assert bench.timers.num_set == 0


async def test_the_first_write_may_wait_as_well() -> None:
    bench = Bench()
    bench.wire.free.clear()
    bench.write(b"one,")
    bench.write(b"two", last=True)
    assert not bench.stream.closed.done()
    bench.wire.free.set()
    await bench.stream.closed
    assert bench.wire.bodies == [b"one,", b"two"]
    assert bench.wire.messages[-1]["more_body"] is False


@given(st.lists(st.tuples(st.binary(min_size=1, max_size=8), st.booleans(), st.booleans())))
@settings(max_examples=60)
def test_whatever_the_client_does_it_reads_every_byte_once(
    writes: list[tuple[bytes, bool, bool]],
) -> None:
    async def play() -> None:
        bench = Bench()
        for data, is_free, turns in writes:
            if is_free:
                bench.wire.free.set()
            else:
                bench.wire.free.clear()
            bench.write(data)
            if turns:
                await asyncio.sleep(0)
        bench.write(b"!", last=True)
        bench.wire.free.set()
        await bench.stream.closed
        assert b"".join(bench.wire.bodies) == b"".join([data for data, _, _ in writes]) + b"!"
        assert [m["more_body"] for m in bench.wire.messages[1:]].count(False) == 1
        assert bench.timers.num_set == 0

    asyncio.run(play())


async def test_a_client_that_leaves_too_much_unread_for_too_long_is_given_up() -> None:
    bench = Bench()
    bench.wire.free.clear()
    bench.write(b"x" * 60)
    assert bench.timers.num_set == 0, "less than the buffer is unread"
    bench.write(b"x" * 60)
    assert bench.timers.num_set == 1
    bench.timers.advance(TIMEOUT_S + 1)
    with pytest.raises(SlowClient, match="120 bytes"):
        await bench.stream.closed
    bench.stream.close()
    await asyncio.sleep(0)
    assert bench.wire.messages == []


async def test_a_client_that_catches_up_in_time_is_kept() -> None:
    bench = Bench()
    bench.wire.free.clear()
    bench.write(b"x" * 60)
    bench.write(b"y" * 60)
    bench.timers.advance(TIMEOUT_S - 1)
    bench.wire.free.set()
    await until(lambda: len(bench.wire.bodies) == 2)
    bench.timers.advance(TIMEOUT_S)
    bench.write(b"z", last=True)
    await bench.stream.closed


async def test_a_client_that_never_reads_the_end_is_given_up() -> None:
    bench = Bench()
    bench.wire.free.clear()
    bench.write(b"end", last=True)
    bench.timers.advance(TIMEOUT_S + 1)
    with pytest.raises(SlowClient):
        await bench.stream.closed
    assert bench.wire.was_aborted, "or it would wait for the client"
    bench.stream.close()


async def test_a_client_that_reads_a_little_and_no_more_is_given_up() -> None:
    bench = Bench(max_unread_bytes=100_000)
    bench.write(b"1")
    bench.wire.free.clear()
    bench.wire.takes_one = True
    for _ in range(5):
        bench.write(b"x" * 40_000)
    bench.write(b"end", last=True)
    for num_writes in (2, 3):
        bench.wire.free.set()
        await until(lambda: len(bench.wire.bodies) == num_writes)  # noqa: B023  (it runs now)
    assert [len(body) for body in bench.wire.bodies] == [1, 40_000, 80_000]
    assert bench.timers.num_set == 1
    assert not bench.stream.closed.done()
    bench.timers.advance(TIMEOUT_S + 1)
    with pytest.raises(SlowClient, match="80003 bytes"):
        await bench.stream.closed
    bench.stream.close()


@pytest.mark.parametrize("ended", [False, True])
async def test_a_client_that_only_trickles_is_given_up(ended: bool) -> None:
    bench = Bench(max_unread_bytes=100_000)
    bench.write(b"1")
    bench.wire.free.clear()
    bench.wire.takes_one = True
    for _ in range(5):
        bench.write(b"x" * 70_000)
    if ended:
        bench.write(b"end", last=True)
    for num_writes in (2, 3):
        bench.timers.advance(TIMEOUT_S / 3)
        bench.wire.free.set()
        await until(lambda: len(bench.wire.bodies) == num_writes)  # noqa: B023  (it runs now)
    assert not bench.stream.closed.done()
    bench.timers.advance(TIMEOUT_S / 3 + 1)
    with pytest.raises(SlowClient):
        await bench.stream.closed
    assert bench.wire.was_aborted
    bench.stream.close()


async def test_much_that_waited_leaves_in_several_writes() -> None:
    bench = Bench(max_unread_bytes=1 << 20)
    bench.write(b"0")
    bench.wire.free.clear()
    parts = [bytes([ord("a") + place]) * size for place, size in enumerate((9, 70_000, 65_000, 9))]
    for part in parts:
        bench.write(part)
    bench.write(b"end", last=True)
    bench.wire.free.set()
    await bench.stream.closed
    assert [len(body) for body in bench.wire.bodies] == [1, 9, 70_000, 65_009 + 3]
    assert b"".join(bench.wire.bodies) == b"".join((b"0", *parts, b"end"))
    assert [message["more_body"] for message in bench.wire.messages[1:]] == [True] * 3 + [False]
    assert bench.timers.num_set == 0


@pytest.mark.parametrize("is_slow", [False, True])
async def test_a_broken_connection_closes_the_stream(is_slow: bool) -> None:
    bench = Bench()
    bench.write(b"one")
    bench.wire.error = OSError("reset")
    if is_slow:
        bench.wire.free.clear()
    bench.write(b"two")
    bench.write(b"three")
    bench.wire.free.set()
    await bench.stream.closed
    assert bench.wire.bodies == [b"one"]


@pytest.mark.parametrize("is_slow", [False, True])
async def test_a_fault_of_the_server_reaches_whoever_waits(is_slow: bool) -> None:
    bench = Bench()
    bench.wire.error = RuntimeError("not in this state")
    if is_slow:
        bench.wire.free.clear()
    bench.write(b"one")
    bench.wire.free.set()
    with pytest.raises(RuntimeError, match="not in this state"):
        await bench.stream.closed


async def test_a_failure_is_a_status_before_the_first_byte_and_an_event_after_it() -> None:
    bench = Bench()
    bench.stream.fail(bad_field("x", "is wrong"), b"the event")
    with pytest.raises(ApiError):
        await bench.stream.closed
    assert bench.wire.messages == []
    bench = Bench()
    bench.write(b"one")
    bench.stream.fail(bad_field("x", "is wrong"), b"the event")
    bench.outbox.send()
    await bench.stream.closed
    assert bench.wire.bodies[-1] == b"the event"


async def test_closing_cancels_a_send_that_waits() -> None:
    bench = Bench()
    bench.wire.free.clear()
    bench.write(b"one")
    bench.write(b"two")
    await asyncio.sleep(0)
    bench.stream.close()
    await asyncio.sleep(0)
    bench.wire.free.set()
    await asyncio.sleep(0)
    assert bench.wire.messages == []


# --- tokens -> events ---


async def test_a_stream_that_closes_late_leaves_its_connection_to_the_one_behind_it() -> None:
    first = Bench()
    writer = first.wire.writer
    first.write(b"end", last=True)
    behind = Bench(first.wire)
    first.stream.close()
    assert writer.stream is behind.stream
    behind.stream.close()
    assert writer.stream is None


async def test_a_chat_stream_opens_with_the_role_and_ends_with_reason_usage_and_done() -> None:
    run = Streaming([asked()], include_usage=True)
    sink = run.answer.sinks[0]
    for token_id in LETTERS[:3]:
        sink.on_tokens(Tokens([token_id]))
    sink.on_end("length")
    await run.bench.stream.closed
    events = run.events
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert run.texts() == ["a", "b", "c"]
    assert events[-3]["choices"][0]["finish_reason"] == "length"
    assert events[-2]["choices"] == []
    assert events[-2]["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 3,
        "total_tokens": 6,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    assert events[-1] == "[DONE]"
    assert all(event["usage"] is None for event in events[:-2])
    for event in events[:-1]:
        ChatCompletionChunk.model_validate(event)


async def test_the_first_piece_leaves_at_once_and_later_ones_when_an_interval_is_full() -> None:
    run = Streaming([asked()], interval=4)
    sink = run.answer.sinks[0]
    for token_id in LETTERS[:7]:
        sink.on_tokens(Tokens([token_id]))
    assert run.texts() == ["a", "bcde"]
    sink.on_tokens(Tokens(LETTERS[7:10]))
    assert run.texts() == ["a", "bcde", "fghij"]
    sink.on_tokens(Tokens([LETTERS[10]]))
    sink.on_end("length")
    assert run.texts() == ["a", "bcde", "fghij", "k"]


async def test_tokens_without_text_wait_for_a_piece_as_the_others_do() -> None:
    run = Streaming([asked()], interval=3)
    sink = run.answer.sinks[0]
    sink.on_tokens(Tokens([LETTERS[0]]))
    for token_id in (EOS, EOS, FIRST_BYTE):  # a full interval, and nothing to show
        sink.on_tokens(Tokens([token_id]))
    assert run.texts() == ["a"]
    sink.on_tokens(Tokens([SECOND_BYTE]))
    assert run.texts() == ["a", "\u00e9"], "four tokens are unsent"
    sink.on_tokens(Tokens(LETTERS[1:3]))
    assert run.texts() == ["a", "\u00e9"]


async def test_the_prompts_logprobs_come_before_those_of_the_first_piece() -> None:
    ask = asked(prompt=Prompt([1, 2], "ab"), echo=True, num_logprobs=0, num_prompt_logprobs=0)
    run = Streaming([ask], is_chat=False)
    run.answer.sinks[0].on_tokens(Tokens([LETTER_A], [-1.0]))
    offsets = [event["choices"][0]["logprobs"]["text_offset"] for event in run.events]
    lengths = [len(TOKENIZER.token_text(token_id)) for token_id in (1, 2)]
    assert offsets == [[0, lengths[0]], [sum(lengths)]]


async def test_offsets_are_places_in_the_text_whatever_its_tokens_are() -> None:
    prompt = Prompt([EOS, FIRST_BYTE, SECOND_BYTE, LETTER_A], "éa")  # a tokenizer added the first
    ask = asked(prompt=prompt, echo=True, num_logprobs=0, num_prompt_logprobs=0)
    run = Streaming([ask], is_chat=False)
    for token_id in (FIRST_BYTE, SECOND_BYTE, LETTER_A, EOS):
        run.answer.sinks[0].on_tokens(Tokens([token_id], [-1.0]))
    shapes = [event["choices"][0]["logprobs"] for event in run.events]
    assert [shape["text_offset"] for shape in shapes] == [[0, 0, 0, 1], [2], [2], [3], [4]]


@pytest.mark.parametrize(("text", "offsets"), [("the b", [0, 3, 4]), (" b", [0, 0, 1])])
async def test_a_space_that_sentencepiece_adds_is_no_part_of_an_echo(
    text: str, offsets: list[int]
) -> None:
    tokenizer = Tokenizer(sentencepiece_like(), {}, {}, False)
    prompt = Prompt(tokenizer.encode(text), text)
    ask = asked(prompt=prompt, echo=True, num_logprobs=0, num_prompt_logprobs=0)
    run = Streaming([ask], is_chat=False, tokenizer=tokenizer)
    run.answer.sinks[0].on_tokens(Tokens([prompt.ids[-1]], [-1.0]))
    shapes = [event["choices"][0]["logprobs"] for event in run.events]
    assert [shape["text_offset"] for shape in shapes] == [offsets, [len(text)]]


async def test_an_error_after_the_first_byte_is_the_last_event() -> None:
    run = Streaming([asked(), asked(1)])
    run.answer.sinks[0].on_tokens(Tokens([LETTER_A]))
    run.answer.sinks[1].on_error(RequestError(Code.PEER_LOST, "both workers are gone"))
    await run.bench.stream.closed
    assert run.events[-1]["error"]["message"] == "both workers are gone"
    assert run.bench.wire.messages[-1]["more_body"] is False
    run.answer.sinks[0].on_tokens(Tokens([LETTER_A]))
    run.answer.sinks[0].on_end("length")
    assert "error" in run.events[-1]


@pytest.mark.parametrize("ask", [{}, {"num_logprobs": 0}], ids=["text", "logprobs"])
async def test_what_waited_for_a_full_interval_is_shown_before_an_error(ask: dict) -> None:
    run = Streaming([asked(**ask)], interval=8)
    for letter in LETTERS[:3]:
        run.answer.sinks[0].on_tokens(Tokens([letter], [-1.0]))
    assert run.texts() == ["a"]
    run.answer.sinks[0].on_error(RequestError(Code.PEER_LOST, "both workers are gone"))
    await run.bench.stream.closed
    *pieces, last = run.events
    assert last["error"]["message"] == "both workers are gone"
    assert [piece["choices"][0]["delta"]["content"] for piece in pieces[-2:]] == ["a", "bc"]


async def test_an_error_before_the_first_byte_is_a_status() -> None:
    run = Streaming([asked()])
    run.answer.sinks[0].on_error(RequestError(Code.DEADLINE, "too late"))
    with pytest.raises(ApiError) as caught:
        await run.bench.stream.closed
    assert caught.value.status == 504


async def test_echo_comes_once_before_the_first_piece() -> None:
    ask = asked(prompt=Prompt([1, 2], "prompt "), echo=True)
    run = Streaming([ask], is_chat=False)
    run.answer.sinks[0].on_tokens(Tokens([FIRST_BYTE]))
    run.answer.sinks[0].on_tokens(Tokens([SECOND_BYTE, LETTER_A]))
    run.answer.sinks[0].on_end("length")
    assert run.texts() == ["prompt ", "éa"]


async def test_continuous_usage_counts_in_every_event() -> None:
    run = Streaming([asked()], include_usage=True, continuous_usage=True)
    for token_id in LETTERS[:2]:
        run.answer.sinks[0].on_tokens(Tokens([token_id]))
    run.answer.sinks[0].on_end("length")
    counts = [event["usage"]["completion_tokens"] for event in run.events[:-1]]
    assert counts == [1, 1, 2, 2, 2]


@given(
    text=st.text(min_size=1),
    is_chat=st.booleans(),
    include_usage=st.booleans(),
    index=st.integers(0, 200),
    request_id=st.text(),
)
@settings(max_examples=200)
def test_the_fast_path_spells_what_a_plain_encoder_spells(
    text: str, is_chat: bool, include_usage: bool, index: int, request_id: str
) -> None:
    request = Request(request_id, [asked(index)], stream=True, include_usage=include_usage)
    spell = chat_answer if is_chat else completion_answer
    spelling = spell(request, TOKENIZER, "name", 7)
    choice = Choice(request.choices[0], TOKENIZER)
    frame = spelling.frame(choice)
    assert frame is not None
    fast = frame[0] + dumps(text) + frame[1]
    assert fast == spelling.piece(choice, Piece(text))
    chunk = orjson.loads(fast.removeprefix(b"data: "))
    item = chunk["choices"][0]
    assert (chunk["id"], item["index"]) == (cleaned(request_id), index)
    assert (item["delta"]["content"] if is_chat else item["text"]) == cleaned(text)
