"""Peers that connect to a control port and prove nothing: dropped soon, bounded, and reported."""

import asyncio
import contextlib
import errno
import os
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.recording import until
from tests.transfer.samples import PATIENCE_S, SECURITY
from transfer import open_files, rpc, wire
from transfer.clock import ManualClock
from transfer.errors import Unavailable
from transfer.rpc import RpcClient, RpcServer, Security

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = b"\0\0\0\4\0\0\0\0\0"
MESSAGE = wire.AbortBatch((1,))

type Stranger = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def echo(batch: wire.AbortBatch) -> wire.AbortBatch:
    return batch


@contextlib.asynccontextmanager
async def a_port(security: Security = SECURITY) -> AsyncIterator[int]:
    """The port of a running server."""
    server = RpcServer(security)
    server.unary("Echo", wire.AbortBatch, echo)
    try:
        yield await server.start("127.0.0.1", 0)
    finally:
        await server.stop(0.0)


async def let_go(stranger: Stranger) -> None:
    """Wait until the server closes the connection. Raises TimeoutError."""
    reader, writer = stranger
    with contextlib.suppress(ConnectionError):
        async with asyncio.timeout(PATIENCE_S):
            await reader.read()
    writer.close()


@pytest.mark.parametrize("said", [b"", PREFACE[:5], PREFACE, PREFACE + SETTINGS], ids=len)
@pytest.mark.parametrize("way", ["plain", "tls", "silent at tls"])
async def test_who_does_not_begin_as_http2_does_is_let_go_soon(
    way: str, said: bytes, tls_security: Security, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc, "_HANDSHAKE_S", 0.2)
    context = None
    if way == "tls":
        context = ssl.create_default_context(cafile=tls_security.ca_file)
        context.set_alpn_protocols(["h2"])
    async with a_port(SECURITY if way == "plain" else tls_security) as port:
        name = "localhost" if context else None
        stranger = await asyncio.open_connection(
            "127.0.0.1", port, ssl=context, server_hostname=name
        )
        stranger[1].write(said)
        await let_go(stranger)


async def test_strangers_take_half_of_the_files_and_whoever_calls_then_comes_in_after_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    most = 8
    monkeypatch.setattr(open_files, "limit", lambda: 2 * most)
    async with a_port() as port:
        strangers = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3 * most)]
        refused = [asyncio.create_task(let_go(stranger)) for stranger in strangers]
        await until(lambda: sum(each.done() for each in refused) == 2 * most)
        for _, writer in strangers:
            writer.close()
        await asyncio.gather(*refused)
        client = RpcClient(f"127.0.0.1:{port}", SECURITY)
        answer = None
        async with asyncio.timeout(PATIENCE_S):
            while answer is None:
                with contextlib.suppress(Unavailable):  # it has not noticed yet that they are gone
                    answer = await client.call("Echo", MESSAGE, wire.AbortBatch, PATIENCE_S)
        assert answer == MESSAGE
        await client.close()


async def test_a_server_tells_when_its_port_may_be_full(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(open_files, "limit", lambda: 4)
    async with a_port():
        await until(lambda: "of 4 files are open" in caplog.text)
    assert not any("tell_when_short" in repr(task) for task in asyncio.all_tasks())


def test_few_files_are_told_of_once_a_minute_also_when_there_is_none_to_count_them(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock, limit = ManualClock(), 1 << 20
    monkeypatch.setattr(open_files, "limit", lambda: limit)
    shortage = open_files.Shortage(clock)
    shortage.look()
    assert caplog.text == ""
    limit = len([*Path("/proc/self/fd").iterdir()]) * 3 // 2  # more than half of them
    for _ in range(2):
        shortage.look()
    assert caplog.text.count(f"of {limit} files are open") == 1
    clock.advance(61.0)
    limit = 4

    def none_left(_: Path, **options: bool) -> os.stat_result:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(Path, "stat", none_left)
    shortage.look()
    assert caplog.messages[1].startswith("4 of 4 files are open")
