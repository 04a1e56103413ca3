"""Drives generations through the cluster: places them, puts their tokens in order, moves them."""

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from serving.config import ServeConfig
from serving.generation import FinishReason, Generation, GenerationSpec, Sink
from serving.limits import Limiter, Ticket
from serving.membership import Membership
from serving.metrics import Metrics, of_processes
from serving.placement import Placement
from serving.prefix_index import ToldUse, Untold
from serving.router import Router
from serving.steps import Steps
from serving.timeline import ChoiceTimeline, Timelines
from serving.timers import LoopTimers, Timers
from serving.worker_link import Context, WorkerLink
from transfer import wire
from transfer.clock import SYSTEM_CLOCK, Clock
from transfer.errors import Code, RequestError, RpcError
from transfer.rpc import Security

logger = logging.getLogger(__name__)

SHUTTING_DOWN = "the server is shutting down"


class Dispatcher:
    """What the HTTP routes know of the cluster. Everything runs on one event loop.

    A request goes through `admit` (a ticket, or 429) and `submit` (one generation per choice). Then
    its sinks are called, each at last with exactly one of on_end and on_error, and
    `ticket.release()` ends it. When its client leaves: `abort`.
    """

    def __init__(
        self,
        config: ServeConfig,
        security: Security,
        clock: Clock = SYSTEM_CLOCK,
        *,
        timers: Timers | None = None,
    ) -> None:
        self.metrics = Metrics()
        self.config = config
        self._clock = clock
        self._timers = timers or LoopTimers()
        self._limiter = Limiter(
            config.max_inflight_requests,
            config.max_queued_requests,
            config.queue_timeout_s,
            self._timers,
        )
        self.api_id = f"api-{secrets.token_hex(6)}"
        context = Context(self.api_id, security, clock, self._timers, self)
        self._membership = Membership(config, context, self._view_changed)
        self._router = Router(
            config.policy,
            prefill_policy=config.prefill_policy,
            decode_policy=config.decode_policy,
            breaker_failures=config.breaker_failures,
        )
        self.timelines = Timelines(config.timeline_requests, self._router.policies, clock)
        self._placement = Placement(
            config,
            self._membership,
            self._router,
            clock,
            self._timers,
            self,
            self.timelines,
        )
        self._steps = Steps(config, self._placement, self.metrics, clock, self)
        self.interval = self._steps.interval
        self.metrics.watch_health(self._placement.health)
        self._stopped = False
        self._was_ready = False
        self._met = asyncio.Event()  # once all workers that the registry lists were open
        self.metrics.gauge("num_running_reqs", "Generations handed to workers", self.num_running)
        self.metrics.gauge(
            "num_queue_reqs", "Generations waiting to be handed to workers", self.num_queued
        )
        self.metrics.gauge(
            "stream_interval", "Tokens per streamed chunk at present", lambda: self.interval.tokens
        )
        self.metrics.gauge(
            "step_lag_seconds",
            "How long the last step waited to be handled",
            lambda: self._steps.lag_s,
        )

    async def start(self) -> asyncio.Task[None]:
        """Begin to watch the registry; see Membership.start and cluster_ready()."""
        return self._membership.start()

    async def meet(self, timeout_s: float) -> bool:
        """Wait until every worker that the registry lists is open; False if timeout_s passes."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._met.wait()
        except TimeoutError:
            return False
        return True

    async def stop(self) -> None:
        """End every generation with on_error(SHUTTING_DOWN), then every stream."""
        self._stopped = True
        self._met.set()  # `meet` need not wait any more
        for generation in self._placement.all():
            self.fail(generation, _shutting_down())
        await self._membership.stop()

    @property
    def rows_taken(self) -> int:
        """How many runs of tokens workers have sent so far, of any request."""
        return self._steps.rows_taken

    # --- requests ---

    def admit_now(self, n: int = 1) -> Ticket | None:
        """Room for n generations, if there is any without waiting."""
        return None if self._stopped else self._limiter.admit_now(n)

    async def admit(self, n: int = 1) -> Ticket:
        """Room for n generations; waits its turn. Raises RequestError, mostly QUEUE_FULL."""
        if self._stopped:
            raise _shutting_down()
        return await self._limiter.admit(n)

    def submit(
        self, spec: GenerationSpec, sink: Sink, timeline: ChoiceTimeline | None = None
    ) -> Generation:
        """Start a generation. The sink hears nothing before this returns."""
        generation = Generation(spec, sink, timeline)
        delay_s = spec.deadline_s - self._clock.monotonic_s()
        generation.deadline_timer = self._timers.call_later(
            delay_s, lambda: self._deadline(generation)
        )
        self._placement.place(generation)
        if self._stopped:
            self._timers.call_later(0.0, lambda: self.fail(generation, _shutting_down()))
        return generation

    def abort(self, generation: Generation, finish_reason: FinishReason = "abort") -> None:
        """Drop it at both workers, at once. Its sink hears nothing any more.

        finish_reason: for the metrics; "stop" when the stream found a stop string. A generation
        that ended already is left as it is.
        """
        if self._close(generation):
            self._observe_end(generation, finish_reason)

    def find(self, request_id: str) -> list[Generation]:
        """The live generations of that request, one a choice."""
        return [g for g in self._placement.all() if g.spec.request_id == request_id]

    def abort_request(self, request_id: str | None) -> int:
        """Abort for someone other than the stream, which gets on_end("abort").

        None: all requests. Returns how many generations.
        """
        generations = self._placement.all() if request_id is None else self.find(request_id)
        for generation in generations:
            self.end(generation, "abort")
        return len(generations)

    # --- the cluster ---

    def cluster_ready(self) -> bool:
        """Whether workers take work: of decode, and of prefill unless decode needs no prefill."""
        return not self.missing_roles()

    def missing_roles(self) -> list[wire.Role]:
        """The needed roles of which no worker takes work."""
        return self._membership.missing_roles()

    def roles_without_progress(self) -> list[wire.Role]:
        """The needed roles whose workers are all alive by their heartbeats, but all stand still."""
        return self._membership.roles_without_progress()

    def was_ready(self) -> bool:
        """Whether the cluster was ready at any time: from then on requests wait for workers."""
        return self._was_ready

    def context_length(self) -> int:
        """Most tokens, prompt and output, of one request; 0 while neither workers nor flags say."""
        return self._membership.context_length()

    def dp_size(self, role: wire.Role) -> int | None:
        """The most data-parallel ranks of a worker of that role.

        None while no such worker is there, 0 where none is needed.
        """
        return self._membership.dp_size(role)

    def adapters(self) -> tuple[str, ...] | None:
        """The names of the workers' adapters, as last known; None before any worker was seen."""
        return self._membership.adapters

    def members(self) -> tuple[wire.Member, ...]:
        """The cluster as last told by the registry."""
        return self._membership.members

    async def server_info(self) -> dict[str, Any]:
        """What /get_server_info shows; asks every worker, and shows the error if one fails."""
        answers = await self._ask_all(WorkerLink.info)
        workers = [
            {"worker_id": link.worker_id, "error": str(answer)}
            if isinstance(answer, RpcError)
            else msgspec.structs.asdict(answer)
            | {
                "load": msgspec.structs.asdict(answer.load),
                "transfers": [msgspec.structs.asdict(pair) for pair in answer.transfers],
            }
            | self._placement.health_of(link)._asdict()
            for link, answer in answers
        ]
        return {
            "ready": self.cluster_ready(),
            "context_length": self.context_length(),
            "model_digest": self._membership.model_digest,
            "running": self.num_running(),
            "queued": self.num_queued(),
            "policy": self.config.policy,
            "workers": workers,
        }

    async def flush_cache(self) -> tuple[bool, str]:
        """Drop every worker's cached prefixes; whether all did, and what they said."""
        answers = await self._ask_all(WorkerLink.flush)
        flushed = bool(answers)
        messages = []
        for link, answer in answers:
            if isinstance(answer, RpcError):
                flushed = False
                messages.append(f"{link.worker_id}: {answer}")
            else:
                flushed = flushed and answer.flushed
                self._router.flushed(link.key)
                messages.append(f"{link.worker_id}: {answer.message}")
        return flushed, "; ".join(messages) or "no worker is available"

    async def profile(self, start: bool) -> tuple[dict[str, str], dict[str, str]]:
        """Begin a profile in every worker, or end it and wait until it is written.

        Returns folders, and why some workers have none, both by worker id.
        """
        ask = WorkerLink.start_profile if start else WorkerLink.stop_profile
        folders, refusals = {}, {}
        for link, answer in await self._ask_all(ask):
            if isinstance(answer, RpcError):
                refusals[link.worker_id] = str(answer)
            elif answer.refusal:
                refusals[link.worker_id] = answer.refusal
            else:
                folders[link.worker_id] = answer.folder
        return folders, refusals

    def untold_uses(self) -> Untold | None:
        """From now on, what the other processes of this server want to know of caches.

        None if no role's policy looks at them.
        """
        if "cache_aware" in self._router.policies.values():
            self._router.untold = Untold()
        return self._router.untold

    def told_uses(self, uses: Sequence[ToldUse]) -> None:
        """Other processes send prompts to these workers; those that are gone do not matter."""
        for use in uses:
            if self._membership.link((use.worker_id, use.epoch)) is not None:
                self._router.told(use)

    def forget_prefixes(self) -> None:
        """Another process of this server had all caches flushed."""
        for link in self._membership.open_links():
            self._router.flushed(link.key)

    async def drain(self, worker_id: str) -> wire.DrainReply:
        """Tell a worker to leave once what it holds has ended.

        Raises KeyError when there is none of that name, RpcError when it does not answer.
        """
        for link in self._membership.open_links():
            if link.worker_id == worker_id:
                return await link.drain()
        raise KeyError(worker_id)

    def worker_ids(self) -> list[str]:
        """The ids of the workers whose streams are open."""
        return [link.worker_id for link in self._membership.open_links()]

    def num_running(self) -> int:
        """Generations in the workers' hands."""
        return len(self._placement)

    def num_queued(self) -> int:
        """Generations waiting for a place."""
        return self._limiter.queued

    async def metrics_text(self, processes: Mapping[int, bytes] | None = None) -> bytes:
        """Metrics in Prometheus' format; asks the workers for what they count.

        processes: the own text of each API process of this server, by number; None: this is alone.
        """
        # In a thread: it takes milliseconds for each process, and streams wait on the loop.
        own = None if processes is None else await asyncio.to_thread(of_processes, processes)
        answers = await self._ask_all(WorkerLink.info)
        states = [answer for _, answer in answers if not isinstance(answer, RpcError)]
        self.metrics.set_states(states)
        return self.metrics.render(own)

    async def _ask_all[T](
        self, ask: Callable[[WorkerLink], Awaitable[T]]
    ) -> list[tuple[WorkerLink, T | RpcError]]:
        async def one(link: WorkerLink) -> T | RpcError:
            try:
                return await ask(link)
            except RpcError as error:
                return error

        links = self._membership.open_links()
        return list(zip(links, await asyncio.gather(*map(one, links)), strict=True))

    # --- what workers say (LinkOwner) ---

    def on_open(self, link: WorkerLink) -> None:
        self._pair_may_be_there()

    async def on_batch(self, link: WorkerLink, batch: wire.StepBatch) -> None:
        for event in batch.events:
            if event.kind == "prefilled":
                self._steps.prefilled(link, event)
        if batch.rooms:
            await self._steps.take(link, batch)
        for event in batch.events:
            if event.kind != "prefilled":
                self._interrupted(link, event)
        if batch.legs:
            self.timelines.over(link.role, batch.legs)

    def on_sending(self, link: WorkerLink, rooms: Iterable[int]) -> None:
        self.timelines.sent(link.role, rooms)

    def on_answered(self, link: WorkerLink, rooms: Iterable[int]) -> None:
        self.timelines.answered(link.role, rooms)

    def on_stale(self, link: WorkerLink, batch: wire.StepBatch) -> None:
        self.metrics.dropped(1)

    def on_broken(self, link: WorkerLink, message: str) -> None:
        self._placement.worker_lost(link.key, message, link.drained)
        self._membership.broken(link)

    def on_refused(self, link: WorkerLink, refusal: wire.Refusal) -> None:
        code = _code(refusal.code)
        if code is Code.DRAINING:
            link.mark_draining()
        generation = self._placement.at(refusal.room, link.key)
        if generation is not None:
            # If only the answer was lost, the leg has arrived after all, so it is aborted too.
            self._placement.move(generation, code, refusal.message, None, link.worker_id)

    def _view_changed(self) -> None:
        self._router.reported(self._clock.monotonic_s())
        self._router.keep(self._membership.keys())
        self._steps.keep(self._membership.keys())
        self.metrics.set_members(self._membership.members)
        self._pair_may_be_there()

    def _pair_may_be_there(self) -> None:
        self._was_ready = self._was_ready or self.cluster_ready()
        if self._membership.met_all():
            self._met.set()
        self._placement.place_waiting()

    def _interrupted(self, link: WorkerLink, event: wire.RoomEvent) -> None:
        """The room is over at that worker, the generation is not."""
        code = _code(event.code)
        if event.kind == "drained" or code is Code.DRAINING:
            link.mark_draining()
            link.drained = link.drained or event.kind == "drained"
        generation = self._placement.at(event.room, link.key)
        if generation is None:
            return  # its other leg failed first, or the client left
        if event.kind == "preempted":
            self.metrics.preempted()
            self._placement.move_preempted(generation, link.key)
            return
        avoid = link.worker_id
        pair = generation.pair
        if pair is not None and not pair.needs(link.key, generation.decoding) and code.retryable:
            return  # decode has all that this worker sent, but has not reported it yet
        if code in (Code.PEER_LOST, Code.GONE) and pair is not None:
            # The peer is at fault, not the worker that reports.
            peer = pair.prefill if pair.decode_key == link.key else pair.decode
            avoid = peer.info.worker_id
        if code is Code.GONE:
            self._placement.await_word(generation, event.message, link.key, avoid)
            return
        self._placement.move(generation, code, event.message, link.key, avoid)

    # --- ends ---

    def end(self, generation: Generation, reason: FinishReason) -> None:
        """Complete it early and tell its stream."""
        if self._close(generation):
            self._observe_end(generation, reason)
            self._tell(generation, lambda: generation.sink.on_end(reason))

    def fail(self, generation: Generation, error: RequestError) -> None:
        """Give it up and tell its stream."""
        if self._close(generation):
            logger.info("%s failed: %s", generation.spec.request_id, error)
            self._observe_end(generation, "error", (error.code.value, error.message))
            self._tell(generation, lambda: generation.sink.on_error(error))

    def retried(self, reason: str) -> None:
        self.metrics.retried(reason)

    def finish(self, generation: Generation) -> None:
        """Its last token was told just now.

        Decode knows, unless the token was prefill's: then pages that nobody needs may still be on
        their way, so the workers are told.
        """
        if self._close(generation, tell_workers=not generation.decoding):
            reason = generation.finish_reason
            self._observe_end(generation, reason)
            self._tell(generation, lambda: generation.sink.on_end(reason))

    def _tell(self, generation: Generation, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception:  # one stream's fault must not reach the others
            logger.exception("the stream of %s failed at its end", generation.spec.request_id)

    def _close(self, generation: Generation, tell_workers: bool = True) -> bool:
        """End it, unless it has ended; whether it was alive until now."""
        if generation.ended:
            return False
        self._placement.remove(generation, tell_workers=tell_workers)
        _cancel_timers(generation)
        return True

    def _deadline(self, generation: Generation) -> None:
        spec = generation.spec
        waited_s = spec.deadline_s - spec.arrival_s
        where = "being served" if generation.room else "waiting for workers"
        self.fail(
            generation,
            RequestError(Code.DEADLINE, f"not done within {waited_s:.3g} s, still {where}"),
        )

    def stream_failed(self, generation: Generation, error: Exception) -> None:
        logger.error("the stream of %s failed", generation.spec.request_id, exc_info=error)
        self.fail(generation, RequestError(Code.INTERNAL, "its stream failed"))

    def observe_left_queue(self, arrival_s: float) -> None:
        """A generation that waited for its place was given up. arrival_s: monotonic."""
        self.metrics.ended("abort", self._clock.monotonic_s() - arrival_s)

    def _observe_end(
        self, generation: Generation, reason: str, error: tuple[str, str] | None = None
    ) -> None:
        """error: code and message, if it is one."""
        self.timelines.ended(generation.timeline, reason, len(generation.token_ids), error)
        if not generation.spec.is_probe:
            self.metrics.ended(reason, self._clock.monotonic_s() - generation.spec.arrival_s)


def _cancel_timers(generation: Generation) -> None:
    for timer in (generation.deadline_timer, generation.retry_timer):
        if timer is not None:
            timer.cancel()


def _shutting_down() -> RequestError:
    return RequestError(Code.SHUTTING_DOWN, SHUTTING_DOWN)


def _code(text: str) -> Code:
    """A code from the wire; one that only a newer worker knows is an internal error here."""
    try:
        return Code(text)
    except ValueError:
        return Code.INTERNAL
