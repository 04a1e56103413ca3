"""A member's start and end: what nodes must have alike; leaders that fail, and leaving alone."""

import asyncio
import dataclasses
import signal
from collections.abc import AsyncIterator

import jax
import pytest

from model import members
from model.calls import Calls
from tests.recording import until
from tests.serving.commands import MODEL
from tests.transfer.samples import SECURITY
from tests.transfer.test_group import CONFIG, Group
from transfer import group, member
from transfer.errors import Unavailable
from transfer.member import Member


@pytest.fixture
async def led(monkeypatch: pytest.MonkeyPatch, own_signals: None) -> AsyncIterator[Group]:
    made = Group()
    await made.start()
    monkeypatch.setattr(member, "join", lambda config: None)
    monkeypatch.setattr(members, "texts_of_all", lambda text: [made.address, text])
    yield made
    await made.leader.dismiss()
    await made.server.stop(0.1)


async def _followed(led: Group) -> "asyncio.Task[None]":
    running = asyncio.create_task(Member(CONFIG, SECURITY, Calls).run(lambda what: None))
    await asyncio.to_thread(led.leader.wait_for_all)
    return running


async def test_a_leader_that_fails_takes_members_with_an_error(led: Group) -> None:
    running = await _followed(led)
    await led.leader.dismiss(is_well=False)
    with pytest.raises(Unavailable, match="node 0 has no more for this node"):
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


def test_nodes_compare_versions_flags_and_model_but_not_where_each_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared: dict[str, str] = {}
    monkeypatch.setattr(members, "join", lambda *_: None)
    monkeypatch.setattr(members, "check_alike", compared.update)
    group.join(dataclasses.replace(CONFIG, model_path=MODEL))
    assert compared["version of jax"] == jax.__version__
    assert compared["--tp-size"] == "3"
    assert len(compared["model digest"]) == 16
    assert not {"--host", "--port", "--node-rank", "--model-path"} & set(compared)
