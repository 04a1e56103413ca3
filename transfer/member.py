"""A process of a group that does not lead it: makes the calls that the leader tells it."""

import asyncio
import contextlib
import gc
import logging
import queue
import signal
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, Protocol

from model.calls import Calls
from model.programs import CompileCounter
from model.threads import in_daemon_thread
from transfer import wire
from transfer.backend import Arrived, Finished, SenderEvent, SenderLost
from transfer.clock import SYSTEM_CLOCK
from transfer.errors import RpcError, Unavailable
from transfer.group import (
    CAUSE_S,
    SIGN_OF_LIFE_S,
    SILENCE_S,
    Follow,
    Joined,
    NodeCall,
    NodeCalls,
    NodeState,
    Told,
    arrays_of,
    join,
    meet_all,
)
from transfer.meeting import Visit
from transfer.rpc import RpcClient, Security
from transfer.signals import on_signals
from transfer.watchdog import watch
from transfer.worker_config import WorkerConfig

log = logging.getLogger(__name__)

_BEHIND_EACH_S = 0.05  # at most, until the leader is told of a queue that is too long
_INTERRUPTED_S = 2.0  # for the leader, interrupted too, to say when to leave
_IDLE_S = 0.05  # without a call, until the engine thread tidies up
_TELLING_S = 60.0  # for the leader to take an event: if it is gone, its stream says so earlier

# What a node's data plane says, from any thread.
Event = SenderEvent | Arrived | Finished | SenderLost
Tell = Callable[[Event], None]


class Node(Protocol):
    """What a role's node has: what it compiled, and its own end of transfers."""

    @property
    def calls(self) -> Calls: ...
    @property
    def data_address(self) -> str: ...
    def joined(self, worker_id: str, node: int) -> None:
        """All nodes of this worker are built."""
        ...

    def behind(self) -> frozenset[str]:
        """Data addresses for which too much is queued (loop)."""
        ...

    def state(self) -> NodeState: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class _Built:
    node: Node
    leader: str  # address


class Member:
    """One member process."""

    def __init__(
        self,
        config: WorkerConfig,
        role: wire.Role,
        security: Security,
        build: Callable[[Tell], Node],
    ) -> None:
        """build(tell): loads and compiles as the leader does, on its own thread."""
        self._config, self._role, self._security = config, role, security
        self._build_node = build
        self._events: deque[Event] = deque()  # that the leader is still to be told
        self._compiles = CompileCounter()
        self._queue: queue.SimpleQueue[NodeCall] = queue.SimpleQueue()
        self._is_ready = False
        self._warned = False
        self._over: asyncio.Event
        self._happened: asyncio.Event
        self._loop: asyncio.AbstractEventLoop
        self._visit: Visit

    async def run(self, on_ready: Callable[[str], None]) -> None:
        """Follow until the leader leaves. Raises what the build, a call or the leader's end raises.

        SIGTERM is left to the leader, which drains and then says when to leave. After SIGINT the
        leader has _INTERRUPTED_S to say so. A second signal, or one before this process is built,
        ends it at once; once it follows the leader that is an error, since the leader ends too.
        """
        config = self._config
        self._over = asyncio.Event()
        self._happened = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._visit = Visit(config.dist_init_addr, config.node_rank, self._security)
        try:
            with on_signals({signal.SIGINT: self._interrupted, signal.SIGTERM: self._terminated}):
                stopped = asyncio.create_task(self._over.wait())
                parts = await self._parts(stopped)
                if parts is not None:
                    self._is_ready = True
                    self._compiles.arm()
                    try:
                        await self._serve(parts, stopped, on_ready)
                    finally:
                        parts.node.close()
        finally:
            self._compiles.disarm()
            await self._visit.close()

    async def _parts(self, stopped: "asyncio.Task[Any]") -> _Built | None:
        """What was built; None when told to leave. Raises Unavailable when node 0 is gone."""
        built = asyncio.wrap_future(in_daemon_thread(self._build, "build"))
        alone = asyncio.create_task(self._visit.over.wait())
        waiting: set[asyncio.Future[Any]] = {built, stopped, alone}
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        is_built = built.done()
        if is_built and built.exception() is not None:  # perhaps since another node has gone
            told = {stopped, alone}
            await asyncio.wait(told, timeout=CAUSE_S, return_when=asyncio.FIRST_COMPLETED)
            is_built = not alone.done()
        alone.cancel()
        if is_built and not stopped.done():
            return built.result()
        built.cancel()
        if stopped.done():
            return None
        raise Unavailable("node 0 was lost while this node was starting: see node 0's last lines")

    async def _serve(
        self, parts: _Built, stopped: "asyncio.Task[Any]", on_ready: Callable[[str], None]
    ) -> None:
        rank = self._config.node_rank
        making = in_daemon_thread(partial(self._make, parts.node.calls), "engine")
        engine = asyncio.wrap_future(making)
        following = asyncio.create_task(self._follow(parts, on_ready))
        waiting: set[asyncio.Future[Any]] = {following, stopped, engine}
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if engine.done():  # perhaps since another node has gone, of which node 0 tells
            await asyncio.wait({following}, timeout=CAUSE_S)
        if following.done():
            if not engine.cancel():
                why = str(engine.exception()).partition("\n")[0]
                log.info("a call of node %d broke off: %s", rank, why)
            following.result()
            return
        following.cancel()
        await asyncio.wait({following})
        if not engine.cancel():
            log.error("a call of node %d failed", rank, exc_info=engine.exception())
            engine.result()
        raise Unavailable(f"node {rank} leaves before node 0 does")

    def _interrupted(self) -> None:
        asyncio.get_running_loop().call_later(_INTERRUPTED_S, self._over.set)
        self._terminated()

    def _terminated(self) -> None:
        if self._warned or not self._is_ready:
            self._over.set()
            return
        self._warned = True
        log.info("node %d leaves when node 0 does", self._config.node_rank)

    def _build(self) -> _Built:
        join(self._config, self._role, self._visit.all_came, self._loop)
        node = self._build_node(self._tell)
        leader, *_ = meet_all(Joined(data_address=node.data_address))
        node.joined(leader.worker_id, self._config.node_rank)
        return _Built(node, leader.address)

    async def _follow(self, built: _Built, on_ready: Callable[[str], None]) -> None:
        rank = self._config.node_rank
        client = RpcClient(built.leader, self._security)
        told = client.stream("Follow", Follow(rank), NodeCalls)
        async with aclosing(told) as batches:
            is_over = await self._next(built.node.calls, batches)
            on_ready(f"node {rank} of {self._config.nnodes}, led by {built.leader},")
            # Its loop alone: a call that hangs here hangs at the leader, too, which ends the group.
            watching = watch(self._config.watchdog_timeout_s)
            working = (watching, self._live(client, built.node), self._report(client, built.node))
            beside = [asyncio.create_task(work) for work in working]
            try:
                while not is_over:
                    is_over = await self._next(built.node.calls, batches)
            finally:
                for task in beside:
                    task.cancel()
        log.info("node %d leaves with its leader", rank)

    async def _next(self, calls: Calls, batches: AsyncGenerator[NodeCalls, None]) -> bool:
        """Queue the leader's next calls. True: they were the last. Raises Unavailable."""
        try:
            told = await _while_heard(anext(batches))
        except TimeoutError:
            raise Unavailable(f"node 0 said nothing for {SILENCE_S:g} s") from None
        except StopAsyncIteration:
            raise Unavailable("node 0 ended the stream of calls to this node") from None
        for call in told.calls:
            if calls.is_at_once(call.name):
                calls.take(call.name, call.key, *arrays_of(call))
            else:
                self._queue.put(call)
        return told.is_last

    def _tell(self, event: Event) -> None:
        """Have the leader told (any thread)."""
        self._events.append(event)
        with contextlib.suppress(RuntimeError):  # the loop is closed: this process ends
            self._loop.call_soon_threadsafe(self._happened.set)

    async def _report(self, client: RpcClient, node: Node) -> None:
        """Tell the leader what happens.

        A call that fails ends this process: its leader would wait for what it was not told.
        """
        behind: frozenset[str] = frozenset()
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._happened.wait(), _BEHIND_EACH_S)
            self._happened.clear()
            by_kind: dict[type[Event], list[Any]] = {}
            while self._events:
                event = self._events.popleft()
                by_kind.setdefault(type(event), []).append(event)
            before, behind = behind, node.behind()
            if not by_kind and behind == before:
                continue
            told = Told(
                self._config.node_rank,
                sent=tuple(by_kind.get(SenderEvent, ())),
                came=tuple(by_kind.get(Arrived, ())),
                finished=tuple(by_kind.get(Finished, ())),
                lost=tuple(by_kind.get(SenderLost, ())),
                behind=tuple(behind) if behind != before else None,
            )
            try:
                await client.call("Told", told, wire.Empty, _TELLING_S)
            except RpcError as error:
                await asyncio.sleep(CAUSE_S)  # if node 0 is gone, its stream says so by then
                log.error("node 0 was not told what happened here: %s", error)
                self._over.set()
                return

    async def _live(self, client: RpcClient, node: Node) -> None:
        """Send signs of life; errors are ignored, since the stream of calls breaks as well."""
        while True:
            with contextlib.suppress(RpcError):
                compiles = self._compiles.after_ready
                living = Follow(self._config.node_rank, compiles, node.state())
                await client.call("StillThere", living, wire.Empty, SILENCE_S)
            await asyncio.sleep(SIGN_OF_LIFE_S)

    def _make(self, calls: Calls) -> NoReturn:
        """The engine thread. A call that fails ends the process, and with it the group."""
        while True:
            try:
                call = self._queue.get(timeout=_IDLE_S)
            except queue.Empty:
                gc.collect(0)  # jaxlib lets go of received pages: see transfer/worker.py
                continue
            calls.take(call.name, call.key, *arrays_of(call))


async def _while_heard[T](coming: Coroutine[Any, Any, T]) -> T:
    """What comes. Raises TimeoutError after SILENCE_S in which this process itself did run."""
    task, silent_s = asyncio.ensure_future(coming), 0.0
    try:
        while not task.done():
            before_s = SYSTEM_CLOCK.monotonic_s()
            await asyncio.wait({task}, timeout=SIGN_OF_LIFE_S)
            waited_s = SYSTEM_CLOCK.monotonic_s() - before_s
            # Otherwise it stood still, as when all of the host did: what came is heard only now.
            silent_s = silent_s + waited_s if waited_s < 2 * SIGN_OF_LIFE_S else 0.0
            if silent_s > SILENCE_S and not task.done():
                raise TimeoutError
        return task.result()
    finally:
        task.cancel()
        await asyncio.wait({task})  # it may still have to give up what it waits for
