"""A group's nodes meet at node 0, over real sockets: who is admitted, and what others are told."""

import asyncio
import dataclasses
import gc
import os
import shutil
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Mapping
from pathlib import Path
from typing import Any, cast

import jax
import pytest

from model import executables, members
from prefill.config import PrefillConfig
from tests.certificate import made_security
from tests.model.harness import GOLDENS
from tests.ports import free_port
from tests.recording import until
from tests.serving.commands import MODEL
from tests.transfer.samples import PATIENCE_S, SECURITY
from transfer import group, meeting
from transfer.checks import NamedPath
from transfer.errors import ConfigError, Incompatible, Unauthenticated, Unavailable
from transfer.meeting import Meet, Meeting, Met, Visit, settings_of
from transfer.rpc import RpcClient, RpcServer, Security

CONFIG = PrefillConfig(
    MODEL, "127.0.0.1:1", tp_size=3, nnodes=3, node_rank=1, dist_init_addr="127.0.0.1:2"
)
SETTINGS = {"role": "prefill", "--nnodes": "3", "--dtype": "auto"}


class Nodes:
    """Node 0 of three, and the others that come to it."""

    def __init__(self, security: Security = SECURITY) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self.security = security
        self.lost: list[int] = []
        self.meeting = Meeting(self.address, 3, security, self.lost.append)
        self.visits: list[Visit] = []
        self._tasks: list[asyncio.Task[str]] = []

    def lead(
        self, settings: Mapping[str, str] = SETTINGS, patience_s: float = PATIENCE_S
    ) -> "asyncio.Task[str]":
        return self._started(self.meeting.all_came(settings, patience_s))

    def come(
        self,
        rank: int,
        settings: Mapping[str, str] = SETTINGS,
        patience_s: float = PATIENCE_S,
        security: Security | None = None,
    ) -> "asyncio.Task[str]":
        visit = Visit(self.address, rank, security or self.security)
        self.visits.append(visit)
        return self._started(visit.all_came(settings, patience_s))

    def waiting(self) -> list[int]:
        """Ranks that have come to node 0."""
        return sorted(self.meeting._came)

    async def met(self) -> str:
        """Let the group meet. Returns the address at which JAX is to listen."""
        all_of_them = [self.lead(), self.come(1), self.come(2)]
        first, *others = await asyncio.gather(*all_of_them)
        assert set(others) == {first}
        return first

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for visit in self.visits:
            await visit.close()
        await self.meeting.close()

    def _started(self, coming: Coroutine[Any, Any, str]) -> "asyncio.Task[str]":
        self._tasks.append(asyncio.create_task(coming))
        return self._tasks[-1]


@pytest.fixture
async def nodes() -> AsyncIterator[Nodes]:
    made = Nodes()
    yield made
    await made.close()


async def test_nodes_come_in_any_order_and_hear_of_a_free_port_once_all_are_there(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meeting, "_RETRY_S", 0.01)
    early = nodes.come(2)
    await asyncio.sleep(0.1)
    leader = nodes.lead()
    await until(lambda: nodes.waiting() == [2])
    assert not leader.done()
    assert not early.done()
    late = nodes.come(1)
    coordinator = await leader
    assert [await early, await late] == [coordinator] * 2
    host, _, port = coordinator.rpartition(":")
    assert host == "127.0.0.1"
    assert coordinator != nodes.address
    socket.create_server((host, int(port))).close()  # the port is free


async def test_what_differs_is_told_to_the_node_that_came_and_the_others_wait_on(
    nodes: Nodes,
) -> None:
    leader, first = nodes.lead(), nodes.come(1)
    await until(lambda: nodes.waiting() == [1])
    for name, theirs, ours in (("role", "decode", "prefill"), ("--nnodes", "2", "3")):
        said = f"^{name} differs: node 0 has {ours}, node 2 has {theirs}$"
        with pytest.raises(ConfigError, match=said):
            await nodes.come(2, {**SETTINGS, name: theirs})
    with pytest.raises(ConfigError, match=r"^--new differs: node 0 has None, node 2 has 1$"):
        await nodes.come(2, {**SETTINGS, "--new": "1"})
    assert not leader.done()
    assert await nodes.come(2) == await first == await leader


async def test_a_rank_that_is_taken_or_not_awaited_is_refused(nodes: Nodes) -> None:
    leader, first = nodes.lead(), nodes.come(1)
    await until(lambda: nodes.waiting() == [1])
    with pytest.raises(ConfigError, match=r"^--node-rank 1 is taken: another node came with it$"):
        await nodes.come(1)
    for rank in (0, 3, -1):
        with pytest.raises(ConfigError, match=f"^--node-rank {rank}: expected 1 to 2$"):
            await nodes.come(rank)
    assert await nodes.come(2) == await first == await leader


async def test_a_node_that_dies_while_it_waits_leaves_its_rank_to_another(nodes: Nodes) -> None:
    leader, dies = nodes.lead(), nodes.come(1)
    await until(lambda: nodes.waiting() == [1])
    dies.cancel()
    await until(lambda: nodes.waiting() == [])
    again = nodes.come(1)
    assert await nodes.come(2) == await again == await leader


async def test_a_node_whose_call_broke_may_call_again_before_that_is_noticed(nodes: Nodes) -> None:
    leader, client = nodes.lead(), RpcClient(nodes.address, SECURITY)
    same = Meet(1, "the same process", tuple(SETTINGS.items()))

    def call() -> "asyncio.Task[Met]":
        calls.append(cast(AsyncGenerator[Met, None], client.stream("Meet", same, Met)))
        return asyncio.create_task(anext(calls[-1]))

    calls: list[AsyncGenerator[Met, None]] = []
    await until(lambda: nodes.meeting._server._server is not None)
    first = call()
    await until(lambda: nodes.waiting() == [1])
    held = nodes.meeting._came[1]
    second = call()
    await until(lambda: nodes.meeting._came[1] is not held)
    first.cancel()
    await asyncio.sleep(0.1)
    assert nodes.waiting() == [1]
    assert await nodes.come(2) == await leader == (await second).coordinator
    assert (await call()).coordinator == await leader  # the earlier reply may have been lost
    await calls[1].aclose()
    await asyncio.sleep(0.1)
    assert not nodes.lost
    await client.close()


async def test_nodes_that_have_met_stay_in_touch(nodes: Nodes) -> None:
    await nodes.met()
    first, second = nodes.visits
    await first.close()
    await until(lambda: nodes.lost == [1])
    assert not second.over.is_set()
    await nodes.meeting._server.stop(0.0)
    await asyncio.wait_for(second.over.wait(), PATIENCE_S)


async def test_node_0_lets_the_others_leave_before_it_does(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meeting, "_FAREWELL_S", PATIENCE_S)
    await nodes.met()
    closing = asyncio.create_task(nodes.meeting.close())
    for visit in nodes.visits:
        await asyncio.wait_for(visit.over.wait(), PATIENCE_S)
        gc.collect()  # a stream without a reference would be closed
        await asyncio.sleep(0.05)
        assert not closing.done()
        await visit.close()
    await asyncio.wait_for(closing, PATIENCE_S)
    assert not nodes.lost


async def test_a_node_that_hangs_keeps_node_0_for_a_moment_only(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meeting, "_FAREWELL_S", 0.1)
    await nodes.met()
    await asyncio.wait_for(nodes.meeting.close(), PATIENCE_S)
    assert not nodes.lost


async def test_a_node_0_that_leaves_while_it_waits_does_so_at_once(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meeting, "_FAREWELL_S", PATIENCE_S)
    nodes.lead()
    first = nodes.come(1)
    await until(lambda: nodes.waiting() == [1])
    await asyncio.wait_for(nodes.meeting.close(), 5)
    assert not first.done()  # it still waits for node 2


async def test_a_group_that_has_met_takes_nobody_else_and_says_so(nodes: Nodes) -> None:
    await nodes.met()
    with pytest.raises(Unavailable, match=r"^node 1 is too late: this group has met already$"):
        await nodes.come(1)
    with pytest.raises(ConfigError, match="--dtype differs: node 0 has auto, node 1 has float32"):
        await nodes.come(1, {**SETTINGS, "--dtype": "float32"})


async def test_who_does_not_know_the_token_is_not_heard(nodes: Nodes) -> None:
    leader = nodes.lead()
    with pytest.raises(Unauthenticated, match="wrong or missing cluster token"):
        await nodes.come(1, security=Security("x" * 20))
    assert nodes.waiting() == []
    assert not leader.done()


async def test_a_group_with_certificates_meets_by_them(tmp_path: Path) -> None:
    nodes = Nodes(made_security("token-of-the-tests", tmp_path))
    await nodes.met()
    with pytest.raises(Unavailable, match=r"not all nodes came within 0.3 s; last heard: Meet at"):
        await nodes.come(1, SETTINGS, 0.3, SECURITY)
    await nodes.close()


async def test_whose_patience_ends_says_for_whom_it_waited(nodes: Nodes) -> None:
    said = f"^--dist-init-addr {nodes.address}: "
    with pytest.raises(Unavailable, match=f"{said}not all nodes came within 0.1 s; last heard: Me"):
        await nodes.come(1, SETTINGS, 0.1)
    leader, first = nodes.lead(SETTINGS, 0.5), nodes.come(2, SETTINGS, 0.3)
    with pytest.raises(Unavailable, match=f"{said}not all nodes came within 0.3 s"):
        await first
    with pytest.raises(Unavailable, match=rf"{said}nodes \[1, 2\] did not come within 0.5 s"):
        await leader


async def test_a_node_0_that_cannot_listen_names_the_flag(nodes: Nodes) -> None:
    host, _, port = nodes.address.rpartition(":")
    said = f"cannot listen on {nodes.address}: Address already in use; choose another --dist-init"
    with socket.create_server((host, int(port))), pytest.raises(ConfigError, match=said):
        await nodes.lead()


async def test_a_node_0_that_speaks_otherwise_has_another_version() -> None:
    async def other(request: Meet) -> AsyncIterator[Meet]:
        yield request

    server = RpcServer(SECURITY)
    server.stream("Meet", Meet, other)
    visit = Visit(f"127.0.0.1:{await server.start('127.0.0.1', 0)}", 1, SECURITY)
    with pytest.raises(Incompatible, match="node 0 has another version of kvferry"):
        await visit.all_came(SETTINGS)
    await visit.close()
    await server.stop(0.0)


async def test_all_nodes_join_jax_where_node_0_says(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    joined: list[tuple[str, int, int, bool]] = []
    monkeypatch.setattr(members, "join", lambda *given: joined.append(given))
    loop = asyncio.get_running_loop()
    nodes.visits = [Visit(nodes.address, rank, SECURITY) for rank in (1, 2)]
    ends = [nodes.meeting.all_came, *(visit.all_came for visit in nodes.visits)]

    def join(rank: int) -> None:
        group.join(dataclasses.replace(CONFIG, node_rank=rank), "prefill", ends[rank], loop)

    await asyncio.gather(*(asyncio.to_thread(join, rank) for rank in range(3)))
    assert sorted(rank for _, _, rank, _ in joined) == [0, 1, 2]
    assert len({(coordinator, num, crosses) for coordinator, num, _, crosses in joined}) == 1
    assert not joined[0][-1], "they meet at a loopback address"


# --- what is compared -----------------------------------------------------------------------------


def test_nodes_compare_versions_flags_and_model_but_not_where_each_is() -> None:
    compared = settings_of(CONFIG, "prefill")
    assert list(compared)[:2] == ["role", "version of kvferry"]
    assert compared["role"] == "prefill"
    assert compared["version of jax"] == jax.__version__
    assert compared["--tp-size"] == "3"
    assert compared["--drain-timeout"] == "30.0"
    assert compared["--init-expert-location"] == "trivial"
    assert len(compared["model digest"]) == 16
    assert compared["$JAX_DEFAULT_MATMUL_PRECISION"] == "None"
    assert compared["$XLA_FLAGS"] == os.environ["XLA_FLAGS"]
    assert not {"--host", "--port", "--node-rank", "--model-path"} & set(compared)
    assert not [name for name in compared if "CACHE_DIR" in name]
    dummies = settings_of(dataclasses.replace(CONFIG, load_format="dummy"), "prefill")
    assert dummies["model digest"].endswith("-dummy")


def test_nodes_of_one_host_may_see_different_gpus() -> None:
    before = jax.config.values["jax_cuda_visible_devices"]
    ours = settings_of(CONFIG, "prefill")
    try:
        jax.config.update("jax_cuda_visible_devices", "1")
        assert settings_of(CONFIG, "prefill") == ours
    finally:
        jax.config.update("jax_cuda_visible_devices", before)


def test_nodes_compare_adapters_by_name_and_content(tmp_path: Path) -> None:
    def told(*adapters: tuple[str, Path]) -> str:
        paths = tuple(NamedPath(*adapter) for adapter in adapters)
        config = dataclasses.replace(
            CONFIG, model_path=GOLDENS / "llama" / "model", lora_paths=paths
        )
        return settings_of(config, "prefill")["--lora-paths"]

    adapter, elsewhere = GOLDENS / "lora" / "llama_all", tmp_path / "copy"
    shutil.copytree(adapter, elsewhere)
    assert told() == "none"
    assert told(("a", adapter)) == told(("a", elsewhere))
    other = GOLDENS / "lora" / "llama_queries"
    assert len({told(("a", adapter)), told(("b", adapter)), told(("a", other))}) == 3


def test_what_is_in_a_file_of_experts_is_compared_and_not_where_it_is(tmp_path: Path) -> None:
    def compared(name: str) -> str:
        config = dataclasses.replace(CONFIG, ep_size=3, init_expert_location=str(tmp_path / name))
        return settings_of(config, "prefill")["--init-expert-location"]

    for name, text in (("a", "{}"), ("b", "{}"), ("c", "[]")):
        (tmp_path / name).write_text(text)
    assert compared("a") == compared("b") != compared("c")
    with pytest.raises(ConfigError, match=r"--init-expert-location .*/d cannot be read: No such"):
        compared("d")


async def test_a_node_with_other_code_is_refused(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = settings_of(CONFIG, "prefill")
    leader = nodes.lead(ours)
    monkeypatch.setattr(meeting, "digest_of_sources", lambda: "other code")
    theirs = settings_of(CONFIG, "prefill")
    said = f"version of kvferry differs: node 0 has {ours['version of kvferry']}, node 1 has other"
    with pytest.raises(ConfigError, match=said):
        await nodes.come(1, theirs)
    assert not leader.done()


def test_the_digest_of_the_code_is_over_names_and_contents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = set()
    monkeypatch.setattr(executables, "_ROOT", tmp_path)
    for name, code in (
        ("model/a.py", "1"),
        ("model/a.py", "2"),
        ("decode/a/b.py", "2"),
        ("model/kernels/tiles.json", "2"),
        ("serving/app.py", "2"),  # not part of what nodes must share
        ("model/a.pyc", "2"),
    ):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(code)
        found.add(settings_of(CONFIG, "prefill")["version of kvferry"])
    assert len(found) == 4
    assert {len(digest) for digest in found} == {16}
