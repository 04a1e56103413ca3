"""Registry, routes and router from one seed, with workers and messages coming in any order.

The registry's own handlers run without sockets; workers report to it as the product's do; the
router sees views late. Whatever is lost, doubled, reordered or restarted meanwhile, no request is
sent to a worker that is not there, no charge is left, and once all is calm, all agree.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from random import Random

import pytest

from serving.router import ACKNOWLEDGED_AFTER_S, Pair, Router, key_of
from tests.transfer.samples import SECURITY, a_worker
from transfer import wire
from transfer.bootstrap import RegistryServer
from transfer.clock import ManualClock
from transfer.errors import Incompatible, Unavailable
from transfer.routes import RouteNews, RouteTable

TICK_S = 0.1
TTL_S = 3.0
SEEDS = range(40)


@dataclass
class Life:
    """One incarnation of a worker, as it talks to the registry."""

    info: wire.WorkerInfo
    epoch: int
    news: RouteNews = field(init=False)
    registered: bool = False
    silent: bool = False  # it runs, but none of its heartbeats arrive

    def __post_init__(self) -> None:
        self.news = RouteNews(self.info.worker_id, self.epoch)

    def beat(self) -> wire.Heartbeat:
        ranks = tuple(wire.Load(slots_total=4) for _ in range(self.info.dp_size))
        return wire.Heartbeat(
            self.info.worker_id, self.epoch, wire.Load(slots_total=4), False, ranks
        )


class World:
    """The cluster of one seed."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self.clock = ManualClock()
        self.lives: dict[str, Life] = {}
        self.router = Router("least_load", seed)
        self.views = [wire.ClusterView(0, ())]
        self.pairs: list[Pair] = []
        self.late: list[Callable[[], Awaitable[object]]] = []  # calls that were delayed or doubled
        self._epochs = 0
        self._rooms = 0
        self.restart_registry()

    def restart_registry(self) -> None:
        self.registry = RegistryServer(SECURITY, self.clock, TTL_S, RouteTable(max_rooms=50))

    # --- workers ---

    def join(self) -> None:
        role: wire.Role = self.rng.choice(("prefill", "decode"))
        name = f"{role}-{self.rng.randrange(3)}"
        self._epochs += 1
        size = self.rng.choice((1, 2, 4))
        self.lives[name] = Life(a_worker(role, name, dp_size=size), self._epochs)

    async def leave(self, name: str, told: bool) -> None:
        life = self.lives.pop(name)
        if told:
            await self._call(lambda: self.registry._deregister(wire.Deregister(name, life.epoch)))

    async def talk(self, life: Life) -> None:
        """A worker's heartbeat, and its news of routes, as far as they get through."""
        if life.silent:
            return
        if not life.registered:
            try:
                await self._call(
                    lambda: self.registry._register(wire.Register(life.info, life.epoch))
                )
            except (Incompatible, Unavailable):  # a later life of it is known
                return
            life.registered = True
            life.news.tell_all()
        known = await self._call(lambda: self.registry._heartbeat(life.beat()))
        if isinstance(known, wire.HeartbeatReply) and not known.known:
            life.registered = False
        if life.info.role == "prefill":
            await self._tell_routes(life)

    async def _tell_routes(self, life: Life) -> None:
        self._rooms += 1
        life.news.add([(self._rooms, self._rooms % life.info.dp_size)], [])
        for room in [room for room in life.news.live if self.rng.random() < 0.3]:
            life.news.add([], [room])
        message = life.news.take()
        if message is None:
            return
        if not await self._call(lambda: self._put(message)):
            life.news.tell_all()

    async def _put(self, message: wire.Routes) -> bool:
        return self.registry._feeds.put(message, wire.encode(message))

    async def _call(self, call: Callable[[], Awaitable[object]]) -> object:
        """Make a call that may get lost, lose its reply, or be repeated later."""
        dice = self.rng.random()
        if dice < 0.1:
            return None
        if dice < 0.2:
            self.late.append(call)
        answer = await call()
        return None if dice > 0.95 else answer

    # --- the router ---

    def route(self) -> None:
        """Pick from a view that may be old; end some earlier picks."""
        view = self.rng.choice(self.views[-3:])
        now_s = self.clock.monotonic_s()
        by_role = {
            role: [m for m in view.members if m.info.role == role] for role in ("prefill", "decode")
        }
        pair = self.router.pick(by_role["prefill"], by_role["decode"], 10, now_s)
        assert (pair is None) == (not all(by_role.values()))
        if pair is not None:
            assert pair.prefill in view.members
            assert pair.decode in view.members
            assert pair.prefill_rank == -1
            size = pair.decode.info.dp_size
            assert pair.decode_rank in (range(size) if size > 1 else (-1,))
            self.pairs.append(pair)
        self.rng.shuffle(self.pairs)
        while self.pairs and self.rng.random() < 0.4:
            self.router.ended(self.pairs.pop())

    # --- time ---

    async def tick(self, calm: bool) -> None:
        self.clock.advance(TICK_S)
        if not calm:
            await self._trouble()
        for life in list(self.lives.values()):
            if calm:
                life.silent = False
            await self.talk(life)
        self.registry.expire()
        self.views.append(self.registry.leases.view())
        self.route()
        self.check()

    async def _trouble(self) -> None:
        dice = self.rng.random()
        if dice < 0.15:
            self.join()
        elif dice < 0.25 and self.lives:
            await self.leave(self.rng.choice(sorted(self.lives)), told=self.rng.random() < 0.5)
        elif dice < 0.28:
            self.restart_registry()
        elif dice < 0.35 and self.lives:
            life = self.lives[self.rng.choice(sorted(self.lives))]
            life.silent = not life.silent
        while self.late and self.rng.random() < 0.5:
            call = self.late.pop(self.rng.randrange(len(self.late)))
            try:
                await call()
            except (Incompatible, Unavailable):
                continue

    def check(self) -> None:
        """What must hold at any time."""
        members = self.registry.leases.view().members
        epochs = {member.info.worker_id: member.epoch for member in members}
        assert len(epochs) == len(members)
        table = self.registry.routes
        assert len(table) <= table.max_rooms
        for routes in table.snapshot():
            assert epochs.get(routes.worker_id) == routes.epoch, "routes of nobody"


@pytest.mark.parametrize("seed", SEEDS)
async def test_whatever_happens_on_the_way_all_agree_when_it_is_calm(seed: int) -> None:
    world = World(seed)
    for _ in range(200):
        await world.tick(calm=False)
    world.late.clear()
    for _ in range(round(2 * TTL_S / TICK_S)):
        await world.tick(calm=True)
    world.rng.random = lambda: 0.5  # type: ignore[method-assign]  # nothing is lost any more
    for _ in range(3):
        await world.tick(calm=True)
    members = world.registry.leases.view().members
    alive = {(life.info.worker_id, life.epoch) for life in world.lives.values()}
    assert {key_of(member) for member in members} == alive
    assert all(len(member.ranks) == member.info.dp_size for member in members)
    live = {
        (name, room): rank
        for name, life in world.lives.items()
        for room, rank in life.news.live.items()
    }
    table = world.registry.routes
    assert len(table) == min(len(live), table.max_rooms)
    if len(live) <= table.max_rooms:
        for (name, room), rank in live.items():
            assert table.get(name, world.lives[name].epoch, room) == rank
    for pair in world.pairs:
        world.router.ended(pair)
    world.router.pick([], [], 1, world.clock.monotonic_s() + ACKNOWLEDGED_AFTER_S)
    for view in world.views:
        assert all(world.router.charged_requests(key_of(member)) == 0 for member in view.members)
