"""The decode loop: rooms in, reservations out, pages placed, one step at a time for all slots.

One turn seats and starts rooms, dispatches step n+1, then reads step n's tokens, so all host
work overlaps the device. Everything of one step leaves as one message per API process.
"""

import logging
from collections import Counter, deque
from collections.abc import Coroutine, Sequence
from typing import Any

import jax
import numpy as np

from decode.admission import Admission, Seat
from decode.config import DecodeConfig
from decode.constrained import ConstrainedSlots
from decode.engine import SlotStart, StepEngine
from decode.grants import GrantSender
from decode.held import GrantFailed, Held, LocalFlight, StepFlight, is_local
from decode.loads import Loads
from decode.local import LocalPrompt, LocalQueue
from decode.opening import build_engine, check_data_port, keeps_prefixes, most_local, open_data
from decode.receiving import Receiving
from decode.rings import Rings
from decode.scheduler import DecodeScheduler, OutOfPages, StepPlan, ended
from decode.speculation import Speculation
from decode.told import tell_step, told_leg
from model.buckets import PrefillBuckets
from model.chunks import FirstSample
from model.sampling import NOTHING_LEFT
from transfer import wire
from transfer.backend import Arrived, Finished, FirstToken, PagesArrived, ReceivedEvent, SenderLost
from transfer.bootstrap import RegistryClient
from transfer.chunk_times import ChunkTimes, next_chunk
from transfer.clock import SYSTEM_CLOCK, Clock
from transfer.emit import StepEmitter
from transfer.errors import Code, TransferError
from transfer.group import Told
from transfer.host_sizes import Hosts, take_hosts
from transfer.keeping import keeping_of
from transfer.opened import PoolFacts
from transfer.pages import PagePool
from transfer.prefix_cache import Sharing, flush_caches, reusable_tokens, sharing_salt
from transfer.prompt_logprobs import CollectedLogprobs
from transfer.receiver import Receiver
from transfer.role import RoleWorker
from transfer.room import Room, Side, State
from transfer.routes import RouteTable
from transfer.rpc import Security

log = logging.getLogger(__name__)

MAX_ROUTES = 1 << 16  # rooms, over all prefill workers, whose ranks are remembered


class DecodeWorker(RoleWorker[Held, DecodeConfig]):
    """One decode group."""

    role: wire.Role = "decode"
    side = Side.DECODE

    def __init__(
        self, config: DecodeConfig, security: Security, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        super().__init__(config, security, clock)
        self._starts: list[tuple[Held, FirstToken]] = []
        self._started: list[Held] = []  # since the last step
        self._inflight: deque[StepFlight | LocalFlight] = deque()
        self._constrained = ConstrainedSlots()
        self._grants = GrantSender(  # loop thread only
            security, lambda rooms, message: self.inbox.post(GrantFailed(rooms, message))
        )
        # Written by the loop thread and read by the engine thread, one look-up at a time.
        self._prefill_routes = RouteTable(MAX_ROUTES)

    # --- start ----------------------------------------------------------------------------------

    def build(self) -> wire.WorkerInfo:
        config = self.config
        check_data_port(config)
        self.meet()
        engine, opened, rank_slots, local, ring_pages = build_engine(config, self.before_weights)
        local_tokens = most_local(config, opened.context_length)
        log.info("memory: %s", engine.plan)
        receiver = open_data(config, self.security, opened, self.inbox.post)
        addresses = self.met_all(receiver.start())
        facts = PoolFacts.of(opened)
        hosts = take_hosts(config, opened, engine) if keeps_prefixes(config) else None
        self.assemble(engine, facts, rank_slots, receiver, addresses, local, ring_pages, hosts)
        self.lead(engine.calls)
        self._compiles.arm()
        self.resolved(
            opened,
            engine.num_pages,
            max_running_requests=config.dp_size * rank_slots,
            local_prefill_tokens=local_tokens,
            chunked_prefill_size=local.tokens[-1] if local is not None else 0,
        )
        return self.described(
            opened,
            addresses[0],
            engine.num_pages,
            local_prefill_tokens=local_tokens,
            host_pages=hosts.num_pages if hosts else 0,
            shares_pages=self._shares_sent,
        )

    def assemble(
        self,
        engine: StepEngine,
        facts: PoolFacts,
        rank_slots: int,
        receiver: Receiver,
        addresses: Sequence[str],
        local: PrefillBuckets | None = None,
        ring_pages: int = 0,
        hosts: Hosts | None = None,
    ) -> None:
        """Put the parts together; the simulator brings an engine and a wire of its own.

        addresses: where each node takes pages. local: shapes of chunks of prompts that are computed
        here; None: there are none. ring_pages: see decode/rings.py. hosts: keep prefixes that the
        pools evict.
        """
        assert local is None or not ring_pages, "chunks of prompts look further back than rings"
        self._engine = engine
        self._facts = facts
        self._num_pages = engine.num_pages
        self._rings = Rings(facts, engine.num_pages, ring_pages)
        pools = [PagePool(self._rings.pool_pages) for _ in range(self.config.dp_size)]
        caching = not self.config.disable_radix_cache
        # Pages for windows are sent for the end of a prompt only.
        self._shares_sent = caching and facts.groups == 1
        caching = caching and (local is not None or facts.groups == 1)
        headroom = self.config.headroom_pages
        self._admission = Admission(
            pools, rank_slots, facts.page_size, headroom, caching, ring_pages, hosts and hosts.pages
        )
        self._keeping = keeping_of(hosts, self._admission.caches, engine, self.counters)
        self._scheduler = DecodeScheduler(self._admission, self.config.num_drafts)
        self._speculation = Speculation(self._admission.num_slots, self.config.num_drafts)
        most = (local.tokens[-1], local.pages, local.dear_tokens) if local is not None else (0, 0)
        self._local = LocalQueue(self._admission, *most)
        self._loads = Loads(self._admission, self._local, pools)
        self._emitter = StepEmitter(self.worker_id(), self.epoch)
        self._receiving = Receiving(receiver, engine, self.config.nodes)
        self._addresses = self._receiving.addresses(addresses)
        self._refresh_load()

    def request_tokens(self, submit: wire.Submit) -> int:
        return submit.num_prompt_tokens + submit.sampling.max_new_tokens

    def capacity_refusal(self, submit: wire.Submit) -> wire.Refusal | None:
        num_tokens = len(submit.token_ids) // 4
        limit = most_local(self.config, self._facts.context_length)
        if is_local(submit) and num_tokens > limit:
            message = f"{num_tokens} tokens, {self.worker_id()} computes prompts of at most {limit}"
            return wire.Refusal(submit.room, Code.STALE.value, message)
        return super().capacity_refusal(submit)

    # --- events ---------------------------------------------------------------------------------

    def handle_own(self, event: Any) -> None:
        match event:
            case PagesArrived() | Finished() | SenderLost():
                self._received(0, event)
            case Told():
                for of_node in event.received:
                    self._received(event.node_rank, of_node)
            case GrantFailed(rooms, message):
                for room in rooms:
                    held = self._held.get(room)
                    # Once pages have come, the grant did arrive: only its answer was lost.
                    if held is not None and held.room.state is State.RESERVED:
                        self.fail(room, Code.PEER_LOST, f"prefill cannot be reached: {message}")
            case _:
                raise AssertionError(f"unknown event {event!r}")

    def take(self, submit: wire.Submit, room: Room) -> Held:
        num_tokens, rank = len(submit.token_ids) // 4, self.dictated_rank(submit)
        held, sharing, start = Held(submit, room), None, submit.sampling.prompt_logprobs_start
        local = is_local(submit)
        if local or self._shares_sent:
            # Prefill computes logprobs, and at least one page comes from there.
            reusable = reusable_tokens(num_tokens, start if local else -1)
            token_ids = wire.unpack_i32(submit.token_ids)
            sharing = Sharing(token_ids, sharing_salt(submit.adapter, submit.cache_salt), reusable)
        if local and start >= 0:
            held.logprobs = CollectedLogprobs(start, submit.num_prompt_tokens)
        self._admission.add(submit.room, num_tokens, room.arrival_s, rank, sharing, local)
        return held

    def release(self, held: Held) -> None:
        """Give back the room's slot and pages; its late frames will be refused."""
        self._receiving.forget(held.submit.room)
        self._local.remove(held.submit.room)
        if held.seat is not None:
            if self._scheduler.running(held.seat.slot) is not None:
                held.num_steps = self._scheduler.num_steps(held.seat.slot)
            self._scheduler.stop(held.seat.slot)
            self._constrained.stop(held.seat.slot)
            held.seat = None
        self._admission.release(held.submit.room)

    def leg_of(self, held: Held, stages: dict[str, int], ending: str) -> wire.LegRecord:
        return told_leg(held, stages, ending)

    def has_begun(self, held: Held) -> bool:
        """A prompt that waits for its first chunk has a seat, but has cost nothing yet."""
        waits = held.seat is not None and held.seat.is_local
        return super().has_begun(held) and not (waits and held.room.state is State.RESERVED)

    def _received(self, node: int, event: ReceivedEvent) -> None:
        """What the data plane of one node says."""
        match event:
            case SenderLost(rooms, message, code):
                what = "prefill gave the request up" if code is Code.GONE else "prefill lost"
                for room in rooms:
                    self.fail(room, code, f"{what}: {message}")
            case Finished(room, first):
                held = self._held.get(room)
                if self._receiving.finished(node, room) and held is not None:
                    self._transferred(held, first)
            case PagesArrived() | Arrived():
                held = self._held.get(event.room)
                if held is None or held.seat is None:
                    self.counters["pages_late"] += event.num_pages
                    return
                try:
                    is_everywhere = self._receiving.came(node, event)
                except TransferError as error:  # blamed on prefill
                    self.fail(event.room, Code.PEER_LOST, str(error))
                    return
                if is_everywhere:
                    self._place(held, held.seat, event.page_start, event.num_pages)

    def _place(self, held: Held, seat: Seat, page_start: int, num_pages: int) -> None:
        if held.room.state is State.RESERVED:
            held.room.advance(State.RECEIVING, self.clock.monotonic_s())
        page_ids = held.to_fill[page_start : page_start + num_pages]
        self._receiving.place(seat.room, page_start, page_ids)
        self._admission.digest(seat, page_start + num_pages)
        self.counters["pages_received"] += num_pages

    def _transferred(self, held: Held, first: FirstToken) -> None:
        """All pages are in place: prefill may forget the room, the slot may start."""
        assert held.seat is not None, "pages were expected for a seat"
        self._admission.filled(held.seat, held.seat.num_tokens)
        self._look_up_route(held)  # before the ack, after which prefill ends the room
        self._receiving.ack(held.submit.room)
        self._may_start(held, first)

    def _may_start(self, held: Held, first: FirstToken) -> None:
        """Its pages are written and its first token is known: the slot may start."""
        held.room.advance(State.READY, self.clock.monotonic_s())
        if first.finished:
            self.end(held.submit.room)
        elif held.waits_for_grammar:
            held.first = first
        else:
            self._starts.append((held, first))

    def grammar_ready(self, held: Held) -> None:
        if held.first is not None:
            self._starts.append((held, held.first))
        elif held.seat is not None:
            self._queue_local(held, held.seat)

    def registry_tasks(self, registry: RegistryClient) -> list[Coroutine[Any, Any, None]]:
        return [registry.watch_routes(self._prefill_routes, self.worker_id())]

    def _look_up_route(self, held: Held) -> None:
        """Note which prefill rank had the room, if known: only to be shown, so nothing waits."""
        prefill, dictated = held.submit.prefill, held.submit.disagg_prefill_dp_rank
        rank = self._prefill_routes.get(prefill.worker_id, prefill.epoch, held.submit.room)
        if rank is None:
            return
        held.prefill_rank = rank
        self.counters["routes_known"] += 1
        if dictated not in (-1, rank):
            self.counters["routes_contradicting"] += 1

    # --- one turn -------------------------------------------------------------------------------

    def turn(self) -> bool:
        self._seat()
        self._move_pages()
        while self._constrained and self._inflight:
            self._complete(self._inflight.popleft())
        self._start()
        computes = len(self._local) > 0
        if computes:
            self._dispatch_local()
        plan = self._plan()
        self._move_pages()
        if plan is not None:
            self._dispatch_step(plan)
        while len(self._inflight) > 1:
            self._complete(self._inflight.popleft())
        if self._inflight and plan is None and not computes:
            self._complete(self._inflight.popleft())
        self.expire()
        self._refresh_load()
        self._tell()
        if self._keeping is not None:
            self._keeping.settle()
        # A room that ended in this turn may have left a seat, and no event will say so.
        return bool(self._inflight or self._starts or len(self._local) or self._admission.may_admit)

    def _seat(self) -> None:
        """Reserve slots and pages for rooms that fit, and grant them to their prefill workers."""
        grants: dict[str, list[wire.Grant]] = {}
        for seat in self._admission.admit():
            held = self._held[seat.room]
            held.seat = seat
            held.rank = seat.rank
            held.room.advance(State.RESERVED, self.clock.monotonic_s())
            self.counters[f"rank_{seat.rank}_rooms"] += 1
            if seat.is_local:
                if not held.waits_for_grammar:
                    self._queue_local(held, seat)
                continue
            held.num_cached = seat.num_cached
            first_page = seat.num_cached // self._facts.page_size
            held.to_fill = self._rings.to_fill(seat)[first_page:]
            self.counters["pages_shared"] += first_page
            self._receiving.expect(seat.room, seat.rank, self.epoch, len(held.to_fill))
            grant = wire.Grant(
                room=seat.room,
                epoch=self.epoch,
                data_addresses=self._addresses[seat.rank],
                page_ids=wire.pack_i32(held.to_fill),
                tp_size=self.config.tp_size,
                stored_kv_heads=self._facts.stored_kv_heads,
                first_page=first_page,
            )
            grants.setdefault(held.submit.prefill.address, []).append(grant)
        if grants:
            self.on_loop(self._send_grants, grants)

    def _move_pages(self) -> None:
        """Save the pages that were evicted just now, and fill those that the host gives back."""
        if self._keeping is not None:
            self._keeping.dispatch()

    def _queue_local(self, held: Held, seat: Seat) -> None:
        if seat.is_local and seat.sharing is not None:
            wants, adapter = held.logprobs is not None, self.adapter_of(held.submit)
            self._local.add(LocalPrompt(seat, seat.sharing, wants, adapter))

    def _start(self) -> None:
        """Rooms whose pages are all there join the batch."""
        starts = []
        for held, first in self._starts:
            submit, seat, constraint = held.submit, held.seat, held.constraint
            if seat is None or self._held.get(submit.room) is not held:
                continue
            if constraint is not None:
                error = self._constrained.start(seat.slot, constraint, first.token_id)
                if error is not None:
                    self.fail(submit.room, error.code, error.message)
                    continue
            tokens = np.append(wire.unpack_i32(submit.token_ids), np.int32(first.token_id))
            num_prompt, params = submit.num_prompt_tokens, submit.sampling
            own = seat.pages, params, seat.ring, self.adapter_of(submit)
            starts.append(SlotStart(seat.slot, tokens, num_prompt, *own))
            self._scheduler.start(seat, submit.api_id, params, num_prompt)
            self._speculation.start(seat.slot)
            held.room.advance(State.DECODING, self.clock.monotonic_s())
            self._started.append(held)
        self._starts = []
        self._engine.start_slots(starts)

    def _plan(self) -> StepPlan | None:
        """Plan the next step; while a pool is dry, drop drafts, read steps in flight, preempt."""
        slots = self._scheduler.unfinished()
        tries = self._engine.can_draft(slots) and self._speculation.pays(slots)
        while True:
            try:
                return self._scheduler.plan(tries)
            except OutOfPages as dry:
                if tries:
                    tries = False
                elif self._inflight:
                    self._complete(self._inflight.popleft())
                else:
                    self._preempt(self._admission.victim(dry.rank).room)

    def _dispatch_step(self, plan: StepPlan) -> None:
        stuck = self._constrained.mask(plan.slots, self._grammars, self._engine)
        flight = self._engine.step(*plan.arrays, plan.width > 1, plan.num_pages)
        self._inflight.append(StepFlight(plan, flight, self._started, self.clock.monotonic_s()))
        self._started = []
        self.counters["steps"] += 1
        for slot, error in stuck:  # what this step draws for them is passed over
            seat = self._scheduler.running(slot)
            assert seat is not None
            self.fail(seat.room, error.code, error.message)

    def _preempt(self, room: int) -> None:
        held = self._held[room]
        self.counters["preemptions"] += 1
        request_id = held.submit.request_id
        log.info("%s is preempted in room %d: older requests need its pages", request_id, room)
        self._emitter.event(held.submit.api_id, wire.RoomEvent(room, "preempted"))
        self.drop(room, "preempted")

    def _dispatch_local(self) -> None:
        """A chunk of prompts that decode computes itself, ahead of the next step."""
        now_s = self.clock.monotonic_s()
        chunk = self._engine.run_chunk(self._local.plan())
        firsts: list[FirstSample] = []
        times: list[ChunkTimes] = []
        for placed in chunk.pieces:
            piece = placed.piece
            held = self._held[piece.prompt.room]
            if held.room.state is State.RESERVED:
                held.num_cached = piece.start
                held.room.advance(State.RECEIVING, now_s)
                self.counters["local_prefills"] += 1
            if piece.is_last:
                firsts.append(held.first_sample(placed))
            times.append(next_chunk(held.chunks, piece.num_tokens, now_s, page_end=0))
            self.counters["tokens_computed"] += piece.num_tokens
        sampled = self._engine.sample_first(firsts) if firsts else None
        self._inflight.append(LocalFlight(chunk, sampled, times))

    def _complete(self, flight: StepFlight | LocalFlight) -> None:
        if isinstance(flight, LocalFlight):
            self._complete_local(flight)
        else:
            self._complete_step(flight)
        self._tell()  # now: what completes next may be a chunk later

    def _complete_local(self, flight: LocalFlight) -> None:
        self.collect_logprobs(flight.chunk)
        jax.block_until_ready(flight.chunk.logits)  # the host is a chunk ahead, not more
        for times in flight.times:
            times.computed_s = self.clock.monotonic_s()
        if flight.sampled is not None:
            self.tell_first_tokens(flight.chunk, flight.sampled)

    def first_drawn(self, held: Held, first: FirstToken) -> None:
        """The prompt's pages were written here, so its slot may start."""
        self._may_start(held, first)

    def _tell(self) -> None:
        self.publish(self._emitter.take(self.clock.monotonic_s()))

    def _complete_step(self, done: StepFlight) -> None:
        """Read a step's tokens, send them, and end the rooms that they end."""
        plan, flight = done.plan, done.step
        token_ids, is_right = flight.token_ids()
        result = self._scheduler.finish(plan, token_ids)
        for held in done.started:
            held.first_step_s = self.clock.monotonic_s()
        self.counters["tokens"] += len(result.rows)
        if is_right is not None:
            now_s = self.clock.monotonic_s()
            self.counters.update(self._speculation.read(done, token_ids, is_right, now_s))
        slots = plan.slots[result.rows]
        tell_step(self._emitter, self._scheduler, slots, result, flight)
        for at in ended(result).tolist():
            self.end(int(result.rooms[at]))
        # Of those that go on: what is drawn behind an end, as drafts are, is no fault.
        for at, column in np.argwhere((token_ids < 0) & (token_ids >= NOTHING_LEFT)).tolist():
            self.fail_undrawn(int(plan.rooms[at]), int(token_ids[at, column]))
        for at, error in self._constrained.take(slots, result.token_ids):
            self.fail(int(result.rooms[at]), error.code, error.message)

    # --- grants (loop thread) ---------------------------------------------------------------------

    def _send_grants(self, grants: dict[str, list[wire.Grant]]) -> None:
        for address, batch in grants.items():
            self._grants.send(address, batch)

    # --- what others may know --------------------------------------------------------------------

    def _refresh_load(self) -> None:
        self._load = self._loads.total(self.progress)
        self._rank_loads = self._loads.by_rank(self.progress)

    def state(self) -> wire.WorkerState:
        self._admission.check(each_page=not self._held)
        counters = self.counters + Counter(dict(self._receiving.receiver.counters))
        if self._keeping is not None:
            counters["host_pages"] = self._keeping.num_pages
        held, cached = self._loads.num_held, self._loads.num_cached
        self._refresh_load()
        return self.described_state(held, cached, counters, self._admission.num_waiting)

    def flush(self) -> wire.FlushReply:
        return flush_caches(self._admission.caches)

    def close(self) -> None:
        super().close()
        receiving = getattr(self, "_receiving", None)
        if receiving is not None:
            receiving.receiver.close()
