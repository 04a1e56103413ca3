"""One worker by itself, driven by hand, for tests of what it does event by event."""

from collections import Counter
from random import Random

from model.buckets import pages_for
from tests.sim.plan import WorkerPlan
from tests.sim.transport import Fabric, Net
from tests.sim.workers import SimDecode, SimPrefill, open_stream
from transfer import wire
from transfer.clock import ManualClock
from transfer.worker import Submitted, Worker

PAGE = 4
API = "api"


class Alone:
    """A worker, its clock, and what it published. No frame of the data plane arrives by itself."""

    def __init__(
        self,
        role: wire.Role,
        num_pages: int = 8,
        num_slots: int = 4,
        dp_size: int = 1,
        local_tokens: int = 0,
        drafts: int = 0,
        window: int = 0,
        queue_bytes: int = 1 << 30,
        host_pages: int = 0,
    ) -> None:
        self.clock = ManualClock()
        self.net = Net(Random(0), Counter())
        self.fabric = Fabric(self.net, corrupt=0.0)
        self.batches: list[wire.StepBatch] = []
        self.grants: list[wire.Grant] = []
        self._num_tokens: dict[int, int] = {}  # by room
        plan = WorkerPlan(
            worker_id=role,
            num_pages=num_pages,
            page_size=PAGE,
            context=64,
            tp_size=1,
            logical_heads=2,
            stored_heads=2,
            max_queued=4,
            max_frame_bytes=1 << 20,
            chunk_tokens=8,
            chunk_seqs=2,
            run_pages=4,
            num_slots=num_slots,
            dp_size=dp_size,
            local_tokens=local_tokens,
            drafts=drafts,
            window=window,
            queue_bytes=queue_bytes,
            host_pages=host_pages,
        )
        self.worker: SimPrefill | SimDecode
        if role == "prefill":
            self.worker = SimPrefill(plan, self.fabric, self.clock, publish=self._publish)
        else:
            self.worker = SimDecode(
                plan, self.fabric, self.clock, publish=self._publish, send_grants=self._granted
            )
        open_stream(self.worker, API)

    def submit(self, room: int, num_tokens: int = 3, max_new: int = 4, **fields: object) -> None:
        """Hand the worker a leg that it does not refuse."""
        leg = self.leg(room, num_tokens, max_new, **fields)
        assert self.worker.refusal(leg) is None
        self.worker.handle(Submitted((leg,), self.clock.monotonic_s()))

    def leg(
        self, room: int, num_tokens: int = 3, max_new: int = 4, **fields: object
    ) -> wire.Submit:
        """A submit for this worker; tokens are room, room+1, ..."""
        own = self.ref()
        refs: dict[str, wire.WorkerRef] = dict.fromkeys(("prefill", "decode"), self.ref("other"))
        refs[self.worker.role] = own
        known = {
            "room": room,
            "request_id": "r",
            "api_id": API,
            "token_ids": wire.pack_i32(range(room, room + num_tokens)),
            "num_prompt_tokens": num_tokens,
            "sampling": wire.SamplingParams(max_new),
            "age_s": 1000.0 - room,
            "left_s": 60.0,
            **refs,
        }
        leg = wire.Submit(**{**known, **fields})  # type: ignore[arg-type]
        self._num_tokens[room] = len(leg.token_ids) // 4
        return leg

    def ref(self, worker_id: str = "") -> wire.WorkerRef:
        """How a submit refers to this worker, or to another."""
        return wire.WorkerRef(worker_id or self.worker.worker_id(), self.worker.epoch, "here")

    def grant(
        self, room: int, epoch: int | None = None, address: str = "sim://nobody"
    ) -> wire.Grant:
        """The grant of a decode worker at whose address nobody listens."""
        epoch = self.worker.epoch if epoch is None else epoch
        pages = wire.pack_i32(range(pages_for(self._num_tokens.get(room, 1), PAGE)))
        return wire.Grant(room, epoch, (address,), pages, 1, 2)

    def turn(self) -> bool:
        """Run one turn, and check the worker's bookkeeping."""
        more = self.worker.turn()
        self.worker.check(self.net.stats)
        return more

    def events(self) -> list[tuple[str, int, str]]:
        """(kind, room, code) of every event so far."""
        return [(e.kind, e.room, e.code) for batch in self.batches for e in batch.events]

    def tokens(self) -> list[tuple[int, int]]:
        """(room, token index) of every row so far."""
        return [
            pair
            for batch in self.batches
            for pair in zip(
                wire.unpack_i64(batch.rooms).tolist(),
                wire.unpack_i32(batch.token_idx).tolist(),
                strict=True,
            )
        ]

    def legs(self) -> list[wire.LegRecord]:
        """The records of all legs that have ended."""
        return [leg for batch in self.batches for leg in batch.legs]

    def _publish(self, _: Worker, batches: dict[str, wire.StepBatch]) -> None:
        self.batches += batches.values()

    def _granted(self, _: Worker, address: str, grants: tuple[wire.Grant, ...]) -> None:
        assert address == "here"
        self.grants += grants
