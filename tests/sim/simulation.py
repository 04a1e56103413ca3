"""The whole system from one seed: its own code but for devices, sockets and HTTP, and trouble.

After each event of each worker, its pages, slots and room states must add up; every token that any
worker draws must be the one an undisturbed request would get; every request ends once; and when
all is over, everything is free again, long before any deadline would have freed it.
"""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from random import Random
from unittest.mock import patch

import msgspec

from serving.router import ANY_RANKS, Ranks
from tests.sim.api import Api
from tests.sim.calls import ControlPlane, Process, VirtualLoop, turns
from tests.sim.clocks import HostClock
from tests.sim.grammars import WRONG
from tests.sim.lives import RegistryLife, WorkerLife
from tests.sim.network import ADAPTERS, FIRST_ID, SEEDS, VOCAB, breaking, expected_tokens
from tests.sim.plan import Plan, WorkerPlan, draw_plan
from tests.sim.requests import Request
from tests.sim.transport import Fabric, Net
from tests.sim.workers import SimDecode, SimPrefill
from transfer import wire
from transfer.clock import ManualClock
from transfer.room import State

GRAMMARS = ("", "", "", "", "", "", "", "0", "1", "2", "2", WRONG)
TICK_S = 0.01
PATIENCE_S = 100_000.0  # of requests that are not hasty, so that no deadline helps a stuck one
CLOCK_IS_SET = 0.02  # chance per tick
IS_FLUSHED = 0.02  # chance per tick
BREAKS = 0.1  # chance per request
STREAMED = 0.7  # chance per request that asks for nothing but text
TURNS = 4  # of the event loop, twice in each tick
QUIET_TICKS = 60  # longer than any message takes
TROUBLE_TICKS = 200  # after the last arrival; more trouble later could free what is stuck
PEACE_TICKS = 4_000  # enough for all requests that remain
SETTLE_TICKS = 1_500  # longer than prefill keeps early grants


class SimulationFailed(Exception):
    """Names the seed; the cause says what was wrong."""


class Simulation:
    """One seed, played by `run`."""

    def __init__(self, seed: int, plan: Plan | None = None) -> None:
        self.seed = seed
        self.rng = Random(seed)
        self.plan = plan or draw_plan(self.rng)
        self.stats: Counter[str] = Counter()
        self.net = Net(self.rng, self.stats)
        self.time = ManualClock()
        self._clocks: dict[str, HostClock] = {}  # by host
        self._clock_rng = Random(f"clocks {seed}")
        self._other_rng = Random(f"others {seed}")
        self.fabric = Fabric(self.net, self.plan.corrupt)
        self.plane = ControlPlane(self.net, seed, self.plan.lost_reply, self.plan.duplicate)
        self.lives: dict[str, WorkerLife] = {}  # by id, the living
        self.apis: list[Api] = []
        self.requests: list[Request] = []
        self._registry: RegistryLife | None = None
        self._plans = {plan.worker_id: plan for plan in (*self.plan.prefills, *self.plan.decodes)}
        self._owners: dict[int, Request] = {}
        self._prefixes = [self._tokens(self.plan.limit_tokens) for _ in range(2)]
        self._room_rng = Random(f"rooms {seed}")

    def run(self) -> Counter[str]:
        """Play to the end. Raises SimulationFailed."""
        try:
            with self._stood_in(), asyncio.Runner(loop_factory=self._loop) as runner:
                runner.run(self._play())
        except Exception as error:
            raise SimulationFailed(
                f"seed {self.seed}, tick {self.net.tick}: {error!r}; play it again with "
                f"python -m tests.sim --seed {self.seed}"
            ) from error
        self.stats["ticks"] += self.net.tick
        self.stats.update(f"ended_{request.end}" for request in self.requests)
        self.stats["second_attempts_finished"] += sum(
            request.end == "finished" and len(request.rooms) > 1 for request in self.requests
        )
        return self.stats

    def _loop(self) -> VirtualLoop:
        return VirtualLoop(self.time)

    @contextlib.contextmanager
    def _stood_in(self) -> Iterator[None]:
        """Everything that the product opens to other processes goes over the simulated network."""
        client, server = self.plane.client, self.plane.server
        with contextlib.ExitStack() as stack:
            for module in ("transfer.bootstrap", "serving.worker_link", "decode.grants"):
                stack.enter_context(patch(f"{module}.RpcClient", client))
            for module in ("transfer.bootstrap", "transfer.worker"):
                stack.enter_context(patch(f"{module}.RpcServer", server))
            stack.enter_context(patch("serving.plain_streams.LEAST_STREAMS", 1))
            stack.enter_context(patch("serving.plain_streams.RECENT", 2))
            stack.enter_context(
                patch("serving.placement.secrets.randbits", self._room_rng.getrandbits)
            )
            watch = _ErrorLog(self.plane.errors)
            logging.getLogger().addHandler(watch)
            stack.callback(logging.getLogger().removeHandler, watch)
            yield

    async def _play(self) -> None:
        try:
            self._start_registry()
            for plan in self._plans.values():
                self._spawn(plan)
            for _ in range(self.plan.num_apis):
                self._start_api()
            while len(self.requests) < self.plan.num_requests:
                await self._tick(trouble=True)
            for _ in range(TROUBLE_TICKS):
                await self._tick(trouble=True)
            for life in self.lives.values():
                life.process.thaw()
            for _ in range(PEACE_TICKS):
                if all(request.end for request in self.requests):
                    break
                await self._tick(trouble=False)
            else:
                raise AssertionError(f"stuck: {self._stuck()}")
            await self._settle()
        finally:
            await self._end_all()

    async def _end_all(self) -> None:
        """End all tasks while time still passes."""
        for life in self.lives.values():
            life.kill()
        for api in self.apis:
            api.die()
        if self._registry is not None:
            self._registry.kill()
        for _ in range(QUIET_TICKS):
            self.time.advance(TICK_S)
            self.net.deliver()
            await turns(TURNS)

    # --- one tick -------------------------------------------------------------------------------

    async def _tick(self, trouble: bool) -> None:
        self.time.advance(TICK_S)
        self.net.deliver()
        if len(self.requests) < self.plan.num_requests and self._chance(self.plan.arrival):
            self._arrive()
        if trouble:
            for api in self.apis:
                for request in list(api.live):
                    if not request.end and self._chance(self.plan.abort):
                        api.abort(request)
                self._slow_down(api)
        await turns(TURNS)
        for life in list(self.lives.values()):
            # Slow workers shake up the order of events as a slow network does.
            if self._chance(0.8) and not life.process.frozen:
                self._turn(life, trouble)
        await turns(TURNS)
        if trouble:
            self._misbehave()
        if self.plane.errors:
            raise self.plane.errors[0]

    def _slow_down(self, api: Api) -> None:
        """Now and then a client of a stream does not read for a while."""
        for streamed in api.streams.values():
            if streamed.is_ready and self._other_rng.random() < self.plan.slow:
                self.stats["clients_slow"] += 1
                streamed.stop_reading()
                self.net.after(self._other_rng.randrange(1, 100), streamed.read_on)

    def _turn(self, life: WorkerLife, trouble: bool) -> None:
        worker = life.worker
        for event in worker.inbox.drain(0.0):
            worker.handle(event)
            worker.check(self.stats)
        dies = trouble and self._chance(self.plan.worker_death * self._worth(worker))
        if dies and self._chance(self.plan.death_between):
            self._kill(life)
            return
        worker.turn()
        worker.progress += 1
        worker.check(self.stats)
        if dies:
            self._kill(life)
        elif worker.handing_on and not worker.num_held():
            worker.handing_on = False
            worker.check_drained()
            worker.leaving.emptied()

    def _worth(self, worker: SimPrefill | SimDecode) -> float:
        """Weight of a worker's death: larger if it has rooms in states that are rare."""
        rare = (State.COMPUTING, State.SENDING, State.READY, State.RECEIVING)
        return 4.0 if any(held.room.state in rare for held in worker._held.values()) else 1.0

    def _misbehave(self) -> None:
        plan = self.plan
        if self._clock_rng.random() < CLOCK_IS_SET:
            self.stats["clocks_set"] += 1
            self._clock_rng.choice(list(self._clocks.values())).set_wrong()
        lives = list(self.lives.values())
        if lives and self._other_rng.random() < IS_FLUSHED:
            self._flush(self._other_rng.choice(lives).worker)
        if lives and self._chance(plan.drain):
            self._drain(self.rng.choice(lives).worker)
        if lives and self._other_rng.random() < plan.freeze:
            self._freeze(self._other_rng.choice(lives).process)
        if self._chance(plan.data_break):
            self.fabric.break_one()
        if self._chance(plan.control_break):
            connections = self.plane.connections()
            if connections:
                self.stats["control_breaks"] += 1
                self.rng.choice(connections).break_()
        if self.apis and self._chance(plan.api_death):
            api = self.rng.choice(self.apis)
            self.apis.remove(api)
            self.stats["api_deaths"] += 1
            api.die()
            self.net.after(self.rng.randrange(1, 30), self._start_api)
        if self._registry is not None and self._other_rng.random() < plan.registry_death:
            self.stats["registry_deaths"] += 1
            self._registry.kill()
            self._registry = None
            self.net.after(self._other_rng.randrange(1, 400), self._start_registry)

    def _flush(self, worker: SimPrefill | SimDecode) -> None:
        """Nothing stays cached but what rooms hold."""
        reply = worker.flush()
        worker.check(self.stats)
        self.stats["flushes_amid_rooms"] += not reply.flushed
        self.stats["flushes"] += 1

    # --- lives and deaths -----------------------------------------------------------------------

    def _spawn(self, plan: WorkerPlan) -> None:
        self.stats["lives"] += 1
        clock = self._clock_of(plan.worker_id)
        process = self.plane.begin(f"{plan.worker_id}#{self.stats['lives']}")
        make = SimPrefill if plan in self.plan.prefills else SimDecode
        worker = make(plan, self.fabric, clock, process.security)
        worker.drain_timeout_s = self.plan.drain_timeout_s
        self.lives[plan.worker_id] = WorkerLife(self.plane, process.name, plan, worker, self._left)

    def _clock_of(self, host: str) -> HostClock:
        if host not in self._clocks:
            self._clocks[host] = HostClock(self.time, self._clock_rng)
        return self._clocks[host]

    def _start_registry(self) -> None:
        self.stats["registries"] += 1
        name = f"registry#{self.stats['registries']}"
        self._registry = RegistryLife(self.plane, name, self._clock_of("registry"))

    def _start_api(self) -> None:
        name = f"api#{self.stats['apis']}"
        self.stats["apis"] += 1
        clock = self._clock_of(name)
        told = self.requests, self._owners, self._workers
        self.apis.append(Api(name, self.plane, clock, self.plan, *told))

    def _workers(self) -> list[SimPrefill | SimDecode]:
        return [life.worker for life in self.lives.values()]

    def _kill(self, life: WorkerLife) -> None:
        """The worker loses all its state; another incarnation comes later."""
        worker = life.worker
        for held in worker._held.values():
            self.stats[f"{worker.role}_died_{held.room.state.value}"] += 1
        self.stats[f"{worker.role}_deaths"] += 1
        del self.lives[life.plan.worker_id]
        life.kill()
        self.net.after(self.rng.randrange(2, 40), lambda: self._spawn(life.plan))

    def _drain(self, worker: SimPrefill | SimDecode) -> None:
        """Tell a worker to leave."""
        if worker.leaving.draining:
            return
        for held in worker._held.values():
            self.stats[f"{worker.role}_drains_{held.room.state.value}"] += 1
        worker.drain()

    def _left(self, life: WorkerLife) -> None:
        """A drained worker leaves: all it has sent still arrives, and a new life comes later."""
        role, drained = life.worker.role, life.worker.leaving.drained
        self.stats[f"{role}_drained" if drained else f"{role}_not_drained"] += 1
        del self.lives[life.plan.worker_id]
        again = 300 + self.rng.randrange(2, 40)
        self.net.after(again, lambda: self._spawn(life.plan))

    def _freeze(self, process: Process) -> None:
        """Its engine stands still, and what it says and hears waits; but its timers go on."""
        if not process.frozen:
            self.stats["freezes"] += 1
            process.frozen = True
            self.net.after(self._other_rng.choice((20, 200, 500)), process.thaw)

    # --- requests -------------------------------------------------------------------------------

    def _arrive(self) -> None:
        if not self.apis:
            return
        rng = self.rng
        num_prompt = rng.randint(1, self.plan.longest_prompt)
        most = self.plan.limit_tokens - num_prompt
        shared = rng.choice(self._prefixes)[: rng.randrange(num_prompt + 1)]
        prompt = [*shared, *self._tokens(num_prompt - len(shared))]
        sampling = wire.SamplingParams(
            max_new_tokens=1 if self._chance(0.1) else rng.randrange(1, most + 1),
            seed=rng.randrange(SEEDS),
            stop_token_ids=(FIRST_ID, FIRST_ID + 1) if self._chance(0.5) else (),
            num_top_logprobs=rng.choice((-1, -1, 0, 2)),
            prompt_logprobs_start=rng.randrange(num_prompt) if self._chance(0.1) else -1,
            grammar=GRAMMARS[rng.randrange(len(GRAMMARS))],
        )
        adapter = "" if len(self.requests) % 4 else ADAPTERS[0]
        patience_s = rng.random() * 0.5 if self._chance(self.plan.hasty) else PATIENCE_S
        request = Request(
            number=len(self.requests),
            prompt_ids=prompt,
            sampling=self._perhaps_breaking(prompt, sampling, adapter),
            salt=rng.choice(("", "", "tenant")),
            adapter=adapter,
            patience_s=patience_s,
            ranks=self._dictated() if self._chance(self.plan.dictated) else ANY_RANKS,
            max_retries=self.plan.max_retries,
            queue_timeout_s=self.plan.queue_timeout_s,
            is_streamed=self._other_rng.random() < STREAMED and _shows_text_only(sampling),
        )
        self.requests.append(request)
        rng.choice(self.apis).take(request)

    def _dictated(self) -> Ranks:
        """Ranks that every worker of a role has."""
        self.stats["dictated"] += 1
        plan = self.plan
        least = [min(worker.dp_size for worker in role) for role in (plan.prefills, plan.decodes)]
        return Ranks(*(len(self.requests) % size for size in least))

    def _perhaps_breaking(
        self, prompt: Sequence[int], sampling: wire.SamplingParams, adapter: str
    ) -> wire.SamplingParams:
        """Now and then, logits that are not finite: within an answer, or just behind its end."""
        if self._other_rng.random() >= BREAKS:
            return sampling
        end = len(expected_tokens(prompt, sampling, adapter))
        at = self._other_rng.choice((self._other_rng.randrange(end), end))
        return msgspec.structs.replace(sampling, seed=breaking(sampling.seed, at))

    def _tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(VOCAB) for _ in range(count)]

    def _chance(self, chance: float) -> bool:
        return chance > 0 and self.rng.random() < chance

    # --- the end --------------------------------------------------------------------------------

    async def _settle(self) -> None:
        """Let everything under way arrive; then nobody may hold anything."""
        quiet = 0
        for _ in range(SETTLE_TICKS):
            await self._tick(trouble=False)
            quiet = quiet + 1 if all(map(self._idle, self._workers())) else 0
            if quiet == QUIET_TICKS:
                break
        for worker in self._workers():
            worker.check_idle()
            self.stats.update({f"{worker.role}_{k}": v for k, v in worker.counters.items()})
        for api in self.apis:
            api.dispatcher.check_idle()

    def _idle(self, worker: SimPrefill | SimDecode) -> bool:
        try:
            worker.check_idle()
        except AssertionError:
            return False
        return True

    def _stuck(self) -> dict[int, tuple[int, str]]:
        return {
            request.number: (request.rooms[-1] if request.rooms else 0, api.where(request))
            for api in self.apis
            for request in api.live
        }


def _shows_text_only(sampling: wire.SamplingParams) -> bool:
    return sampling.num_top_logprobs < 0 and sampling.prompt_logprobs_start < 0


class _ErrorLog(logging.Handler):
    """What the product logs as an error, it has caught: here it fails the simulation."""

    def __init__(self, errors: list[BaseException]) -> None:
        super().__init__(logging.ERROR)
        self._errors = errors

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        self._errors.append(error or AssertionError(record.getMessage()))


def play(seed: int) -> Counter[str]:
    """Play one seed; returns what happened in it. Raises SimulationFailed."""
    return Simulation(seed).run()
