"""Calls in vain leave nothing to the garbage collector, which processes that serve rarely run."""

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any

import grpc.aio
import pytest

from tests.ports import free_port
from tests.transfer.samples import PATIENCE_S, SECURITY
from transfer import wire
from transfer.errors import Unavailable
from transfer.rpc import RpcClient, RpcServer

NUM_CALLS = 3
Call = Callable[[RpcClient], Coroutine[Any, Any, None]]
NOTHING = wire.AbortBatch(())


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def num_channels() -> int:
    """A closed channel that something still holds connects again, and stays connected."""
    return sum(isinstance(item, grpc.aio.Channel) for item in gc.get_objects())


async def follow(client: RpcClient) -> None:
    async with contextlib.aclosing(client.stream("Hang", NOTHING, wire.AbortBatch)) as stream:
        async for _ in stream:
            pass


async def ask(client: RpcClient) -> None:
    await client.call("Ask", NOTHING, wire.AbortBatch, PATIENCE_S)


async def ask_in_order(client: RpcClient) -> None:
    await client.in_order().call("Ask", NOTHING, wire.AbortBatch, PATIENCE_S)


@pytest.mark.parametrize("call", [follow, ask, ask_in_order])
async def test_a_call_that_nobody_takes_leaves_no_channel(call: Call) -> None:
    before, client = num_channels(), RpcClient(f"127.0.0.1:{free_port()}", SECURITY)
    for _ in range(NUM_CALLS):
        with contextlib.suppress(Unavailable):
            await call(client)
            raise AssertionError
        await client.renew()
    await client.close()
    assert num_channels() - before <= 1  # this client's; those of other tests may go meanwhile


@pytest.mark.parametrize("call", [follow, ask, ask_in_order])
@pytest.mark.parametrize("is_given_up", [True, False])
async def test_a_call_that_is_given_up_or_cut_off_leaves_no_channel(
    call: Call, is_given_up: bool
) -> None:
    begun = asyncio.Event()

    async def hang(_: wire.AbortBatch) -> AsyncIterator[wire.AbortBatch]:
        begun.set()
        await asyncio.Event().wait()
        yield NOTHING

    async def never(_: wire.AbortBatch) -> wire.AbortBatch:
        begun.set()
        await asyncio.Event().wait()
        return NOTHING

    server = RpcServer(SECURITY)
    server.stream("Hang", wire.AbortBatch, hang)
    server.unary("Ask", wire.AbortBatch, never)
    port = await server.start("127.0.0.1", 0)
    before, client = num_channels(), RpcClient(f"127.0.0.1:{port}", SECURITY)
    for _ in range(NUM_CALLS):
        begun.clear()
        calling = asyncio.create_task(call(client))
        await begun.wait()
        if is_given_up:
            calling.cancel()
        await client.renew()
        with contextlib.suppress(Unavailable, asyncio.CancelledError):
            await calling
            raise AssertionError
        del calling
        await asyncio.sleep(0)
    await client.close()
    assert num_channels() - before <= 1  # this client's; those of other tests may go meanwhile
    await server.stop()
