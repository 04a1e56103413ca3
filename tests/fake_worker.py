"""A fake registry and fake workers: the real control plane, with tokens from a fake network."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from tests.fake_network import logprob_of, prompt_logprobs, top_arrays
from tests.recording import until
from transfer import wire
from transfer.clock import Clock
from transfer.emit import Rows, StepEmitter
from transfer.errors import Code
from transfer.rpc import RpcServer, Security
from transfer.stops import finish_of

PAGE_SIZE = 4
_HEARTBEAT_S = 0.5


class FakeRegistry:
    """Shows the members it is given to every watcher."""

    def __init__(self, security: Security) -> None:
        self.members: dict[str, wire.Member] = {}
        self.address = ""
        self._security = security
        self._server: RpcServer | None = None
        self._revision = 0
        self._watchers: set[asyncio.Queue[wire.ClusterView]] = set()

    async def start(self, port: int = 0) -> None:
        self._revision = 0
        server = RpcServer(self._security)
        server.stream("Watch", wire.Empty, self._watch)
        self.address = f"127.0.0.1:{await server.start('127.0.0.1', port)}"
        self._server = server

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(0.0)
            self._server = None

    def set(self, member: wire.Member) -> None:
        """Add or replace one worker, and tell every watcher."""
        self.members[member.info.worker_id] = member
        self.push()

    def remove(self, worker_id: str) -> None:
        self.members.pop(worker_id, None)
        self.push()

    async def restart(self) -> None:
        """Restart at the same address, knowing no worker."""
        await self.stop()
        self.members.clear()
        await self.start(int(self.address.rpartition(":")[2]))

    def push(self) -> None:
        self._revision += 1
        for queue in self._watchers:
            queue.put_nowait(self._view())

    def _view(self) -> wire.ClusterView:
        return wire.ClusterView(self._revision, tuple(self.members.values()))

    async def _watch(self, _: wire.Empty) -> AsyncIterator[wire.ClusterView]:
        queue: asyncio.Queue[wire.ClusterView] = asyncio.Queue()
        self._watchers.add(queue)
        try:
            yield self._view()
            while True:
                yield await queue.get()
        finally:
            self._watchers.discard(queue)


@dataclass
class FakeRoom:
    """One leg of a request at a fake worker."""

    submit: wire.Submit
    token_ids: list[int]  # prompt and all generated ones
    ready: bool  # decode: pages and first token are here

    @property
    def next_idx(self) -> int:
        return len(self.token_ids) - self.submit.num_prompt_tokens


class FakeHome(Protocol):
    """What a fake worker needs from the cluster around it."""

    security: Security
    registry: FakeRegistry
    context_length: int
    clock: Clock

    @property
    def network(self) -> Callable[[Sequence[int]], int]: ...

    def decode_room(self, room: FakeRoom) -> FakeRoom | None: ...

    def hand_over(self, room: FakeRoom, finish: int) -> None: ...

    def wake(self) -> None: ...


class FakeWorker:
    """One worker of either role: takes legs, and sends their tokens when it is stepped."""

    def __init__(self, cluster: FakeHome, role: wire.Role, worker_id: str) -> None:
        self.cluster = cluster
        self.role: wire.Role = role
        self.worker_id = worker_id
        self.epoch = 0
        self.address = ""
        self.model_digest = "fake-digest"
        self.max_request_tokens = cluster.context_length
        self.rooms: dict[int, FakeRoom] = {}
        self.aborted: list[int] = []  # rooms of Abort calls, in order
        self.submit_calls: list[int] = []  # how many legs each Submit carried
        self.refusals: deque[Code] = deque()  # for the next legs, one each; those legs are refused
        self.gate = asyncio.Event()  # while cleared, calls to Submit do not get through
        self.gate.set()
        self.draining = False
        self.stuck = False  # its loop stands still, although it sends signs of life
        self.slots = 1 << 20  # at most so many rooms in a step
        self._turns = 0
        self.silent = False  # hung: connected, but it sends nothing any more
        self.load = wire.Load(pages_total=256, pages_free=256, slots_total=64, slots_free=64)
        self.dp_size = 1
        self.ranks: tuple[wire.Load, ...] = ()
        self.counters: dict[str, float] = {}
        self.compiles_after_ready = 0
        self.profile_dir = ""
        self.profiling = False
        self._held: list[tuple[str, wire.StepBatch]] | None = None
        self._prefixes: set[tuple[str, tuple[int, ...]]] = set()
        self._streams: dict[str, asyncio.Queue[wire.StepBatch | None]] = {}
        self.sent: dict[str, int] = {}  # stream that is open -> batches on it so far
        self._server: RpcServer | None = None

    @property
    def alive(self) -> bool:
        return self._server is not None

    @property
    def num_streams(self) -> int:
        return len(self._streams)

    # --- life ---

    async def start(self) -> None:
        """Serve as a new incarnation, on a new port, and register."""
        self.epoch += 1
        self.silent = False
        self.rooms.clear()
        self._prefixes.clear()
        self._emitter = StepEmitter(self.worker_id, self.epoch)
        server = RpcServer(self.cluster.security)
        server.unary("Submit", wire.SubmitBatch, self._submit)
        server.unary("Abort", wire.AbortBatch, self._abort)
        server.unary("Info", wire.Empty, self._info)
        server.unary("Flush", wire.Empty, self._flush)
        server.unary("StartProfile", wire.Empty, self._start_profile)
        server.unary("StopProfile", wire.Empty, self._stop_profile)
        server.unary("Drain", wire.Empty, self._drain)
        server.stream("Subscribe", wire.Subscribe, self._subscribe)
        self.address = f"127.0.0.1:{await server.start('127.0.0.1', 0)}"
        self._server = server
        self.announce()

    async def kill(self, *, unlist: bool = False) -> None:
        """Die without a message; the registry notices only if told to (unlist)."""
        if self._server is not None:
            server, self._server = self._server, None
            await server.stop(0.0)
        self.rooms.clear()
        if unlist:
            self.cluster.registry.remove(self.worker_id)

    async def break_streams(self) -> None:
        """Lose every reply stream, and its rooms, but keep serving at the same address."""
        for queue in self._streams.values():
            queue.put_nowait(None)
        await until(lambda: not self._streams)

    def announce(self) -> None:
        """Tell the registry this worker's info and load."""
        self.cluster.registry.set(
            wire.Member(self.info(), self.epoch, self.load, self.draining, self.ranks)
        )

    def info(self) -> wire.WorkerInfo:
        return wire.WorkerInfo(
            worker_id=self.worker_id,
            role=self.role,
            address=self.address,
            data_address="" if self.role == "prefill" else "tcp://127.0.0.1:1",
            model_name="fake",
            model_digest=self.model_digest,
            kv_spec=wire.KVSpecMessage(2, 2, 8, PAGE_SIZE, "float32"),
            tp_size=1,
            dp_size=self.dp_size,
            context_length=self.cluster.context_length,
            max_request_tokens=self.max_request_tokens,
            stored_kv_heads=2,
        )

    # --- what a test does to it ---

    def hold(self) -> None:
        """Keep back every batch from now on: streams stay open, but tokens wait."""
        self._held = self._held or []

    def release(self) -> None:
        """Send what was kept back, in order; later batches are sent at once again."""
        held, self._held = self._held or [], None
        for api_id, batch in held:
            self._send(api_id, batch)

    def preempt(self, room: int) -> None:
        """Give the room's pages to somebody else."""
        self._event(self.rooms.pop(room), wire.RoomEvent(room, "preempted"))

    def fail(self, room: int, code: Code, message: str = "told to fail") -> None:
        self._event(
            self.rooms.pop(room), wire.RoomEvent(room, "failed", code=code.value, message=message)
        )

    async def leave(self) -> None:
        """Leave in order: a farewell on every stream, then off the registry."""
        farewell = wire.RoomEvent(0, "drained")
        self._send_all(wire.StepBatch(self.worker_id, self.epoch, 0, 0.0, events=(farewell,)))
        for queue in self._streams.values():
            queue.put_nowait(None)
        await until(lambda: not self._streams)
        self.rooms.clear()
        await self.kill(unlist=True)

    def send_rows(self, room: int, token_idx: int, token_id: int, *, epoch: int = 0) -> None:
        """Send an unexpected row to every stream; epoch 0 = the worker's own."""
        batch = wire.StepBatch(
            self.worker_id,
            epoch or self.epoch,
            0,
            0.0,
            wire.pack_i64([room]),
            wire.pack_i32([token_id]),
            wire.pack_i32([token_idx]),
            wire.pack_u8([wire.RUNNING]),
        )
        self._send_all(batch)

    def tell(self, *legs: wire.LegRecord) -> None:
        """Send how legs went to every stream."""
        self._send_all(wire.StepBatch(self.worker_id, self.epoch, 0, 0.0, legs=legs))

    def sign_of_life(self) -> None:
        """An empty batch to every stream, as idle workers send every half second."""
        self._send_all(self._alive())

    def _send_all(self, batch: wire.StepBatch) -> None:
        for api_id in self._streams:
            self._put(api_id, batch)

    def _put(self, api_id: str, batch: wire.StepBatch) -> None:
        self.sent[api_id] += 1
        self._streams[api_id].put_nowait(batch)

    def _alive(self) -> wire.StepBatch:
        self._turns += not self.stuck
        return wire.StepBatch(self.worker_id, self.epoch, self._turns, 0.0)

    def step(self) -> int:
        """One step: a token for each room that can have one. Returns how many."""
        if self.silent or self.stuck or not self.alive:
            return 0
        ready = [room for room in self.rooms.values() if self._can_step(room)][: self.slots]
        rows: dict[str, list[tuple[FakeRoom, int, int, int]]] = {}
        for room in ready:
            token_idx = room.next_idx
            token_id = self.cluster.network(room.token_ids)
            finish = finish_of(token_id, token_idx, room.submit.sampling)
            if self.role == "prefill":
                self._prefilled(room)
            room.token_ids.append(token_id)
            rows.setdefault(room.submit.api_id, []).append((room, token_id, token_idx, finish))
            if self.role == "prefill" or finish:
                del self.rooms[room.submit.room]
            if self.role == "prefill":
                self.cluster.hand_over(room, finish)
        for api_id, api_rows in rows.items():
            self._emitter.rows(api_id, _pack(api_rows))
        self._flush_emitter()
        return len(ready)

    def _can_step(self, room: FakeRoom) -> bool:
        if self.role == "decode":
            return room.ready
        # Decode must have reserved pages before prefill computes.
        return self.cluster.decode_room(room) is not None

    def _prefilled(self, room: FakeRoom) -> None:
        submit = room.submit
        salt, tokens = submit.cache_salt, room.token_ids
        start = submit.sampling.prompt_logprobs_start
        pages = (len(tokens) - 1) // PAGE_SIZE if start < 0 else 0
        while pages and (salt, tuple(tokens[: pages * PAGE_SIZE])) not in self._prefixes:
            pages -= 1
        for page in range(1, len(tokens) // PAGE_SIZE + 1):
            self._prefixes.add((salt, tuple(tokens[: page * PAGE_SIZE])))
        logprobs = None
        if start >= 0:
            logprobs = prompt_logprobs(tokens[: submit.num_prompt_tokens], max(start, 1))
        event = wire.RoomEvent(
            submit.room,
            "prefilled",
            cached_tokens=pages * PAGE_SIZE,
            prompt_logprobs=logprobs,
        )
        self._emitter.event(submit.api_id, event)

    def _event(self, room: FakeRoom, event: wire.RoomEvent) -> None:
        self._emitter.event(room.submit.api_id, event)
        self._flush_emitter()

    def _flush_emitter(self) -> None:
        now_s = self.cluster.clock.monotonic_s()
        for api_id, batch in self._emitter.take(now_s).items():
            self._send(api_id, batch)

    def _send(self, api_id: str, batch: wire.StepBatch) -> None:
        if self._held is not None:
            self._held.append((api_id, batch))
        elif api_id in self._streams:
            self._put(api_id, batch)

    # --- what it serves ---

    async def _submit(self, batch: wire.SubmitBatch) -> wire.SubmitReply:
        await self.gate.wait()
        self.submit_calls.append(len(batch.submits))
        refused = []
        for submit in batch.submits:
            if self.refusals:
                refused.append(wire.Refusal(submit.room, self.refusals.popleft(), "told to refuse"))
                continue
            if submit.api_id not in self._streams:
                refused.append(wire.Refusal(submit.room, Code.STALE, "no reply stream"))
                continue
            tokens = wire.unpack_i32(submit.token_ids).tolist()
            self.rooms[submit.room] = FakeRoom(submit, tokens, ready=False)
        self.cluster.wake()
        return wire.SubmitReply(tuple(refused))

    async def _abort(self, batch: wire.AbortBatch) -> wire.Empty:
        for room in batch.rooms:
            self.aborted.append(room)
            self.rooms.pop(room, None)
        return wire.Empty()

    async def _info(self, _: wire.Empty) -> wire.WorkerState:
        return wire.WorkerState(
            worker_id=self.worker_id,
            role=self.role,
            epoch=self.epoch,
            load=self.load,
            pages_held=len(self.rooms),
            pages_cached=len(self._prefixes),
            rooms=len(self.rooms),
            compiles_after_ready=self.compiles_after_ready,
            counters=self.counters,
            config={},
        )

    async def _flush(self, _: wire.Empty) -> wire.FlushReply:
        self._prefixes.clear()
        return wire.FlushReply(True, "flushed")

    async def _start_profile(self, _: wire.Empty) -> wire.ProfileReply:
        if not self.profile_dir:
            return wire.ProfileReply("", "started without --profile-dir")
        self.profiling = True
        return wire.ProfileReply(self.profile_dir)

    async def _stop_profile(self, _: wire.Empty) -> wire.ProfileReply:
        if not self.profiling:
            return wire.ProfileReply("", "no profile has begun")
        self.profiling = False
        return wire.ProfileReply(self.profile_dir)

    async def _drain(self, _: wire.Empty) -> wire.DrainReply:
        """Draining is reported at once, also to the registry; the test makes it leave."""
        began, self.draining = not self.draining, True
        self.announce()
        return wire.DrainReply(len(self.rooms), 30.0, began)

    async def _subscribe(self, request: wire.Subscribe) -> AsyncIterator[wire.StepBatch]:
        queue: asyncio.Queue[wire.StepBatch | None] = asyncio.Queue()
        self._streams[request.api_id] = queue
        self.sent[request.api_id] = 0
        self._put(request.api_id, self._alive())
        try:
            while True:
                try:
                    batch = await asyncio.wait_for(queue.get(), _HEARTBEAT_S)
                except TimeoutError:
                    self._put(request.api_id, self._alive())
                    continue
                if batch is None:
                    return
                if self.silent:
                    self.sent[request.api_id] -= 1
                else:
                    yield batch
        finally:
            del self._streams[request.api_id], self.sent[request.api_id]
            for room in list(self.rooms.values()):
                if room.submit.api_id == request.api_id:
                    self.rooms.pop(room.submit.room)


def _pack(rows: list[tuple[FakeRoom, int, int, int]]) -> Rows:
    wanted = [room.submit.sampling.num_top_logprobs for room, *_ in rows]
    ids = [token_id for _, token_id, _, _ in rows]
    packed = Rows(
        rooms=np.array([room.submit.room for room, *_ in rows]),
        token_ids=np.array(ids),
        token_idx=np.array([token_idx for _, _, token_idx, _ in rows]),
        finish=np.array([finish for *_, finish in rows]),
    )
    if max(wanted) >= 0:
        packed.logprobs = np.array([logprob_of(token_id) for token_id in ids])
    if max(wanted) > 0:
        top_rows = [row for row, num_top in enumerate(wanted) if num_top > 0]
        packed.top_rows = np.array(top_rows)
        packed.top_ids, packed.top_logprobs = top_arrays([ids[row] for row in top_rows])
    return packed
