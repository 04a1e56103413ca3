"""A prefill and a decode worker without a model, in one process, beside the registry they are in.

They speak the wire that real workers speak: Submit, Subscribe and one StepBatch a step for all
streams. First tokens come from prefill as requests arrive, the others from decode, when told.
`python -m bench.frontend_engine FD [FLOOR_FD]`, driven by lines of JSON; FD is a socket to the
client. With FLOOR_FD the steps go to bench/frontend_floor instead.
"""

import asyncio
import itertools
import socket
import sys
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any, Protocol

import numpy as np
import uvloop

from bench.frontend_plan import (
    REQUESTED,
    STEER,
    STEP,
    Cell,
    inherited_socket,
    pieces_of,
    say,
    stream_of,
    told,
)
from transfer import wire
from transfer.bootstrap import RegistryClient, RegistryServer
from transfer.clock import SYSTEM_CLOCK
from transfer.emit import Rows, StepEmitter
from transfer.replies import Replies
from transfer.rpc import RpcServer, Security

HOST = "127.0.0.1"
CONTEXT_LENGTH = 4096
_SIGN_OF_LIFE_S = 0.5
_MOST_WAITING = 32  # steps that wait for the pipe before the engine does, in backlog
_PATIENCE_S = 180.0  # for the steps of a round
_LOAD = wire.Load(pages_total=1 << 20, pages_free=1 << 20, slots_total=4096, slots_free=4096)


class Round:
    """What came in and what left since the cell was told. Times are monotonic seconds."""

    def __init__(self, cell: Cell) -> None:
        self.cell = cell
        self.rooms = np.zeros(cell.num_streams, np.int64)
        self.first_s = [0.0] * cell.num_streams
        self.step_s: list[float] = []
        self.complete = asyncio.Event()  # every stream can go on
        self._num_begun = 0
        self._num_ready = 0

    def begin(self, streams: Sequence[int], now_s: float) -> None:
        """Their first tokens leave now."""
        for stream in streams:
            self.first_s[stream] = now_s
        self._num_begun += len(streams)
        self._check()

    def ready(self, num_streams: int) -> None:
        """So many more are known to decode."""
        self._num_ready += num_streams
        self._check()

    def _check(self) -> None:
        if min(self._num_begun, self._num_ready) == self.cell.num_streams:
            self.complete.set()


class Way(Protocol):
    """How tokens get to the server under test."""

    async def start(self) -> dict[str, Any]:
        """Connect or listen; what the parent must know."""
        ...

    def begin(self, cell: Cell) -> Round:
        """A round begins: requests of these streams come soon."""
        ...

    def emit(self, token_idx: int) -> None:
        """One token for every stream of the round."""
        ...

    async def room(self) -> None:
        """Until the pipe to the server takes another step."""
        ...


class Worker:
    """One role's control server: takes legs, keeps reply streams."""

    def __init__(self, role: wire.Role, workers: "Workers") -> None:
        self.role: wire.Role = role
        self.worker_id = f"synthetic-{role}"
        self.epoch = 1
        self.emitter = StepEmitter(self.worker_id, self.epoch)
        # Begun by Submit, over by its last token or Abort.
        self.rooms: dict[int, wire.Submit] = {}
        self._workers = workers
        # Bounded by the steps of a round, and by _MOST_WAITING for who asks for room.
        self._streams: dict[str, Replies] = {}
        self._newest_step = 0
        self._taken_step = 0  # by the pipe
        self._taken = asyncio.Event()
        self._server = RpcServer(workers.security)

    async def start(self) -> wire.WorkerInfo:
        """Listen; returns what to register."""
        server = self._server
        server.unary("Submit", wire.SubmitBatch, self._submit)
        server.unary("Abort", wire.AbortBatch, self._abort)
        server.unary("Info", wire.Empty, self._info)
        server.unary("Flush", wire.Empty, self._flush)
        server.stream("Subscribe", wire.Subscribe, self._subscribe)
        port = await server.start(HOST, 0)
        return wire.WorkerInfo(
            worker_id=self.worker_id,
            role=self.role,
            address=f"{HOST}:{port}",
            data_address="tcp://127.0.0.1:1" if self.role == "decode" else "",
            model_name="synthetic",
            model_digest="synthetic",
            kv_spec=wire.KVSpecMessage(4, 4, 32, 16, "float32"),
            tp_size=1,
            dp_size=1,
            context_length=CONTEXT_LENGTH,
            max_request_tokens=CONTEXT_LENGTH,
            stored_kv_heads=4,
        )

    async def stop(self) -> None:
        """Serve nobody any more, at once."""
        await self._server.stop(0.0)

    def send(self) -> None:
        """Everything the emitter has, to the streams it is for."""
        for api_id, batch in self.emitter.take(SYSTEM_CLOCK.monotonic_s()).items():
            self._newest_step = batch.step
            assert self._streams[api_id].offer(batch), "a round is within what may wait"

    def over(self, rooms: Iterable[int]) -> None:
        """These had their last token here."""
        for room in rooms:
            self.rooms.pop(room, None)

    async def room(self, most_waiting: int = _MOST_WAITING) -> None:
        """Until fewer steps wait for the pipe, which takes one when gRPC's flow control lets it."""
        while self._newest_step - self._taken_step >= most_waiting:
            self._taken.clear()
            await self._taken.wait()

    async def _submit(self, batch: wire.SubmitBatch) -> wire.SubmitReply:
        self.rooms.update({submit.room: submit for submit in batch.submits})
        self._workers.submitted(self.role, batch.submits)
        return wire.SubmitReply()

    async def _abort(self, batch: wire.AbortBatch) -> wire.Empty:
        self.over(batch.rooms)
        return wire.Empty()

    async def _info(self, _: wire.Empty) -> wire.WorkerState:
        return wire.WorkerState(
            self.worker_id, self.role, self.epoch, _LOAD, 0, 0, len(self.rooms), 0, {}, {}
        )

    async def _flush(self, _: wire.Empty) -> wire.FlushReply:
        return wire.FlushReply(True, "there is no cache")

    async def _subscribe(self, request: wire.Subscribe) -> AsyncIterator[wire.StepBatch]:
        self._streams[request.api_id] = replies = Replies()
        try:
            # A worker whose signs of life never change counts as one that stands still.
            for turn in itertools.count():
                try:
                    batch = await replies.take(_SIGN_OF_LIFE_S if turn else 0.0)
                except TimeoutError:
                    yield wire.StepBatch(self.worker_id, self.epoch, turn, 0.0)
                    continue
                assert batch is not None, "nobody ends this stream"
                self._taken_step = max(self._taken_step, batch.step)
                self._taken.set()
                yield batch
        finally:
            del self._streams[request.api_id]


class Workers:
    """Both workers and their registry: the way of the real server."""

    def __init__(self, security: Security, token_ids: Sequence[int]) -> None:
        self.security = security
        self._ids = np.array(token_ids, np.int32)
        self._registry = RegistryServer(security, SYSTEM_CLOCK)
        self._prefill = Worker("prefill", self)
        self._decode = Worker("decode", self)
        self._leases: list[asyncio.Task[None]] = []
        self._api_id = ""
        self._round: Round | None = None

    async def start(self) -> dict[str, Any]:
        address = f"{HOST}:{await self._registry.start(HOST, 0)}"
        for worker in (self._prefill, self._decode):
            client = RegistryClient(address, self.security, SYSTEM_CLOCK)
            lease = client.run_worker(await worker.start(), worker.epoch, lambda: (_LOAD, False))
            self._leases.append(asyncio.create_task(lease))
        return {"registry": address}

    def begin(self, cell: Cell) -> Round:
        self._round = Round(cell)
        self._streams = np.arange(cell.num_streams)
        return self._round

    def submitted(self, role: wire.Role, submits: Sequence[wire.Submit]) -> None:
        """Legs arrived. At prefill their first tokens leave at once."""
        current = self._round
        assert current is not None, "a request outside of a round"
        streams = [stream_of(submit.request_id) for submit in submits]
        rooms = [submit.room for submit in submits]
        api_id = submits[0].api_id
        if role == "decode":
            self._api_id = api_id
            current.rooms[streams] = rooms
            current.ready(len(streams))
            return
        for room in rooms:
            self._prefill.emitter.event(api_id, wire.RoomEvent(room, "prefilled"))
        self._prefill.emitter.rows(api_id, self._rows(np.array(streams), np.array(rooms), 0))
        self._prefill.over(rooms)
        current.begin(streams, SYSTEM_CLOCK.monotonic_s())
        self._prefill.send()

    def emit(self, token_idx: int) -> None:
        assert self._round is not None, "a step outside of a round"
        rows = self._rows(self._streams, self._round.rooms, token_idx)
        self._decode.emitter.rows(self._api_id, rows)
        self._decode.send()
        if token_idx == self._round.cell.output_tokens - 1:
            self._decode.over(rows.rooms.tolist())

    async def room(self) -> None:
        await self._decode.room()

    def _rows(self, streams: np.ndarray, rooms: np.ndarray, token_idx: int) -> Rows:
        assert self._round is not None, "rows outside of a round"
        last = token_idx == self._round.cell.output_tokens - 1
        return Rows(
            rooms=rooms,
            token_ids=self._ids[(streams + token_idx) % len(self._ids)],
            token_idx=np.full(len(rooms), token_idx),
            finish=np.full(len(rooms), wire.LENGTH if last else wire.RUNNING),
        )


class FloorSteps:
    """The way of the floor: a socket that carries stream numbers, and a token index a step."""

    def __init__(self, floor: socket.socket) -> None:
        self._socket = floor
        self._round: Round | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._taking: asyncio.Task[None] | None = None

    async def start(self) -> dict[str, Any]:
        self._reader, self._writer = await asyncio.open_connection(sock=self._socket)
        self._taking = asyncio.create_task(self._take(self._reader))
        return {}

    def begin(self, cell: Cell) -> Round:
        self._round = Round(cell)
        self._streams = range(cell.num_streams)
        return self._round

    def emit(self, token_idx: int) -> None:
        self._write(token_idx, self._streams)

    async def room(self) -> None:
        assert self._writer is not None, "not started"
        await self._writer.drain()

    async def _take(self, reader: asyncio.StreamReader) -> None:
        data = b""
        while more := await reader.read(1 << 16):
            data += more
            whole = len(data) - len(data) % REQUESTED.size
            streams = [stream for (stream,) in REQUESTED.iter_unpack(data[:whole])]
            data = data[whole:]
            assert self._round is not None, "a request outside of a round"
            self._round.begin(streams, SYSTEM_CLOCK.monotonic_s())
            self._round.ready(len(streams))
            self._write(0, streams)

    def _write(self, token_idx: int, streams: Sequence[int]) -> None:
        assert self._writer is not None, "not started"
        self._writer.write(STEP.pack(token_idx, len(streams)) + np.array(streams, "<i4").tobytes())


class Pacer:
    """Sends the steps of a round: by the clock, as the client keeps up, or as the pipe takes."""

    def __init__(self, way: Way, steering: socket.socket) -> None:
        self._way = way
        self._steering = steering

    async def steps(self, current: Round) -> None:
        """All tokens after the first, as frontend_plan.Drive says."""
        await current.complete.wait()
        cell = current.cell
        next_s = time.monotonic()
        held_pieces = 1
        for token_idx in range(1, cell.output_tokens):
            current.step_s.append(time.monotonic())
            self._way.emit(token_idx)
            if cell.drive == "paced":
                next_s += cell.step_s
                await asyncio.sleep(max(0.0, next_s - time.monotonic()))
                continue
            await asyncio.sleep(0)  # for the step to leave
            if cell.drive == "backlog":
                await self._way.room()
                continue
            pieces = pieces_of(token_idx + 1, cell.interval)
            if pieces > held_pieces and token_idx < cell.output_tokens - 1:
                held_pieces = pieces
                await self._held(cell.num_streams * (1 + pieces) - cell.num_streams // 4)

    async def _held(self, num_events: int) -> None:
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(self._steering, STEER.pack(num_events))
        await loop.sock_recv(self._steering, 1)


async def serve(steering: socket.socket, floor: socket.socket | None) -> None:
    """Run rounds until nothing more is asked."""
    steering.setblocking(False)
    setup = await asyncio.to_thread(told)
    way: Way
    if floor is None:
        way = Workers(Security(setup["token"]), setup["ids"])
    else:
        way = FloorSteps(floor)
    say(**await way.start())
    pacer = Pacer(way, steering)
    while ask := await asyncio.to_thread(told):
        current = way.begin(Cell(**ask["cell"]))
        say(ready=True)
        await asyncio.to_thread(told)  # every stream has its first token
        try:
            async with asyncio.timeout(_PATIENCE_S):
                await pacer.steps(current)
        except TimeoutError:
            say(error=f"{len(current.step_s)} steps left in {_PATIENCE_S:g} s, and no more")
            return
        say(first_s=current.first_s, step_s=current.step_s)


def main() -> None:
    """`python -m bench.frontend_engine FD [FLOOR_FD]`."""
    floor = inherited_socket(sys.argv[2]) if len(sys.argv) > 2 else None
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(inherited_socket(sys.argv[1]), floor))


if __name__ == "__main__":
    main()
