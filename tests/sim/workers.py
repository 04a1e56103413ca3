"""The real workers without loop and device, and invariants checked between any two events."""

from collections import Counter
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from decode.config import DecodeConfig
from decode.local import MAX_SEQS
from decode.rings import ringed_window
from decode.worker import DecodeWorker
from model.buckets import PrefillBuckets, decode_buckets, pages_for
from model.config import KVSpec
from prefill.config import PrefillConfig
from prefill.worker import PrefillWorker
from tests.sim.engines import ChunkEngine, StepEngine
from tests.sim.grammars import SimGrammars
from tests.sim.network import ADAPTERS
from tests.sim.plan import WorkerPlan
from tests.sim.transport import Fabric, SimReceiver, SimSender
from transfer import wire
from transfer.clock import Clock
from transfer.host_pages import HostMemory, HostPages
from transfer.host_sizes import Hosts
from transfer.opened import PoolFacts
from transfer.replies import Replies
from transfer.room import LEGAL, Room, Side, State
from transfer.rpc import Security
from transfer.worker import ApiGone, Worker

SECURITY = Security(token="simulated")

Publish = Callable[[Worker, dict[str, wire.StepBatch]], None]
SendGrants = Callable[[Worker, str, tuple[wire.Grant, ...]], None]


def _reachable(side: Side, state: State) -> frozenset[State]:
    after = LEGAL[side].get(state, ())
    return frozenset(after).union(*(_reachable(side, next_state) for next_state in after))


_FINAL = (State.DONE, State.FAILED)
REACHABLE = {(side, state): _reachable(side, state) for side in Side for state in State}


def run_now[T](call: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that never suspends."""
    try:
        call.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("it waits")


class RoomWatch:
    """Follows every room of a worker from its first state to its last."""

    def __init__(self, side: Side) -> None:
        self._side = side
        self._seen: dict[int, tuple[Room, State]] = {}

    def look(self, rooms: dict[int, Room], stats: Counter[str]) -> None:
        for number, room in rooms.items():
            known, before = self._seen.get(number, (room, State.QUEUED))
            assert known is room, f"room {number} was opened again"
            assert room.state not in _FINAL, f"room {number} is {room.state} and still held"
            self._check(number, before, room.state)
            self._seen[number] = room, room.state
        for number in [number for number in self._seen if number not in rooms]:
            room, before = self._seen.pop(number)
            assert room.state in _FINAL, f"room {number} was dropped in {room.state}"
            self._check(number, before, room.state)
            stats[f"{self._side.value}_{before.value}_{room.state.value}"] += 1

    def _check(self, number: int, before: State, now: State) -> None:
        if now is not before:
            assert now in REACHABLE[self._side, before], f"room {number}: {before} -> {now}"


def _facts_of(plan: WorkerPlan) -> PoolFacts:
    heads = plan.logical_heads, plan.stored_heads
    return PoolFacts(plan.page_size, plan.context, *heads, plan.window, ADAPTERS)


def _hosts(plan: WorkerPlan, facts: PoolFacts) -> Hosts | None:
    if not plan.host_pages:
        return None
    shape = 1, 2, plan.page_size, plan.stored_heads // plan.tp_size, 1
    memory = HostMemory(plan.host_pages, plan.tp_size, shape, "float32", facts.groups)
    return Hosts([HostPages(plan.host_pages, facts.groups)] * plan.dp_size, [memory] * plan.dp_size)


class SimPrefill(PrefillWorker):
    """A prefill worker in simulated surroundings."""

    def __init__(
        self,
        plan: WorkerPlan,
        fabric: Fabric,
        clock: Clock,
        security: Security = SECURITY,
        publish: Publish | None = None,
    ) -> None:
        config = PrefillConfig(
            model_path=Path(),
            registry_address="",
            host=plan.worker_id,
            worker_id=plan.worker_id,
            tp_size=plan.tp_size,
            dp_size=plan.dp_size,
            load_balance_method=plan.balancing,
            max_queued_requests=plan.max_queued,
            transfer_queue_bytes=plan.queue_bytes,
        )
        super().__init__(config, security, clock)
        stats = fabric.net.stats
        facts = _facts_of(plan)
        sender = SimSender(fabric, self.inbox.post, plan.max_frame_bytes)
        sender.clock = clock
        self.sender = sender
        buckets = PrefillBuckets(
            (plan.chunk_tokens,),
            plan.chunk_seqs,
            2 * pages_for(plan.context, plan.page_size) + plan.chunk_seqs,
            (plan.run_pages,),
            2 * plan.run_pages,
        )
        engine = ChunkEngine(
            plan.num_pages,
            facts,
            plan.tp_size,
            plan.run_pages,
            plan.chunk_tokens,
            plan.chunk_seqs,
            stats,
            plan.dp_size,
        )
        self.assemble(engine, facts, buckets, sender, _hosts(plan, facts))
        self._grammars = SimGrammars(fabric.net)
        self._ready = True
        self._publish = publish
        self._watch = RoomWatch(Side.PREFILL)

    def publish(self, batches: dict[str, wire.StepBatch]) -> None:
        if self._publish is None:
            super().publish(batches)
        else:
            self._publish(self, batches)

    def check(self, stats: Counter[str]) -> None:
        """Pages, rooms and states add up."""
        self._watch.look({room: held.room for room, held in self._held.items()}, stats)
        sending = {room for room, held in self._held.items() if held.room.state is State.SENDING}
        assert len(self._held) == len(self._ranks) + len(sending)
        for number, rank in enumerate(self._ranks.ranks):
            rank.pool.check()
            prompts = [held.prompt for held in self._held.values() if held.prompt.rank == number]
            stats[f"prefill_rank_{number}_holds"] += any(prompt.pages for prompt in prompts)
            owners = Counter(page for prompt in prompts for page in prompt.pages)
            owners.update(rank.cache._pages.values())
            for page in range(rank.pool.num_pages):
                assert rank.pool.refcount(page) == owners[page], f"rank {number}, page {page}"
        for room, held in self._held.items():
            if held.room.state in (State.QUEUED, State.GRANTED):
                first_page = held.grant.first_page if held.grant is not None else 0
                assert held.shipped_pages == first_page, f"room {room} ships before it computes"
            gave_up = held.room.state is State.COMPUTING and not held.prompt.pages
            stats["prefill_gives_pages_up"] += gave_up
            if held.prompt.pages:
                assert room not in sending, f"room {room} has pages that the host has"
                assert held.grant is not None, f"room {room} has pages without a grant"
                assert not held.waits_for_grammar, f"room {room} has pages before its grammar"
            dictated = held.submit.disagg_prefill_dp_rank
            assert dictated in (-1, held.prompt.rank), f"room {room} is not where it was sent"

    def check_idle(self) -> None:
        """Nothing is held but what the cache keeps."""
        assert not self._held, f"rooms left: {self._left()}"
        assert not self._inflight
        assert not self._early
        for rank in self._ranks.ranks:
            assert rank.pool.num_held == len(rank.cache) == rank.cache.num_evictable
        assert not self.sender.open_rooms
        assert not self.sender.in_flight_bytes

    def check_drained(self) -> None:
        """The worker is leaving, and holds nothing but what the cache keeps."""
        for rank in self._ranks.ranks:
            assert rank.pool.num_held == len(rank.cache) == rank.cache.num_evictable
        assert not self.sender.open_rooms

    def _left(self) -> dict[int, str]:
        return {room: held.room.state.value for room, held in self._held.items()}


class SimDecode(DecodeWorker):
    """A decode worker in simulated surroundings."""

    def __init__(
        self,
        plan: WorkerPlan,
        fabric: Fabric,
        clock: Clock,
        security: Security = SECURITY,
        publish: Publish | None = None,
        send_grants: SendGrants | None = None,
    ) -> None:
        config = DecodeConfig(
            model_path=Path(),
            registry_address="",
            host=plan.worker_id,
            worker_id=plan.worker_id,
            tp_size=plan.tp_size,
            dp_size=plan.dp_size,
            max_queued_requests=plan.max_queued,
            headroom_pages=plan.headroom_pages,
            local_prefill_tokens=plan.local_tokens,
            speculative_algorithm="NGRAM" if plan.drafts else "NONE",
            speculative_num_draft_tokens=max(plan.drafts, 1),
        )
        super().__init__(config, security, clock)
        stats = fabric.net.stats
        facts = _facts_of(plan)
        receiver = SimReceiver(
            fabric,
            f"sim://{plan.worker_id}",
            KVSpec(1, plan.stored_heads, 1, plan.page_size, "float32"),
            plan.tp_size,
            on_event=self.inbox.post,
        )
        self.receiver = receiver
        window = ringed_window(facts, plan.local_tokens)
        sizes = plan.num_slots, plan.context, plan.page_size
        ring_pages = decode_buckets(*sizes, config.drafting, window).ring_pages
        engine = StepEngine(
            plan.num_pages,
            facts,
            plan.tp_size,
            plan.num_slots,
            stats,
            plan.dp_size,
            plan.chunk_tokens,
            plan.drafts,
            ring_pages,
        )
        pages = 2 * pages_for(plan.context, plan.page_size)
        local = PrefillBuckets((plan.chunk_tokens,), MAX_SEQS, pages, (1,), 1)
        self.assemble(
            engine,
            facts,
            plan.num_slots,
            receiver,
            [receiver.start()],
            local if plan.local_tokens else None,
            ring_pages,
            _hosts(plan, facts) if plan.local_tokens else None,
        )
        self._grammars = SimGrammars(fabric.net)
        self._ready = True
        self._publish = publish
        self._grants_out = send_grants
        self._watch = RoomWatch(Side.DECODE)

    def publish(self, batches: dict[str, wire.StepBatch]) -> None:
        if self._publish is None:
            super().publish(batches)
        else:
            self._publish(self, batches)

    def on_loop(self, function: Callable[..., Any], *args: Any) -> None:
        if self._loop is None:
            function(*args)
        else:
            super().on_loop(function, *args)

    def _send_grants(self, grants: dict[str, list[wire.Grant]]) -> None:
        if self._grants_out is None:
            super()._send_grants(grants)
            return
        for address, batch in grants.items():
            self._grants_out(self, address, tuple(batch))

    def check(self, stats: Counter[str]) -> None:
        """Pages, slots, rooms and states add up."""
        self._watch.look({room: held.room for room, held in self._held.items()}, stats)
        for pool in self._admission._pools:
            pool.check()
        self._admission.check()
        seated = {room for room, held in self._held.items() if held.seat is not None}
        assert set(self._admission._seats) == seated
        assert self._admission.num_waiting == len(self._held) - len(seated)
        # A room that its sender cancelled is no longer expected, while its end waits in the inbox.
        assert self.receiver.expected <= seated
        decoding = {room for room, held in self._held.items() if held.room.state is State.DECODING}
        running = {seat.room for seat in self._scheduler._running.values()}
        assert running == decoding
        constrained = {room for room in running if self._held[room].submit.sampling.grammar}
        assert len(self._constrained) == len(constrained)
        for room, held in self._held.items():
            if held.seat is not None:
                assert held.seat.room == room
                assert held.submit.routed_dp_rank in (-1, held.seat.rank), f"room {room}"
                stats[f"decode_rank_{held.seat.rank}_holds"] += 1

    def check_idle(self) -> None:
        """Everything is free."""
        left = {room: held.room.state.value for room, held in self._held.items()}
        assert not left, f"rooms left: {left}"
        assert not self._inflight
        assert not self._starts
        assert not self._constrained
        self.check_drained()
        assert not self.receiver.expected

    def check_drained(self) -> None:
        """The worker is leaving, and holds nothing."""
        assert self._loads.num_held == 0
        assert self._admission.num_free_slots == self._admission.num_slots


def open_stream(worker: Worker, api_id: str) -> None:
    """An API process subscribes."""
    worker._streams[api_id] = Replies()


def close_stream(worker: Worker, api_id: str) -> None:
    """The API process's stream breaks."""
    if worker._streams.pop(api_id, None) is not None:
        worker.inbox.post(ApiGone(api_id))
