"""One campaign: aims and injects one fault after another, and sometimes lets the system settle."""

import asyncio
import contextlib
import math
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from serving.config import ServeConfig
from tests.faults.member import Line, Member
from tests.faults.network import Namespaces
from tests.faults.notices import Notices, Strike
from tests.faults.plan import FRAME_PHASES, LONG_HANG_S, Fault, Means, draw_fault
from tests.faults.proxy import Harm, Pair, Trap
from tests.faults.system import START_TIMEOUT_S, System, until
from tests.faults.traffic import CLIENT_TIMEOUT_S, NUM_ASKS, Flight, Traffic

AIM_TIMEOUT_S = 4.0
REST_TIMEOUT_S = 30.0
_LAG_TICK_S = 0.05


class Broken(AssertionError):
    """A promise was broken; the message has everything that helps to see why."""


@dataclass
class Counts:
    """What a worker holds at rest."""

    pages_free: int
    slots_free: int


class Campaign:
    """Faults of one seed on one system, which has been started."""

    def __init__(
        self,
        system: System,
        seed: int,
        means: Means,
        num_clients: int,
        settle_every: int,
        num_asks: int = NUM_ASKS,
    ) -> None:
        self.system = system
        self.seed = seed
        self.findings: list[str] = []
        self.traffic = Traffic(system, seed, self.findings.append, num_clients, num_asks)
        self.notices = Notices(system, self.traffic)
        self.settled_s: list[float] = []
        self._means = means
        self._settle_every = settle_every
        self._start_counts: dict[str, Counts] = {}
        self._later: set[asyncio.Task[None]] = set()
        self._cut_off: set[str] = set()  # workers whose cable is unplugged or lossy
        self._number = 0
        self._lag_s = 0.0  # how late this process woke up recently, at worst
        self._lags: asyncio.Task[None] | None = None

    def hear(self, line: Line) -> None:
        self.notices.hear(line)

    async def run(self, count: int, tell: Callable[[Strike], None] = lambda strike: None) -> None:
        """Inject `count` faults. Raises Broken at the first broken promise."""
        self._lags = asyncio.create_task(self._measure_lag())
        try:
            await self.traffic.start()
            await self._rest()
            for self._number in range(1, count + 1):
                self.traffic.go()
                fault = draw_fault(self.seed, self._number, self._means)
                tell(await self._do(fault))
                await asyncio.sleep(fault.pause_s)
                if self._number % self._settle_every == 0 or self._number == count:
                    await self._rest()
                self._raise_findings()
        except AssertionError as error:
            raise Broken(self._report(str(error))) from error
        finally:
            self._lags.cancel()
            for task in self._later:
                task.cancel()
            await self.traffic.close()

    # --- a fault ----------------------------------------------------------------------------------

    async def _do(self, fault: Fault) -> Strike:
        """Aim the fault, inject it, and schedule the check that it was noticed."""

        def can_aim() -> bool:
            self._raise_findings()
            return self._can_aim(fault)

        await until(can_aim, START_TIMEOUT_S, self.system.describe)
        if fault.phase in FRAME_PHASES and self.system.proxies:
            strike = await self._at_frame(fault)
        else:
            strike = await self._at_request(fault)
        self._soon(self._see_noticed(strike))
        return strike

    def _can_aim(self, fault: Fault) -> bool:
        """Whether what it is to hurt is there; if that is a worker, whether requests come to it.

        Every fourth does not wait for that, and hurts whoever is there.
        """
        target = self._target(fault)
        if target is None or fault.role not in ("prefill", "decode") or fault.number % 4 == 0:
            return target is not None
        served = [
            {self.system.members[worker].role for worker in self.system.open[api.name]}
            for api in self.system.named("api")
            if api.up
        ]
        return target.role == fault.role and {"prefill", "decode"} in served

    async def _at_frame(self, fault: Fault) -> Strike:
        """Inject it at a frame of any request that passes a proxy."""
        strikes: list[Strike] = []

        def spring(pair: Pair) -> Harm:
            strikes.append(self._strike(fault, fault.phase, pair))
            return _harm_of(fault, pair, strikes[0].target)

        trap = Trap(fault.phase, _harm(fault), fault.at, lasts_s=fault.lasts_s, spring=spring)
        for proxy in self.system.proxies.values():
            proxy.trap = trap
        # A fault of a link needs a frame, so it waits longer, until somebody is there to send one.
        until_s = time.monotonic() + (START_TIMEOUT_S if fault.role == "link" else AIM_TIMEOUT_S)
        while not trap.sprung.is_set() and time.monotonic() < until_s:
            self.traffic.launch_long()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(AIM_TIMEOUT_S):
                    await trap.sprung.wait()
        trap.over = True
        return strikes[0] if strikes else self._strike(fault, "missed", None)

    async def _at_request(self, fault: Fault) -> Strike:
        """Inject it at a phase of a request sent for this purpose."""
        flight = self.traffic.launch_long()
        hit = await self._reached(fault, flight) if flight is not None else False
        return self._strike(fault, fault.phase if hit else "missed", self._last_pair())

    async def _reached(self, fault: Fault, flight: Flight) -> bool:
        """Wait for the phase; False if the request was past it."""
        told = flight.told
        first_token_s = sorted(self.traffic.first_token_s)[len(self.traffic.first_token_s) // 2]
        if fault.phase in ("first_token", "mid_decode"):
            frames = 1 if fault.phase == "first_token" else 2 + int(fault.at * 12)
            try:
                async with asyncio.timeout(AIM_TIMEOUT_S):
                    while told.frames < frames and not told.ended_s:
                        told.changed.clear()
                        await told.changed.wait()
            except TimeoutError:
                return False
            return not told.ended_s
        shares = {"queued": (0.0, 0.1), "granted": (0.1, 0.3), "mid_chunk": (0.3, 0.9)}
        low, high = shares.get(fault.phase, (0.3, 1.5))
        await asyncio.sleep((low + (high - low) * fault.at) * first_token_s)
        return not told.frames

    def _strike(self, fault: Fault, hit: str, pair: Pair | None) -> Strike:
        """Inject the fault now."""
        if fault.role == "link":
            assert pair is not None, f"no frame passed for {fault}: {self.system.describe()}"
            sender = pair.sender if fault.kind in ("cut", "stall") else ""
            return self.notices.struck(fault, pair.decode, hit, sender, pair.room)
        target = self._target(fault, pair)
        if target is None:
            raise AssertionError(f"nobody is left for {fault}: {self.system.describe()}")
        strike = self.notices.struck(fault, target.name, hit)
        self._hurt(fault, target)
        return strike

    def _hurt(self, fault: Fault, target: Member) -> None:
        match fault.kind:
            case "kill":
                target.kill()
            case "term":
                target.leader.terminate()
            case "int":
                target.leader.terminate(signal.SIGINT)
            case "hang" | "hang_kill":
                target.freeze()
                self._soon(self._end_hang(fault, target))
            case "part" | "lossy":
                self._soon(self._disconnect(fault, target.name))

    async def _end_hang(self, fault: Fault, target: Member) -> None:
        await asyncio.sleep(fault.lasts_s)
        if fault.kind == "hang":
            target.thaw()
        else:
            target.kill()

    async def _disconnect(self, fault: Fault, worker: str) -> None:
        network = self.system.network
        assert isinstance(network, Namespaces), f"{fault} on one host"
        self._cut_off.add(worker)
        if fault.kind == "part":
            network.unplug(worker)
        else:
            network.loses(worker, 5 + 20 * fault.at, 40 * fault.at)
        try:
            await asyncio.sleep(fault.lasts_s)
        finally:
            self._cut_off.discard(worker)
            if fault.kind == "part":
                network.plug(worker)
            else:
                network.loses(worker, 0, 0)

    def _target(self, fault: Fault, pair: Pair | None = None) -> Member | None:
        """Which process to hurt: one of the pair if known and well, else one of the role, else any.

        Never one that is cut off: the cut ends by itself, and other ends behind it would go unseen.
        """
        members = self.system.members
        well = [m for m in members.values() if m.up and m.name not in self._cut_off]
        if fault.kind in ("part", "lossy"):
            well = [m for m in well if m.role in ("prefill", "decode")]
        if pair is not None and fault.role in ("prefill", "decode"):
            named = members[pair.sender if fault.role == "prefill" else pair.decode]
            if named in well:
                return named
        chosen = [m for m in well if m.role == fault.role] or well
        return chosen[fault.index % len(chosen)] if chosen else None

    def _last_pair(self) -> Pair | None:
        pairs = [p.last_finish for p in self.system.proxies.values() if p.last_finish is not None]
        return max(pairs, key=lambda pair: pair.at_s, default=None)

    async def _see_noticed(self, strike: Strike) -> None:
        """Check, once the time for it has passed, that the fault was noticed."""
        if strike.bound_s == math.inf or strike.hit == "missed":
            return
        await asyncio.sleep(strike.bound_s + 1.0)
        self.findings += self.notices.overdue(strike, self._lag_s)

    def _soon(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._later.add(task)
        task.add_done_callback(self._later.discard)

    # --- rest -------------------------------------------------------------------------------------

    async def _rest(self) -> None:
        """Wait until every request has ended and every process is well, then check what is left."""
        begun_s = time.monotonic()
        self.traffic.hold()
        if self._later:
            await asyncio.wait(self._later)
        await self.system.whole()
        flights = self.traffic.flights
        await until(lambda: not flights, CLIENT_TIMEOUT_S, lambda: f"in flight: {list(flights)}")
        for api in self.system.named("api"):
            await self._nothing_held(api.name)
        await self._counts_are_back()
        self.settled_s.append(time.monotonic() - begun_s)

    async def _nothing_held(self, api: str) -> None:
        left: list[str] = []
        until_s = time.monotonic() + REST_TIMEOUT_S
        while time.monotonic() < until_s:
            left = _left(await self.system.info(api), api, len(self.system.workers()))
            if not left:
                return
            await asyncio.sleep(0.1)
        raise AssertionError(f"{REST_TIMEOUT_S:g} s after the last request: {left}")

    async def _counts_are_back(self) -> None:
        """Each worker has as many free pages and slots as at first, and compiled nothing."""
        api = self.system.named("api")[0].name
        await self.system.flush(api)
        for worker in (await self.system.info(api))["workers"]:
            name, load = worker["worker_id"], worker["load"]
            now = Counts(load["pages_free"], load["slots_free"])
            first = self._start_counts.setdefault(name, now)
            assert now == first, f"{name} has {now}, at first {first}"
            assert worker["compiles_after_ready"] == 0, f"{name} compiled after ready"

    # --- findings ---------------------------------------------------------------------------------

    def _raise_findings(self) -> None:
        found = self.findings + self.system.unexpected + self._given_up_too_soon()
        for proxy in self.system.proxies.values():
            found += [f"proxy of {proxy.decode}: {fault!r}" for fault in proxy.faults]
        assert not found, "\n".join(found)

    def _given_up_too_soon(self) -> list[str]:
        """Requests that were given up although they met fewer faults than they had attempts."""
        wrong = []
        for flight in self.traffic.given_up:
            told = flight.told
            met = [
                strike.fault.number
                for strike in self.notices.strikes
                if told.sent_s - LONG_HANG_S[1] < strike.at_s < told.ended_s
            ]
            if len(met) <= ServeConfig.max_retries:
                wrong.append(f"{flight.request_id} was given up, it met faults {met}: {told}")
        return wrong

    def _report(self, message: str) -> str:
        done = "\n".join(
            f"  {s.fault} -> {s.target}, hit {s.hit}" for s in self.notices.strikes[-6:]
        )
        return (
            f"seed {self.seed}, fault {self._number}: {message}\nfindings: {self.findings}\n"
            f"replay: --seed {self.seed} --faults {self._number}, all else as it was\n"
            f"last faults:\n{done}\n{self.system.logs()}"
        )

    async def _measure_lag(self) -> None:
        """Measure how late this process wakes up, which shows how busy the machine is."""
        while True:
            asked_s = time.monotonic()
            await asyncio.sleep(_LAG_TICK_S)
            late_s = time.monotonic() - asked_s - _LAG_TICK_S
            self._lag_s = max(late_s, self._lag_s * 0.98)


def _harm(fault: Fault) -> Harm:
    """What a proxy does to the frame."""
    if fault.kind in ("flip", "cut", "delay", "stall"):
        return fault.kind
    return "none"


def _harm_of(fault: Fault, pair: Pair, target: str) -> Harm:
    """What happens to the rest of a frame: a dead sender sends no more."""
    if target == pair.sender and fault.role != "link":
        return (
            "cut" if fault.kind in ("kill", "int") else "none" if fault.kind == "term" else "stall"
        )
    return _harm(fault)


def _left(info: dict[str, Any], api: str, num_workers: int) -> list[str]:
    """What an API process and the workers still hold."""
    left = [f"{api}: {name} {info[name]}" for name in ("running", "queued") if info[name]]
    if not info["ready"] or len(info["workers"]) < num_workers:
        left.append(f"{api}: sees {len(info['workers'])} workers")
    for worker in info["workers"]:
        if "error" in worker:
            left.append(f"{worker['worker_id']}: {worker['error']}")
            continue
        left += [
            f"{worker['worker_id']}: {name} {worker[name]}"
            for name in ("rooms", "pages_held")
            if worker[name]
        ]
    return left
