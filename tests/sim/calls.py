"""The control plane of a simulation: calls and streams between processes, without gRPC.

Both ends are the product's own code on one event loop, whose time is the simulation's. Every
message takes a while; those of one direction of a call or stream keep their order, others overtake
each other. A connection may break at any time, a process may freeze, and answers may get lost.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from functools import partial
from random import Random
from typing import Any

import msgspec

from tests.sim.transport import Action, Net, delay
from transfer import wire
from transfer.clock import ManualClock
from transfer.errors import RpcError, Unavailable
from transfer.rpc import Security

LOSABLE = frozenset({"Submit", "Abort", "Grant"})
BACK_OFF_TICKS = 20
KEEPS_UP = 0.5  # chance that a stream's next message leaves before the last one has arrived


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop on the simulation's time. It never waits while the simulation is playing."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__()
        self._clock = clock

    def time(self) -> float:
        return self._clock.monotonic_s()


class Process:
    """One process as the network knows it. Its name differs from those of its earlier lives."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.alive = True
        self.frozen = False
        self.held: list[Action] = []  # what it sends or gets while it is frozen
        self.connections: dict[Connection, None] = {}

    @property
    def security(self) -> Security:
        """Tells whose client or server is made."""
        return Security(token=self.name)

    def thaw(self) -> None:
        self.frozen = False
        held, self.held = self.held, []
        for action in held:
            action()


class ControlPlane:
    """Who listens where, and all connections."""

    def __init__(self, net: Net, seed: int, lost_reply: float, duplicate: float) -> None:
        self.net = net
        self.seed = seed
        self.lost_reply = lost_reply
        self.duplicate = duplicate
        self.processes: dict[str, Process] = {}
        self.servers: dict[str, SimServer] = {}  # by address
        self.errors: list[BaseException] = []  # of handlers, which must raise nothing but RpcError
        self._num_connections = Counter[str]()
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, name: str) -> Process:
        self.processes[name] = Process(name)
        return self.processes[name]

    def end(self, process: Process) -> None:
        """It is no more: the others notice it by their connections, each after a while."""
        process.alive = False
        for server in [s for s in self.servers.values() if s.process is process]:
            server.close()
        for connection in list(process.connections):
            connection.break_()

    def client(self, address: str, security: Security) -> "SimClient":
        return SimClient(self, address, self.processes[security.token])

    def server(self, security: Security, *_: Any, **__: Any) -> "SimServer":
        return SimServer(self, self.processes[security.token])

    def connect(self, client: Process, server: "SimServer") -> "Connection":
        ends = f"{client.name} {server.process.name}"
        self._num_connections[ends] += 1
        return Connection(self, client, server, f"{ends} {self._num_connections[ends]}")

    def connections(self) -> list["Connection"]:
        """All that are open, in an order that only the seed determines."""
        living = [process for process in self.processes.values() if process.alive]
        found = {connection for process in living for connection in process.connections}
        return sorted(found, key=lambda connection: connection.name)

    def run(self, work: Awaitable[None]) -> asyncio.Task[None]:
        """Run it beside everything else; an error that it raises is the simulation's."""
        task = asyncio.ensure_future(self._watched(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _watched(self, work: Awaitable[None]) -> None:
        try:
            await work
        except Exception as error:
            self.errors.append(error)


class SimServer:
    """Stands for transfer.rpc.RpcServer."""

    def __init__(self, plane: ControlPlane, process: Process) -> None:
        self.process = process
        self.methods: dict[str, tuple[type[msgspec.Struct], Callable[[Any], Any]]] = {}
        self._plane = plane
        self._address = ""

    def unary(self, name: str, request: type[msgspec.Struct], handler: Any) -> None:
        self.methods[name] = request, handler

    def stream(self, name: str, request: type[msgspec.Struct], handler: Any) -> None:
        self.methods[name] = request, handler

    def listen(self, address: str) -> None:
        self._address = address
        self._plane.servers[address] = self

    def close(self) -> None:
        """Take no new connections."""
        if self._plane.servers.get(self._address) is self:
            del self._plane.servers[self._address]


class Connection:
    """What a client has open at a server. If it breaks, so does all that goes over it."""

    def __init__(self, plane: ControlPlane, client: Process, server: SimServer, name: str) -> None:
        self.name = name
        self.open = True
        self.plane = plane
        self.client = client
        self.server = server
        self.rng = Random(f"{plane.seed} {name}")
        self._num_paths = 0
        self._waiting: dict[Feed, None] = {}
        self._serving: dict[asyncio.Task[None], None] = {}
        for process in (client, server.process):
            process.connections[self] = None

    def begin(self, method: str, request: msgspec.Struct, feed: "Feed") -> None:
        """Send a request; its answers go into the feed."""
        self._waiting[feed] = None
        there = self._path(self.client, self.server.process)
        back = self._path(self.server.process, self.client)
        data = wire.encode(request)
        there.send(lambda: self._arrived(method, data, feed, back))

    def forget(self, feed: "Feed") -> None:
        """The client waits no more."""
        self._waiting.pop(feed, None)
        if feed.task is not None and not feed.task.done():
            self._path(self.client, self.server.process).send(feed.task.cancel)
        feed.is_over = True

    def break_(self) -> None:
        """Both ends notice, each after a while; nothing more arrives."""
        if not self.open:
            return
        self.open = False
        for process in (self.client, self.server.process):
            process.connections.pop(self, None)
        net = self.plane.net
        net.after(delay(self.rng), self._client_notices, self.name)
        net.after(delay(self.rng), self._server_notices, self.name)

    def _client_notices(self) -> None:
        for feed in self._waiting:
            feed.put(Unavailable(f"{self.name} is broken"))
        self._waiting.clear()

    def _server_notices(self) -> None:
        for task in list(self._serving):
            task.cancel()

    def _path(self, source: Process, target: Process) -> "Path":
        self._num_paths += 1
        return Path(self, source, target, f"{self.name} {self._num_paths}")

    def _arrived(self, method: str, data: bytes, feed: "Feed", back: "Path") -> None:
        if feed.is_over:
            return
        kind, handler = self.server.methods[method]
        request = wire.decode(data, kind)
        answers = handler(request)
        if isinstance(answers, AsyncGenerator):
            work = self._stream(method, answers, feed, back)
        else:
            work = self._answer(method, request, handler, answers, feed, back)
        task = feed.task = self.plane.run(work)
        self._serving[task] = None
        task.add_done_callback(self._serving.pop)

    async def _answer(
        self, method: str, request: Any, handler: Any, answers: Any, feed: "Feed", back: "Path"
    ) -> None:
        stats, plane = self.plane.net.stats, self.plane
        try:
            reply = await answers
            if method == "Submit" and self.rng.random() < plane.duplicate:
                stats["submits_doubled"] += 1
                reply = await handler(request)
        except RpcError as error:
            back.send(partial(feed.put, error))
            return
        if method in LOSABLE and self.rng.random() < plane.lost_reply:
            stats[f"{method.lower()}_replies_lost"] += 1
            reply = Unavailable(f"{method}: no answer")
        back.send(partial(feed.put, reply if isinstance(reply, RpcError) else wire.encode(reply)))

    async def _stream(
        self, method: str, answers: AsyncIterator[Any], feed: "Feed", back: "Path"
    ) -> None:
        try:
            async for answer in answers:
                arrived = back.send(partial(feed.put, wire.encode(answer)))
                if self.rng.random() >= KEEPS_UP:
                    await arrived.wait()
            back.send(partial(feed.put, None))
        except RpcError as error:
            back.send(partial(feed.put, error))
        finally:
            await answers.aclose()  # type: ignore[attr-defined]


class Path:
    """One direction of one call or stream: what is sent on it arrives in order."""

    def __init__(self, connection: Connection, source: Process, target: Process, name: str) -> None:
        self._connection = connection
        self._source = source
        self._target = target
        self._name = name
        self._last = 0

    def send(self, action: Action) -> asyncio.Event:
        """Returns what is set once it has arrived, or is lost."""
        arrived = asyncio.Event()
        self._send(action, arrived)
        return arrived

    def _send(self, action: Action, arrived: asyncio.Event) -> None:
        if self._source.frozen:
            self._source.held.append(lambda: self._send(action, arrived))
            return
        net, rng = self._connection.plane.net, self._connection.rng
        self._last = max(self._last, net.tick + delay(rng))
        net.at(self._last, lambda: self._arrive(action, arrived), self._name)

    def _arrive(self, action: Action, arrived: asyncio.Event) -> None:
        arrived.set()
        if not (self._connection.open and self._target.alive):
            return
        if self._target.frozen:
            self._target.held.append(lambda: self._arrive(action, arrived))
            return
        action()


class Feed:
    """What a client gets for one request."""

    def __init__(self) -> None:
        self.task: asyncio.Task[None] | None = None  # what the server does for it
        self.is_over = False
        self._came: list[bytes | RpcError | None] = []
        self._changed = asyncio.Event()

    def put(self, item: bytes | RpcError | None) -> None:
        """A message, an error, or None at the end."""
        self._came.append(item)
        self._changed.set()

    async def get(self) -> bytes | None:
        """The next message; None at the end. Raises RpcError."""
        while not self._came:
            self._changed.clear()
            await self._changed.wait()
        item = self._came.pop(0)
        if isinstance(item, RpcError):
            raise item
        return item


class SimClient:
    """Stands for transfer.rpc.RpcClient."""

    def __init__(self, plane: ControlPlane, address: str, process: Process) -> None:
        self.address = address
        self._plane = plane
        self._process = process
        self._connection: Connection | None = None
        self._refused_until = 0

    async def call(
        self, name: str, request: Any, reply: type[Any], timeout_s: float, calls: Any = None
    ) -> Any:
        """See RpcClient.call. calls: where it can be ended with others."""
        what = f"{name} at {self.address}"
        feed = Feed()
        connection = self._begin(name, request, feed)
        if calls is not None:
            calls.add(feed)
        try:
            async with asyncio.timeout(timeout_s):
                data = await feed.get()
        except TimeoutError as error:
            raise Unavailable(f"{what}: no answer in time") from error
        finally:
            if connection is not None:
                connection.forget(feed)
            if calls is not None:
                calls.discard(feed)
        assert data is not None
        return wire.decode(data, reply)

    async def stream(self, name: str, request: Any, reply: type[Any]) -> AsyncGenerator[Any, None]:
        """See RpcClient.stream."""
        feed = Feed()
        connection = self._begin(name, request, feed)
        try:
            while (data := await feed.get()) is not None:
                yield wire.decode(data, reply)
        finally:
            if connection is not None:
                connection.forget(feed)

    def in_order(self) -> "SimOrderedCalls":
        return SimOrderedCalls(self)

    @property
    def is_backing_off(self) -> bool:
        return self._plane.net.tick < self._refused_until

    async def renew(self) -> None:
        await self.close()

    async def close(self, _: float | None = None) -> None:
        self._refused_until = 0
        if self._connection is not None:
            self._connection.break_()

    def _begin(self, name: str, request: msgspec.Struct, feed: Feed) -> Connection | None:
        net = self._plane.net
        server = self._plane.servers.get(self.address)
        if not self._process.alive or self.is_backing_off:
            feed.put(Unavailable(f"{self.address} backs off"))
            return None
        if self._connection is None or not self._connection.open:
            if server is None:
                self._refused_until = net.tick + BACK_OFF_TICKS
                refused = Unavailable(f"{self.address} refuses")
                net.after(2, partial(feed.put, refused), f"{self._process.name} {self.address}")
                return None
            self._connection = self._plane.connect(self._process, server)
        self._connection.begin(name, request, feed)
        return self._connection


class SimOrderedCalls:
    """Stands for transfer.rpc.OrderedCalls."""

    def __init__(self, client: SimClient) -> None:
        self._client = client
        self._turn = asyncio.Lock()
        self._under_way: set[Feed] = set()

    async def call(self, name: str, request: Any, reply: type[Any], timeout_s: float) -> Any:
        async with self._turn:
            return await self._client.call(name, request, reply, timeout_s, self._under_way)

    def reset(self) -> None:
        for feed in self._under_way:
            feed.put(Unavailable("the stream of calls ended"))


async def turns(count: int) -> None:
    """Let everything that is ready run, and what that makes ready, `count` times over."""
    for _ in range(count):
        await asyncio.sleep(0)
