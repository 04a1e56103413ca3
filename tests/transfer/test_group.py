"""A group's leader and members over real sockets: calls in order, and the end of either side."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from model import members
from model.calls import Calls
from prefill.config import PrefillConfig
from tests.recording import until
from tests.transfer.samples import SECURITY
from tests.transfer.test_worker import PlainWorker, run_engine
from transfer import group, member, wire
from transfer.errors import BadMessage, ConfigError, Unauthenticated, Unavailable
from transfer.group import (
    Follow,
    HostArray,
    Joined,
    Leader,
    NodeCall,
    NodeCalls,
    NodeState,
    Told,
    arrays_of,
    packed_call,
)
from transfer.member import Member, Tell
from transfer.rpc import RpcClient, RpcServer, Security

CONFIG = PrefillConfig(
    Path("model"), "127.0.0.1:1", tp_size=3, nnodes=3, node_rank=1, dist_init_addr="127.0.0.1:2"
)


class PlainNode:
    """A node without a model: what it is told, and what it has to tell."""

    data_address = ""

    def __init__(self, calls: Calls | None = None) -> None:
        self.calls = calls or Calls()
        self.joined_as: tuple[str, int] | None = None
        self.too_much: frozenset[str] = frozenset()
        self.counted = NodeState()
        self.closed = False

    def joined(self, worker_id: str, node: int) -> None:
        self.joined_as = worker_id, node

    def behind(self) -> frozenset[str]:
        return self.too_much

    def state(self) -> NodeState:
        return self.counted

    def close(self) -> None:
        self.closed = True


def plain(calls: Calls | None = None) -> Callable[[Tell], PlainNode]:
    """Builds a node with these calls."""
    return lambda tell: PlainNode(calls)


class Group:
    """A leader that listens, the ranks it lost, and what it was told."""

    def __init__(self) -> None:
        self.lost: list[int] = []
        self.told: list[Told] = []
        self.leader = Leader(2, self.lost.append, self.told.append)
        self.server = RpcServer(SECURITY)
        self.server.stream("Follow", Follow, self.leader.feed)
        self.server.unary("StillThere", Follow, self.leader.still_there)
        self.server.unary("Told", Told, self.leader.told)
        self.address = ""

    async def start(self) -> None:
        self.address = f"127.0.0.1:{await self.server.start('127.0.0.1', 0)}"

    def client(self) -> RpcClient:
        return RpcClient(self.address, SECURITY)

    def texts_of_all(self, text: str) -> list[str]:
        """As members.texts_of_all, in a member."""
        leader = Joined("prefill-0", self.address)
        return [msgspec.json.encode(leader).decode(), text]


@pytest.fixture
async def led() -> AsyncIterator[Group]:
    made = Group()
    await made.start()
    yield made
    await made.leader.dismiss()
    await made.server.stop(0.1)


@pytest.fixture
def follow(
    led: Group, monkeypatch: pytest.MonkeyPatch, own_signals: None
) -> Callable[[Calls], "asyncio.Task[None]"]:
    """Runs a member whose engine has these calls, as the member's process would."""
    monkeypatch.setattr(member, "join", lambda *_: None)
    monkeypatch.setattr(members, "texts_of_all", led.texts_of_all)

    def start(calls: Calls) -> "asyncio.Task[None]":
        return asyncio.create_task(
            Member(CONFIG, "prefill", SECURITY, plain(calls)).run(ready.append)
        )

    ready: list[str] = []
    return start


def recording(seen: list[tuple[str, int, list[np.ndarray]]]) -> Calls:
    calls = Calls()
    for name in ("step", "place"):
        calls.add(name, lambda key, *arrays, name=name: seen.append((name, key, list(arrays))))
    return calls


async def following(led: Group) -> None:
    await asyncio.to_thread(led.leader.wait_for_all)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.int32).reshape(2, 3),
        np.array([], np.float32),
        np.array(True),
        np.float32(-0.0),
        np.arange(12, dtype=np.int32).reshape(3, 4)[:, ::2],
    ],
)
def test_an_array_arrives_as_it_is(array: np.ndarray) -> None:
    (found,) = arrays_of(packed_call("step", 1, [array]))
    assert (found.dtype, found.shape) == (array.dtype, array.shape)
    assert found.tobytes() == np.ascontiguousarray(array).tobytes()


@pytest.mark.parametrize(
    "broken",
    [
        HostArray("<i4", (2,), b"1234"),
        HostArray("<i4", (1,), b"123"),
        HostArray("no type", (), b""),
        HostArray("O", (1,), b"12345678"),
    ],
)
def test_what_is_no_array_is_refused(broken: HostArray) -> None:
    with pytest.raises(BadMessage, match="arrays of step"):
        arrays_of(NodeCall("step", 1, (broken,)))


async def test_a_member_makes_every_call_in_order(
    led: Group, follow: Callable[[Calls], "asyncio.Task[None]"]
) -> None:
    seen: list[tuple[str, int, list[np.ndarray]]] = []
    running = follow(recording(seen))
    await following(led)
    for number in range(500):
        name = "place" if number % 7 == 0 else "step"
        led.leader.tell(name, number, [np.full(3, number, np.int32), np.array(number % 2 == 0)])
    await until(lambda: len(seen) == 500)
    assert [key for _, key, _ in seen] == list(range(500))
    assert all(name == ("step", "place")[key % 7 == 0] for name, key, _ in seen)
    assert all((arrays[0] == key).all() and arrays[1] == (key % 2 == 0) for _, key, arrays in seen)
    assert led.leader.compiles_after_ready == 0
    client = led.client()
    await client.call("StillThere", Follow(1, 3), wire.Empty, 2.0)
    assert led.leader.compiles_after_ready == 3
    await client.close()
    await led.leader.dismiss()
    await asyncio.wait_for(running, 5)
    assert not led.lost


async def test_a_call_that_fails_ends_the_member_and_its_leader_knows(
    led: Group, follow: Callable[[Calls], "asyncio.Task[None]"]
) -> None:
    calls = Calls()

    def fails(key: int, *arrays: np.ndarray) -> None:
        raise RuntimeError("the device is gone")

    calls.add("step", fails)
    running = follow(calls)
    await following(led)
    led.leader.tell("step", 1, [])
    with pytest.raises(RuntimeError, match="the device is gone"):
        await asyncio.wait_for(running, 5)
    await until(lambda: led.lost == [1])


async def test_a_call_that_breaks_off_as_a_node_is_lost_is_reported_as_that_loss(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Bereft(PlainWorker):
        cause_wait_s = 10.0

        def turn(self) -> bool:
            self.on_loop(self.fail_process, Unavailable("node 1 is lost"))
            raise RuntimeError("Connection reset by peer")

    worker = Bereft()
    thread, _ = await run_engine(worker)
    await asyncio.to_thread(thread.join)
    assert str(worker._engine_error) == "node 1 is lost"
    assert "Traceback" not in caplog.text


@pytest.mark.usefixtures("own_signals")
async def test_a_start_that_breaks_off_as_a_node_is_lost_is_reported_as_that_loss() -> None:
    class Bereft(PlainWorker):
        cause_wait_s = 10.0

        def build(self) -> wire.WorkerInfo:
            assert self._loop is not None
            lost = Unavailable("node 1 is lost")
            self.on_loop(self._loop.call_later, 0.1, self.fail_process, lost)
            raise RuntimeError("Connection reset by peer")

    worker = Bereft()
    worker.host, worker.port = "127.0.0.1", 0
    with pytest.raises(Unavailable, match="node 1 is lost"):
        await asyncio.wait_for(worker.run("127.0.0.1:1", lambda _: None), 20)


async def test_a_member_whose_leader_ends_or_hangs_ends(
    led: Group,
    follow: Callable[[Calls], "asyncio.Task[None]"],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    running = follow(recording([]))
    await following(led)
    await led.server.stop(0.0)
    with pytest.raises(Unavailable):
        await asyncio.wait_for(running, 5)

    async def hangs(request: Follow) -> AsyncIterator[NodeCalls]:
        yield NodeCalls()
        await asyncio.sleep(60)

    monkeypatch.setattr(member, "SILENCE_S", 0.3)
    server = RpcServer(SECURITY)
    server.stream("Follow", Follow, hangs)
    led.address = f"127.0.0.1:{await server.start('127.0.0.1', 0)}"
    with pytest.raises(Unavailable, match="node 0 said nothing for"):
        await asyncio.wait_for(follow(recording([])), 5)
    await server.stop(0.0)


async def test_a_member_that_gives_no_sign_of_life_is_lost(
    led: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group, "SILENCE_S", 1.2)
    client = led.client()
    told = [batch async for batch in client.stream("Follow", Follow(1), NodeCalls)]
    assert led.lost == [1]
    assert told
    assert not any(batch.calls or batch.is_last for batch in told)
    await client.close()


async def test_a_member_that_hangs_with_calls_on_their_way_is_lost(
    led: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The member reads no more, so its leader's data stays queued: nothing else would show it."""
    monkeypatch.setattr(group, "SILENCE_S", 1.2)
    client = led.client()
    stream = client.stream("Follow", Follow(1), NodeCalls)
    await anext(stream)
    for _ in range(8):
        led.leader.tell("step", 0, [np.zeros(1 << 20, np.float32)])
        await asyncio.sleep(0.05)
    await until(lambda: led.lost == [1])
    await stream.aclose()
    await client.close()


async def test_a_leader_that_slept_blames_nobody(
    led: Group,
    follow: Callable[[Calls], "asyncio.Task[None]"],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(group, "SILENCE_S", 1.2)
    monkeypatch.setattr(member, "SILENCE_S", 1.2)
    running = follow(recording([]))
    await following(led)
    time.sleep(1.4)  # noqa: ASYNC251  (of the whole process)
    await asyncio.sleep(0.8)
    assert not led.lost
    assert not running.done()
    await led.leader.dismiss()
    await asyncio.wait_for(running, 5)


async def test_a_member_that_fell_far_behind_is_sent_what_a_message_may_hold(
    led: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group, "_MOST_BYTES", 100)
    client = led.client()
    stream: Any = client.stream("Follow", Follow(1), NodeCalls)
    await anext(stream)
    arrays = [np.zeros(num_bytes, np.uint8) for num_bytes in (60, 60, 60, 300, 10)]
    for key, array in enumerate(arrays):
        led.leader.tell("step", key, [array])
    dismissing = asyncio.create_task(led.leader.dismiss())
    told: list[NodeCalls] = []
    while not told or not told[-1].is_last:
        told.append(await anext(stream))
    batches = [[call.key for call in calls.calls] for calls in told if calls.calls]
    assert batches == [[0, 1], [2, 3], [4]]
    await stream.aclose()
    await asyncio.wait_for(dismissing, 5)
    await client.close()


async def test_a_leader_stays_until_its_members_have_left_not_until_they_are_told(
    led: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    """JAX aborts a member that sees its leader gone before it has ended itself."""
    monkeypatch.setattr(group, "_FAREWELL_S", 60.0)
    client = led.client()
    stream: Any = client.stream("Follow", Follow(1), NodeCalls)
    await anext(stream)
    dismissing = asyncio.create_task(led.leader.dismiss())
    while not (await anext(stream)).is_last:
        pass
    await asyncio.sleep(2 * group._ENDING_S)  # the member was told long ago, and is busy ending
    assert not dismissing.done()
    await stream.aclose()
    await asyncio.wait_for(dismissing, 5)
    assert not led.lost
    await client.close()


async def test_only_members_may_follow_and_each_once(led: Group) -> None:
    client = led.client()
    for rank in (0, 2, -1):
        with pytest.raises(BadMessage, match=f"node {rank} of 2 cannot follow"):
            await anext(client.stream("Follow", Follow(rank), NodeCalls))
    stream: Any = client.stream("Follow", Follow(1), NodeCalls)
    await anext(stream)
    with pytest.raises(BadMessage, match="node 1 of 2 cannot follow"):
        await anext(client.stream("Follow", Follow(1), NodeCalls))
    with pytest.raises(BadMessage, match="node 2 does not follow"):
        await client.call("StillThere", Follow(2), wire.Empty, 2.0)
    await stream.aclose()
    await until(lambda: led.lost == [1])
    await client.close()


async def test_calls_are_for_those_who_know_the_token(led: Group) -> None:
    client = RpcClient(led.address, Security("x" * 20))
    with pytest.raises(Unauthenticated):
        await anext(client.stream("Follow", Follow(1), NodeCalls))
    await client.close()


def test_a_leader_whose_members_do_not_come_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "FOLLOW_TIMEOUT_S", 0.01)
    with pytest.raises(Unavailable, match=r"nodes \[1, 2\] did not follow within 0.01 s"):
        Leader(3, lambda rank: None).wait_for_all()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"nnodes": 0}, "--nnodes must be at least 1, got 0"),
        ({"node_rank": 1}, "--node-rank must be at most 0, got 1"),
        ({"nnodes": 2, "tp_size": 2, "node_rank": 2}, "--node-rank must be at most 1, got 2"),
        ({"nnodes": 2, "tp_size": 3}, "--nnodes 2 must divide --dp-size 1 x --tp-size 3"),
        ({"nnodes": 2, "tp_size": 2}, "needs --dist-init-addr HOST:PORT, .*; got ''"),
        (
            {"nnodes": 2, "tp_size": 2, "dist_init_addr": "host:0"},
            "needs --dist-init-addr HOST:PORT, .*; got 'host:0'",
        ),
        ({"dist_init_addr": "host:1"}, "--dist-init-addr needs --nnodes above 1"),
        (
            {
                "nnodes": 2,
                "tp_size": 2,
                "dp_size": 2,
                "ep_size": 2,
                "enable_eplb": True,
                "dist_init_addr": "host:1",
            },
            "--enable-eplb needs --nnodes 1 or --dp-size 1",
        ),
        (
            {"nnodes": 2, "tp_size": 2, "dist_init_addr": "10.1.2.3:1"},
            "--host 127.0.0.1 is where node 0 says .* --dist-init-addr 10.1.2.3:1 is for, cannot",
        ),
    ],
)
def test_flags_of_a_group_that_make_no_sense_are_refused(
    flags: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        PrefillConfig(Path("model"), "127.0.0.1:1", **flags)
