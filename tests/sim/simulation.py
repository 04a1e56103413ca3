"""The whole system from one seed: real bookkeeping, fake devices, a network that misbehaves.

After each event of each worker, its pages, slots and room states must add up; every token that any
worker draws must be the one an undisturbed request would get; every request ends once; and when
all is over, everything is free again, long before any deadline would have freed it.
"""

from collections import Counter
from collections.abc import Sequence
from random import Random

import msgspec

from decode.held import GrantFailed
from tests.sim.api import Api, Line, Request
from tests.sim.clocks import HostClock
from tests.sim.grammars import WRONG
from tests.sim.network import ADAPTERS, FIRST_ID, SEEDS, VOCAB, breaking, expected_tokens
from tests.sim.plan import Plan, WorkerPlan, draw_plan
from tests.sim.transport import LONGEST_DELAY, Fabric, Net
from tests.sim.workers import SimDecode, SimPrefill, run_now
from transfer import wire
from transfer.clock import ManualClock
from transfer.leaving import LINGER_S
from transfer.room import State
from transfer.worker import Drain, Worker

GRAMMARS = ("", "", "", "", "", "", "", "0", "1", "2", "2", WRONG)
TICK_S = 0.01
PATIENCE_S = 100_000.0  # of requests that are not hasty, so that no deadline helps a stuck one
CLOCK_IS_SET = 0.02  # chance per tick
IS_FLUSHED = 0.02  # chance per tick
BREAKS = 0.1  # chance per request
LINGER_TICKS = round(LINGER_S / TICK_S)
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
        self.workers: dict[str, SimPrefill | SimDecode] = {}  # by id, the living
        self.apis: list[Api] = []
        self.requests: list[Request] = []
        self._plans = {plan.worker_id: plan for plan in (*self.plan.prefills, *self.plan.decodes)}
        self._owners: dict[int, Request] = {}
        self._lines: dict[tuple[Worker, str], Line] = {}
        self._num_lines = 0
        self._linger_until: dict[Worker, int] = {}
        self._prefixes = [self._tokens(self.plan.limit_tokens) for _ in range(2)]

    def run(self) -> Counter[str]:
        """Play to the end. Raises SimulationFailed."""
        try:
            for plan in self._plans.values():
                self._spawn(plan)
            for _ in range(self.plan.num_apis):
                self._start_api()
            while len(self.requests) < self.plan.num_requests:
                self._tick(trouble=True)
            for _ in range(TROUBLE_TICKS):
                self._tick(trouble=True)
            for _ in range(PEACE_TICKS):
                if all(request.end for request in self.requests):
                    break
                self._tick(trouble=False)
            else:
                raise AssertionError(f"stuck: {self._stuck()}")
            self._settle()
        except Exception as error:
            raise SimulationFailed(
                f"seed {self.seed}, tick {self.net.tick}: {error!r}; play it again with "
                f"python -m tests.sim --seed {self.seed}"
            ) from error
        self.stats["ticks"] += self.net.tick
        self.stats.update(f"ended_{request.end}" for request in self.requests)
        self.stats["second_attempts_finished"] += sum(
            request.end == "finished" and request.attempts > 1 for request in self.requests
        )
        return self.stats

    # --- one tick -------------------------------------------------------------------------------

    def _tick(self, trouble: bool) -> None:
        self.time.advance(TICK_S)
        self.net.deliver()
        if len(self.requests) < self.plan.num_requests and self._chance(self.plan.arrival):
            self._arrive()
        for api in self.apis:
            api.tick(self.plan.abort if trouble else 0.0)
        for worker in list(self.workers.values()):
            # Slow workers shake up the order of events as a slow network does.
            if self._chance(0.8):
                self._turn(worker, trouble)
        if trouble:
            self._misbehave()

    def _turn(self, worker: SimPrefill | SimDecode, trouble: bool) -> None:
        for event in worker.inbox.drain(0.0):
            worker.handle(event)
            worker.check(self.stats)
        dies = trouble and self._chance(self.plan.worker_death * self._worth(worker))
        if dies and self._chance(self.plan.death_between):
            self._kill(worker)
            return
        worker.turn()
        worker.progress += 1
        worker.check(self.stats)
        if dies:
            self._kill(worker)
        elif worker.handing_on and not worker.num_held() and self._lingered(worker):
            self._leave(worker)

    def _worth(self, worker: SimPrefill | SimDecode) -> float:
        """Weight of a worker's death: larger if it has rooms in states that are rare."""
        rare = (State.COMPUTING, State.SENDING, State.READY, State.RECEIVING)
        return 4.0 if any(held.room.state in rare for held in worker._held.values()) else 1.0

    def _misbehave(self) -> None:
        plan = self.plan
        if self._clock_rng.random() < CLOCK_IS_SET:
            self.stats["clocks_set"] += 1
            self._clock_rng.choice(list(self._clocks.values())).set_wrong()
        if self.workers and self._other_rng.random() < IS_FLUSHED:
            self._flush(self._other_rng.choice(list(self.workers.values())))
        if self.workers and self._chance(plan.drain):
            self._drain(self.rng.choice(list(self.workers.values())))
        if self._chance(plan.data_break):
            self.fabric.break_one()
        if self._lines and self._chance(plan.control_break):
            lines = [line for line in self._lines.values() if line.open]
            if lines:
                self.stats["control_breaks"] += 1
                self._break_line(self.rng.choice(lines))
        if self.apis and self._chance(plan.api_death):
            api = self.rng.choice(self.apis)
            self.apis.remove(api)
            self.stats["api_deaths"] += 1
            api.die()
            self.net.after(self.rng.randrange(1, 30), self._start_api)

    def _flush(self, worker: SimPrefill | SimDecode) -> None:
        """Nothing stays cached but what rooms hold."""
        reply = worker.flush()
        worker.check(self.stats)
        self.stats["flushes_amid_rooms"] += not reply.flushed
        self.stats["flushes"] += 1

    # --- lives and deaths -----------------------------------------------------------------------

    def _spawn(self, plan: WorkerPlan) -> None:
        worker: SimPrefill | SimDecode
        clock = self._clock_of(plan.worker_id)
        if plan in self.plan.prefills:
            worker = SimPrefill(plan, self.fabric, clock, self._publish)
        else:
            worker = SimDecode(plan, self.fabric, clock, self._publish, self._send_grants)
        self.workers[plan.worker_id] = worker
        for api in self.apis:
            self._open_line(api, worker)

    def _clock_of(self, host: str) -> HostClock:
        if host not in self._clocks:
            self._clocks[host] = HostClock(self.time, self._clock_rng)
        return self._clocks[host]

    def _start_api(self) -> None:
        name = f"api-{self.stats['apis']}"
        api = Api(name, self.net, self._clock_of(name), self._owners)
        self.stats["apis"] += 1
        self.apis.append(api)
        for worker in self.workers.values():
            self._open_line(api, worker)

    def _kill(self, worker: SimPrefill | SimDecode) -> None:
        """The worker loses all its state; another incarnation comes later."""
        for held in worker._held.values():
            self.stats[f"{worker.role}_died_{held.room.state.value}"] += 1
        self.stats[f"{worker.role}_deaths"] += 1
        worker_id = worker.worker_id()
        del self.workers[worker_id]
        if isinstance(worker, SimPrefill):
            worker.sender.close()
        else:
            worker.receiver.close()
        for (owner, _), line in list(self._lines.items()):
            if owner is worker:
                line.break_()
                del self._lines[worker, line.api_id]
        self.net.after(self.rng.randrange(2, 40), lambda: self._spawn(self._plans[worker_id]))

    def _drain(self, worker: SimPrefill | SimDecode) -> None:
        """Tell a worker to leave.

        API processes hear of it from the worker alone, which is the latest that they can.
        """
        if worker.leaving.draining:
            return
        for held in worker._held.values():
            self.stats[f"{worker.role}_drains_{held.room.state.value}"] += 1
        worker.leaving.draining = True
        worker.inbox.post(Drain())
        self._linger_until[worker] = self.net.tick + LINGER_TICKS

    def _lingered(self, worker: Worker) -> bool:
        return self.net.tick >= self._linger_until[worker]

    def _leave(self, worker: SimPrefill | SimDecode) -> None:
        """A drained worker leaves: all it has sent still arrives, and a new life comes later."""
        self.stats[f"{worker.role}_drained"] += 1
        worker.check_drained()
        worker_id = worker.worker_id()
        del self.workers[worker_id]
        for (owner, api_id), line in list(self._lines.items()):
            if owner is worker:
                del self._lines[worker, api_id]
                line.farewell()
        # It waits until all have read its last message: the break then concerns only ended rooms.
        data_plane = worker.sender if isinstance(worker, SimPrefill) else worker.receiver
        self.net.after(LONGEST_DELAY, data_plane.close)
        again = LONGEST_DELAY + self.rng.randrange(2, 40)
        self.net.after(again, lambda: self._spawn(self._plans[worker_id]))

    def _open_line(self, api: Api, worker: SimPrefill | SimDecode) -> None:
        """Called whenever an API process and a worker find each other; each line has a new name."""
        self._num_lines += 1
        line = Line(api, worker, f"{api.name}.{self._num_lines}", self.plan.lost_reply)
        line.duplicate = self.plan.duplicate
        self._lines[worker, line.api_id] = line
        api.lines.append(line)

    def _break_line(self, line: Line) -> None:
        line.break_()
        del self._lines[line.worker, line.api_id]

        def again() -> None:
            if line.api.alive and self.workers.get(line.worker.worker_id()) is line.worker:
                self._open_line(line.api, line.worker)

        self.net.after(self.rng.randrange(5, 60), again)

    # --- what workers send ----------------------------------------------------------------------

    def _publish(self, worker: Worker, batches: dict[str, wire.StepBatch]) -> None:
        for api_id, batch in batches.items():
            line = self._lines.get((worker, api_id))
            if line is not None:
                line.steps(batch)

    def _send_grants(self, decode: Worker, address: str, grants: tuple[wire.Grant, ...]) -> None:
        """A separate call: it may overtake others, and its reply may be lost."""
        host = address.partition(":")[0]

        def arrive() -> None:
            prefill = self.workers.get(host)
            lost = self._chance(self.plan.lost_reply)
            if prefill is not None:
                assert isinstance(prefill, SimPrefill)
                run_now(prefill._granted(wire.GrantBatch(grants)))
            if prefill is None or lost:
                self.net.after(self.net.delay(), failed)

        def failed() -> None:
            self.stats["grants_failed"] += 1
            rooms = tuple(grant.room for grant in grants)
            decode.inbox.post(GrantFailed(rooms, "no answer"))

        self.net.after(self.net.delay(), arrive)

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
            is_dictated=self._chance(self.plan.dictated),
        )
        self.requests.append(request)
        rng.choice(self.apis).take(request)

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

    def _settle(self) -> None:
        """Let everything under way arrive; then nobody may hold anything."""
        for _ in range(SETTLE_TICKS):
            self._tick(trouble=False)
            if self.net.idle and all(self._idle(worker) for worker in self.workers.values()):
                break
        for worker in self.workers.values():
            worker.check_idle()
            self.stats.update({f"{worker.role}_{k}": v for k, v in worker.counters.items()})

    def _idle(self, worker: SimPrefill | SimDecode) -> bool:
        try:
            worker.check_idle()
        except AssertionError:
            return False
        return True

    def _stuck(self) -> dict[int, tuple[int, str]]:
        return {
            request.number: (request.room, api._where(request))
            for api in self.apis
            for request in api.live
        }


def play(seed: int) -> Counter[str]:
    """Play one seed; returns what happened in it. Raises SimulationFailed."""
    return Simulation(seed).run()
