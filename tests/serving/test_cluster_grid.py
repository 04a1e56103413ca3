"""Every pair of meshes: {1, 2, 4} prefill devices by {1, 2, 4} decode devices, pages resharded."""

import asyncio
import contextlib
import json
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from serving.step_rows import unpack_runs
from tests.cluster import environment
from transfer import wire
from transfer.bootstrap import RegistryClient
from transfer.clock import SYSTEM_CLOCK
from transfer.flags import TOKEN_ENV
from transfer.rpc import RpcClient, Security

GOLDENS = Path(__file__).resolve().parents[1] / "goldens"
SIZES = (1, 2, 4)
STEPS = 24
START_TIMEOUT_S = 240.0


@pytest.fixture(scope="module", params=["llama", "qwen3_moe"])
def cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Path, str, Security]]:
    """A registry, three prefill and three decode workers of one checkpoint, started by hand."""
    golden = GOLDENS / request.param
    token = secrets.token_hex(16)
    env = {**environment(few_steps=True), TOKEN_ENV: token}
    path = tmp_path_factory.mktemp("grid") / "log"
    with path.open("w") as log, contextlib.ExitStack() as stack:

        def start(*argv: str) -> None:
            process = subprocess.Popen(
                [sys.executable, "-m", "serving.launch", *argv], env=env, stdout=log, stderr=log
            )
            stack.callback(process.wait, 20)
            stack.callback(process.terminate)

        start("registry", "--disaggregation-bootstrap-port=0")
        address = _said(path, "registry is ready on ")
        for role in ("prefill", "decode"):
            # One program of a chunk: compiling is what takes time here.
            small = "--chunked-prefill-size=16" if role == "prefill" else "--max-running-requests=2"
            for size in SIZES:
                start(
                    role,
                    f"--model-path={golden / 'model'}",
                    f"--registry-address={address}",
                    f"--worker-id={role}-{size}",
                    f"--tp-size={size}",
                    f"--ep-size={max(1, size // 2)}",
                    small,
                )
        yield golden, address, Security(token)


def _said(log: Path, words: str) -> str:
    until = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < until:
        _, found, rest = log.read_text().partition(words)
        if found and "\n" in rest:
            return rest.split()[0]
        time.sleep(0.05)
    raise AssertionError(log.read_text()[-4000:])


async def test_every_pair_of_meshes_gives_the_recorded_tokens(
    cluster: tuple[Path, str, Security],
) -> None:
    golden, address, security = cluster
    members = await _members(address, security)
    prompts = json.loads((golden / "golden.json").read_text())["prompts"]
    tokens: dict[int, dict[int, int]] = {}
    failures: list[wire.RoomEvent] = []
    clients = {name: RpcClient(m.info.address, security) for name, m in members.items()}
    refs = {n: wire.WorkerRef(n, m.epoch, m.info.address) for n, m in members.items()}
    want: dict[int, list[int]] = {}
    complete, subscribed = asyncio.Event(), asyncio.Event()
    hellos: set[str] = set()

    async def listen(name: str) -> None:
        stream = clients[name].stream("Subscribe", wire.Subscribe("grid"), wire.StepBatch)
        async for batch in stream:
            hellos.add(name)
            if len(hellos) == len(members):
                subscribed.set()
            failures.extend(event for event in batch.events if event.kind == "failed")
            runs = unpack_runs(batch)
            columns = runs.rooms.tolist(), runs.first_idx.tolist()
            for room, first, ids in zip(*columns, runs.ids_of(np.arange(len(runs))), strict=True):
                tokens.setdefault(room, {}).update(enumerate(ids, first))
            if failures or (want and sum(map(len, tokens.values())) >= STEPS * len(want)):
                complete.set()

    listeners = [asyncio.create_task(listen(name)) for name in members]
    await asyncio.wait_for(subscribed.wait(), 30)
    rooms: dict[str, list[wire.Submit]] = {name: [] for name in members}
    for prefill_size in SIZES:
        for decode_size in SIZES:
            for prompt in prompts:
                submit = _submit(
                    len(want) + 1, prompt["ids"], refs[f"prefill-{prefill_size}"],
                    refs[f"decode-{decode_size}"],
                )  # fmt: skip
                want[submit.room] = prompt["greedy_ids"]
                rooms[f"prefill-{prefill_size}"].append(submit)
                rooms[f"decode-{decode_size}"].append(submit)
    for name, submits in rooms.items():
        batch = wire.SubmitBatch(tuple(submits))
        reply = await clients[name].call("Submit", batch, wire.SubmitReply, 10.0)
        assert not reply.refused
    await asyncio.wait_for(complete.wait(), 120)
    assert not failures
    got = {room: [ids.get(i) for i in range(STEPS)] for room, ids in tokens.items()}
    assert got == want
    for name, client in clients.items():
        state = await client.call("Info", wire.Empty(), wire.WorkerState, 10.0)
        assert state.compiles_after_ready == 0, name
    for task in listeners:
        task.cancel()
    await asyncio.gather(*listeners, return_exceptions=True)
    for client in clients.values():
        await client.close()


async def _members(address: str, security: Security) -> dict[str, wire.Member]:
    """All six, once they are registered."""
    found: dict[str, wire.Member] = {}
    there = asyncio.Event()

    def see(view: wire.ClusterView) -> None:
        found.update({member.info.worker_id: member for member in view.members})
        if len(found) == 2 * len(SIZES):
            there.set()

    registry = RegistryClient(address, security, SYSTEM_CLOCK)
    watching = asyncio.create_task(registry.watch(see))
    await asyncio.wait_for(there.wait(), START_TIMEOUT_S)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    await registry.close()
    return found


def _submit(
    room: int, ids: list[int], prefill: wire.WorkerRef, decode: wire.WorkerRef
) -> wire.Submit:
    return wire.Submit(
        room=room,
        request_id=f"r{room}",
        api_id="grid",
        token_ids=wire.pack_i32(ids),
        num_prompt_tokens=len(ids),
        sampling=wire.SamplingParams(max_new_tokens=STEPS, temperature=0.0),
        age_s=0.0,
        left_s=120.0,
        prefill=prefill,
        decode=decode,
    )
