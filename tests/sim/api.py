"""An API process: the product's dispatcher, on the simulation's network, with clients."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from serving.config import ServeConfig
from serving.dispatch import Dispatcher
from serving.generation import Generation, GenerationSpec
from serving.prompt import Prompt
from serving.step_rows import unpack_runs
from serving.worker_link import WorkerLink
from tests.sim.calls import ControlPlane
from tests.sim.lives import REGISTRY
from tests.sim.plan import Plan
from tests.sim.requests import Request
from tests.sim.streams import Streamed
from tests.sim.workers import SimDecode, SimPrefill
from transfer import wire
from transfer.clock import Clock
from transfer.errors import Code, RequestError
from transfer.rpc import Security


class _Counting(Dispatcher):
    """Counts what happened to its rooms, and checks every token before it is handed out."""

    def __init__(
        self,
        config: ServeConfig,
        security: Security,
        clock: Clock,
        stats: Counter[str],
        requests: Sequence[Request],
        owners: dict[int, Request],
    ) -> None:
        super().__init__(config, security, clock)
        self._requests = requests
        self._stats = stats
        self._owners = owners  # the request of every room there ever was, of all API processes

    def on_sending(self, link: WorkerLink, rooms: Iterable[int]) -> None:
        rooms = list(rooms)
        for room in rooms:
            generation = self._placement.at(room, link.key)
            assert generation is not None
            if room not in self._owners:
                request = self._requests[int(generation.spec.request_id)]
                self._owners[room] = request
                request.rooms.append(room)
                self._stats["rooms"] += 1
        super().on_sending(link, rooms)

    async def on_batch(self, link: WorkerLink, batch: wire.StepBatch) -> None:
        self._look(link, batch)
        await super().on_batch(link, batch)

    def _look(self, link: WorkerLink, batch: wire.StepBatch) -> None:
        runs = unpack_runs(batch)
        every = np.arange(len(runs))
        columns = (column.tolist() for column in (runs.rooms, runs.first_idx, runs.finish))
        rows = zip(*columns, runs.ids_of(every), runs.detail_of(every), strict=True)
        for room, first, finish, ids, detail in rows:
            request = self._owners[room]
            for place, token_id in enumerate(ids):
                is_last = place == len(ids) - 1
                request.check(first + place, token_id, finish if is_last else wire.RUNNING)
            if detail is not None and request.sampling.num_top_logprobs >= 0:
                assert detail.logprobs == [-token_id / 8 for token_id in ids]
            self._count(self._placement.at(room, link.key), first)
            self._stats["runs_of_several"] += len(ids) > 1
        for event in batch.events:
            if event.kind == "prefilled":
                self._stats["cached_tokens"] += event.cached_tokens
                self._stats["prompt_logprobs"] += event.prompt_logprobs is not None
            elif self._placement.at(event.room, link.key) is not None:
                what = "preempted" if event.kind == "preempted" else f"failed_{event.code}"
                self._stats[what] += 1

    def _count(self, generation: Generation | None, first_idx: int) -> None:
        if generation is None:
            self._stats["strays"] += 1
        elif generation.lent_to is not None:
            self._stats["told_by_columns"] += 1
        else:
            self._stats["tokens_early"] += first_idx > len(generation.token_ids)
            self._stats["tokens_doubled"] += first_idx < len(generation.token_ids)

    def on_refused(self, link: WorkerLink, refusal: wire.Refusal) -> None:
        if self._placement.at(refusal.room, link.key) is not None:
            assert Code(refusal.code).retryable, refusal
            self._stats[f"refused_{refusal.code}"] += 1
        super().on_refused(link, refusal)

    def retried(self, reason: str) -> None:
        self._stats[f"retried_{reason}"] += 1
        super().retried(reason)

    def check_idle(self) -> None:
        """Nothing is left of any request."""
        assert not self._limiter.inflight
        assert not self._limiter.queued
        placement = self._placement
        assert not [*placement._live, *placement._rooms, *placement._waiting]
        for ranks in self._router._charges.values():
            for charge in ranks.values():
                assert (charge.requests, charge.to_compute, charge.to_hold) == (0, 0, 0)


class Api:
    """One life of an API process, and the clients that are connected to it."""

    def __init__(
        self,
        name: str,
        plane: ControlPlane,
        clock: Clock,
        plan: Plan,
        requests: Sequence[Request],
        owners: dict[int, Request],
        workers: Callable[[], Iterable[SimPrefill | SimDecode]],
    ) -> None:
        self.process = plane.begin(name)
        self.live: dict[Request, Generation | None] = {}
        self.streams: dict[Request, Streamed] = {}
        self._plane = plane
        self._clock = clock
        self._workers = workers
        self._stats = plane.net.stats
        config = ServeConfig(
            model_path=Path(),
            registry_address=REGISTRY,
            max_inflight_requests=plan.max_inflight,
            queue_timeout_s=plan.queue_timeout_s,
            max_retries=plan.max_retries,
            policy=plan.policy,
            timeline_requests=0,
        )
        security = self.process.security
        stats = self._stats
        self.dispatcher = _Counting(config, security, clock, stats, requests, owners)
        plane.run(self._start())

    async def _start(self) -> None:
        await (await self.dispatcher.start())

    def take(self, request: Request) -> None:
        """A client sends a request."""
        now_s = self._clock.monotonic_s()
        request.arrival_s, request.now_s = now_s, self._clock.monotonic_s
        request.errors = self._plane.errors
        self.live[request] = None
        self._plane.run(self._serve(request, now_s))

    def abort(self, request: Request) -> None:
        """Its client leaves."""
        self._stats[f"aborts_{self.where(request)}"] += 1
        request.finish("aborted")

    def die(self) -> None:
        """The process is killed."""
        self._plane.end(self.process)
        for request in self.live:
            if not request.end:
                request.finish("api_died")
        # Its tasks and timers are of the simulation's own process, and must end too.
        self._plane.run(self.dispatcher.stop())

    async def _serve(self, request: Request, arrival_s: float) -> None:
        """As serving.answer.Runner does."""
        try:
            ticket = await self.dispatcher.admit()
        except RequestError as error:
            del self.live[request]
            request.on_error(error)
            return
        try:
            if request.end:
                return
            spec = GenerationSpec(
                Prompt(request.prompt_ids),
                request.sampling,
                str(request.number),
                arrival_s,
                request.deadline_s,
                request.salt,
                request.ranks,
                request.adapter,
            )
            streamed = self._stream(request, spec)
            request.may_be_told = False
            generation = self.dispatcher.submit(spec, streamed.sink if streamed else request)
            self.live[request] = request.generation = generation
            request.may_be_told = True
            if streamed is None:
                await request.over.wait()
                self.dispatcher.abort(generation)
            else:
                streamed.sink.generation = generation
                reading = self._plane.run(self._read(request, streamed))
                await request.over.wait()
                reading.cancel()
                self.dispatcher.abort(generation)
                streamed.answer.close()
        finally:
            del self.live[request]
            self.streams.pop(request, None)
            ticket.release()

    def _stream(self, request: Request, spec: GenerationSpec) -> Streamed | None:
        if not request.is_streamed:
            return None
        ask = Streamed.ask(request.number, spec.prompt, spec.sampling)
        streamed = self.streams[request] = Streamed(ask, self.dispatcher)
        return streamed

    async def _read(self, request: Request, streamed: Streamed) -> None:
        code = await streamed.ended()
        if not request.end:
            request.read(*streamed.told(), code)

    def where(self, request: Request) -> str:
        """How far the request has come."""
        generation = self.live.get(request)
        if generation is None or not generation.room:
            return "waiting"
        for worker in self._workers():
            held = worker._held.get(generation.room)
            if held is not None:
                return f"{worker.role}_{held.room.state.value}"
        return "under_way"
