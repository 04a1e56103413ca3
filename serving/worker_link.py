"""The link to one incarnation of a worker: reads its reply stream, sends it submits and aborts."""

import asyncio
import itertools
import logging
from collections.abc import Iterable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from serving.router import Key, key_of
from serving.timers import Timers, pause
from transfer import wire
from transfer.clock import Clock
from transfer.complaint import Complaint
from transfer.errors import Code, Incompatible, RpcError, Unavailable
from transfer.rpc import RpcClient, Security

logger = logging.getLogger(__name__)

SILENCE_S = 3.0  # a worker sends something every 0.5 s; one silent for this long hangs
CALL_TIMEOUT_S = 5.0
_INFO_TIMEOUT_S = 2.0
_PROFILE_TIMEOUT_S = 600.0  # writing what a long profile saw can take minutes
MAX_BATCH = 256  # submits in one call
# Bytes of their token ids, unless one has more: gRPC takes 256 MiB, and a worker must answer in
# time. 128 choices of one prompt of 524,288 tokens have 256 MiB.
MAX_BATCH_BYTES = 16 << 20
_REOPEN_FIRST_S = 0.05
_REOPEN_LONGEST_S = 1.0
_ABORT_AGAIN_S = 0.2
# A worker that was killed leaves the registry's view sooner, so it causes no complaint.
_COMPLAIN_AFTER_S = 5.0


class LinkOwner(Protocol):
    """Receives what happens on a link."""

    def on_open(self, link: "WorkerLink") -> None:
        """The worker said hello: it takes work."""
        ...

    async def on_batch(self, link: "WorkerLink", batch: wire.StepBatch) -> None:
        """A step of this incarnation. Raises BadMessage when it makes no sense."""
        ...

    def on_stale(self, link: "WorkerLink", batch: wire.StepBatch) -> None:
        """A batch that names another incarnation came over this one's stream."""
        ...

    def on_broken(self, link: "WorkerLink", message: str) -> None:
        """The stream ended: the worker drops, or has lost, all rooms of this process."""
        ...

    def on_sending(self, link: "WorkerLink", rooms: Iterable[int]) -> None:
        """A call with these rooms' submits begins."""
        ...

    def on_answered(self, link: "WorkerLink", rooms: Iterable[int]) -> None:
        """The worker has answered the call with these rooms' submits."""
        ...

    def on_refused(self, link: "WorkerLink", refusal: wire.Refusal) -> None:
        """A leg did not reach the worker, or the worker refused it."""
        ...


@dataclass(frozen=True)
class Context:
    """What all links of one process share."""

    api_id: str
    security: Security
    clock: Clock
    timers: Timers
    owner: LinkOwner
    stream_numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))


@dataclass(frozen=True, slots=True)
class _Leaving:
    """A submit that waits to be sent. Times are monotonic."""

    submit: wire.Submit
    arrival_s: float
    deadline_s: float

    def as_of(self, now_s: float) -> wire.Submit:
        return msgspec.structs.replace(
            self.submit, age_s=now_s - self.arrival_s, left_s=self.deadline_s - now_s
        )


class WorkerLink:
    """Keeps one reply stream open until retired, and sends submits and aborts in order.

    Only one call to the worker is in flight at a time. While it is, further submits gather, so they
    batch by themselves, and an abort cannot overtake its submit. Each stream has a new api_id for
    this process, so the rooms that a worker drops with a broken stream are never those of the next.
    """

    def __init__(self, member: wire.Member, context: Context) -> None:
        self.member = member
        self.key: Key = key_of(member)
        self.open = False
        self.drained = False  # the worker said that it has nothing of ours left
        self.api_id = ""
        self._context = context
        self._client = RpcClient(member.info.address, context.security)
        self._calls = self._client.in_order()  # submits and aborts
        self.heard_s = 0.0  # monotonic, when the worker last sent something
        self._progress_s = 0.0  # monotonic, when that last showed progress
        self._last_step = -1
        self._retired = False
        self._attempt: asyncio.Task[None] | None = None
        self._reader: asyncio.Task[None] | None = None
        self._sender: asyncio.Task[None] | None = None
        self._submits: dict[int, _Leaving] = {}
        self._aborts: list[int] = []

    @property
    def worker_id(self) -> str:
        return self.member.info.worker_id

    @property
    def role(self) -> wire.Role:
        return self.member.info.role

    def update(self, member: wire.Member) -> None:
        """Take the registry's latest entry for it; once it is draining, it stays so."""
        draining = member.draining or self.member.draining
        self.member = msgspec.structs.replace(member, draining=draining)

    def mark_draining(self) -> None:
        """The worker itself said that it drains, which may be before the registry says so."""
        self.member = msgspec.structs.replace(self.member, draining=True)

    @property
    def stalled_s(self) -> float:
        """For how long it had sent only signs of life when it last sent anything.

        The worker's stepping loop counts its turns, even idle ones; another loop sends the count.
        So a stalled worker still sends, but the count stands still.
        """
        return self.heard_s - self._progress_s if self.open else 0.0

    def start(self) -> None:
        self._reader = asyncio.create_task(self._keep_reading())

    async def close(self) -> None:
        """End the stream and all calls under way, without telling the owner."""
        self.retire()
        tasks = [t for t in (self._attempt, self._reader, self._sender) if t is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.close()

    def retire(self) -> None:
        """Drop what is waiting to be sent, and do not reopen the stream."""
        self._retired = True
        self.open = False
        self._submits.clear()
        self._aborts.clear()

    def submit(self, submit: wire.Submit, arrival_s: float, deadline_s: float) -> None:
        """Send at the end of this turn of the loop, with whatever else came in it.

        arrival_s, deadline_s: of its request, monotonic. The worker gets them as seconds before and
        after the sending, since the clocks of two hosts have nothing in common. The time in transit
        is not counted, so the worker's deadline is later than this process's by as much.
        """
        self._submits[submit.room] = _Leaving(submit, arrival_s, deadline_s)
        self._wake_sender()

    def abort(self, room: int) -> None:
        """Send an abort after the room's submit, or drop the submit if it was not sent yet."""
        if self._submits.pop(room, None) is None and self.open:
            self._aborts.append(room)
            self._wake_sender()

    def check_silence(self, now_s: float) -> None:
        """Give the stream up when nothing came for too long.

        A peer that was killed breaks the stream; one that hangs does not.
        """
        if self._attempt is not None and now_s - self.heard_s > SILENCE_S:
            self._attempt.cancel()

    async def info(self) -> wire.WorkerState:
        return await self._client.call("Info", wire.Empty(), wire.WorkerState, _INFO_TIMEOUT_S)

    async def flush(self) -> wire.FlushReply:
        return await self._client.call("Flush", wire.Empty(), wire.FlushReply, CALL_TIMEOUT_S)

    async def drain(self) -> wire.DrainReply:
        reply = await self._client.call("Drain", wire.Empty(), wire.DrainReply, CALL_TIMEOUT_S)
        self.mark_draining()
        return reply

    async def start_profile(self) -> wire.ProfileReply:
        return await self._profile("StartProfile")

    async def stop_profile(self) -> wire.ProfileReply:
        return await self._profile("StopProfile")

    async def _profile(self, method: str) -> wire.ProfileReply:
        return await self._client.call(method, wire.Empty(), wire.ProfileReply, _PROFILE_TIMEOUT_S)

    # --- the reply stream ---

    async def _keep_reading(self) -> None:
        clock, delay_s = self._context.clock, _REOPEN_FIRST_S
        complaint = Complaint(logger, f"worker {self.worker_id} cannot be opened, trying again")
        closed_s = clock.monotonic_s()  # since when the stream is not open
        while True:
            self.heard_s = clock.monotonic_s()
            self._attempt = asyncio.create_task(self._read())
            await asyncio.wait([self._attempt])
            message = self._end_of(self._attempt)
            self._attempt = None
            if self.open:
                delay_s, closed_s = _REOPEN_FIRST_S, clock.monotonic_s()
                complaint.settle()
                self._break(message)
            if self._retired:
                return
            if clock.monotonic_s() - closed_s > _COMPLAIN_AFTER_S:
                complaint.tell(message)
                await self._client.renew()  # its name may have another address by now
            await pause(self._context.timers, delay_s)
            delay_s = min(2 * delay_s, _REOPEN_LONGEST_S)

    async def _read(self) -> None:
        """One stream from hello to its end. Raises RpcError."""
        context = self._context
        self.api_id = f"{context.api_id}.{next(context.stream_numbers)}"
        stream = self._client.stream("Subscribe", wire.Subscribe(self.api_id), wire.StepBatch)
        # If this is left early, the call must end now, not when the garbage collector finds it.
        async with aclosing(stream) as batches:
            async for batch in batches:
                if (batch.worker_id, batch.epoch) != self.key:
                    self._reject(batch)
                    continue
                self.heard_s = context.clock.monotonic_s()
                if batch.step != self._last_step or batch.rooms or not self.open:
                    self._last_step = batch.step
                    self._progress_s = self.heard_s
                if not self.open:
                    self.open = True
                    logger.info("worker %s is open", self.worker_id)
                    context.owner.on_open(self)
                await context.owner.on_batch(self, batch)

    def _reject(self, batch: wire.StepBatch) -> None:
        """Drop another incarnation's batch; raise Incompatible if it is at this address now."""
        if not self.open:
            raise Incompatible(
                f"{self.member.info.address} is {batch.worker_id} of epoch {batch.epoch}, "
                f"expected {self.worker_id} of epoch {self.member.epoch}"
            )
        self._context.owner.on_stale(self, batch)

    def _end_of(self, attempt: asyncio.Task[None]) -> str:
        """Why the stream ended. An error that is no RpcError is a bug of ours, logged in full."""
        if attempt.cancelled():
            return f"{self.worker_id} said nothing for {SILENCE_S:g} s"
        error = attempt.exception()
        if error is None:
            return f"{self.worker_id} ended its stream"
        if not isinstance(error, RpcError):
            logger.error("reading from %s failed", self.worker_id, exc_info=error)
        return f"{self.worker_id} is lost: {error}"

    def _break(self, message: str) -> None:
        self.open = False
        self._submits.clear()
        self._aborts.clear()
        self._calls.reset()  # a worker that shuts down waits for its streams to end
        if self.drained:
            logger.info("worker %s has drained", self.worker_id)
        else:
            logger.warning("worker %s broke off: %s", self.worker_id, message)
        self._context.owner.on_broken(self, message)

    # --- submits and aborts ---

    def _wake_sender(self) -> None:
        if self._sender is None:
            self._sender = asyncio.create_task(self._send())

    async def _send(self) -> None:
        try:
            while self._submits or self._aborts:
                if self._submits:
                    await self._send_submits(self._next_submits())
                if self._aborts:
                    rooms, self._aborts = self._aborts, []
                    await self._send_aborts(rooms)
        finally:
            self._sender = None

    def _next_submits(self) -> list[_Leaving]:
        """Take the submits of the next call: the first ones, as many as one call may carry."""
        leaving: list[_Leaving] = []
        num_bytes = 0
        for leg in self._submits.values():
            num_bytes += len(leg.submit.token_ids)
            if len(leaving) == MAX_BATCH or (leaving and num_bytes > MAX_BATCH_BYTES):
                break
            leaving.append(leg)
        for leg in leaving:
            del self._submits[leg.submit.room]
        return leaving

    async def _send_submits(self, leaving: list[_Leaving]) -> None:
        owner, now_s = self._context.owner, self._context.clock.monotonic_s()
        submits = [leg.as_of(now_s) for leg in leaving]
        rooms = [submit.room for submit in submits]
        owner.on_sending(self, rooms)
        try:
            reply = await self._calls.call(
                "Submit", wire.SubmitBatch(tuple(submits)), wire.SubmitReply, CALL_TIMEOUT_S
            )
        except RpcError as error:
            # Any other error than an absent peer would occur at the next worker too.
            code = Code.PEER_LOST if isinstance(error, Unavailable) else Code.INTERNAL
            self._refuse_all(submits, code, str(error))
            return
        except Exception:  # a bug of ours: fail these now rather than at their deadlines
            logger.exception("%d requests for %s cannot be sent", len(submits), self.worker_id)
            self._refuse_all(submits, Code.INTERNAL, "the request could not be sent")
            return
        owner.on_answered(self, rooms)
        for refusal in reply.refused:
            owner.on_refused(self, refusal)

    def _refuse_all(self, submits: list[wire.Submit], code: Code, message: str) -> None:
        for submit in submits:
            self._context.owner.on_refused(self, wire.Refusal(submit.room, code, message))

    async def _send_aborts(self, rooms: list[int]) -> None:
        try:
            await self._calls.call(
                "Abort", wire.AbortBatch(tuple(rooms)), wire.Empty, CALL_TIMEOUT_S
            )
        except RpcError as error:
            if not self.open:
                return  # the worker drops the rooms of a broken stream by itself
            logger.warning("abort of %d rooms at %s: %s", len(rooms), self.worker_id, error)
            self._aborts = rooms + self._aborts
            await pause(self._context.timers, _ABORT_AGAIN_S)
