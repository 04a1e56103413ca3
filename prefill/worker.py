"""The prefill loop: rooms in, chunks on the device, pages and first tokens out.

One turn dispatches a chunk, then reads the results of the chunk before it, so the host ships
pages and tokens of chunk n while the device computes chunk n+1.
"""

import logging
from collections import Counter, deque
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Protocol

import jax

from model.buckets import PrefillBuckets, bucket_for
from model.chunks import ChunkInFlight, FirstSample
from model.pieces import Piece
from model.sampling import SampleOut
from prefill.config import PrefillConfig
from prefill.held import Held
from prefill.opening import build_engine
from prefill.ranks import Rank, Ranks
from prefill.scheduler import PrefillScheduler, Prompt
from prefill.sending import Sending
from prefill.shipping import NO_RUN, InFlight, Run, Shipping, Staged, pages_to_ship
from transfer import wire
from transfer.backend import FirstToken, SenderEvent
from transfer.bootstrap import RegistryClient
from transfer.choice import default_connections, open_sender
from transfer.chunk_times import ChunkTimes, next_chunk, told_shipment, told_times
from transfer.clock import SYSTEM_CLOCK, Clock
from transfer.emit import StepEmitter
from transfer.errors import Code, Incompatible
from transfer.gathered import GatheredPages, RunEngine
from transfer.group import Told
from transfer.host_pages import HostPages
from transfer.host_sizes import Hosts, take_hosts
from transfer.keeping import keeping_of
from transfer.opened import PoolFacts
from transfer.outbound import Sender
from transfer.pages import PagePool
from transfer.prefix_cache import PrefixCache, flush_caches, sharing_salt
from transfer.prompt_logprobs import CollectedLogprobs
from transfer.role import RoleWorker
from transfer.room import EndedRooms, Room, Side, State
from transfer.route_feeds import RoutePublisher
from transfer.rpc import RpcServer, Security

log = logging.getLogger(__name__)

LOAD_REFRESH_S = 0.2
EARLY_GRANT_S = 10.0  # a grant may come before its submit; kept this long


@dataclass(frozen=True)
class Granted:
    grants: tuple[wire.Grant, ...]


class ChunkEngine(RunEngine, Protocol):
    """What the loop needs of `prefill.engine.PrefillEngine`."""

    def run_chunk(self, plans: Sequence[tuple[Piece[Prompt], ...]]) -> ChunkInFlight[Prompt]: ...
    def sample_first(self, firsts: Sequence[FirstSample]) -> SampleOut: ...


class PrefillWorker(RoleWorker[Held, PrefillConfig]):
    """One prefill group."""

    role: wire.Role = "prefill"
    side = Side.PREFILL

    def __init__(
        self, config: PrefillConfig, security: Security, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        super().__init__(config, security, clock)
        self._early: dict[int, tuple[wire.Grant, float]] = {}
        self._too_early = EndedRooms()  # whose grant is forgotten, and decode grants only once
        self._inflight: deque[InFlight] = deque()
        self._staged_pages = 0  # of every rank, padding included
        self._behind: frozenset[str] = frozenset()  # data addresses that too many pages wait for
        # Changes of routes that are still to be told: rooms with their ranks, rooms that ended.
        self._bound: list[tuple[int, int]] = []
        self._ended: list[int] = []
        self._publisher: RoutePublisher | None = None  # with several ranks
        self._load_due_s = 0.0

    # --- start ----------------------------------------------------------------------------------

    def build(self) -> wire.WorkerInfo:
        config = self.config
        self.meet()
        engine, opened, buckets = build_engine(config, self.before_weights)
        log.info("memory: %s", engine.plan)
        connections = config.transfer_connections or default_connections()
        sender = open_sender(
            config,
            self.security,
            connections,
            config.max_frame_bytes,
            sender_id=self.worker_id(),
            on_event=self.inbox.post,
        )
        hosts = take_hosts(config, opened, engine) if config.enable_hierarchical_cache else None
        self.met_all()
        self.assemble(engine, PoolFacts.of(opened), buckets, sender, hosts)
        self.lead(engine.calls)
        self._compiles.arm()
        self.resolved(
            opened,
            engine.num_pages,
            chunked_prefill_size=buckets.tokens[-1],
            transfer_connections=connections,
        )
        kept = hosts.num_pages if hosts else 0
        return self.described(opened, num_pages=engine.num_pages, host_pages=kept)

    def assemble(
        self,
        engine: ChunkEngine,
        facts: PoolFacts,
        buckets: PrefillBuckets,
        sender: Sender,
        hosts: Hosts | None = None,
    ) -> None:
        """Put the parts together; the simulator brings an engine and a wire of its own."""
        self._engine = engine
        self._facts = facts
        self._num_pages = engine.num_pages
        self._buckets = buckets
        self._shipping = Shipping(
            facts.page_size, engine.num_pages, engine.max_run_pages, facts.groups
        )
        config = self.config
        kept: Sequence[HostPages | None] = hosts.pages if hosts else [None] * config.dp_size
        ranks = [self._make_rank(buckets, host) for host in kept]
        self._gathered = GatheredPages(engine)
        caches = [rank.cache for rank in ranks]
        self._keeping = keeping_of(hosts, caches, engine, self.counters, self._gathered)
        self._sending = Sending(
            sender, engine, self._gathered, facts, config.nodes, config.max_frame_bytes
        )
        self._ranks = Ranks(ranks, self.config.load_balance_method)
        self._emitter = StepEmitter(self.worker_id(), self.epoch)
        self._refresh_load()

    def _make_rank(self, buckets: PrefillBuckets, host: HostPages | None) -> Rank:
        pool = PagePool(self._num_pages)
        caching = not self.config.disable_radix_cache
        cache = PrefixCache(pool, self._facts.page_size, caching, host)
        # The longest chunk of any rank is the length of all: one alone cannot choose it.
        sizes = buckets.dear_tokens if self.config.dp_size == 1 else ()
        limits = buckets.tokens[-1], buckets.seqs, buckets.pages, sizes
        return Rank(pool, cache, PrefillScheduler(pool, cache, *limits))

    def register_methods(self, server: RpcServer) -> None:
        super().register_methods(server)
        server.unary("Grant", wire.GrantBatch, self._granted)

    async def _granted(self, batch: wire.GrantBatch) -> wire.Empty:
        self.require_ready()
        self.inbox.post(Granted(batch.grants))
        return wire.Empty()

    def request_tokens(self, submit: wire.Submit) -> int:
        return len(submit.token_ids) // 4

    # --- events ---------------------------------------------------------------------------------

    def handle_own(self, event: Any) -> None:
        match event:
            case Granted(grants):
                for grant in grants:
                    self._take_grant(grant)
            case SenderEvent():
                self._sender_said(0, event)
            case Told():
                for said in event.sent:
                    self._sender_said(event.node_rank, said)
                if event.behind is not None:
                    self._sending.told_behind(event.node_rank, frozenset(event.behind))
            case _:
                raise AssertionError(f"unknown event {event!r}")

    def take(self, submit: wire.Submit, room: Room) -> Held:
        prompt = Prompt(
            room=submit.room,
            token_ids=wire.unpack_i32(submit.token_ids),
            arrival_s=room.arrival_s,
            salt=sharing_salt(submit.adapter, submit.cache_salt),
            adapter=self.adapter_of(submit),
            logprobs_start=submit.sampling.prompt_logprobs_start,
            rank=self.dictated_rank(submit),
        )
        self._ranks.add(prompt)
        held = Held(submit, room, prompt)
        if prompt.wants_logprobs:
            held.logprobs = CollectedLogprobs(prompt.logprobs_start, submit.num_prompt_tokens)
        return held

    def open_room(self, submit: wire.Submit, received_s: float) -> None:
        super().open_room(submit, received_s)
        early, held = self._early.pop(submit.room, None), self._held.get(submit.room)
        if early is not None and held is not None:
            self._grant(held, early[0])
        if submit.room in self._too_early:
            self.fail(submit.room, Code.STALE, f"its grant came over {EARLY_GRANT_S:g} s before")

    def drop(self, room: int, why: str) -> None:
        self._early.pop(room, None)
        super().drop(room, why)

    def release(self, held: Held) -> None:
        if held.room.state is State.FAILED and held.grant is not None:
            left = self._sending.cancel(held.submit.room)
            held.shipped = held.shipped or left
        self._ranks.release(held.prompt)
        self._ended.append(held.submit.room)

    def leg_of(self, held: Held, stages: dict[str, int], ending: str) -> wire.LegRecord:
        return wire.LegRecord(
            held.submit.room,
            stages,
            ending,
            held.prompt.num_cached,
            told_times(held.chunks, held.shipped, held.received_s),
            told_shipment(held.shipped, held.received_s),
            dp_rank=held.prompt.rank,
        )

    def _take_grant(self, grant: wire.Grant) -> None:
        held = self._held.get(grant.room)
        if held is not None:
            self._grant(held, grant)
        else:
            # Bounded by decode, which grants no more rooms than it has slots, and by time.
            self._early[grant.room] = (grant, self.clock.monotonic_s() + EARLY_GRANT_S)

    def _grant(self, held: Held, grant: wire.Grant) -> None:
        if held.grant is not None:
            return
        if grant.epoch != held.submit.decode.epoch:
            self.counters["grants_stale"] += 1
            return
        num_tokens, num_granted = held.prompt.num_tokens, len(grant.page_ids) // 4
        first = self._shipping.first_windowed(num_tokens, num_granted, grant.first_page)
        if first is None:
            granted = f"{num_granted} pages, from page {grant.first_page} of the prompt on"
            message = f"decode granted {granted}, for {num_tokens} tokens"
            self.fail(grant.room, Code.STALE, message)
            return
        try:
            self._sending.open(grant)  # connects while the first chunk is computed
        except Incompatible as error:
            self.fail(grant.room, Code.STALE, str(error))
            return
        held.first_windowed = first
        held.shipped_pages = grant.first_page
        held.grant = grant
        held.room.advance(State.GRANTED, self.clock.monotonic_s())
        self._let_run(held)

    def grammar_ready(self, held: Held) -> None:
        self._let_run(held)

    def _let_run(self, held: Held) -> None:
        """Let the prompt be computed, unless it still waits for something."""
        grant = held.grant
        if grant is None or held.waits_for_grammar:
            return
        if self._behind.isdisjoint(grant.data_addresses):
            self._ranks.grant(held.prompt)

    def _watch_queues(self) -> None:
        """Hold prompts back while their decode worker takes pages slower than they are computed.

        Pages that wait are in this host's memory, which else only decode's pool would bound.
        """
        before, behind = self._behind, self._sending.behind(self.config.transfer_queue_bytes)
        if behind == before:
            return
        self._behind = behind
        self.counters["decodes_behind"] += len(behind - before)
        for held in self._held.values():
            if held.grant is None or held.room.state is State.SENDING:
                continue
            addresses = held.grant.data_addresses
            if not (behind - before).isdisjoint(addresses):
                self._ranks.keep_back(held.prompt)
            elif not (before - behind).isdisjoint(addresses):
                self._let_run(held)

    def _sender_said(self, node: int, event: SenderEvent) -> None:
        said = self._sending.told(node, event)
        if said is None:
            return
        held = self._held.get(said.room)
        if held is not None:
            held.shipped = said.shipped
        match said.kind:
            case "acked":
                if held is not None and held.room.state is not State.SENDING:
                    self.counters["transfers_refused"] += 1
                    message = "decode acknowledged pages before all were sent"
                    self.fail(said.room, Code.STALE, message)
                elif held is not None:
                    self.end(said.room)
            case "nacked":
                code = Code.GONE if said.code == Code.GONE else Code.STALE
                if code is not Code.GONE:  # decode itself says why the room is over there
                    self.counters["transfers_refused"] += 1
                self.fail(said.room, code, f"decode refused pages: {said.message}")
            case "lost":
                self.counters["transfers_lost"] += 1
                self.fail(said.room, Code.PEER_LOST, f"decode lost: {said.message}")
            case "unsent":  # a fault of this worker: the next attempt avoids it
                self.counters["transfers_unsent"] += 1
                self.fail(said.room, Code.STALE, f"no connection to decode: {said.message}")

    # --- one turn -------------------------------------------------------------------------------

    def turn(self) -> bool:
        self._watch_queues()
        plans = self._ranks.plan()
        has_work = any(plans)
        if self._keeping is not None:
            self._keeping.dispatch()
        if has_work:
            self._dispatch_chunk(plans)
        if self._inflight and (len(self._inflight) > 1 or not has_work):
            self._complete(self._inflight.popleft())
        self.expire()
        if self.clock.monotonic_s() >= self._load_due_s:
            self._refresh_load()
        self.publish(self._emitter.take(self.clock.monotonic_s()))
        if self._keeping is not None:
            self._keeping.settle()
        return bool(self._inflight)

    def _dispatch_chunk(self, plans: Sequence[tuple[Piece[Prompt], ...]]) -> None:
        now_s = self.clock.monotonic_s()
        chunk = self._engine.run_chunk(plans)
        firsts: list[FirstSample] = []
        times: list[ChunkTimes] = []
        wanted: list[list[Run]] = [[] for _ in plans]  # by rank
        for placed in chunk.pieces:
            piece = placed.piece
            held = self._held[piece.prompt.room]
            if held.room.state is State.GRANTED:
                held.room.advance(State.COMPUTING, now_s)
                self.counters[f"rank_{piece.prompt.rank}_rooms"] += 1
                self._bound.append((piece.prompt.room, piece.prompt.rank))
            if piece.is_last:
                firsts.append(held.first_sample(placed))
            runs = self._runs_of(held, piece)
            wanted[piece.prompt.rank] += runs
            page_end = runs[-1].first_page + len(runs[-1].page_ids) if runs else 0
            times.append(next_chunk(held.chunks, piece.num_tokens, now_s, page_end))
            self.counters["tokens_computed"] += piece.num_tokens
        flight = InFlight(chunk, times)
        self._inflight.append(flight)
        for each in zip_longest(*wanted, fillvalue=NO_RUN):  # one of every rank
            self._stage(flight, each)
        if firsts:
            flight.sampled = self._engine.sample_first(firsts)
        self.counters["chunks"] += 1
        self._tell_routes()  # the rest of the turn waits for the device

    def _runs_of(self, held: Held, piece: Piece[Prompt]) -> list[Run]:
        """The pages that this piece completes, in runs that fit a compiled gather."""
        wanted = pages_to_ship(piece, self._facts.page_size, held.shipped_pages)
        held.shipped_pages += len(wanted)
        first_page = held.grant.first_page if held.grant is not None else 0
        return self._shipping.runs_of(piece, wanted, held.first_windowed, first_page)

    def _stage(self, flight: InFlight, runs: Sequence[Run]) -> None:
        """Gather a run of each rank. The oldest staged runs leave first if memory is short."""
        num_pages = bucket_for(max(len(run.page_ids) for run in runs), self._buckets.run_pages)
        for older in self._inflight:
            while older.staged and self._staged_pages + num_pages > self._buckets.staged_pages:
                self._ship(older.staged.popleft())
        ticket = self._gathered.gather([run.page_ids for run in runs])
        flight.staged.append(Staged(num_pages, ticket, runs))
        self._staged_pages += num_pages

    def _ship(self, staged: Staged) -> None:
        """Hand pages to the data plane. Rooms that ended meanwhile are passed over."""
        for rank, run in enumerate(staged.runs):
            held, num_pages = self._held.get(run.room), len(run.page_ids)
            if not num_pages or held is None or held.grant is None:
                continue
            self._sending.ship(run.room, rank, run.first_page, num_pages, staged.ticket)
            self.counters["pages_sent"] += num_pages
        self._gathered.drop(staged.ticket)
        self._staged_pages -= staged.num_pages

    def _complete(self, flight: InFlight) -> None:
        """Ship the pages that the chunk completed, and send its first tokens."""
        jax.block_until_ready(flight.chunk.logits)  # the host is a chunk ahead, not more
        computed_s = self.clock.monotonic_s()
        while flight.staged:
            self._ship(flight.staged.popleft())
        shipped_s = self.clock.monotonic_s()
        for times in flight.times:
            times.computed_s, times.shipped_s = computed_s, shipped_s
        self.collect_logprobs(flight.chunk)
        if flight.sampled is not None:
            self.tell_first_tokens(flight.chunk, flight.sampled)

    def first_drawn(self, held: Held, first: FirstToken) -> None:
        """The first token goes to decode behind the last page, of which the host has a copy."""
        held.room.advance(State.SENDING, self.clock.monotonic_s())
        self._sending.finish(held.submit.room, held.prompt.rank, first)
        self._ranks.release(held.prompt)  # however slowly decode takes its pages

    def expire(self) -> None:
        super().expire()
        now = self.clock.monotonic_s()
        for room_id in [r for r, (_, until) in self._early.items() if until < now]:
            del self._early[room_id]
            self._too_early.add(room_id)
            self.counters["grants_expired"] += 1

    # --- routes ---------------------------------------------------------------------------------

    def registry_tasks(self, registry: RegistryClient) -> list[Coroutine[Any, Any, None]]:
        """Publish which rank has which room; with one rank there is nothing to tell."""
        if self.config.dp_size == 1:
            return []
        self._publisher = RoutePublisher(self.worker_id(), self.epoch, registry.connect_routes)
        registry.on_registered = self._publisher.registered
        return [self._publisher.run()]

    def publish(self, batches: dict[str, wire.StepBatch]) -> None:
        """At the end of a turn; the turn's changes of routes leave as well."""
        super().publish(batches)
        self._tell_routes()

    def _tell_routes(self) -> None:
        """Send this turn's changes of routes so far."""
        bound, ended, self._bound, self._ended = self._bound, self._ended, [], []
        if self._publisher is not None and (bound or ended):
            self.on_loop(self._publisher.feed, bound, ended)

    # --- what others may know --------------------------------------------------------------------

    def _refresh_load(self) -> None:
        """Count anew. It walks all prompts: a busy loop does it now and then."""
        self._load_due_s = self.clock.monotonic_s() + LOAD_REFRESH_S
        requests, tokens = self._ranks.queued()
        ranks = self._ranks.ranks
        self._load = wire.Load(
            queued_requests=requests,
            queued_tokens=tokens,
            running_requests=len(self._held) - requests,
            pages_total=sum(rank.pool.num_pages for rank in ranks),
            pages_free=sum(rank.pool.num_to_have for rank in ranks),
            steps=self.progress,
        )
        if len(ranks) > 1:
            self._rank_loads = tuple(map(self._load_of, range(len(ranks))))

    def _load_of(self, at: int) -> wire.Load:
        """The load of one rank. Prompts that wait for any rank are in no rank's load."""
        rank = self._ranks.ranks[at]
        requests, tokens = self._ranks.queued_at(at)
        return wire.Load(
            queued_requests=requests,
            queued_tokens=tokens,
            running_requests=len(rank.scheduler) - rank.scheduler.queued()[0],
            pages_total=rank.pool.num_pages,
            pages_free=rank.pool.num_to_have,
            steps=self.progress,
        )

    def state(self) -> wire.WorkerState:
        self._refresh_load()
        ranks = self._ranks.ranks
        sender = self._sending.sender
        counters = self.counters + Counter(dict(sender.counters))  # another thread counts
        if self._keeping is not None:
            counters["host_pages"] = self._keeping.num_pages
        return self.described_state(
            pages_held=sum(rank.pool.num_pages - rank.pool.num_to_have for rank in ranks),
            pages_cached=sum(len(rank.cache) for rank in ranks),
            counters=counters,
            grants_waiting=sum(held.grant is None for held in self._held.values()),
            transfers=sender.transfers,
            in_flight_bytes=sender.in_flight_bytes,
        )

    def flush(self) -> wire.FlushReply:
        return flush_caches([rank.cache for rank in self._ranks.ranks])

    def close(self) -> None:
        super().close()
        sending = getattr(self, "_sending", None)
        if sending is not None:
            sending.sender.close()
