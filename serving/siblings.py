"""Lets the HTTP processes of one server ask each other, so that any of them can answer for all.

Each has a control server on a Unix socket in the server's private folder. A process that does not
answer in time (it died, hangs, or is restarting) is left out, and counted.
"""

import asyncio
import logging
import os

import msgspec

from serving.front import Front
from serving.prefix_index import ToldUse, Untold
from serving.seat import Seat
from serving.timeline_answer import spell
from transfer import wire
from transfer.complaint import Complaints
from transfer.errors import RpcError
from transfer.rpc import RpcClient, RpcServer, Security

log = logging.getLogger(__name__)

TIMEOUT_S = 2.0
_TELL_EACH_S = 0.1


class Picked(wire.Message, frozen=True):
    """Prompts that one process sent to workers lately."""

    uses: tuple[ToldUse, ...]


class Siblings:
    """The other processes of this server, if there are any. Answers always include this one's."""

    def __init__(
        self, front: Front, seat: Seat | None = None, security: Security | None = None
    ) -> None:
        """seat, security: None in a process that serves alone."""
        self._front = front
        self._seat = seat
        self._security = security
        self._clients: list[RpcClient] = []
        self._complaints = Complaints(log, "another API process of this server is left out")
        self._server: RpcServer | None = None
        self._telling: asyncio.Task[None] | None = None

    @property
    def process(self) -> int:
        """This process's number."""
        return self._seat.process if self._seat is not None else 0

    async def start(self) -> None:
        """Answer the others, and be able to ask them. Raises ConfigError."""
        seat = self._seat
        if seat is None:
            return
        assert self._security is not None, "a seat comes with the cluster's token"
        # The folder is private, so TLS is not needed; its host names would not fit a path anyway.
        security = Security(self._security.token)
        server = RpcServer(security)
        server.unary("State", wire.Empty, self._state)
        server.unary("Metrics", wire.Empty, self._metrics)
        server.unary("AbortRequest", wire.AbortRequest, self._abort)
        server.unary("FindTimeline", wire.FindTimeline, self._find_timeline)
        server.unary("Flushed", wire.Empty, self._flushed)
        server.unary("Picked", Picked, self._picked)
        await server.start_at(seat.address_of(seat.process))
        self._server = server
        others = (number for number in range(seat.num_processes) if number != seat.process)
        self._clients = [RpcClient(seat.address_of(number), security) for number in others]
        untold = self._front.dispatcher.untold_uses() if self._clients else None
        if untold is not None:
            self._telling = asyncio.create_task(self._tell_uses(untold))

    async def stop(self) -> None:
        if self._telling is not None:
            self._telling.cancel()
        clients, self._clients = self._clients, []
        await asyncio.gather(*(client.close() for client in clients))
        if self._server is not None:
            await self._server.stop()

    # --- what a client asks of the server ---

    async def states(self) -> list[wire.ApiState]:
        """The state of every process that answers, in order of their numbers."""
        others = await self._ask_all("State", wire.Empty(), wire.ApiState)
        own = await self._state(wire.Empty())
        return sorted([own, *others], key=lambda state: state.process)

    async def metrics(self) -> dict[int, bytes] | None:
        """Every process's own metrics as text, by number; None for a process that serves alone."""
        if self._seat is None:
            return None
        others = await self._ask_all("Metrics", wire.Empty(), wire.ApiMetrics)
        # This process's metrics are read last: they count the processes that did not answer now.
        own = await self._metrics(wire.Empty())
        return {metrics.process: metrics.text for metrics in (*others, own)}

    async def abort(self, request_id: str | None) -> int:
        """Abort one request wherever it is, or with None all; how many, as Runner.abort counts."""
        ask = wire.AbortRequest(request_id)
        own = await self._abort(ask)
        others = await self._ask_all("AbortRequest", ask, wire.Aborted)
        return sum(aborted.count for aborted in (own, *others))

    async def timeline(self, request_id: str) -> bytes | None:
        """The timeline of the latest request of that id, as JSON; None when no process knows it."""
        ask = wire.FindTimeline(request_id)
        own = await self._find_timeline(ask)
        others = await self._ask_all("FindTimeline", ask, wire.FoundTimeline)
        latest = max([own, *others], key=lambda found: found.arrival_unix_s)
        return latest.body or None

    async def flushed(self) -> None:
        """Every worker's cache was emptied: tell the other processes to forget what was in them."""
        await self._ask_all("Flushed", wire.Empty(), wire.Empty)

    async def _tell_uses(self, untold: Untold) -> None:
        """Tell the others which prompts go to which workers, a few times a second.

        One that has not answered yet is not told more: it misses hints, and holds nobody up.
        """
        telling: dict[RpcClient, asyncio.Task[wire.Empty | None]] = {}
        try:
            while True:
                await asyncio.sleep(_TELL_EACH_S)
                if uses := untold.take():
                    for client in self._clients:
                        if client not in telling or telling[client].done():
                            told = self._ask(client, "Picked", Picked(uses), wire.Empty)
                            telling[client] = asyncio.create_task(told)
        finally:
            for task in telling.values():
                task.cancel()

    async def _ask_all[M: msgspec.Struct](
        self, name: str, request: msgspec.Struct, reply: type[M]
    ) -> list[M]:
        asked = [self._ask(client, name, request, reply) for client in self._clients]
        answers = []
        for answer in await asyncio.gather(*asked):
            if answer is None:
                self._front.dispatcher.metrics.sibling_silent()
            else:
                answers.append(answer)
        return answers

    async def _ask[M: msgspec.Struct](
        self, client: RpcClient, name: str, request: msgspec.Struct, reply: type[M]
    ) -> M | None:
        """The answer; None if none came in time."""
        complaint = self._complaints.of(client.address)
        try:
            answer = await client.call(name, request, reply, TIMEOUT_S)
        except RpcError as error:
            # To all questions it fails alike, so that is one failure.
            complaint.tell(str(error).removeprefix(f"{name} at {client.address}: "))
            return None
        complaint.settle()
        return answer

    # --- what the others ask of this process ---

    async def _state(self, _: wire.Empty) -> wire.ApiState:
        dispatcher = self._front.dispatcher
        return wire.ApiState(
            self.process,
            os.getpid(),
            dispatcher.api_id,
            dispatcher.cluster_ready(),
            dispatcher.num_running(),
            dispatcher.num_queued(),
        )

    async def _find_timeline(self, ask: wire.FindTimeline) -> wire.FoundTimeline:
        for generation in self._front.dispatcher.find(ask.request_id):
            generation.reclaim()  # while its stream is borrowed, the borrower counts the writes
        timelines = self._front.dispatcher.timelines
        request = timelines.find(ask.request_id)
        if request is None:
            return wire.FoundTimeline(b"")
        return wire.FoundTimeline(spell(request, timelines.policies), request.arrival_unix_s)

    async def _flushed(self, _: wire.Empty) -> wire.Empty:
        self._front.dispatcher.forget_prefixes()
        return wire.Empty()

    async def _picked(self, picked: "Picked") -> wire.Empty:
        self._front.dispatcher.told_uses(picked.uses)
        return wire.Empty()

    async def _metrics(self, _: wire.Empty) -> wire.ApiMetrics:
        return wire.ApiMetrics(self.process, self._front.dispatcher.metrics.own_text())

    async def _abort(self, ask: wire.AbortRequest) -> wire.Aborted:
        return wire.Aborted(self._front.runner.abort(ask.request_id))
