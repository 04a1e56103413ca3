"""A member's start and end: leaders that fail, and leaving alone."""

import asyncio
import signal
import threading
from collections.abc import AsyncIterator
from functools import partial

import pytest

from model import members
from model.calls import Calls
from tests.recording import until
from tests.transfer.samples import SECURITY
from tests.transfer.test_group import CONFIG, Group
from transfer import member
from transfer.errors import Unavailable
from transfer.member import Member


@pytest.fixture
async def led(monkeypatch: pytest.MonkeyPatch, own_signals: None) -> AsyncIterator[Group]:
    made = Group()
    await made.start()
    monkeypatch.setattr(member, "join", lambda *_: None)
    monkeypatch.setattr(members, "texts_of_all", lambda text: [made.address, text])
    yield made
    await made.leader.dismiss()
    await made.server.stop(0.1)


async def _followed(led: Group) -> "asyncio.Task[None]":
    running = asyncio.create_task(Member(CONFIG, "prefill", SECURITY, Calls).run(lambda what: None))
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


@pytest.mark.parametrize("is_well", [True, False])
async def test_a_call_that_breaks_off_as_other_nodes_leave_is_no_failure_of_its_member(
    led: Group,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    is_well: bool,
) -> None:
    monkeypatch.setattr(member, "CAUSE_S", 20.0)
    gone = threading.Event()
    build = partial(_breaking, gone)
    running = asyncio.create_task(Member(CONFIG, "prefill", SECURITY, build).run(lambda what: None))
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
    running = asyncio.create_task(Member(CONFIG, "prefill", SECURITY, Calls).run(lambda what: None))
    await until(lambda: bool(led.leader._feeds))
    await led.leader.dismiss()
    await asyncio.wait_for(running, 5)


async def test_a_member_whose_leader_is_gone_before_it_follows_ends(
    monkeypatch: pytest.MonkeyPatch, own_signals: None
) -> None:
    over = threading.Event()
    monkeypatch.setattr(member, "join", lambda *_: over.wait(20))
    ending = Member(CONFIG, "prefill", SECURITY, Calls)
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
    ending = Member(CONFIG, "prefill", SECURITY, Calls)
    with pytest.raises(Unavailable, match="node 0 was lost while this node was starting"):
        await asyncio.wait_for(ending.run(lambda what: None), 5)
