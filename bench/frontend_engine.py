"""Plays a prefill and a decode worker without a model, in one process together with their registry.

They speak the protocol of real workers: Submit, Subscribe, and one StepBatch per step for all
streams. First tokens come from prefill as requests arrive, the others from decode when it is told.
`python -m bench.frontend_engine FD [FLOOR_FD]`, driven by lines of JSON; FD is a socket to the
client. With FLOOR_FD the steps go to bench/frontend_floor instead.
"""

import asyncio
import itertools
import socket
import sys
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

import numpy as np

from bench.frontend_plan import (
    CONTEXT_LENGTH,
    HOST,
    MOST_STREAMS,
    REQUESTED,
    STEP,
    Cell,
    inherited_socket,
    stream_of,
)
from bench.frontend_steps import Round, Way, run
from transfer import wire
from transfer.bootstrap import RegistryClient, RegistryServer
from transfer.clock import SYSTEM_CLOCK
from transfer.emit import Rows, StepEmitter
from transfer.replies import Replies
from transfer.rpc import RpcServer, Security

_SIGN_OF_LIFE_S = 0.5
_LEASE_TTL_S = 60.0  # long: workers die with their registry, so only a stalled host could end one
_LOAD = wire.Load(
    pages_total=1 << 20, pages_free=1 << 20, slots_total=MOST_STREAMS, slots_free=MOST_STREAMS
)


class Worker:
    """One role's control server: takes legs, keeps reply streams."""

    def __init__(self, role: wire.Role, workers: "Workers") -> None:
        self.role: wire.Role = role
        self.worker_id = f"synthetic-{role}"
        self.epoch = 1
        self.emitter = StepEmitter(self.worker_id, self.epoch)
        # From Submit until the last token or Abort.
        self.rooms: dict[int, wire.Submit] = {}
        self._workers = workers
        self._streams: dict[str, Replies] = {}  # bounded by the steps of a round
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
        """Stop serving, at once."""
        await self._server.stop(0.0)

    def send(self) -> None:
        """Send everything that the emitter has to the reply streams that it is for."""
        for api_id, batch in self.emitter.take(SYSTEM_CLOCK.monotonic_s()).items():
            assert self._streams[api_id].offer(batch), "a round is within what may wait"

    def over(self, rooms: Iterable[int]) -> None:
        """Forget rooms that had their last token here."""
        for room in rooms:
            self.rooms.pop(room, None)

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
            # A worker whose signs of life never change counts as stalled, so `turn` is in them.
            for turn in itertools.count():
                try:
                    batch = await replies.take(_SIGN_OF_LIFE_S if turn else 0.0)
                except TimeoutError:
                    yield wire.StepBatch(self.worker_id, self.epoch, turn, 0.0)
                    continue
                assert batch is not None, "nobody ends this stream"
                yield batch
        finally:
            del self._streams[request.api_id]


class Workers:
    """Both workers and their registry: the `Way` to a real server."""

    def __init__(self, security: Security, token_ids: Sequence[int]) -> None:
        self.security = security
        self._ids = np.array(token_ids, np.int32)
        self._registry = RegistryServer(security, SYSTEM_CLOCK, _LEASE_TTL_S)
        self._prefill = Worker("prefill", self)
        self._decode = Worker("decode", self)
        self._leases: list[asyncio.Task[None]] = []
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
        self._api_ids = np.full(cell.num_streams, "", object)
        self._streams: dict[str, np.ndarray] = {}  # by the API process that asked for them
        return self._round

    def submitted(self, role: wire.Role, submits: Sequence[wire.Submit]) -> None:
        """Legs arrived. Prefill sends their first tokens at once."""
        current = self._round
        assert current is not None, "a request outside of a round"
        streams = [stream_of(submit.request_id) for submit in submits]
        rooms = [submit.room for submit in submits]
        api_id = submits[0].api_id
        if role == "decode":
            self._api_ids[streams] = api_id
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
        if not self._streams:  # the first step: all were asked for
            ids = set(self._api_ids.tolist())
            self._streams = {api_id: np.flatnonzero(self._api_ids == api_id) for api_id in ids}
        for api_id, streams in self._streams.items():
            rows = self._rows(streams, self._round.rooms[streams], token_idx)
            self._decode.emitter.rows(api_id, rows)
        self._decode.send()
        if token_idx == self._round.cell.output_tokens - 1:
            self._decode.over(self._round.rooms.tolist())

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
    """The `Way` to the floor: over a socket, requested streams come in and steps go out."""

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


def main() -> None:
    """`python -m bench.frontend_engine FD [FLOOR_FD]`."""
    floor = inherited_socket(sys.argv[2]) if len(sys.argv) > 2 else None

    def way_of(setup: dict[str, Any]) -> Way:
        if floor is not None:
            return FloorSteps(floor)
        return Workers(Security(setup["token"]), setup["ids"])

    run(inherited_socket(sys.argv[1]), way_of)


if __name__ == "__main__":
    main()
