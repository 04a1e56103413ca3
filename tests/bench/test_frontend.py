"""The front end benchmark: what it counts in a stream, and which errors it catches."""

import gc
import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from itertools import islice
from types import SimpleNamespace
from typing import cast

import orjson
import pytest

from bench.client import Server
from bench.frontend_client import BadStream, Heard, LoadClient, Reads
from bench.frontend_engine import Workers
from bench.frontend_floor import Spelling, native_round
from bench.frontend_plan import Cell, Dialect, pieces_of, request_id, text_of, tokens_of
from bench.frontend_processes import Child, Load, Target, cpu_s
from serving.demo import demo_model_path
from transfer import wire
from transfer.rpc import Security

TEXTS = [" boat", " page", "other", "house", " tide"]
NUM_TOKENS = 12


def spelt(interval: int = 1, stream: int = 3) -> list[bytes]:
    """What the floor writes for each token of a stream."""
    cell = Cell(num_streams=4, output_tokens=NUM_TOKENS, interval=interval)
    spelling = Spelling(cell, 240, TEXTS)
    return [spelling.write(stream, k) for k in range(NUM_TOKENS)]


def unpacked(data: bytes) -> Iterator[bytes]:
    """The parts that follow the three numbers of a native round, one by one."""
    at = 12
    while at < len(data):
        (length,) = struct.unpack_from("<I", data, at)
        yield data[at + 4 : at + 4 + length]
        at += 4 + length


def heard(pieces: list[bytes]) -> Heard:
    reads = Reads()
    for time_s, data in enumerate(pieces):
        if data:
            reads.add(float(time_s), data)
    return Heard.of(3, reads, NUM_TOKENS, TEXTS)


def test_the_native_floor_is_given_the_bytes_that_the_other_writes():
    data = native_round(Cell(num_streams=4, output_tokens=NUM_TOKENS, interval=1), 240, TEXTS)
    assert struct.unpack_from("<III", data) == (4, NUM_TOKENS, len(TEXTS))
    parts = unpacked(data)
    texts = [*islice(parts, len(TEXTS))]
    streams = [[*islice(parts, 4)] for _ in range(4)]
    assert not [*parts]
    for stream, (opening, before, after, closing) in enumerate(streams):
        said = [before + texts[(stream + k) % len(texts)] + after for k in range(NUM_TOKENS)]
        assert opening + b"".join(said) + closing == b"".join(spelt(stream=stream))


def test_the_native_floor_knows_one_interval():
    with pytest.raises(ValueError, match="an event a token, got interval 8"):
        native_round(Cell(num_streams=4, output_tokens=NUM_TOKENS, interval=8), 240, TEXTS)


def test_the_first_token_is_a_piece_and_then_every_interval():
    assert [pieces_of(n, 1) for n in range(4)] == [0, 1, 2, 3]
    assert [pieces_of(n, 8) for n in (0, 1, 8, 9, 16, 17, 128)] == [0, 1, 1, 2, 2, 3, 16]


def test_each_api_process_has_the_tokens_of_its_own_streams(monkeypatch):
    asked = [("a", 0, 10), ("b", 1, 11), ("a", 2, 12)]
    workers = Workers(Security("token"), range(100, 150))
    workers.begin(Cell(num_streams=3, output_tokens=2, interval=1))
    for api_id, stream, room in asked:
        submit = SimpleNamespace(api_id=api_id, request_id=request_id(stream), room=room)
        workers.submitted("decode", [cast(wire.Submit, submit)])
    sent: dict[str, wire.StepBatch] = {}
    decode = workers._decode
    monkeypatch.setattr(decode, "send", lambda: sent.update(decode.emitter.take(0.0)))
    workers.emit(1)
    rooms = {api_id: wire.unpack_i64(batch.rooms).tolist() for api_id, batch in sent.items()}
    ids = {api_id: wire.unpack_i32(batch.token_ids).tolist() for api_id, batch in sent.items()}
    assert rooms == {"a": [10, 12], "b": [11]}
    assert ids == {"a": [101, 103], "b": [102]}


def test_neighbouring_streams_and_tokens_differ():
    assert text_of(3, 0, 3, TEXTS) == "house tide boat"
    assert text_of(4, 0, 3, TEXTS) == " tide boat page"


def test_tokens_of_the_small_checkpoint_are_five_plain_characters():
    ids, texts = tokens_of(demo_model_path())
    assert len(ids) == len(texts) > 200
    assert {len(text) for text in texts} == {5}


def test_every_token_is_stamped_by_the_read_that_ended_its_event():
    found = heard(spelt())
    assert found.token_s.tolist() == [float(k) for k in range(NUM_TOKENS)]
    assert (found.num_pieces, found.piece_bytes) == (NUM_TOKENS, 240)


def test_a_server_may_put_something_of_its_own_before_the_id():
    reads = Reads()
    reads.add(0.0, b"".join(spelt()).replace(b's-000003"', b'chat-s-000003"'))
    assert (
        Heard.of(3, reads, NUM_TOKENS, TEXTS, Dialect(id_prefix="chat-")).num_pieces == NUM_TOKENS
    )
    with pytest.raises(BadStream, match="stream 3 got"):
        Heard.of(3, reads, NUM_TOKENS, TEXTS)


def event(kind: str, **data: object) -> bytes:
    told = orjson.dumps({"type": kind, **data})
    return b"event: " + kind.encode() + b"\ndata: " + told + b"\n\n"


def response(end: str = "response.incomplete", stream: int = 3) -> list[bytes]:
    """What a Responses server writes, without chunk headers; the opening events as one piece."""

    of_request = {"response": {"id": f"s-{stream:06d}"}}
    opening = [event("response.created", **of_request)] + [event("other")] * 3
    said = [
        event("response.output_text.delta", delta=text_of(stream, k, k + 1, TEXTS))
        for k in range(NUM_TOKENS)
    ]
    head = b"HTTP/1.1 200 OK\r\n\r\n" + b"".join(opening)
    return [head, *said, event(end, **of_request) + b"\r\n0\r\n\r\n"]


RESPONSES = Dialect("/v1/responses", opening=4)


MESSAGES = Dialect("/v1/messages", opening=2)


def message(stream: int = 3, reason: str = "max_tokens", end: str = "message_stop") -> list[bytes]:
    """A stream of /v1/messages: the opening events, one with each token, and the ending ones."""

    opening = event("message_start", message={"id": f"s-{stream:06d}"})
    opening += event("content_block_start", index=0)
    said = [
        event("content_block_delta", delta={"text": text_of(stream, k, k + 1, TEXTS)})
        for k in range(NUM_TOKENS)
    ]
    ending = event("content_block_stop") + event("message_delta", delta={"stop_reason": reason})
    return [b"HTTP/1.1 200 OK\r\n\r\n" + opening, *said, ending + event(end) + b"\r\n0\r\n\r\n"]


@pytest.mark.parametrize(
    ("dialect", "pieces"),
    [(RESPONSES, response()), (MESSAGES, message())],
    ids=["response", "message"],
)
def test_a_response_and_a_message_are_read_as_a_chat_is(dialect, pieces):
    reads = Reads.after(dialect.opening)
    counted = []
    for time_s, data in enumerate(pieces):
        reads.add(float(time_s), data)
        counted.append(reads.events)
    assert counted[:-1] == list(range(1, NUM_TOKENS + 2))  # as after a chat's single opening event
    found = Heard.of(3, reads, NUM_TOKENS, TEXTS, dialect)
    assert found.token_s.tolist() == [float(k + 1) for k in range(NUM_TOKENS)]


@pytest.mark.parametrize(
    ("dialect", "pieces"),
    [
        (RESPONSES, response()[:5] + response()[6:]),
        (RESPONSES, response("response.failed")),
        (RESPONSES, response()[:-1]),
        (RESPONSES, [*response()[:-1], response(stream=2)[-1]]),
        (RESPONSES, [response()[0] + b"data: no json\n\n", *response()[1:]]),
        (MESSAGES, message()[:5] + message()[6:]),
        (MESSAGES, message(reason="end_turn")),
        (MESSAGES, message()[:-1]),
        (MESSAGES, [message(stream=2)[0], *message()[1:]]),
        (MESSAGES, [message()[0] + b"data: no json\n\n", *message()[1:]]),
        (MESSAGES, message(end="error")),
    ],
    ids=[
        *("lost", "failed", "no end", "of another request", "no event"),
        *("message lost", "ended early", "message without end", "another's message"),
        *("no event of a message", "message failed"),
    ],
)
def test_a_response_or_message_that_is_not_whole_fails(dialect, pieces):
    reads = Reads.after(dialect.opening)
    for data in pieces:
        reads.add(0.0, data)
    with pytest.raises(BadStream, match="stream 3"):
        Heard.of(3, reads, NUM_TOKENS, TEXTS, dialect)


def test_tokens_of_one_piece_share_its_stamp():
    assert heard(spelt(interval=8)).token_s.tolist() == [0.0] + [8.0] * 8 + [11.0] * 3


@pytest.mark.parametrize(
    "broken",
    [
        lambda pieces: pieces[:5] + pieces[6:],
        lambda pieces: pieces[:5] + pieces[4:],
        lambda pieces: [*pieces[:4], pieces[5], pieces[4], *pieces[6:]],
        lambda pieces: pieces[:-1],
        lambda pieces: [*pieces[:5], spelt(stream=2)[5], *pieces[6:]],
        lambda pieces: [pieces[0].replace(b"200", b"429"), *pieces[1:]],
    ],
    ids=["lost", "doubled", "swapped", "no end", "of another stream", "refused"],
)
def test_a_stream_that_is_not_whole_fails(broken):
    with pytest.raises(BadStream, match="stream 3"):
        heard(broken(spelt()))


def test_events_are_counted_once_wherever_reads_cut_them():
    whole = b"".join(spelt())
    for size in (1, 5, 7, 100):
        reads = Reads()
        ended = []
        for start in range(0, len(whole), size):
            reads.add(0.0, whole[start : start + size])
            ended.append(reads.ended)
        assert reads.events == NUM_TOKENS + 3  # role, finish reason, [DONE]
        assert ended.index(True) == len(ended) - 1


def test_an_answer_that_is_no_stream_ends_the_round_at_once():
    """There is no last chunk to wait for."""
    cell = Cell(2, 4, 1)
    steering, _engine = socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as listening, steering, _engine:

        def serve() -> None:
            ours = [listening.accept()[0] for _ in range(3)]
            for connection, status in ((ours[2], b"200 OK"), (ours[0], b"429 Too Many Requests")):
                assert connection.recv(1 << 16)
                connection.sendall(b"HTTP/1.1 " + status + b"\r\nContent-Length: 4\r\n\r\nfull")
            assert ours[0].recv(1) == b""
            for connection in ours:
                connection.close()

        server = threading.Thread(target=serve)
        server.start()
        client = LoadClient(steering, TEXTS)
        client.connect("127.0.0.1", listening.getsockname()[1], cell)
        try:
            with pytest.raises(BadStream, match=r"stream 0 was answered b'HTTP/1\.1 429"):
                client.play(cell, {}, Dialect(), "nowhere")
        finally:
            gc.enable()
        for connection in client._sockets:
            connection.close()
        server.join()


def test_a_round_waits_for_a_server_whose_workers_are_away():
    steering, _engine = socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as listening, steering, _engine:
        answers = []

        def serve() -> None:
            with listening.accept()[0] as of_stream, listening.accept()[0] as connection:
                for status in (b"503 Service Unavailable", b"200 OK"):
                    assert connection.recv(1 << 16).startswith(b"GET /health ")
                    answers.append(status)
                    connection.sendall(b"HTTP/1.1 " + status + b"\r\nContent-Length: 4\r\n\r\n")
                    connection.sendall(b"word")  # perhaps read separately
                assert connection.recv(1) == b""
                assert of_stream.recv(1) == b""  # nothing was asked on this connection

        server = threading.Thread(target=serve)
        server.start()
        client = LoadClient(steering, TEXTS)
        client.connect("127.0.0.1", listening.getsockname()[1], Cell(1, 4, 1))
        (connection,) = client._sockets
        connection.close()
        server.join()
        assert len(answers) == 2


def test_a_round_does_not_wait_for_a_server_that_hangs_up():
    steering, _engine = socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as listening, steering, _engine:

        def serve() -> None:
            with listening.accept()[0], listening.accept()[0] as connection:
                assert connection.recv(1 << 16)

        server = threading.Thread(target=serve)
        server.start()
        client = LoadClient(steering, TEXTS)
        with pytest.raises(BadStream, match="asked for its health: RemoteDisconnected"):
            client.connect("127.0.0.1", listening.getsockname()[1], Cell(1, 4, 1))
        server.join()
        for connection in client._sockets:
            connection.close()


def test_processor_time_is_told_to_less_than_a_tick():
    told_s = [cpu_s(os.getpid()) for _ in range(5)]
    assert any(abs(value * 100 - round(value * 100)) > 1e-3 for value in told_s)


def test_a_failure_says_which_process_ended():
    with subprocess.Popen([sys.executable, "-c", ""]) as server:
        server.wait()
        engine, client = (cast(Child, SimpleNamespace(has_ended=gone)) for gone in (True, False))
        load = Load(engine, client)
        target = Target(Server("127.0.0.1", 1), server.pid, load)
        assert target.who_ended() == " (ended: engine, server)"
