"""A worker that does not fit is refused before it reads weights; dead workers do not count."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator

import pytest

from model import opening
from model.opening import OpenedModel
from tests.cluster import environment
from tests.model.harness import GOLDENS, open_plainly
from tests.transfer.children import ROOT
from tests.transfer.samples import PATIENCE_S, SECURITY, a_worker
from transfer import bootstrap, wire
from transfer.bootstrap import RegistryClient, RegistryServer
from transfer.clock import SYSTEM_CLOCK
from transfer.errors import Incompatible, Unauthenticated, Unavailable
from transfer.flags import TOKEN_ENV
from transfer.leases import Leases
from transfer.rpc import RpcServer, Security

MODEL = GOLDENS / "llama" / "model"


class OfLater(wire.Message, frozen=True):
    """What `Register` may be in another version."""

    info: wire.WorkerInfo
    epoch: int
    more: int


@contextlib.asynccontextmanager
async def registry_with(*workers: wire.WorkerInfo) -> AsyncIterator[tuple[RegistryServer, str]]:
    """A registry that lists these workers without hearing from them again, and its address."""
    server = RegistryServer(SECURITY, SYSTEM_CLOCK, ttl_s=600.0)
    port = await server.start("127.0.0.1", 0)
    for worker in workers:
        server.leases.register(worker, 1, SYSTEM_CLOCK.monotonic_s())
    try:
        yield server, f"127.0.0.1:{port}"
    finally:
        await server.stop()


async def ask(address: str, worker: wire.WorkerInfo, security: Security = SECURITY) -> None:
    client = RegistryClient(address, security, SYSTEM_CLOCK)
    try:
        await asyncio.wait_for(client.check_fit(worker), PATIENCE_S)
    finally:
        await client.close()


async def test_who_fits_all_or_replaces_the_only_other_is_told_nothing() -> None:
    async with registry_with(a_worker("prefill"), a_worker("decode")) as (_, address):
        await ask(address, a_worker("decode", "decode-1"))
    async with registry_with(a_worker("decode")) as (server, address):
        await ask(address, a_worker("decode", model_digest="d2"))
        assert server.leases.view().members[0].info.model_digest == "d1"


async def test_who_does_not_fit_hears_both_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "SILENCE_S", 0.2)
    async with registry_with(a_worker("prefill")) as (_, address):
        with pytest.raises(Incompatible, match="prefill-0 has d1, decode-0 has d2"):
            await ask(address, a_worker("decode", model_digest="d2"))


@pytest.fixture
def misfit_seen(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Set once a worker has found that it does not fit; from then on it waits for long."""
    seen, found = asyncio.Event(), bootstrap._misfit

    def misfit(info: wire.WorkerInfo, view: wire.ClusterView) -> Incompatible | None:
        error = found(info, view)
        if error is not None:
            seen.set()
        return error

    monkeypatch.setattr(bootstrap, "_misfit", misfit)
    monkeypatch.setattr(bootstrap, "SILENCE_S", 2 * PATIENCE_S)
    return seen


async def test_who_it_does_not_fit_may_be_dead_and_leave_meanwhile(
    misfit_seen: asyncio.Event,
) -> None:
    async with registry_with(a_worker("prefill")) as (server, address):
        asking = asyncio.create_task(ask(address, a_worker("decode", model_digest="d2")))
        await asyncio.wait_for(misfit_seen.wait(), PATIENCE_S)
        assert server.leases.deregister("prefill-0", 1)
        await asking


async def test_who_it_does_not_fit_may_be_about_to_leave() -> None:
    async with registry_with(a_worker("prefill")) as (server, address):
        beat = wire.Heartbeat("prefill-0", 1, wire.Load(), draining=True)
        assert server.leases.heartbeat(beat, SYSTEM_CLOCK.monotonic_s())
        await ask(address, a_worker("decode", model_digest="d2"))


async def test_who_has_loaded_before_one_that_it_does_not_fit_has_left_waits_for_that() -> None:
    async with registry_with(a_worker("prefill")) as (server, address):
        beat = wire.Heartbeat("prefill-0", 1, wire.Load(), draining=True)
        assert server.leases.heartbeat(beat, SYSTEM_CLOCK.monotonic_s())
        client = RegistryClient(address, SECURITY, SYSTEM_CLOCK)
        newcomer, load = a_worker("decode", model_digest="d2"), (wire.Load(), False)
        running = asyncio.create_task(client.run_worker(newcomer, 1, lambda: load))
        try:
            with pytest.raises(Unavailable, match="d1, decode-0 has d2; prefill-0 drains"):
                server.leases.register(newcomer, 1, SYSTEM_CLOCK.monotonic_s())
            assert server.leases.deregister("prefill-0", 1)
            await asyncio.wait_for(client.registered.wait(), PATIENCE_S)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await client.close()


def test_one_that_stays_refuses_whoever_does_not_fit_whatever_others_do() -> None:
    leases = Leases(3.0)
    for worker_id in ("a", "b", "c"):
        leases.register(a_worker("decode", worker_id), 1, now_s=1.0)
    for worker_id in ("a", "c"):
        leases.heartbeat(wire.Heartbeat(worker_id, 1, wire.Load(), draining=True), now_s=1.0)
    with pytest.raises(Incompatible, match="b has d1"):
        leases.register(a_worker("decode", "newcomer", model_digest="d2"), 1, now_s=1.0)


async def test_a_registry_that_goes_away_while_it_is_asked_refuses_nobody(
    misfit_seen: asyncio.Event,
) -> None:
    async with registry_with(a_worker("prefill")) as (server, address):
        asking = asyncio.create_task(ask(address, a_worker("decode", model_digest="d2")))
        await asyncio.wait_for(misfit_seen.wait(), PATIENCE_S)
        await server.stop()
        await asking


async def test_a_registry_that_is_not_there_yet_is_no_obstacle_and_a_wrong_token_is() -> None:
    await ask("127.0.0.1:1", a_worker())
    async with registry_with() as (_, address):
        with pytest.raises(Unauthenticated):
            await ask(address, a_worker(), Security("another-token-of-the-tests"))


async def test_a_registry_of_another_version_ends_whoever_starts_as_a_misfit_does() -> None:
    """The operator mends it, so the exit code is 2: a service is not started again in vain."""

    async def watch(_: wire.Empty) -> AsyncIterator[wire.Empty]:
        yield wire.Empty()  # where this version has fields

    server = RpcServer(SECURITY)
    server.unary("Register", OfLater, lambda _: asyncio.sleep(0, wire.Registered(1.0)))
    server.stream("Watch", wire.Empty, watch)
    address = f"127.0.0.1:{await server.start('127.0.0.1', 0)}"
    client = RegistryClient(address, SECURITY, SYSTEM_CLOCK)
    load = wire.Load(), False
    try:
        with pytest.raises(Incompatible, match=r"another version of kvferry.*not a ClusterView"):
            await ask(address, a_worker())
        with pytest.raises(Incompatible, match=r"another version of kvferry.*not a OfLater"):
            await asyncio.wait_for(client.run_worker(a_worker(), 1, lambda: load), PATIENCE_S)
        with pytest.raises(Incompatible, match=r"another version of kvferry.*not a ClusterView"):
            await asyncio.wait_for(client.watch(print), PATIENCE_S)
    finally:
        await client.close()
        await server.stop()


async def test_an_address_of_another_process_ends_whoever_starts_as_a_misfit_does() -> None:
    server = RpcServer(SECURITY)  # as of a worker, given in the place of the registry
    address = f"127.0.0.1:{await server.start('127.0.0.1', 0)}"
    try:
        with pytest.raises(Incompatible, match=f"{address}: a process of another kind"):
            await ask(address, a_worker())
        client = RegistryClient(address, SECURITY, SYSTEM_CLOCK)
        with pytest.raises(Incompatible, match=f"{address}: a process of another kind"):
            await asyncio.wait_for(client.watch(print), PATIENCE_S)
        await client.close()
    finally:
        await server.stop()


def test_what_comes_before_the_weights_knows_all_but_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("weights were read")

    known: list[OpenedModel] = []

    def refuse(opened: OpenedModel) -> None:
        known.append(opened)
        raise Incompatible("as the registry says")

    whole = open_plainly(MODEL, 16, 128)
    monkeypatch.setattr(opening, "load_params", never)
    with pytest.raises(Incompatible, match="as the registry says"):
        open_plainly(MODEL, 16, 128, before_weights=refuse)
    (before,) = known
    assert before.params is None
    assert (before.digest, before.kv) == (whole.digest, whole.kv)


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_real_worker_that_does_not_fit_ends_before_it_loads(role: str) -> None:
    async with registry_with(a_worker("decode", "decode-9")) as (_, address):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", role, f"--model-path={MODEL}", f"--registry-address={address}"),
            *("--port=0", "--worker-id=newcomer", "--context-length=64", "--page-size=16"),
            env={**environment(), TOKEN_ENV: SECURITY.token},
            cwd=ROOT,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        _, said = await asyncio.wait_for(process.communicate(), 60.0)
    lines = said.decode().splitlines()
    assert process.returncode == 2, lines
    assert lines[-1].startswith(f"kvferry {role}: model")
    assert "decode-9 has d1" in lines[-1]
    assert not any("loading weights" in line for line in lines)
