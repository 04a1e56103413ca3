"""The sending side of every backend: queues frames, and ends each room exactly once."""

import contextlib
import threading
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from model.buckets import RUN_LENGTHS
from transfer import wire
from transfer.backend import FirstToken, Frame, Kind, OnSenderEvent, Refused, SenderEvent, Shipped
from transfer.clock import SYSTEM_CLOCK, Clock
from transfer.errors import BadMessage, Unavailable
from transfer.layout import HeadRun
from transfer.pairs import Pairs
from transfer.room import EndedRooms

_AT_ONCE_BYTES = 64 << 10  # the most that a thread which queues a job may copy and send itself


class Job(NamedTuple):
    """A frame to send. payload: of PAGES only, [layers, planes, n, page_size, heads, head_dim]."""

    frame: Frame
    meta: bytes = b""
    payload: np.ndarray | None = None
    num_bytes: int = 0  # of the payload


@dataclass(eq=False)
class Lane(ABC):
    """What is on its way to one receiver. Changed only under the sender's lock.

    Rooms take turns, one run of pages at a time, so that a long prompt does not hold up short
    ones. A run's frames for several shards stay together: the receiver keeps the memory of all of
    them until the last arrives, and would run out if it held one frame of each of many runs.
    """

    address: str
    queued_bytes: int = 0  # handed over and not yet sent
    cancels: deque[Job] = field(default_factory=deque)
    queues: dict[int, deque[Job]] = field(default_factory=dict)  # by room, none empty; next first
    rooms: dict[int, int] = field(default_factory=dict)  # open room -> epoch
    max_frame_bytes: int = 0  # 0: the sender's
    # Held from choosing a job until it is sent, so that jobs leave in the order in which they
    # were chosen. Taken before the sender's lock, or without waiting.
    leaving: threading.Lock = field(default_factory=threading.Lock)

    @property
    def way(self) -> str:
        """How pages travel: the name that timelines show."""
        return "tcp"

    @property
    def is_over(self) -> bool:
        """Whether its receiver has left, though its rooms are not lost yet (any thread)."""
        return False

    @abstractmethod
    def wake(self) -> None:
        """There are jobs (any thread)."""

    @abstractmethod
    def close(self) -> None:
        """Stop for good (any thread)."""

    def try_send(self, job: Job) -> bool:
        """Send a small job if that needs no waiting; its caller holds `leaving`. False: unsent."""
        return False


class Sender(ABC):
    """Prefill's end. Its calls may come from any thread and never wait.

    A backend opens lanes and empties them.

    Invariant: a room is open in at most one lane to an address, so its frames keep their order. It
    ends with an ACK from each address, a NACK, the loss of a lane (one event in all) or `cancel`
    (no event); whatever is queued for it afterwards is dropped. After a NACK or a loss it is still
    to be cancelled at the other addresses, if it has any.
    """

    def __init__(self, on_event: OnSenderEvent, max_frame_bytes: int, connections: int = 1) -> None:
        """connections: the most lanes to one receiver."""
        assert max_frame_bytes > 0
        assert connections > 0
        self.clock: Clock = SYSTEM_CLOCK
        self.node = 0  # of its worker's nodes, which one this is
        self._on_event = on_event
        self._max_frame_bytes = max_frame_bytes
        self.counters: Counter[str] = Counter()  # connections, by how their pages travel
        self._pairs = Pairs()
        self._connections = connections
        self._lock = threading.Lock()
        self._lanes: dict[str, list[Lane]] = {}  # by address, none empty
        self._shipped: dict[int, Shipped] = {}  # of the open rooms
        # Of rooms that are open at several addresses: how many answers they wait for besides one.
        self._more_answers: Counter[int] = Counter()
        self._over = EndedRooms()  # for which late calls are ignored
        self._in_flight_bytes = 0
        self._closed = False

    @abstractmethod
    def _open_lane(self, address: str) -> Lane:
        """Begin to connect; never waits."""

    # --- prefill's calls --------------------------------------------------------------------------

    def open(self, grant: wire.Grant) -> None:
        """Begin to connect, unless connected: pages of this grant will follow."""
        address = grant.data_addresses[0]
        with self._lock:
            if self._closed or any(not lane.is_over for lane in self._lanes.get(address, ())):
                return
            # If no lane can be opened now, the first room with pages retries and gets the error.
            with contextlib.suppress(Unavailable):
                self._lane_of(grant)

    def send_pages(
        self,
        grant: wire.Grant,
        page_start: int,
        shards: Sequence[np.ndarray],
        runs: Sequence[HeadRun],
        frame_pages: int = 0,
    ) -> None:
        """Queue a run of pages.

        shards: one per source shard, [layers, planes, n, page_size, heads of the shard, head_dim],
        kept alive and unchanged until sent. Fills pages page_start .. page_start+n-1 of the
        grant. runs: which heads go where (transfer.layout.plan_heads). frame_pages: the most of a
        frame, where others send further heads of these pages and must cut alike; 0: what fits.
        """
        self._queue(
            grant, lambda most: cut_frames(grant, page_start, shards, runs, most, frame_pages)
        )

    def finish(self, grant: wire.Grant, first: FirstToken) -> None:
        """Queue the end of a room behind its pages."""
        frame = Frame(Kind.FINISH, grant.room, grant.epoch)
        self._queue(grant, lambda _: [Job(frame, wire.encode(first))])

    def cancel(self, room: int) -> Shipped | None:
        """Drop what is queued for a room and tell the receiver. No event follows.

        Returns what had been sent; None for a room that is not open.
        """
        with self._lock:
            self._over.add(room)
            lanes = [lane for lane in self._all_lanes() if room in lane.rooms]
            for lane in lanes:
                epoch = lane.rooms.pop(room)
                self._drop_jobs(lane, room)
                # Ahead of other rooms: a cancel may free pages that they wait for.
                lane.cancels.append(Job(Frame(Kind.CANCEL, room, epoch)))
            shipped = self._end(room)
        for lane in lanes:
            lane.wake()
        return shipped

    @property
    def in_flight_bytes(self) -> int:
        """Bytes queued and not yet handed to the network."""
        return self._in_flight_bytes

    def behind(self, most_bytes: int) -> frozenset[str]:
        """Data addresses for which more than most_bytes are queued."""
        if self._in_flight_bytes <= most_bytes:
            return frozenset()
        with self._lock:
            return frozenset(
                address
                for address, lanes in self._lanes.items()
                if sum(lane.queued_bytes for lane in lanes) > most_bytes
            )

    @property
    def transfers(self) -> tuple[wire.TransferPair, ...]:
        """Totals written per receiver, for the receivers used last."""
        with self._lock:
            return self._pairs.told()

    def close(self) -> None:
        """Drop everything; no events follow."""
        with self._lock:
            self._closed = True
            lanes = list(self._all_lanes())
        for lane in lanes:
            lane.close()

    def _all_lanes(self) -> Iterator[Lane]:
        return (lane for lanes in self._lanes.values() for lane in lanes)

    def _lane_of(self, grant: wire.Grant) -> Lane:
        """The room's lane; for a new room, the lane with the least to send.

        Another lane is opened only when every existing one has rooms, so a pair that is seldom
        busy keeps to one connection. Raises Unavailable when there is none and none can be opened.
        """
        lanes = self._lanes.get(grant.data_addresses[0], [])
        for lane in lanes:
            if grant.room in lane.rooms:
                return lane
        # A room that was lost with its lane may be tried again before the lane's thread notices.
        lanes = [lane for lane in lanes if not lane.is_over]
        if len(lanes) < self._connections and all(lane.rooms for lane in lanes):
            try:
                opened = self._open_lane(grant.data_addresses[0])
            except RuntimeError as error:  # as many threads as this process may have
                self.counters["connections_not_opened"] += 1
                if not lanes:
                    raise Unavailable(f"{grant.data_addresses[0]}: {error}") from error
            else:
                self._lanes.setdefault(grant.data_addresses[0], []).append(opened)
                return opened
        if len(lanes) == 1:
            return lanes[0]
        return min(lanes, key=lambda lane: (lane.queued_bytes, len(lane.rooms)))

    def _queue(self, grant: wire.Grant, cut: Callable[[int], list[Job]]) -> None:
        """Queue the jobs that cut(max_frame_bytes) returns."""
        with self._lock:
            if self._closed or grant.room in self._over:
                return
            lost: SenderEvent | None = None
            try:
                lane = self._lane_of(grant)
            except Unavailable as error:
                self._over.add(grant.room)
                lost = SenderEvent("unsent", grant.room, str(error), shipped=Shipped())
            else:
                jobs = cut(lane.max_frame_bytes or self._max_frame_bytes)
                was_idle = not lane.rooms  # so its thread sends no PINGs
                is_next = self._put(lane, grant, jobs)
        if lost is not None:
            self._on_event(lost)
        elif not (is_next and self._send_at_once(lane, jobs[0])) or was_idle:
            lane.wake()

    def _put(self, lane: Lane, grant: wire.Grant, jobs: list[Job]) -> bool:
        """Queue jobs. True: the one job may leave at once; the caller holds `lane.leaving`."""
        room = grant.room
        if room not in lane.rooms:
            lane.rooms[room] = grant.epoch
            if room in self._shipped:
                self._more_answers[room] += 1
            else:
                self._shipped[room] = Shipped()
        num_bytes = sum([job.num_bytes for job in jobs])
        self._queued(lane, num_bytes)
        if (
            len(jobs) == 1
            and num_bytes <= _AT_ONCE_BYTES
            and not lane.queues
            and not lane.cancels
            and lane.leaving.acquire(blocking=False)
        ):
            return True
        lane.queues.setdefault(room, deque()).extend(jobs)
        return False

    def _send_at_once(self, lane: Lane, job: Job) -> bool:
        """Send a job from this thread, not the lane's, if the lane can; otherwise queue it."""
        begun_s = self.clock.monotonic_s()
        try:
            is_sent = lane.try_send(job)
            with self._lock:
                if is_sent:
                    self._sent(lane, job, begun_s)
                elif job.frame.room in lane.rooms:
                    lane.queues.setdefault(job.frame.room, deque()).appendleft(job)
                else:  # the room has ended meanwhile
                    self._queued(lane, -job.num_bytes)
        finally:
            lane.leaving.release()
        return is_sent

    # --- the lanes' calls ------------------------------------------------------------------------

    def next_job(self, lane: Lane, with_pages: bool = True) -> Job | None:
        """The next job to send; call `sent` after it. with_pages: whether pages can be sent now."""
        with self._lock:
            if lane.cancels:
                return lane.cancels.popleft()
            for room, queue in lane.queues.items():
                if with_pages or queue[0].payload is None:
                    job = queue.popleft()
                    if not (queue and _are_one_run(job, queue[0])):
                        del lane.queues[room]
                        if queue:
                            lane.queues[room] = queue  # behind the other rooms
                    return job
            return None

    def sent(self, lane: Lane, job: Job, begun_s: float) -> float:
        """The job has left, or failed to: then `lost` follows for the lane.

        begun_s: when writing it began. Returns how long writing took, in seconds.
        """
        with self._lock:
            return self._sent(lane, job, begun_s)

    def _sent(self, lane: Lane, job: Job, begun_s: float) -> float:
        now_s = self.clock.monotonic_s()
        took_s = now_s - begun_s
        if job.payload is not None:
            num_bytes = job.num_bytes
            self._queued(lane, -num_bytes)
            self._pairs.add(lane.way, lane.address, num_bytes, took_s)
            shipped = self._shipped.get(job.frame.room)
            if shipped is not None:
                shipped.way = lane.way
                shipped.num_bytes += num_bytes
                shipped.num_frames += 1
                shipped.first_s = shipped.first_s or begun_s
                shipped.last_s = now_s
                shipped.page_ends[job.frame.page_start + job.frame.num_pages] = now_s
        return took_s

    def heard(self, lane: Lane, frame: Frame, meta: bytes) -> None:
        """Take an ACK or NACK. Raises BadMessage for anything else."""
        if frame.kind not in (Kind.ACK, Kind.NACK):
            raise BadMessage(f"unexpected {frame.kind.name} frame")
        refused = wire.decode(meta, Refused) if frame.kind is Kind.NACK else None
        with self._lock:
            if lane.rooms.pop(frame.room, None) is None:
                return
            self._drop_jobs(lane, frame.room)
            if refused is None and self._more_answers[frame.room]:
                self._more_answers[frame.room] -= 1
                return
            shipped = self._end(frame.room)
            if shipped is None:  # it has ended elsewhere
                return
            self._over.add(frame.room)
        if refused is None:
            shipped.acked_s = self.clock.monotonic_s()
            event = SenderEvent("acked", frame.room, shipped=shipped)
        else:
            event = SenderEvent("nacked", frame.room, refused.message, refused.code, shipped)
        self._on_event(event)

    def count(self, what: str) -> None:
        with self._lock:
            self.counters[what] += 1

    def lost(self, lane: Lane, message: str) -> None:
        """The lane has ended, and its open rooms with it; the next job opens a new lane."""
        with self._lock:
            lanes = self._lanes.get(lane.address, [])
            if lane in lanes:
                lanes.remove(lane)
                if not lanes:
                    del self._lanes[lane.address]
            for room in list(lane.queues):
                self._drop_jobs(lane, room)
            lane.cancels.clear()
            rooms, lane.rooms = lane.rooms, {}
            ended = {room: self._end(room) for room in rooms if room in self._shipped}
            for room in ended:
                self._over.add(room)
            closed = self._closed
        if not closed:
            for room, shipped in ended.items():
                self._on_event(SenderEvent("lost", room, message, shipped=shipped))

    def _end(self, room: int) -> Shipped | None:
        """The room is over at all addresses; what was sent of it, None if it is not open."""
        if self._more_answers:
            self._more_answers.pop(room, None)
        return self._shipped.pop(room, None)

    def _drop_jobs(self, lane: Lane, room: int) -> None:
        queue = lane.queues.pop(room, None)
        if queue:
            self._queued(lane, -sum([job.num_bytes for job in queue]))

    def _queued(self, lane: Lane, more_bytes: int) -> None:
        lane.queued_bytes += more_bytes
        self._in_flight_bytes += more_bytes


def cut_frames(
    grant: wire.Grant,
    page_start: int,
    shards: Sequence[np.ndarray],
    runs: Sequence[HeadRun],
    max_frame_bytes: int,
    frame_pages: int = 0,
) -> list[Job]:
    """The frames of a run of pages, each of at most max_frame_bytes unless one page has more.

    All shards are cut at the same pages, so that the receiver can put them together. frame_pages:
    see Sender.send_pages.
    """
    num_layers, planes, num_pages, page_size, _, head_dim = shards[0].shape
    head_bytes = num_layers * planes * page_size * head_dim * shards[0].itemsize
    most_heads = max([run.num_heads for run in runs])
    fitting = frame_pages or max_frame_bytes // (head_bytes * most_heads)
    per_frame = _pages_per_frame(num_pages, fitting)
    jobs = []
    for at in range(0, num_pages, per_frame):
        end = min(at + per_frame, num_pages)
        for run in runs:
            frame = Frame(
                Kind.PAGES,
                grant.room,
                grant.epoch,
                page_start + at,
                end - at,
                run.dst_shard,
                run.dst_start,
                run.num_heads,
            )
            payload, num_heads = shards[run.src_shard], run.num_heads
            if end - at < num_pages:
                payload = payload[:, :, at:end]
            if num_heads < payload.shape[4]:
                payload = payload[..., run.src_start : run.src_start + num_heads, :]
            jobs.append(Job(frame, b"", payload, (end - at) * num_heads * head_bytes))
    return jobs


def _are_one_run(job: Job, following: Job) -> bool:
    """Whether two jobs of one room have the same pages, of different heads."""
    if job.payload is None or following.payload is None:
        return False
    return job.frame.page_start == following.frame.page_start


def _pages_per_frame(num_pages: int, most: int) -> int:
    """All, or a number that decode writes without padding: padding would copy the pages."""
    if num_pages <= most:
        return num_pages
    return max((size for size in RUN_LENGTHS if size <= most), default=1)


def segments(pages: np.ndarray | None) -> list[memoryview]:
    """The bytes of pages in order, in as few contiguous pieces as possible; none for None.

    pages: [layers, planes, n, page_size, heads, head_dim], of any dtype. Copied only when it is a
    slice of heads; a slice of pages is sent from where it lies.
    """
    if pages is None:
        return []
    if pages.flags.c_contiguous:
        return [_bytes_of(pages)]
    if pages[0, 0].flags.c_contiguous:
        return [_bytes_of(part) for layer in pages for part in layer]
    return [_bytes_of(np.ascontiguousarray(pages))]


def _bytes_of(array: np.ndarray) -> memoryview:
    return memoryview(array.view(np.uint8).reshape(-1))
