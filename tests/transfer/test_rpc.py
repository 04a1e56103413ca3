"""Control calls over real sockets: replies, streams, errors by name, the token, TLS."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import pytest
import uvloop

from tests.transfer.samples import PATIENCE_S, SECURITY
from transfer import rpc, wire
from transfer.clock import ManualClock
from transfer.errors import (
    BadMessage,
    ConfigError,
    Incompatible,
    RpcError,
    Unauthenticated,
    Unavailable,
)
from transfer.rpc import SERVICE, RpcClient, RpcServer, Security, to_the_end


async def echo(batch: wire.AbortBatch) -> wire.AbortBatch:
    return batch


def an_echo_server(security: Security = SECURITY) -> RpcServer:
    server = RpcServer(security)
    server.unary("Echo", wire.AbortBatch, echo)
    return server


def a_hanging_server() -> tuple[RpcServer, asyncio.Event, asyncio.Event]:
    """A server whose Hang sets the first event when it begins, and waits for the second."""
    begun, ever = asyncio.Event(), asyncio.Event()

    async def hang(_: wire.Empty) -> wire.Empty:
        begun.set()
        await ever.wait()
        return wire.Empty()

    server = RpcServer(SECURITY)
    server.unary("Hang", wire.Empty, hang)
    return server, begun, ever


@contextlib.asynccontextmanager
async def served(
    server: RpcServer, security: Security = SECURITY, host: str = "127.0.0.1"
) -> AsyncIterator[RpcClient]:
    """A client of a running server; both are closed after the block."""
    port = await server.start("127.0.0.1", 0)
    client = RpcClient(f"{host}:{port}", security)
    try:
        yield client
    finally:
        await client.close()
        await server.stop(0.0)


MESSAGE = wire.AbortBatch((1, 2, 3))


async def test_a_call_brings_its_reply() -> None:
    async with served(an_echo_server()) as client:
        assert await client.call("Echo", MESSAGE, wire.AbortBatch, PATIENCE_S) == MESSAGE


async def test_without_the_token_nothing_of_a_message_is_waited_for() -> None:
    server = an_echo_server()
    port = await server.start("127.0.0.1", 0)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        for method in ("Echo", "Calls", "Nothing"):
            call = channel.stream_stream(f"/{SERVICE}/{method}")(
                metadata=(("kvferry-token", "wrong"),), timeout=PATIENCE_S
            )
            assert await call.code() is grpc.StatusCode.UNAUTHENTICATED
    await server.stop(0.0)


@pytest.mark.parametrize("pause_s", [0.0, 0.001])
def test_a_call_that_its_client_leaves_as_the_server_stops_leaves_no_complaint(
    pause_s: float, capfd: pytest.CaptureFixture[str]
) -> None:
    ended: list[bool] = []

    async def watch(_: wire.Empty) -> AsyncIterator[wire.Empty]:
        try:
            yield wire.Empty()
            await asyncio.sleep(PATIENCE_S)
        finally:
            for _turn in range(5):
                await asyncio.sleep(0)
            ended.append(True)

    async def play() -> None:
        server = RpcServer(SECURITY)
        server.stream("Watch", wire.Empty, watch)
        async with served(server) as client:
            replies = client.stream("Watch", wire.Empty(), wire.Empty)
            async for _ in replies:
                break
            await replies.aclose()
            await asyncio.sleep(pause_s)
            await server.stop(0.1)

    for _ in range(5):
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(play())
    assert ended == [True] * 5
    assert capfd.readouterr().err == ""


async def test_a_unix_socket_serves_too_and_takes_the_place_of_one_that_was_left(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a socket"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    server = an_echo_server()
    await server.start_at(f"unix:{path}")
    client = RpcClient(f"unix:{path}", SECURITY)
    assert await client.call("Echo", MESSAGE, wire.AbortBatch, PATIENCE_S) == MESSAGE
    await client.close()
    await server.stop(0.0)
    with pytest.raises(ConfigError, match="cannot listen on unix:"):
        await an_echo_server().start_at(f"unix:{tmp_path}/no/folder")


@pytest.mark.parametrize("kind", [Incompatible, BadMessage, Unavailable, Unauthenticated])
async def test_an_error_of_the_handler_reaches_the_caller_by_type_and_text(
    kind: type[RpcError],
) -> None:
    async def fail(_: wire.Empty) -> wire.Empty:
        raise kind("page_size 16 here, 64 there")

    server = RpcServer(SECURITY)
    server.unary("Fail", wire.Empty, fail)
    async with served(server) as client:
        with pytest.raises(kind, match="page_size 16 here, 64 there"):
            await client.call("Fail", wire.Empty(), wire.Empty, PATIENCE_S)


@pytest.mark.parametrize("token", ["", "another-token-of-tests", "token-of-the-test"])
async def test_a_wrong_token_is_refused_before_the_handler(token: str) -> None:
    called = False

    async def handler(_: wire.Empty) -> wire.Empty:
        nonlocal called
        called = True
        return wire.Empty()

    server = RpcServer(SECURITY)
    server.unary("Call", wire.Empty, handler)
    async with served(server, Security(token)) as client:
        with pytest.raises(Unauthenticated, match="token"):
            await client.call("Call", wire.Empty(), wire.Empty, PATIENCE_S)
    assert not called


async def test_the_log_tells_of_the_first_wrong_token_and_counts_those_of_a_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = ManualClock()
    server = RpcServer(SECURITY, clock)

    async def nothing(_: wire.Empty) -> wire.Empty:
        return wire.Empty()

    server.unary("Call", wire.Empty, nothing)
    async with served(server, Security("another-token-of-tests")) as client:

        async def refused(times: int) -> None:
            for _ in range(times):
                with pytest.raises(Unauthenticated):
                    await client.call("Call", wire.Empty(), wire.Empty, PATIENCE_S)

        await refused(3)
        clock.advance(59.0)
        await refused(2)
        clock.advance(1.0)
        await refused(1)
    # gRPC may still log to asyncio about the loop of an earlier test.
    records = [record for record in caplog.records if record.name == "transfer.rpc"]
    told = [record.getMessage().rpartition(":")[0] for record in records]
    assert told == [
        f"wrong or missing cluster token: {calls}, the last from ipv4:127.0.0.1"
        for calls in ("1 call(s) refused", "5 call(s) refused in 60 s")
    ]


async def test_a_malformed_message_is_refused_by_name() -> None:
    async with served(an_echo_server()) as client:
        with pytest.raises(BadMessage, match="AbortBatch"):
            await client.call("Echo", wire.Load(), wire.AbortBatch, PATIENCE_S)


async def test_a_process_that_takes_other_calls_is_said_to_be_of_another_kind() -> None:
    """As a worker is whose address is given as the registry's."""
    async with served(an_echo_server()) as client:
        told = f"^Register at {client.address}: a process of another kind is at this address$"
        with pytest.raises(RpcError, match=told):
            await client.call("Register", wire.Empty(), wire.Empty, PATIENCE_S)


async def test_nobody_there_is_unavailable_within_the_time() -> None:
    server = an_echo_server()
    port = await server.start("127.0.0.1", 0)
    await server.stop(0.0)
    client = RpcClient(f"127.0.0.1:{port}", SECURITY)
    with pytest.raises(Unavailable, match=r"Echo at 127\.0\.0\.1"):
        await client.call("Echo", MESSAGE, wire.AbortBatch, PATIENCE_S)
    await client.close()


async def test_a_handler_that_hangs_is_unavailable_after_the_time() -> None:
    async def hang(_: wire.Empty) -> wire.Empty:
        await asyncio.Event().wait()
        raise AssertionError("never set")

    server = RpcServer(SECURITY)
    server.unary("Hang", wire.Empty, hang)
    async with served(server) as client:
        with pytest.raises(Unavailable, match="no answer in time"):
            await client.call("Hang", wire.Empty(), wire.Empty, 0.05)


async def test_a_call_under_way_when_its_client_closes_is_unavailable_not_a_cancel() -> None:
    server, begun, ever = a_hanging_server()
    async with served(server) as client:

        async def ask() -> wire.Empty:
            return await client.call("Hang", wire.Empty(), wire.Empty, PATIENCE_S)

        asked, dropped = asyncio.create_task(ask()), asyncio.create_task(ask())
        await begun.wait()
        dropped.cancel()
        with pytest.raises(asyncio.CancelledError):
            await dropped
        await client.close()
        with pytest.raises(Unavailable, match="closed"):
            await asked
        ever.set()


async def test_calls_in_order_share_a_stream_and_are_answered_one_by_one() -> None:
    handled: list[int] = []
    gate = asyncio.Event()

    async def slow_at_first(batch: wire.AbortBatch) -> wire.AbortBatch:
        handled.append(batch.rooms[0])
        await gate.wait()
        return batch

    server = an_echo_server()
    server.unary("Slow", wire.AbortBatch, slow_at_first)
    async with served(server) as client:
        calls = client.in_order()
        both = asyncio.gather(
            *(
                calls.call("Slow", wire.AbortBatch((room,)), wire.AbortBatch, PATIENCE_S)
                for room in (1, 2)
            )
        )
        # Calls out of order are not held up, so the second call had its chance to overtake.
        while not handled:
            await client.call("Echo", MESSAGE, wire.AbortBatch, PATIENCE_S)
        assert handled == [1]
        gate.set()
        assert [reply.rooms for reply in await both] == [(1,), (2,)]
        assert await calls.call("Echo", MESSAGE, wire.AbortBatch, PATIENCE_S) == MESSAGE
        assert handled == [1, 2]


async def test_a_call_in_order_that_fails_says_why_and_the_next_one_goes_on() -> None:
    async def fail(_: wire.Empty) -> wire.Empty:
        raise Incompatible("page_size 16 here, 64 there")

    async def bug(_: wire.Empty) -> wire.Empty:
        raise ZeroDivisionError

    server = an_echo_server()
    server.unary("Fail", wire.Empty, fail)
    server.unary("Bug", wire.Empty, bug)
    async with served(server) as client:
        calls = client.in_order()

        async def ask(name: str) -> None:
            await calls.call(name, wire.Empty(), wire.Empty, PATIENCE_S)

        with pytest.raises(Incompatible, match=r"Fail at 127\.0\.0\.1:\d+: page_size 16 here"):
            await ask("Fail")
        with pytest.raises(RpcError, match="Bug failed: ZeroDivisionError"):
            await ask("Bug")
        with pytest.raises(Incompatible, match="there is no Foreign here"):
            await ask("Foreign")
        with pytest.raises(BadMessage, match="AbortBatch"):
            await ask("Echo")
        assert await calls.call("Echo", MESSAGE, wire.AbortBatch, PATIENCE_S) == MESSAGE


@pytest.mark.parametrize("token", ["", "another-token-of-tests"])
async def test_calls_in_order_are_refused_with_a_wrong_token(token: str) -> None:
    async with served(an_echo_server(), Security(token)) as client:
        with pytest.raises(Unauthenticated, match="token"):
            await client.in_order().call("Echo", MESSAGE, wire.AbortBatch, PATIENCE_S)


async def test_foreign_bytes_among_calls_in_order_are_answered_as_malformed() -> None:
    async with served(an_echo_server()) as client:
        method = client._channel.stream_stream("/kvferry.v1/Calls")
        stream = method(metadata=client._metadata)
        await stream.write(b"\xff not a message")
        assert b"INVALID_ARGUMENT" in await stream.read()
        stream.cancel()


async def test_calls_in_order_find_a_peer_that_was_away_or_hung() -> None:
    server = an_echo_server()
    hang = asyncio.Event()

    async def hangs(_: wire.Empty) -> wire.Empty:
        await hang.wait()
        return wire.Empty()

    server.unary("Hang", wire.Empty, hangs)
    async with served(server) as client:
        calls = client.in_order()
        with pytest.raises(Unavailable, match="no answer in time"):
            await calls.call("Hang", wire.Empty(), wire.Empty, 0.05)
        assert await calls.call("Echo", MESSAGE, wire.AbortBatch, PATIENCE_S) == MESSAGE
        await server.stop(0.0)
        with pytest.raises(Unavailable, match="Echo at"):
            await calls.call("Echo", MESSAGE, wire.AbortBatch, PATIENCE_S)
        again = an_echo_server()
        await again.start("127.0.0.1", int(client.address.rpartition(":")[2]))
        async with asyncio.timeout(PATIENCE_S):
            while True:  # gRPC reconnects in its own time
                with contextlib.suppress(Unavailable):
                    await calls.call("Echo", MESSAGE, wire.AbortBatch, PATIENCE_S)
                    break
        await again.stop(0.0)


async def test_a_call_in_order_under_way_when_its_stream_is_reset_is_unavailable() -> None:
    server, begun, ever = a_hanging_server()
    async with served(server) as client:
        calls = client.in_order()
        asked = asyncio.create_task(calls.call("Hang", wire.Empty(), wire.Empty, PATIENCE_S))
        await begun.wait()
        calls.reset()
        with pytest.raises(Unavailable, match="closed"):
            await asked
        ever.set()


async def test_a_port_in_use_is_a_config_error_that_names_it() -> None:
    first, second = an_echo_server(), an_echo_server()
    port = await first.start("127.0.0.1", 0)
    for start in (second.start("127.0.0.1", port), second.start_at(f"127.0.0.1:{port}")):
        with pytest.raises(ConfigError, match=str(port)):
            await start
    await first.stop(0.0)


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
async def test_all_addresses_are_not_taken_where_another_has_one_of_them() -> None:
    first, second = an_echo_server(), an_echo_server()
    port = await first.start("::1", 0)
    with pytest.raises(ConfigError, match=rf"\[::\]:{port}.*in use"):
        await second.start("::", port)
    await first.stop(0.0)


async def test_a_name_stands_for_one_address_however_many_it_has() -> None:
    first, second = an_echo_server(), an_echo_server()
    port = await first.start("127.0.0.1", 0)
    with pytest.raises(ConfigError, match=rf"localhost:{port}.*in use"):  # it is often ::1 as well
        await second.start("localhost", port)
    await first.stop(0.0)


async def test_a_stream_brings_every_reply_in_order_and_ends() -> None:
    async def count(request: wire.AbortBatch) -> AsyncIterator[wire.AbortBatch]:
        for room in request.rooms:
            yield wire.AbortBatch((room,))

    server = RpcServer(SECURITY)
    server.stream("Count", wire.AbortBatch, count)
    async with served(server) as client:
        replies = [reply.rooms async for reply in client.stream("Count", MESSAGE, wire.AbortBatch)]
    assert replies == [(1,), (2,), (3,)]


async def test_leaving_a_stream_reaches_the_handler_s_finally() -> None:
    left = asyncio.Event()

    async def forever(_: wire.Empty) -> AsyncIterator[wire.Empty]:
        try:
            yield wire.Empty()
            await asyncio.Event().wait()
        finally:
            left.set()

    server = RpcServer(SECURITY)
    server.stream("Forever", wire.Empty, forever)
    async with served(server) as client:
        stream = client.stream("Forever", wire.Empty(), wire.Empty)
        assert await anext(stream) == wire.Empty()
        await stream.aclose()
        await asyncio.wait_for(left.wait(), PATIENCE_S)


async def test_a_process_ends_once_grpc_has_let_go_of_a_handler_that_took_its_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rpc, "_LAST_S", PATIENCE_S)  # on a busy host a turn may take a second
    begun, ended = asyncio.Event(), asyncio.Event()

    async def linger(_: wire.Empty) -> AsyncIterator[wire.Empty]:
        try:
            begun.set()
            yield wire.Empty()
            await asyncio.Event().wait()
        finally:
            try:  # the client that leaves and the server that stops may both cancel it
                await asyncio.sleep(0.2)  # more turns than a stopping server gives it
            finally:
                ended.set()

    async def main() -> str:
        server = RpcServer(SECURITY)
        server.stream("Linger", wire.Empty, linger)
        async with served(server) as client:
            async for _ in client.stream("Linger", wire.Empty(), wire.Empty):
                break
        return "done"

    assert await to_the_end(main()) == "done"
    assert begun.is_set()
    assert ended.is_set()
    names = [getattr(task.get_coro(), "__qualname__", "") for task in asyncio.all_tasks()]
    assert "_schedule_rpc_coro" not in names


async def test_an_error_inside_a_stream_reaches_the_reader_by_type() -> None:
    async def fail(_: wire.Empty) -> AsyncIterator[wire.Empty]:
        yield wire.Empty()
        raise Incompatible("not you")

    server = RpcServer(SECURITY)
    server.stream("Fail", wire.Empty, fail)
    async with served(server) as client:
        stream = client.stream("Fail", wire.Empty(), wire.Empty)
        assert await anext(stream) == wire.Empty()
        with pytest.raises(Incompatible, match="not you"):
            await anext(stream)


async def test_a_server_that_goes_away_ends_its_streams_as_unavailable() -> None:
    async def forever(_: wire.Empty) -> AsyncIterator[wire.Empty]:
        yield wire.Empty()
        await asyncio.Event().wait()

    server = RpcServer(SECURITY)
    server.stream("Forever", wire.Empty, forever)
    async with served(server) as client:
        stream = client.stream("Forever", wire.Empty(), wire.Empty)
        assert await anext(stream) == wire.Empty()
        await server.stop(0.0)
        with pytest.raises(Unavailable):
            await anext(stream)


async def test_tls_carries_calls_and_refuses_peers_without_it(
    tls_security: Security,
) -> None:
    server = an_echo_server(tls_security)
    async with served(server, tls_security, host="localhost") as client:
        assert await client.call("Echo", MESSAGE, wire.AbortBatch, PATIENCE_S) == MESSAGE
        plain = RpcClient(client.address, SECURITY)
        with pytest.raises(Unavailable):
            await plain.call("Echo", MESSAGE, wire.AbortBatch, PATIENCE_S)
        await plain.close()


def test_a_missing_certificate_file_is_a_config_error_that_names_it(tmp_path: Path) -> None:
    missing = tmp_path / "cert.pem"
    with pytest.raises(ConfigError, match=r"cert\.pem"):
        Security(SECURITY.token, missing, missing, missing).channel_credentials()
