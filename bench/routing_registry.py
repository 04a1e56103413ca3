"""`kvferry bench routing --only registry`: how soon decode knows the rank that prefill announced.

A real `kvferry registry` runs in a process of its own. One loop in this process plays a prefill
worker that announces ranks and a decode worker that follows them, over real sockets. Right after
that, bench/routing_floor measures bytes alone on the same way.
"""

import asyncio
import contextlib
import json
import os
import random
import secrets
import subprocess
import tempfile
from collections import deque
from collections.abc import Iterator

import numpy as np

from bench import routing_floor
from bench.endings import lifeline, words_of
from bench.report import Report
from bench.serve import not_ready
from transfer import wire
from transfer.bootstrap import RegistryClient
from transfer.clock import SYSTEM_CLOCK
from transfer.flags import LIFELINE_ENV, NOTIFY_ENV, TOKEN_ENV
from transfer.route_feeds import RoutePublisher
from transfer.routes import RouteTable
from transfer.rpc import Security

ROOMS_PER_S = 1000
ROOM_LIFE_S = 1.0
RANKS = 4
# Rooms that one turn of a worker binds: a single one as it comes, or a chunk of many prompts.
PER_TURN = (1, 10, 100)
_PATIENCE_S = 10.0
_WORKER = "prefill-of-the-benchmark"


class Failed(RuntimeError):
    """The registry did not pass on what it was told."""


def run(report: Report, seconds: float) -> None:
    """Add rows for each number of rooms per turn. Raises Failed, NoServer or ConfigError."""
    for per_turn in PER_TURN:
        seen_s, num_messages = asyncio.run(_measure(per_turn, seconds, report.seed))
        shapes = {"rooms_per_s": ROOMS_PER_S, "rooms_per_turn": per_turn, "seconds": seconds}
        case = f"registry {ROOMS_PER_S} rooms/s by {per_turn}"
        floor_s = routing_floor.measure(ROOMS_PER_S / per_turn, seconds, report.seed)
        for percent in (50, 99):
            value, floor = (
                1e3 * float(np.percentile(all_s, percent)) for all_s in (seen_s, floor_s)
            )
            report.add(case, f"put to got p{percent}", value, "ms", floor, shapes=shapes)
        report.add(case, "messages", num_messages, "count", shapes=shapes)


async def _measure(per_turn: int, seconds: float, seed: int) -> tuple[list[float], int]:
    """(seconds from each room's turn until decode knows the room, number of messages for that)."""
    token = secrets.token_hex(16)
    with _registry(token) as address:
        cluster = _Cluster(address, Security(token))
        try:
            await cluster.open()
            await cluster.play(per_turn, seconds, random.Random(seed))
        finally:
            await cluster.close()
        return cluster.seen_s, cluster.num_messages


class _Cluster:
    """A prefill worker that binds rooms, and a decode worker."""

    def __init__(self, address: str, security: Security) -> None:
        self.seen_s: list[float] = []
        self.num_messages = 0
        self._prefill = RegistryClient(address, security, SYSTEM_CLOCK)
        self._decode = RegistryClient(address, security, SYSTEM_CLOCK)
        self._publisher = RoutePublisher(_WORKER, 1, self._prefill.connect_routes)
        self._prefill.on_registered = self._publisher.registered
        self._told_s: dict[int, float] = {}
        self._all_seen = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def open(self) -> None:
        lease = self._prefill.run_worker(_info(), 1, lambda: (wire.Load(), False))
        self._tasks = [
            asyncio.create_task(lease),
            asyncio.create_task(self._publisher.run()),
            asyncio.create_task(self._decode.watch_routes(RouteTable(), on_news=self._got)),
        ]
        await asyncio.wait_for(self._prefill.registered.wait(), _PATIENCE_S)
        await self._settled({0: 0})
        self.seen_s.clear()
        self.num_messages = 0

    async def play(self, per_turn: int, seconds: float, rng: random.Random) -> None:
        """Play turns at random times, with ROOMS_PER_S rooms a second overall."""
        living: deque[tuple[float, range]] = deque()
        start_s = SYSTEM_CLOCK.monotonic_s()
        due_s, room = 0.0, 1
        while due_s < seconds:
            due_s += rng.expovariate(ROOMS_PER_S / per_turn)
            now_s = SYSTEM_CLOCK.monotonic_s() - start_s
            await asyncio.sleep(max(due_s - now_s, 0.0))
            rooms, room = range(room, room + per_turn), room + per_turn
            living.append((due_s + ROOM_LIFE_S, rooms))
            ended: list[int] = []
            while living[0][0] < due_s:
                ended += living.popleft()[1]
            self._tell({at: at % RANKS for at in rooms}, ended)
        await self._settled({room: 0})

    def _tell(self, bound: dict[int, int], ended: list[int]) -> None:
        now_s = SYSTEM_CLOCK.monotonic_s()
        self._told_s |= dict.fromkeys(bound, now_s)
        self._publisher.feed(bound.items(), ended)

    async def _settled(self, bound: dict[int, int]) -> None:
        """Announce rooms, and wait until decode knows everything that was announced."""
        self._all_seen.clear()
        self._tell(bound, [])
        try:
            await asyncio.wait_for(self._all_seen.wait(), _PATIENCE_S)
        except TimeoutError:
            left = len(self._told_s)
            raise Failed(f"{left} rooms were told and not seen in {_PATIENCE_S:g} s") from None

    def _got(self, routes: wire.Routes) -> None:
        now_s = SYSTEM_CLOCK.monotonic_s()
        self.num_messages += 1
        for room in wire.unpack_i64(routes.rooms).tolist():
            told_s = self._told_s.pop(room, None)
            if told_s is not None:
                self.seen_s.append(now_s - told_s)
        if not self._told_s:
            self._all_seen.set()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for client in (self._prefill, self._decode):
            await client.close()


@contextlib.contextmanager
def _registry(token: str) -> Iterator[str]:
    """The address of a registry that runs during the block.

    Raises NoServer, or ConfigError, with the end of its log if it does not start.
    """
    reading, writing = os.pipe()
    command = [*words_of("serving.launch"), "registry"]
    with tempfile.TemporaryFile() as log, lifeline() as fd:
        process = subprocess.Popen(
            [*command, "--disaggregation-bootstrap-port=0"],
            env=os.environ | {TOKEN_ENV: token, NOTIFY_ENV: str(writing), LIFELINE_ENV: str(fd)},
            pass_fds=[writing, fd],
            stderr=log,
        )
        os.close(writing)
        try:
            with os.fdopen(reading) as pipe:
                told = pipe.read()  # until the registry closes its end, or dies
            if not told:
                raise not_ready("the registry", log, process.wait())
            yield json.loads(told)["address"]
        finally:
            process.terminate()
            process.wait()


def _info() -> wire.WorkerInfo:
    return wire.WorkerInfo(
        worker_id=_WORKER,
        role="prefill",
        address="127.0.0.1:1",
        data_address="",
        model_name="none",
        model_digest="none",
        kv_spec=wire.KVSpecMessage(1, 1, 1, 1, "float32"),
        tp_size=1,
        dp_size=RANKS,
        context_length=1,
        max_request_tokens=1,
        stored_kv_heads=1,
    )
