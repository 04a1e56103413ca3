"""Requests in flight, and the judgement of how each of them ended."""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from tests.faults.asks import Answer, Ask, draw_asks
from tests.faults.client import Client, Told
from tests.faults.member import Member
from tests.faults.system import CONTEXT, REQUEST_TIMEOUT_S, System

# Requests have a deadline of their own; a client that hears nothing for this long found a hang.
CLIENT_TIMEOUT_S = REQUEST_TIMEOUT_S + 20.0
NUM_ASKS = 25
GIVEN_UP = "given up after"


@dataclass(eq=False)
class Flight:
    """One request of one client."""

    request_id: str
    ask: Ask
    api: Member
    api_life: int
    told: Told = field(default_factory=Told)
    task: "asyncio.Task[None] | None" = None


class Traffic:
    """Keeps requests in flight until told to hold. Findings go to `complain`."""

    def __init__(
        self,
        system: System,
        seed: int,
        complain: Callable[[str], None],
        num_clients: int,
        num_asks: int = NUM_ASKS,
    ) -> None:
        self.asks = draw_asks(Random(f"asks {seed}"), num_asks, CONTEXT)
        self.expected: dict[int, Answer] = {}
        self.flights: dict[str, Flight] = {}  # by request id, while they run
        self.ends: Counter[str] = Counter()
        self.given_up: list[Flight] = []
        self.first_token_s: list[float] = []  # from the undisturbed requests
        self._system = system
        self._rng = Random(f"traffic {seed}")
        self._complain = complain
        self._num_clients = num_clients
        self._open = asyncio.Event()
        self._clients: list[asyncio.Task[None]] = []
        self._http: dict[str, Client] = {}
        self._numbers = 0
        self._served: set[tuple[str, int]] = set()  # API processes that have answered

    async def start(self) -> None:
        """Learn the right answers, one request at a time, then start the clients."""
        for api in self._system.named("api"):
            self._http[api.name] = Client(self._system.uds(api.name), CLIENT_TIMEOUT_S)
        for ask in self.asks:
            flight = self.launch(ask, self._system.named("api")[0])
            assert flight.task is not None
            await flight.task
            told = flight.told
            assert told.end == "done", f"undisturbed: {told}"
            self.expected[ask.number] = told.answer
            self.first_token_s.append(told.first_s - told.sent_s)
        self.ends.clear()
        self._clients = [asyncio.create_task(self._client()) for _ in range(self._num_clients)]

    async def close(self) -> None:
        for task in [*self._clients, *(f.task for f in self.flights.values() if f.task)]:
            task.cancel()
        await asyncio.gather(*self._clients, return_exceptions=True)
        for client in self._http.values():
            await client.close()

    def go(self) -> None:
        self._open.set()

    def hold(self) -> None:
        """Start no more requests; `flights` has those that still run."""
        self._open.clear()

    def launch(self, ask: Ask, api: Member) -> Flight:
        """Send one request."""
        self._numbers += 1
        flight = Flight(f"f{self._numbers}", ask, api, api.life)
        # Most prompts are computed anew; some find a cached prefix, wherever that is.
        salt = flight.request_id if self._rng.random() < 0.7 else ""
        self.flights[flight.request_id] = flight
        flight.task = asyncio.create_task(self._fly(flight, salt))
        return flight

    def launch_long(self) -> Flight | None:
        """A streamed request of several chunks to aim a fault at; None if no API process is up."""
        ups = [api for api in self._system.named("api") if api.up]
        long = [a for a in self.asks if len(a.prompt) > 2 * CONTEXT // 3 and a.route != "whole"]
        return self.launch(self._rng.choice(long), self._rng.choice(ups)) if ups else None

    async def _client(self) -> None:
        """Send one request after the other."""
        while True:
            await self._open.wait()
            apis = [api for api in self._system.named("api") if api.alive and api.ready]
            if not apis:
                await asyncio.sleep(0.02)  # another process's state
                continue
            flight = self.launch(self._rng.choice(self.asks), self._rng.choice(apis))
            assert flight.task is not None
            await flight.task
            if flight.told.end in ("refused", "broken"):
                await asyncio.sleep(0.1)  # a client's pause before it tries again

    async def _fly(self, flight: Flight, salt: str) -> None:
        client, told = self._http[flight.api.name], flight.told
        try:
            await client.ask(flight.ask, salt, flight.request_id, told)
            self._judge(flight)
        except Exception as error:
            self._complain(f"{flight.request_id}: {type(error).__name__}: {error}; {told}")
        finally:
            del self.flights[flight.request_id]

    # --- judgement --------------------------------------------------------------------------------

    def _judge(self, flight: Flight) -> None:
        if flight.ask.number not in self.expected:
            return
        wrong = self._wrong(flight)
        if wrong:
            self._complain(
                f"{flight.request_id} ({flight.ask.route}, ask {flight.ask.number}, "
                f"{flight.api.name} of life {flight.api_life}): {wrong}; {flight.told}"
            )

    def _wrong(self, flight: Flight) -> str:
        """What is wrong with how the request ended; "" = nothing."""
        told = flight.told
        expected = self.expected[flight.ask.number]
        if told.end == "done":
            self._served.add((flight.api.name, flight.api_life))
            self.ends["done"] += 1
            return "" if told.answer == expected else f"another answer than {expected}"
        if not told.answer.begins(expected):
            return f"its beginning is not that of {expected}"
        if told.end == "refused" and told.status == 503 and told.code == "not_ready":
            self.ends["not_ready"] += 1
            known = (flight.api.name, flight.api_life) in self._served
            return "refused at once by a server that was ready before" if known else ""
        kinds = {t.kind for t in flight.api.hurt(told.sent_s - 0.05, told.ended_s)}
        if told.end in ("failed", "refused"):
            self.ends[told.code] += 1
            if GIVEN_UP in told.message:
                self.given_up.append(flight)
                return ""
            if told.code == "shutting_down":
                return "" if "term" in kinds else "an error of an API process nobody ended"
            return "an error nobody is to blame for"
        if told.end == "broken":
            self.ends["broken"] += 1
            if "kill" in kinds or ("term" in kinds and not told.frames):
                return ""
            return "its connection broke for no reason"
        return f"it ended {told.end}"
