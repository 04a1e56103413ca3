"""When a stream may be lent, what its writes count as, and that closing it leaves nothing."""

import asyncio

import pytest
from starlette.types import Message

from serving.event_stream import EventStream
from tests.recording import until
from tests.serving.streaming import TIMEOUT_S, Bench


def lends(stream: EventStream) -> bool:
    return stream.lends


async def test_a_stream_lends_once_it_has_begun_and_while_it_has_nothing_to_send() -> None:
    bench = Bench()
    stream = bench.stream
    assert not lends(stream)
    stream.write(b"one")
    assert not lends(stream)
    bench.outbox.send()
    assert lends(stream)
    stream.write(b"two")
    assert not lends(stream)
    bench.outbox.send()
    assert lends(stream)
    bench.wire.free.clear()
    assert not lends(stream)
    bench.wire.free.set()
    assert lends(stream)
    stream.write(b"end", last=True)
    bench.outbox.send()
    assert not lends(stream)
    await stream.closed


async def test_a_stream_whose_client_just_caught_up_lends_only_when_all_of_it_left() -> None:
    bench = Bench()
    bench.write(b"one,")
    bench.wire.free.clear()
    for data in (b"two,", b"three,"):
        bench.write(data)
    await asyncio.sleep(0)
    bench.wire.free.set()
    assert bench.wire.writer.ready
    assert not bench.stream.lends, "or what is lent would overtake what waits"
    await until(lambda: len(bench.wire.bodies) == 3)
    await until(lambda: bench.stream.lends)


async def test_a_stream_that_waits_with_its_end_does_not_lend() -> None:
    bench = Bench()
    bench.write(b"one,")
    bench.stream.write(b"end", last=True)
    bench.outbox.send()
    assert not bench.stream.lends
    assert bench.wire.bodies == [b"one,", b"end"]


async def test_writes_are_counted_as_they_leave_merged_or_not() -> None:
    bench = Bench()
    bench.write(b"one,")
    bench.wire.free.clear()
    for data in (b"two,", b"three,", b"four,"):
        bench.write(data)
    bench.wire.free.set()
    await until(lambda: len(bench.wire.bodies) == 3)
    bench.write(b"end", last=True)
    await bench.stream.closed
    assert bench.stream.num_writes == len(bench.wire.bodies) == 4


async def test_whoever_wants_to_know_hears_once_when_the_first_byte_leaves() -> None:
    told: list[int] = []
    bench = Bench()
    bench.stream.on_begin = lambda: told.append(len(bench.wire.messages))
    bench.stream.write(b"one")
    assert told == []
    bench.outbox.send()
    bench.write(b"two")
    assert told == [0]


async def test_a_buffer_that_is_just_full_is_not_too_much_unread() -> None:
    bench = Bench(max_unread_bytes=8)
    bench.write(b"one")
    bench.wire.free.clear()
    bench.write(b"1234")
    bench.write(b"5678")
    assert bench.timers.num_set == 0
    bench.write(b"9")
    assert bench.timers.num_set == 1
    bench.stream.close()


async def test_a_stream_that_is_closed_leaves_no_timer() -> None:
    bench = Bench(max_unread_bytes=8)
    bench.wire.free.clear()
    bench.write(b"123456789")
    assert bench.timers.num_set == 1
    bench.stream.close()
    assert bench.timers.num_set == 0
    bench.timers.advance(TIMEOUT_S + 1)
    assert not bench.wire.was_aborted


async def test_what_repeats_the_only_one_that_waits_takes_its_place() -> None:
    bench = Bench(max_unread_bytes=1 << 30)
    bench.write(b"begin")
    bench.wire.free.clear()
    bench.wire.takes_one = True
    bench.write(b"wait")
    bench.write(b"x" * 70_000)
    bench.write(b"old", repeats=0)
    bench.wire.free.set()
    await until(lambda: len(bench.wire.bodies) == 2)
    bench.write(b"new", repeats=0)  # the long one is in the server's hands
    bench.wire.takes_one = False
    bench.wire.free.set()
    await until(lambda: bench.stream.lends)
    assert bench.wire.bodies[2:] == [b"x" * 70_000, b"new"]


async def test_a_stream_may_end_after_whoever_waited_for_its_end_was_cancelled() -> None:
    bench = Bench()
    bench.write(b"one")
    bench.stream.closed.cancel()
    bench.write(b"end", last=True)
    assert bench.wire.bodies == [b"one", b"end"]
    bench.stream.close()


@pytest.mark.parametrize("is_first", [True, False])
async def test_a_send_that_waits_hears_that_it_is_cancelled(is_first: bool) -> None:
    heard: list[str] = []
    full = asyncio.Event()

    async def send(message: Message) -> None:
        if full.is_set():
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                heard.append(message["type"])
                raise

    bench = Bench()
    stream = EventStream(send, send, None, [], bench.outbox, bench.timers, 100, TIMEOUT_S)
    if not is_first:
        stream.write(b"one")
        bench.outbox.send()
    full.set()
    stream.write(b"two")
    bench.outbox.send()
    await asyncio.sleep(0)
    stream.close()
    await until(lambda: bool(heard))
    assert heard == ["http.response.start" if is_first else "http.response.body"]
