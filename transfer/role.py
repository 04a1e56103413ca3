"""What both roles have in common: holding rooms, telling first tokens, ending rooms, reporting."""

import asyncio
import dataclasses
from abc import abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from model import processors
from model.calls import Calls
from model.chunks import ChunkInFlight
from model.errors import ProfileError
from model.opening import OpenedModel, on_cpu
from model.pieces import NO_ADAPTER
from model.profiles import Profiler
from model.programs import CompileCounter
from model.sampling import NOTHING_LEFT, SampleOut
from transfer import flags, wire
from transfer.backend import FirstToken
from transfer.chunk_times import micros
from transfer.clock import SYSTEM_CLOCK, Clock
from transfer.emit import FirstRow, StepEmitter, ToldPrompt, first_rows, prefilled
from transfer.errors import Code, RequestError, Unavailable
from transfer.grammars import Grammars, Outcome
from transfer.group import CAUSE_S, Follow, Joined, Leader, NodeState, Told, join, meet_all
from transfer.held import HeldRoom
from transfer.meeting import Meeting
from transfer.opened import PoolFacts
from transfer.pairs import summed
from transfer.ports import host_port
from transfer.room import EndedRooms, Room, Side, State
from transfer.rpc import RpcServer, Security
from transfer.shm import host_identity
from transfer.stops import finish_of
from transfer.worker import Aborted, ApiGone, Drain, Submitted, Worker
from transfer.worker_config import WorkerConfig

API_GONE = "api_gone"  # why a room ended whose API process is gone: nobody is told
# States in which a room has cost nothing yet but its place in a queue.
_NOT_BEGUN = (State.QUEUED, State.GRANTED)


@dataclass(frozen=True)
class GrammarReady:
    """A grammar was compiled, or could not be."""

    room: int
    outcome: Outcome


class RoleWorker[H: HeldRoom, C: WorkerConfig](Worker):
    """Owner of the rooms that one worker holds: the engine thread alone changes them.

    `meet`, `before_weights`, `lead` and `resolved` are parts of the build, when there are no rooms
    yet.
    """

    side: Side

    def __init__(self, config: C, security: Security, clock: Clock = SYSTEM_CLOCK) -> None:
        super().__init__(security, clock, config.host, config.port)
        self.config = config
        self.drain_timeout_s = config.drain_timeout_s
        self.watchdog_timeout_s = config.watchdog_timeout_s
        self.counters: Counter[str] = Counter()
        self._experts_counted: Mapping[str, float] = {}
        self._devices = ""
        self._held: dict[int, H] = {}
        self._over = EndedRooms()  # which a submit that is delivered twice does not open again
        self._load = wire.Load()
        self._rank_loads: tuple[wire.Load, ...] = ()
        self._compiles = CompileCounter()
        self._leader: Leader | None = None
        if config.nnodes > 1:
            self.cause_wait_s = CAUSE_S
            self._leader = Leader(config.nnodes, self._member_lost, self.inbox.post, clock)
            self._meeting = Meeting(
                config.dist_init_addr, config.nnodes, security, self._member_lost
            )
        self._profiler = Profiler(config.profile_dir, config.profile_timeout_s)
        self._grammars: Grammars | None = None
        self._emitter: StepEmitter
        self._facts: PoolFacts
        self._num_pages = 0

    # --- filled in by the role ------------------------------------------------------------------

    @abstractmethod
    def take(self, submit: wire.Submit, room: Room) -> H:
        """Queue a new room."""

    @abstractmethod
    def release(self, held: H) -> None:
        """Give back everything that the room owns. Its state is final."""

    @abstractmethod
    def leg_of(self, held: H, stages: dict[str, int], ending: str) -> wire.LegRecord:
        """The record of the room's leg. Called after `release`."""

    @abstractmethod
    def request_tokens(self, submit: wire.Submit) -> int:
        """Tokens for which this role needs pages, in the worst case."""

    @abstractmethod
    def grammar_ready(self, held: H) -> None:
        """The room's grammar is compiled: continue what waited for it."""

    @abstractmethod
    def first_drawn(self, held: H, first: FirstToken) -> None:
        """A prompt was computed here, and its first token goes out to the client."""

    @abstractmethod
    def handle_own(self, event: Any) -> None:
        """Apply an event that only this role knows."""

    # --- members --------------------------------------------------------------------------------

    def meet(self) -> None:
        """Wait for the other members of this group, if it has any; before the first array.

        Runs on the build thread. Raises what transfer.group.join raises.
        """
        if self._leader is not None:
            assert self._loop is not None
            join(self.config, self.role, self._meeting.all_came, self._loop)

    def before_weights(self, opened: OpenedModel) -> None:
        """Begin to open the tokenizer for grammars, if the registry takes such a worker.

        Called before the work that takes minutes. Raises Incompatible if the registry would refuse
        this worker with such a model. Passes where there is no registry yet.
        """
        assert self._loop is not None
        assert self._registry is not None
        asked = self._registry.check_fit(self.described(opened))
        asyncio.run_coroutine_threadsafe(asked, self._loop).result()
        # Their tokenizer takes tens of MiB, which should be there when memory is planned.
        self._grammars = Grammars(self.config.model_path, opened.model.cfg)

    def register_methods(self, server: RpcServer) -> None:
        server.unary("StartProfile", wire.Empty, self._start_profile)
        server.unary("StopProfile", wire.Empty, self._stop_profile)
        if self._leader is not None:
            server.stream("Follow", Follow, self._leader.feed)
            server.unary("StillThere", Follow, self._leader.still_there)
            server.unary("Told", Told, self._leader.told)

    async def _start_profile(self, _: wire.Empty) -> wire.ProfileReply:
        self.require_ready()
        return await _folder_of(self._profiler.start(self.worker_id()))

    async def _stop_profile(self, _: wire.Empty) -> wire.ProfileReply:
        return await _folder_of(self._profiler.stop())

    def met_all(self, data_address: str = "") -> list[str]:
        """Where each node of this group takes pages, given where this one does.

        Once all are built (build thread). Raises what transfer.group.meet_all raises.
        """
        own = Joined(self.worker_id(), host_port(self.host, self.port), data_address)
        return [joined.data_address for joined in meet_all(own)]

    def lead(self, calls: Calls) -> None:
        """Make the other members of this group repeat every call from here on."""
        if self._leader is not None:
            self._leader.wait_for_all()
            calls.tell = self._leader.tell

    def _member_lost(self, node_rank: int) -> None:
        self.fail_process(Unavailable(f"node {node_rank} of this {self.role} group is lost"))

    async def dismiss(self, is_well: bool) -> None:
        if self._leader is not None:
            self._meeting.let_go()
            await self._leader.dismiss(is_well)
            await self._meeting.close()

    # --- events ---------------------------------------------------------------------------------

    def handle(self, event: Any) -> None:
        match event:
            case Submitted(submits, received_s):
                for submit in submits:
                    self.open_room(submit, received_s)
            case Aborted(rooms):
                for room in rooms:
                    self.drop(room, "aborted")
            case ApiGone(api_id):
                gone = [r for r, held in self._held.items() if held.submit.api_id == api_id]
                for room in gone:
                    self.drop(room, API_GONE)
            case Drain():
                self._hand_on()
            case GrammarReady(room, outcome):
                self._grammar_ready(room, outcome)
            case _:
                self.handle_own(event)

    def open_room(self, submit: wire.Submit, received_s: float) -> None:
        """Hold a new room, unless there are too many."""
        # The data planes of all nodes know a room by its number: it has one life.
        if submit.room in self._held or submit.room in self._over:
            return  # the same submit, delivered twice
        # `capacity_refusal` counts without the submits that are still in the inbox.
        if (full := self._full()) is not None:
            self._tell_failed(submit, Code.QUEUE_FULL, full)
            return
        # Only this host's monotonic clock counts: other hosts' clocks, and clock changes, do not.
        times = self.clock.monotonic_s(), received_s + submit.left_s, received_s - submit.age_s
        room = Room(submit.room, self.side, *times)
        held = self._held[submit.room] = self.take(submit, room)
        held.received_s = received_s
        if held.waits_for_grammar:
            self._begin_grammar(submit)

    def _begin_grammar(self, submit: wire.Submit) -> None:
        room, grammars = submit.room, self._grammars
        assert grammars is not None, "it is ready"
        self.counters["grammars"] += 1
        grammars.begin(
            submit,
            lambda: room in self._held,
            lambda outcome: self.inbox.post(GrammarReady(room, outcome)),
        )

    def _grammar_ready(self, room: int, outcome: Outcome) -> None:
        held = self._held.get(room)
        if isinstance(outcome, RequestError):
            self.fail(room, outcome.code, outcome.message)
        elif held is not None:
            held.constraint = outcome
            self.grammar_ready(held)

    def capacity_refusal(self, submit: wire.Submit) -> wire.Refusal | None:
        rank = self.dictated_rank(submit)
        if not -1 <= rank < self.config.dp_size:
            message = (
                f"data-parallel rank {rank}, {self.worker_id()} has dp size {self.config.dp_size}"
            )
            return wire.Refusal(submit.room, Code.BAD_REQUEST.value, message)
        if submit.adapter and submit.adapter not in self._facts.adapters:
            known = ", ".join(self._facts.adapters) or "none"
            message = f"adapter {submit.adapter!r}; this {self.role} worker has: {known}"
            return wire.Refusal(submit.room, Code.BAD_REQUEST.value, message)
        num_tokens = self.request_tokens(submit)
        limit = self._facts.request_limit(self._num_pages)
        if num_tokens > limit:
            message = f"{num_tokens} tokens, this {self.role} worker takes at most {limit}"
            return wire.Refusal(submit.room, Code.TOO_LONG.value, message)
        if (full := self._full()) is not None:
            return wire.Refusal(submit.room, Code.QUEUE_FULL.value, full)
        return None

    def _full(self) -> str | None:
        """Why no further room can be held; None: one can."""
        num_held, most = len(self._held), self.config.max_queued_requests
        return f"{num_held} requests held, at most {most}" if num_held >= most else None

    def dictated_rank(self, submit: wire.Submit) -> int:
        """The data-parallel rank of this worker that the submit asks for; -1: any."""
        return submit.routed_dp_rank if self.role == "decode" else submit.disagg_prefill_dp_rank

    def adapter_of(self, submit: wire.Submit) -> int:
        """Which of the model's adapters the request has, see model/adapted.py."""
        return self._facts.adapters.index(submit.adapter) if submit.adapter else NO_ADAPTER

    # --- prompts computed here -------------------------------------------------------------------

    def collect_logprobs(self, chunk: ChunkInFlight[ToldPrompt]) -> None:
        """Keep the prompt logprobs that a chunk computed, for the rooms that want them."""
        if chunk.prompt_logprobs is None:
            return
        arrays = [np.asarray(array) for array in chunk.prompt_logprobs]
        for placed in chunk.pieces:
            held = self._held.get(placed.piece.prompt.room)
            if held is not None and held.logprobs is not None:
                held.logprobs.add(placed.piece, placed.token_row, arrays)

    def tell_first_tokens(self, chunk: ChunkInFlight[ToldPrompt], sampled: SampleOut) -> None:
        """Tell the first tokens of prompts that end in the chunk; skip rooms that have ended."""
        out = SampleOut(*map(np.asarray, sampled))
        by_api: dict[str, list[FirstRow]] = {}
        for placed in chunk.pieces:
            prompt, row = placed.piece.prompt, placed.row
            held = self._held.get(prompt.room)
            if not placed.piece.is_last or held is None:
                continue
            submit = held.submit
            token_id, token_idx = int(out.ids[row]), submit.num_generated
            if token_id < 0:
                self.fail_undrawn(submit.room, token_id)
                continue
            finish = finish_of(token_id, token_idx, submit.sampling)
            by_api.setdefault(submit.api_id, []).append(FirstRow(row, submit, finish))
            self.counters["cached_tokens"] += prompt.num_cached
            self._emitter.event(submit.api_id, prefilled(prompt, held.logprobs))
            self.first_drawn(held, FirstToken(token_id, token_idx, prompt.num_tokens, finish))
        for api_id, firsts in by_api.items():
            self._emitter.rows(api_id, first_rows(firsts, out))

    # --- endings --------------------------------------------------------------------------------

    def end(self, room: int) -> None:
        """The room ended well."""
        self._close(room, State.DONE)

    def fail(self, room: int, code: Code, message: str) -> None:
        """End a room early and tell its API process. Unknown rooms are ignored."""
        held = self._held.get(room)
        if held is not None:
            self._tell_failed(held.submit, code, message)
            self.drop(room, code.value)

    def fail_undrawn(self, room: int, why: int) -> None:
        """Fail a room that drew no token; why: the number in its place, see model.sampling."""
        if why == NOTHING_LEFT:
            what = "bad_words, with what else limits the tokens of the answer, leave none to draw"
            self.fail(room, Code.BAD_REQUEST, what)
            return
        message = f"the model's output in {self.worker_id()} is not finite: no token can be drawn"
        self.fail(room, Code.INTERNAL, message)

    def drop(self, room: int, why: str) -> None:
        """End a room early, whatever its state. Unknown rooms are ignored."""
        if room in self._held:
            self.counters[f"rooms_{why}"] += 1
            self._close(room, State.FAILED, why)

    def expire(self) -> None:
        """Fail the rooms whose deadline has passed."""
        now_s = self.clock.monotonic_s()
        for room in [r for r, held in self._held.items() if held.room.deadline_s < now_s]:
            self.fail(room, Code.DEADLINE, f"deadline passed in {self.role}")

    def has_begun(self, held: H) -> bool:
        """Whether the room has cost more than its place in a queue."""
        return held.room.state not in _NOT_BEGUN

    def _hand_on(self) -> None:
        """Fail the rooms that have not begun, which move to another worker; finish the others."""
        self.handing_on = True
        for room in [r for r, held in self._held.items() if not self.has_begun(held)]:
            self.fail(room, Code.DRAINING, f"{self.worker_id()} drains")

    def _close(self, room: int, state: State, ending: str = "") -> None:
        held = self._held.pop(room)
        self._over.add(room)
        held.room.advance(state, self.clock.monotonic_s())
        self.release(held)
        if ending != API_GONE:
            stages = {
                stage.value: micros(entered_s - held.received_s)
                for stage, entered_s in held.room.entered_s.items()
            }
            self._emitter.leg(held.submit.api_id, self.leg_of(held, stages, ending))

    def _tell_failed(self, submit: wire.Submit, code: Code, message: str) -> None:
        event = wire.RoomEvent(submit.room, "failed", code=code.value, message=message)
        self._emitter.event(submit.api_id, event)

    def watched(self) -> Sequence[Callable[[], int]]:
        assert self._grammars is not None, "it is ready"
        return (*super().watched(), self._grammars.progress)

    def close(self) -> None:
        self._compiles.disarm()
        if self._grammars is not None:
            self._grammars.close()

    # --- what other threads and processes see ----------------------------------------------------

    def worker_id(self) -> str:
        return self.config.worker_id or f"{self.role}-{host_port(self.host, self.port)}"

    def load(self) -> wire.Load:
        return self._load

    def rank_loads(self) -> tuple[wire.Load, ...]:
        return self._rank_loads

    def num_held(self) -> int:
        return len(self._held)

    def resolved(self, opened: OpenedModel, num_pages: int, **more: Any) -> None:
        """Take over what is known once the model is open, and log the config that is in force.

        more: fields of the config, by name, that only this role knows.
        """
        kv = opened.kv
        self._experts_counted = opened.experts.counters
        mesh = opened.model.mesh
        self._devices = f"{mesh.size} x {mesh.devices.flat[0].device_kind}"
        known: dict[str, Any] = {
            "worker_id": self.worker_id(),
            "served_model_name": self.config.model_name,
            "dtype": opened.model.dtype.name,
            "kv_cache_dtype": kv.dtype,
            "quantization": opened.model.dims.codes if opened.model.dims.coded else "none",
            "context_length": opened.context_length,
            "page_size": kv.page_size,
            "max_total_tokens": num_pages * kv.page_size,
        }
        if on_cpu():
            known["cpu_threads"] = processors.threads(self.config.own_devices)
        self.config = dataclasses.replace(self.config, **known, **more)
        flags.log_config(self.config)

    def described(
        self, opened: OpenedModel, data_address: str = "", num_pages: int = 0, **more: Any
    ) -> wire.WorkerInfo:
        """How this worker presents itself to the registry. more: fields that only its role has."""
        kv, config = opened.kv, self.config
        return wire.WorkerInfo(
            worker_id=self.worker_id(),
            role=self.role,
            address=host_port(self.host, self.port),
            data_address=data_address,
            model_name=config.model_name,
            model_digest=opened.digest,
            kv_spec=wire.KVSpecMessage(
                num_layers=kv.num_layers,
                num_kv_heads=opened.logical_kv_heads,
                head_dim=kv.head_dim,
                page_size=kv.page_size,
                dtype=kv.dtype,
                planes=kv.planes,
                groups=kv.groups,
            ),
            tp_size=config.tp_size,
            dp_size=config.dp_size,
            context_length=opened.context_length,
            max_request_tokens=PoolFacts.of(opened).request_limit(num_pages),
            stored_kv_heads=kv.num_kv_heads,
            dtype=opened.model.dtype.name,
            adapters=opened.adapters,
            transfer_backend=config.disaggregation_transfer_backend,
            host_identity=host_identity(),
            **more,
        )

    def described_state(
        self,
        pages_held: int,
        pages_cached: int,
        counters: Counter[str],
        grants_waiting: int,
        transfers: tuple[wire.TransferPair, ...] = (),
        in_flight_bytes: int = 0,
    ) -> wire.WorkerState:
        """The answer to Info. counters, transfers, in_flight_bytes: this node's."""
        of_others, states = 0, list[NodeState]()
        if self._leader is not None:
            of_others, states = self._leader.compiles_after_ready, self._leader.states
        totals = {name: float(count) for name, count in counters.items()}
        for state in states:
            for name, count in state.counters.items():
                totals[name] = totals.get(name, 0.0) + count
        return wire.WorkerState(
            worker_id=self.worker_id(),
            role=self.role,
            epoch=self.epoch,
            load=self._load,
            pages_held=pages_held,
            pages_cached=pages_cached,
            rooms=len(self._held),
            compiles_after_ready=self._compiles.after_ready + of_others,
            counters=totals | {name: float(n) for name, n in self._experts_counted.items()},
            config={name: str(value) for name, value in vars(self.config).items()},
            transfers=summed([*transfers, *(pair for at in states for pair in at.transfers)]),
            in_flight_bytes=in_flight_bytes + sum(state.in_flight_bytes for state in states),
            grants_waiting=grants_waiting,
            devices=self._devices,
        )


async def _folder_of(profile: Awaitable[Path]) -> wire.ProfileReply:
    try:
        return wire.ProfileReply(str(await profile))
    except ProfileError as error:
        return wire.ProfileReply("", str(error))
