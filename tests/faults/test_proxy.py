"""The proxy's trap waits for a live frame, whatever happened to earlier connections."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from tests.faults.plan import Phase
from tests.faults.proxy import Proxy, Trap
from tests.ports import free_port
from transfer.backend import HEADER_BYTES, Frame, Kind, whole_frame

# More than the sockets along the way hold, so the sender waits until it is read.
LONG = memoryview(bytes(16 << 20))
Ends = asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]]


@contextlib.asynccontextmanager
async def proxied() -> AsyncIterator[tuple[Proxy, int, Ends]]:
    """A proxy, the port that senders reach it at, and decode's ends of their connections."""
    ends: Ends = asyncio.Queue()
    decode = await asyncio.start_server(lambda *end: ends.put(end), "127.0.0.1", 0)
    proxy = Proxy("decode-0", decode.sockets[0].getsockname()[1])
    port = free_port()
    await proxy.start(port)
    try:
        yield proxy, port, ends
    finally:
        await proxy.close()
        decode.close()


@pytest.mark.timeout(30)
@pytest.mark.parametrize("phase", ["mid_chunk", "mid_frame"])
async def test_a_trap_whose_connection_ends_before_it_springs_waits_for_another(
    phase: Phase,
) -> None:
    async with proxied() as (proxy, port, ends):
        proxy.trap = trap = Trap(phase, at=0.9)

        told, over = await asyncio.open_connection("127.0.0.1", port)
        over.write(whole_frame(Frame(Kind.PAGES), payload=[LONG]))
        reader, writer = await ends.get()
        await reader.readexactly(HEADER_BYTES)  # the frame is under way, so it was caught
        assert trap.pair is not None
        writer.transport.abort()
        assert not await told.read()
        assert not trap.sprung.is_set()

        await _springs(trap, port, ends)
        over.close()


@pytest.mark.timeout(30)
async def test_a_proxy_that_closes_amid_connections_has_nothing_to_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with proxied() as (proxy, port, ends):
        over = (await asyncio.open_connection("127.0.0.1", port))[1]
        _, writer = await ends.get()
        await proxy.close()
        await asyncio.sleep(0)  # what the server calls once a connection's task has ended
        assert not caplog.records
        writer.close()
        over.close()


@pytest.mark.timeout(30)
async def test_what_a_sender_left_behind_springs_no_trap() -> None:
    async with proxied() as (proxy, port, ends):
        _, gone = await asyncio.open_connection("127.0.0.1", port)
        first = whole_frame(Frame(Kind.PAGES), payload=[LONG])
        gone.write(first)
        gone.write(whole_frame(Frame(Kind.PAGES), payload=[LONG[:4096]]))
        gone.close()
        await gone.wait_closed()
        reader, writer = await ends.get()
        await reader.readexactly(HEADER_BYTES)  # the first frame is on its way
        proxy.trap = trap = Trap("mid_frame", "cut")
        await reader.readexactly(len(first) - HEADER_BYTES)
        assert len(await reader.read()) < 4096 + HEADER_BYTES
        assert not trap.sprung.is_set()
        writer.close()

        await _springs(trap, port, ends)


@pytest.mark.timeout(30)
async def test_a_connection_that_stood_still_springs_no_further_trap(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its sender may have given up, and its FIN be queued behind everything it sent before."""
    monkeypatch.setattr("tests.faults.proxy._HELD_UP_S", 0.05)
    async with proxied() as (proxy, port, ends):
        proxy.trap = stall = Trap("mid_frame", "stall", lasts_s=0.1)

        _, held_up = await asyncio.open_connection("127.0.0.1", port)
        frame = whole_frame(Frame(Kind.PAGES), payload=[LONG[:4096]])
        held_up.write(frame + frame)
        await stall.sprung.wait()
        proxy.trap = trap = Trap("mid_frame", "cut")
        reader, writer = await ends.get()
        assert await reader.readexactly(2 * len(frame)) == frame + frame
        assert not trap.sprung.is_set()

        await _springs(trap, port, ends)
        held_up.close()
        writer.close()


async def _springs(trap: Trap, port: int, ends: Ends) -> None:
    """The trap springs at the next frame of another connection."""
    _, well = await asyncio.open_connection("127.0.0.1", port)
    well.write(whole_frame(Frame(Kind.PAGES), payload=[LONG[:4096]]))
    reader, writer = await ends.get()
    await reader.readexactly(HEADER_BYTES)
    await trap.sprung.wait()
    well.close()
    writer.close()
