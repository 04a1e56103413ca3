"""The shell of a worker process: control server, reply streams, lease, and the engine thread.

Two threads matter. The *loop* (asyncio, main thread) speaks gRPC. The *engine thread* alone
touches schedulers, pages and the device; everything reaches it through one inbox and leaves it
through `Worker.publish`, one wake-up of the loop for each step. Data-plane threads of the
transfer backend only post to the inbox.

A failure of the engine thread ends the process: its rooms move to another worker. A half-working
worker would be worse than none.
"""

import asyncio
import contextlib
import gc
import logging
import signal
import sys
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from model.threads import in_daemon_thread
from transfer import wire
from transfer.bootstrap import RegistryClient
from transfer.clock import Clock
from transfer.errors import Code, KvferryError, Unavailable
from transfer.leaving import Leaving
from transfer.replies import Replies
from transfer.rpc import RpcServer, Security
from transfer.signals import on_signals
from transfer.submits import malformed
from transfer.watchdog import watch

log = logging.getLogger(__name__)

FAREWELL_S = 2.0  # for readers to take the last messages
HEARTBEAT_S = 0.5  # idle streams carry a sign of life this often


class Inbox:
    """Events for the engine thread, in order of arrival."""

    def __init__(self) -> None:
        self._events: deque[Any] = deque()
        self._ready = threading.Condition()

    def post(self, event: Any) -> None:
        with self._ready:
            self._events.append(event)
            self._ready.notify()

    def drain(self, timeout_s: float) -> list[Any]:
        """All events that have come; waits up to timeout_s for the first."""
        with self._ready:
            if not self._events and timeout_s > 0:
                self._ready.wait(timeout_s)
            events = list(self._events)
            self._events.clear()
        return events


# --- events that every worker understands -------------------------------------------------------


@dataclass(frozen=True)
class Submitted:
    submits: tuple[wire.Submit, ...]
    received_s: float  # monotonic


@dataclass(frozen=True)
class Aborted:
    rooms: tuple[int, ...]


@dataclass(frozen=True)
class ApiGone:
    api_id: str


@dataclass(frozen=True)
class Drain:
    """Hand on the rooms that have not begun; no further submit follows."""


@dataclass(frozen=True)
class Ask:
    """Run a function on the engine thread and hand its result to the loop."""

    function: Callable[[], Any]
    answer: "asyncio.Future[Any]"


class Worker(ABC):
    """Base of the prefill and decode workers; each method below names the thread it runs on."""

    role: wire.Role
    drain_timeout_s = 30.0
    watchdog_timeout_s = 0.0  # see transfer.watchdog
    cause_wait_s = 0.0  # for `fail_process` to say why the build or the engine failed

    def __init__(self, security: Security, clock: Clock, host: str, port: int) -> None:
        self.security = security
        self.clock = clock
        self.host = host
        self.port = port
        self.epoch = int(clock.now_s() * 1000)
        self.inbox = Inbox()
        self.progress = 0  # grows with every turn of the engine loop
        self._streams: dict[str, Replies] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self.leaving = Leaving()
        self.handing_on = False  # Drain was handled (engine thread)
        self._registry: RegistryClient | None = None
        self._stopping = threading.Event()
        self._told_to_end = False  # by a SIGTERM
        self._ready = False
        self._engine_error: BaseException | None = None
        self._has_cause = threading.Event()  # `fail_process` was called

    # --- filled in by the role ------------------------------------------------------------------

    @abstractmethod
    def build(self) -> wire.WorkerInfo:
        """Load, compile, open the data plane (a thread of its own, before ready)."""

    @abstractmethod
    def handle(self, event: Any) -> None:
        """Apply one event (engine thread)."""

    @abstractmethod
    def turn(self) -> bool:
        """Do one step's work (engine thread). True: there is more to do right away."""

    @abstractmethod
    def load(self) -> wire.Load:
        """This worker's load (loop thread; reads plain counters only)."""

    def rank_loads(self) -> tuple[wire.Load, ...]:
        """Each data-parallel rank's part of `load`, () when there is one (loop thread)."""
        return ()

    @abstractmethod
    def num_held(self) -> int:
        """Rooms held (any thread)."""

    @abstractmethod
    def state(self) -> wire.WorkerState:
        """The answer to Info (engine thread)."""

    @abstractmethod
    def flush(self) -> wire.FlushReply:
        """Drop cached prefixes (engine thread)."""

    @abstractmethod
    def close(self) -> None:
        """Close the data plane (loop thread, after the engine has stopped)."""

    def watched(self) -> Sequence[Callable[[], int]]:
        """Numbers that change while this process is well (loop thread, from ready on)."""
        return (lambda: self.progress,)

    def registry_tasks(self, registry: RegistryClient) -> list[Coroutine[Any, Any, None]]:
        """Tasks with the registry other than the lease (loop thread, before the engine starts)."""
        return []

    def register_methods(self, server: RpcServer) -> None:  # noqa: B027  (not every role has some)
        """Add the role's own methods (before start)."""

    async def dismiss(self, is_well: bool) -> None:  # noqa: B027  (few have members)
        """Make the other members of the group, if any, leave (loop thread).

        is_well: this process leaves because it was told to; otherwise because of an error.
        """

    # --- running -----------------------------------------------------------------------------

    async def run(self, registry_address: str, on_ready: Callable[[str], None]) -> None:
        """Serve until told to leave. Raises what the build or the engine raised.

        SIGTERM drains. SIGINT, a second SIGTERM, or a SIGTERM before it is ready ends at once.
        """
        self._loop = asyncio.get_running_loop()
        told = {signal.SIGINT: self.leaving.over.set, signal.SIGTERM: self._terminated}
        with on_signals(told):
            await self._run(registry_address, on_ready)
        if self._engine_error is not None:
            raise self._engine_error

    def drain(self) -> wire.DrainReply:
        """Begin to leave (loop thread): tell the registry, take nothing new, finish begun rooms."""
        began = not self.leaving.draining
        if began:
            self.leaving.drain(self.drain_timeout_s, self.num_held)
            self.inbox.post(Drain())
            if self._registry is not None:
                self._registry.hurry()
        return wire.DrainReply(self.num_held(), self.drain_timeout_s, began)

    def fail_process(self, error: BaseException) -> None:
        """End this process; its rooms move to other workers (loop thread).

        error: the cause; it replaces an error that the engine raised because of it.
        """
        self._engine_error = error
        self._has_cause.set()
        self.leaving.over.set()

    def publish(self, batches: dict[str, wire.StepBatch]) -> None:
        """Send each API process its batch, with one wake-up of the loop (engine thread)."""
        if batches and self._loop is not None:
            self.on_loop(self._deliver, batches)

    def on_loop(self, function: Callable[..., Any], *args: Any) -> None:
        """Run something on the loop (any thread); do nothing once the loop is closed.

        The engine thread ends by itself, perhaps after the rest of the process has shut down.
        """
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            if not self._loop.is_closed():
                raise

    # --- loop thread -------------------------------------------------------------------------

    async def _run(self, registry_address: str, on_ready: Callable[[str], None]) -> None:
        stop = self.leaving.over
        server = self._make_server()
        self.port = await server.start(self.host, self.port)
        stopped = asyncio.create_task(stop.wait())
        registry = RegistryClient(registry_address, self.security, self.clock)
        self._registry = registry
        tasks: list[asyncio.Task[Any]] = []
        try:
            built = asyncio.wrap_future(in_daemon_thread(self.build, "build"))
            waiting: set[asyncio.Future[Any]] = {built, stopped}
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if built.done() and built.exception() is not None:  # perhaps since a node is lost
                await asyncio.wait({stopped}, timeout=self.cause_wait_s)
            if stopped.done():
                built.cancel()
                return
            info = built.result()
            engine = threading.Thread(
                target=self._engine_main, args=(stop,), name="engine", daemon=True
            )
            self._ready = True
            tasks = [asyncio.create_task(_logged(task)) for task in self.registry_tasks(registry)]
            engine.start()
            lease = asyncio.create_task(
                registry.run_worker(
                    info,
                    self.epoch,
                    lambda: (self.load(), self.leaving.draining),
                    HEARTBEAT_S,
                    self.rank_loads,
                )
            )
            watching = watch(self.watchdog_timeout_s, *self.watched())
            announcing = self._announce(registry, info, on_ready)
            needed = [lease, *map(asyncio.create_task, (watching, announcing))]
            tasks += needed
            running: set[asyncio.Task[Any]] = {stopped, *needed}
            while stopped in running:
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()  # raises why it failed
        finally:
            self._ready = False
            self._stopping.set()
            for task in tasks:
                task.cancel()
            # First, since a registry that hangs must not keep rooms from moving.
            self._end_streams()
            await self.dismiss(self._engine_error is None and sys.exception() is None)
            with contextlib.suppress(KvferryError):
                await registry.deregister()
            await server.stop(FAREWELL_S if self.leaving.drained else 0.2)
            self.close()

    def _terminated(self) -> None:
        """A SIGTERM. The first one to a worker that drains already, as it was asked, is no news."""
        if not self._ready or self._told_to_end:
            self.leaving.over.set()
        self._told_to_end = True
        if not (self.leaving.over.is_set() or self.leaving.draining):
            self.drain()

    def _end_streams(self) -> None:
        """End the reply streams; when drained, a last message says that nothing was lost here."""
        if self.leaving.drained:
            farewell = wire.StepBatch(
                self.worker_id(),
                self.epoch,
                0,
                self.clock.monotonic_s(),
                events=(wire.RoomEvent(0, "drained"),),
            )
            self._deliver(dict.fromkeys(self._streams, farewell))
        for replies in self._streams.values():
            if self.leaving.drained:
                replies.finish()
            else:
                replies.end()

    async def _announce(
        self, registry: RegistryClient, info: wire.WorkerInfo, on_ready: Callable[[str], None]
    ) -> None:
        await registry.registered.wait()
        on_ready(info.worker_id)

    def _make_server(self) -> RpcServer:
        server = RpcServer(self.security)
        server.unary("Submit", wire.SubmitBatch, self._submit)
        server.unary("Abort", wire.AbortBatch, self._abort)
        server.unary("Info", wire.Empty, lambda _: self._ask(self.state))
        server.unary("Flush", wire.Empty, lambda _: self._ask(self.flush))
        server.unary("Drain", wire.Empty, self._drain)
        server.stream("Subscribe", wire.Subscribe, self._subscribe)
        self.register_methods(server)
        return server

    async def _submit(self, batch: wire.SubmitBatch) -> wire.SubmitReply:
        self.require_ready()
        refused = []
        accepted = []
        for submit in batch.submits:
            why = self.refusal(submit)
            if why is None:
                accepted.append(submit)
            else:
                refused.append(why)
        if accepted:
            self.inbox.post(Submitted(tuple(accepted), self.clock.monotonic_s()))
        return wire.SubmitReply(tuple(refused))

    def refusal(self, submit: wire.Submit) -> wire.Refusal | None:
        """Why this submit cannot be taken, decided without the engine; None = it can."""
        mine = submit.prefill if self.role == "prefill" else submit.decode
        if mine.epoch != self.epoch:
            return _refuse(submit, Code.STALE, f"epoch {mine.epoch}, this worker has {self.epoch}")
        if submit.api_id not in self._streams:
            return _refuse(submit, Code.STALE, f"{submit.api_id} has no reply stream here")
        if self.leaving.draining:
            return _refuse(submit, Code.DRAINING, f"{self.worker_id()} is draining")
        if wrong := malformed(submit):
            return _refuse(submit, Code.BAD_REQUEST, wrong)
        return self.capacity_refusal(submit)

    @abstractmethod
    def capacity_refusal(self, submit: wire.Submit) -> wire.Refusal | None:
        """The role's part of `refusal`."""

    async def _abort(self, batch: wire.AbortBatch) -> wire.Empty:
        self.inbox.post(Aborted(batch.rooms))
        return wire.Empty()

    async def _drain(self, _: wire.Empty) -> wire.DrainReply:
        self.require_ready()
        return self.drain()

    async def _ask(self, function: Callable[[], Any]) -> Any:
        self.require_ready()
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.inbox.post(Ask(function, answer))
        try:
            return await asyncio.wait_for(answer, 5.0)
        except TimeoutError as error:
            raise Unavailable(f"the engine of this {self.role} worker does not answer") from error

    def require_ready(self) -> None:
        if not self._ready:
            raise Unavailable(f"{self.role} worker is not ready")

    async def _subscribe(self, request: wire.Subscribe) -> AsyncIterator[wire.StepBatch]:
        self.require_ready()
        replies = Replies()
        older = self._streams.get(request.api_id)
        if older is not None:
            older.end()
        self._streams[request.api_id] = replies
        try:
            yield self._sign_of_life()
            while True:
                try:
                    batch = await replies.take(HEARTBEAT_S)
                except TimeoutError:
                    batch = self._sign_of_life()
                if batch is None:
                    return
                yield batch
        finally:
            if self._streams.get(request.api_id) is replies:
                del self._streams[request.api_id]
                self.inbox.post(ApiGone(request.api_id))

    def _sign_of_life(self) -> wire.StepBatch:
        worker_id = self.worker_id()
        # It carries the engine's progress, so that a stuck engine shows although the loop runs.
        return wire.StepBatch(worker_id, self.epoch, self.progress, self.clock.monotonic_s())

    @abstractmethod
    def worker_id(self) -> str:
        """Known once the control port is bound."""

    def _deliver(self, batches: dict[str, wire.StepBatch]) -> None:
        for api_id, batch in batches.items():
            replies = self._streams.get(api_id)
            if replies is not None and not replies.offer(batch):
                log.warning("%s does not read its steps: connection dropped", api_id)
                del self._streams[api_id]
                replies.end()
                self.inbox.post(ApiGone(api_id))

    # --- engine thread ------------------------------------------------------------------------

    def _engine_main(self, stop: asyncio.Event) -> None:
        try:
            busy = False
            while not self._stopping.is_set():
                self._take_events(0.0 if busy else 0.05)
                busy = self.turn()
                self.progress += 1
                if not busy:
                    # Only at its next call or at a garbage collection does jaxlib release host
                    # arrays that devices have copied. An idle engine has neither, and the memory
                    # of received pages would stay taken while their sender may wait for it.
                    gc.collect(0)
                if self.handing_on and not self.num_held():
                    self.handing_on = False
                    left = self.state()
                    log.info("drained: %d rooms, %d pages held", left.rooms, left.pages_held)
                    self.on_loop(self.leaving.emptied)
        except BaseException as error:
            if self._stopping.is_set() or self._has_cause.wait(self.cause_wait_s):
                # Amid a call another node of the group was lost, or all were told to end.
                log.info("the engine ended amid a call: %s", str(error).partition("\n")[0])
            else:
                log.exception("the engine of this %s worker failed", self.role)
                self._engine_error = error
        finally:
            self.on_loop(stop.set)

    def _take_events(self, timeout_s: float) -> None:
        """Handle the events; keep none, since the memory of their pages is needed elsewhere."""
        for event in self.inbox.drain(timeout_s):
            if isinstance(event, Ask):
                self.on_loop(_answer, event.answer, event.function())
            else:
                self.handle(event)


async def _logged(task: Coroutine[Any, Any, None]) -> None:
    """Run a task that the worker can do without; log why it ended."""
    try:
        await task
    except Exception:
        log.exception("routes are not exchanged with the registry any more")


def _answer(future: "asyncio.Future[Any]", result: Any) -> None:
    if not future.done():
        future.set_result(result)


def _refuse(submit: wire.Submit, code: Code, message: str) -> wire.Refusal:
    return wire.Refusal(submit.room, code.value, message)
