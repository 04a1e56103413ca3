"""A member's start and end: leaders that fail, and leaving alone."""

import asyncio
import signal
import threading
import weakref
from collections.abc import AsyncIterator, Callable

import msgspec
import pytest

from model import members
from model.calls import Calls
from tests.recording import until
from tests.transfer.samples import PATIENCE_S, SECURITY
from tests.transfer.test_group import CONFIG, Group, PlainNode, plain
from transfer import member, wire
from transfer.backend import (
    Arrived,
    Finished,
    FirstToken,
    SenderEvent,
    SenderLost,
    Shipped,
)
from transfer.errors import Code, ConfigError, Unavailable
from transfer.group import Joined, NodeState, Told, meet_all
from transfer.member import Member, Tell


@pytest.fixture
async def led(monkeypatch: pytest.MonkeyPatch, own_signals: None) -> AsyncIterator[Group]:
    made = Group()
    await made.start()
    monkeypatch.setattr(member, "join", lambda *_: None)
    monkeypatch.setattr(members, "texts_of_all", made.texts_of_all)
    yield made
    await made.leader.dismiss()
    await made.server.stop(0.1)


def _run(build: Callable[[Tell], PlainNode]) -> "asyncio.Task[None]":
    return asyncio.create_task(Member(CONFIG, "prefill", SECURITY, build).run(lambda what: None))


async def _followed(led: Group) -> "asyncio.Task[None]":
    running = asyncio.create_task(
        Member(CONFIG, "prefill", SECURITY, plain()).run(lambda what: None)
    )
    await asyncio.to_thread(led.leader.wait_for_all)
    return running


async def test_a_leader_that_fails_takes_members_with_an_error(led: Group) -> None:
    running = await _followed(led)
    await led.leader.dismiss(is_well=False)
    with pytest.raises(Unavailable, match="node 0 ended the stream of calls"):
        await asyncio.wait_for(running, 5)
    assert not led.lost


@pytest.mark.parametrize("numbers", [(signal.SIGTERM, signal.SIGTERM), (signal.SIGINT,)])
async def test_a_member_that_leaves_before_its_leader_ends_with_an_error(
    led: Group, monkeypatch: pytest.MonkeyPatch, numbers: tuple[signal.Signals, ...]
) -> None:
    monkeypatch.setattr(member, "_INTERRUPTED_S", 0.2)
    running = await _followed(led)
    for number in numbers:
        assert not running.done()
        signal.raise_signal(number)
        await asyncio.sleep(0.05)
    with pytest.raises(Unavailable, match="node 1 leaves before node 0 does"):
        await asyncio.wait_for(running, 5)
    await until(lambda: led.lost == [1])


def _breaking(gone: threading.Event) -> Calls:
    """Calls that break off once another node is gone."""
    calls = Calls()

    def step(key: int) -> None:
        gone.wait(20)
        raise RuntimeError("Connection reset by peer")

    calls.add("step", step)
    return calls


class _Cycle:
    """Garbage that only a collection finds, as what jaxlib keeps of pages until one."""

    def __init__(self) -> None:
        self.own = self


async def test_a_member_without_calls_collects_what_its_last_one_left(led: Group) -> None:
    calls, gone = Calls(), threading.Event()

    def place(key: int) -> None:
        weakref.finalize(_Cycle(), gone.set)

    calls.add("place", place)
    running = _run(plain(calls))
    await asyncio.to_thread(led.leader.wait_for_all)
    led.leader.tell("place", 1, [])
    assert await asyncio.to_thread(gone.wait, PATIENCE_S)
    await led.leader.dismiss()
    await asyncio.wait_for(running, 5)


@pytest.mark.parametrize("is_well", [True, False])
async def test_a_call_that_breaks_off_as_other_nodes_leave_is_no_failure_of_its_member(
    led: Group,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    is_well: bool,
) -> None:
    monkeypatch.setattr(member, "CAUSE_S", 20.0)
    gone = threading.Event()
    build = plain(_breaking(gone))
    running = _run(build)
    await asyncio.to_thread(led.leader.wait_for_all)
    led.leader.tell("step", 1, [])
    dismissing = asyncio.create_task(led.leader.dismiss(is_well))
    gone.set()  # the member may see this before its leader's last word
    if is_well:
        await asyncio.wait_for(running, 5)
    else:
        with pytest.raises(Unavailable, match="node 0 ended the stream of calls"):
            await asyncio.wait_for(running, 5)
    await dismissing
    assert "Traceback" not in caplog.text
    assert not led.lost


async def test_a_member_whose_first_word_is_the_last_leaves_well(led: Group) -> None:
    running = asyncio.create_task(
        Member(CONFIG, "prefill", SECURITY, plain()).run(lambda what: None)
    )
    await until(lambda: bool(led.leader._feeds))
    await led.leader.dismiss()
    await asyncio.wait_for(running, 5)


async def test_a_member_whose_leader_is_gone_before_it_follows_ends(
    monkeypatch: pytest.MonkeyPatch, own_signals: None
) -> None:
    over = threading.Event()
    monkeypatch.setattr(member, "join", lambda *_: over.wait(20))
    ending = Member(CONFIG, "prefill", SECURITY, plain())
    running = asyncio.create_task(ending.run(lambda what: None))
    await until(lambda: hasattr(ending, "_visit"))
    ending._visit.over.set()
    with pytest.raises(Unavailable, match="node 0 was lost while this node was starting"):
        await asyncio.wait_for(running, 5)
    over.set()


async def test_a_member_whose_start_breaks_off_as_its_leader_is_gone_says_that(
    monkeypatch: pytest.MonkeyPatch, own_signals: None
) -> None:
    def broken(*_: object) -> None:
        loop = ending._loop
        loop.call_soon_threadsafe(loop.call_later, 0.1, ending._visit.over.set)
        raise RuntimeError("Connection reset by peer")

    monkeypatch.setattr(member, "join", broken)
    monkeypatch.setattr(member, "CAUSE_S", 20.0)
    ending = Member(CONFIG, "prefill", SECURITY, plain())
    with pytest.raises(Unavailable, match="node 0 was lost while this node was starting"):
        await asyncio.wait_for(ending.run(lambda what: None), 5)


async def test_what_a_members_data_plane_says_reaches_its_leader_in_order(led: Group) -> None:
    tells: list[Tell] = []
    node = PlainNode()

    def build(tell: Tell) -> PlainNode:
        tells.append(tell)
        return node

    running = _run(build)
    await asyncio.to_thread(led.leader.wait_for_all)
    assert node.joined_as == ("prefill-0", 1)
    (tell,) = tells
    arrived = [Arrived(7, page, 2) for page in range(0, 200, 2)]
    finished, lost = Finished(7, FirstToken(1, 0, 8)), SenderLost((8, 9), "gone", Code.PEER_LOST)
    sent = SenderEvent("acked", 5, shipped=Shipped("tcp", 100, 3, page_ends={4: 1.5}))

    def say() -> None:
        for page in arrived:
            tell(page)
        for event in (finished, lost, sent):
            tell(event)

    thread = threading.Thread(target=say)
    thread.start()
    thread.join()
    await until(lambda: sum(len(told.sent) for told in led.told) == 1)
    assert {told.node_rank for told in led.told} == {1}
    assert [each for told in led.told for each in told.received] == [*arrived, finished, lost]
    (came,) = (each for told in led.told for each in told.sent)
    assert came == sent
    assert came.shipped == sent.shipped
    node.too_much = frozenset({"tcp://a"})
    await until(lambda: led.told[-1].behind == ("tcp://a",))
    node.too_much = frozenset()
    await until(lambda: led.told[-1].behind == ())
    await led.leader.dismiss()
    await asyncio.wait_for(running, 5)
    assert node.closed


async def test_what_a_member_counts_is_known_to_its_leader(led: Group) -> None:
    node = PlainNode()
    pair = wire.TransferPair("tcp", "tcp://a", 10, 0.5, 20.0)
    node.counted = NodeState({"bytes": 10.0}, (pair,), 7)
    running = _run(lambda tell: node)
    await until(lambda: led.leader.states == [node.counted])
    await led.leader.dismiss()
    await asyncio.wait_for(running, 5)


async def test_a_leader_that_cannot_be_told_has_lost_its_member(led: Group) -> None:
    """It would wait for ever for what it was not told."""
    tells: list[Tell] = []

    def build(tell: Tell) -> PlainNode:
        tells.append(tell)
        return PlainNode()

    def refuse(told: Told) -> None:
        raise Unavailable("not now")

    led.leader._on_told = refuse
    running = _run(build)
    await asyncio.to_thread(led.leader.wait_for_all)
    tells[0](SenderEvent("acked", 5))
    with pytest.raises(Unavailable, match="node 1 leaves before node 0 does"):
        await asyncio.wait_for(running, 5)
    await until(lambda: led.lost == [1])


@pytest.mark.parametrize(
    ("addresses", "message"),
    [
        (("tcp://127.0.0.1:1", "tcp://[::1]:2", "tcp://localhost:3"), ""),
        (("tcp://10.0.0.1:1", "tcp://10.0.0.2:1"), ""),
        (("", ""), ""),
        (
            ("tcp://10.0.0.1:1", "tcp://127.0.0.1:2"),
            "node 1 takes pages at tcp://127.0.0.1:2, .* node 0 at tcp://10.0.0.1:1: give node 1",
        ),
        (("tcp://127.0.0.1:1", "tcp://10.0.0.2:2"), "give node 0 a --host or --data-host"),
    ],
)
def test_nodes_of_which_only_some_can_be_reached_do_not_begin(
    monkeypatch: pytest.MonkeyPatch, addresses: tuple[str, ...], message: str
) -> None:
    texts = [msgspec.json.encode(Joined(data_address=each)).decode() for each in addresses]
    monkeypatch.setattr(members, "texts_of_all", lambda text: texts)
    if message:
        with pytest.raises(ConfigError, match=message):
            meet_all(Joined())
    else:
        assert [joined.data_address for joined in meet_all(Joined())] == list(addresses)
