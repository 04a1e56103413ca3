"""The rules of the receiving end: which frames are taken, and how they become a room's pages."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import ml_dtypes
import numpy as np

from model.config import KVSpec
from transfer.backend import Frame, Kind, PagesArrived, Source
from transfer.errors import FrameRefused, Refusal


@dataclass(slots=True)
class _Run:
    """Pages of which some heads are still on their way."""

    shards: list[np.ndarray]
    covered: np.ndarray  # bool[shards, heads of a shard]
    num_copies: int = 0  # of covered heads, under way
    is_over: bool = False  # complete, or given up

    def end(self) -> list[np.ndarray]:
        """It is over: returns its shards, whose memory it keeps no more."""
        shards, self.shards, self.is_over = self.shards, [], True
        return shards


@dataclass(slots=True)
class _Expected:
    epoch: int
    num_pages: int
    shards: Sequence[int]  # of the rank, those that this process has
    delivered: bytearray  # 1 for each delivered page
    runs: dict[tuple[int, int], _Run] = field(default_factory=dict)
    feeders: "dict[Feeder, bool]" = field(default_factory=dict)  # whether it has sent FINISH
    num_senders: int = 0  # as the first FINISH says; 0: none came
    finished: bool = False
    spoiled: bool = False  # a frame was refused, so the sender gives the room up

    def may_be_fed_by(self, feeder: "Feeder") -> bool:
        """Whether a further connection may: each node of one sender has its own."""
        if not self.feeders:
            return True
        others = [other.source for other in self.feeders]
        return feeder.source.sender_id == others[0].sender_id and feeder.source not in others


class HeadCopy(NamedTuple):
    """Heads that belong into a run: to be made with no lock held, then `Inbound.copied`."""

    frame: Frame
    expected: _Expected
    run: _Run
    target: np.ndarray
    heads: np.ndarray

    def make(self) -> None:
        np.copyto(self.target, self.heads)


class Feeder(Protocol):
    """One connection, as the source of a room's frames."""

    @property
    def source(self) -> Source: ...

    def reply(self, frame: Frame, meta: bytes = b"") -> None:
        """Send a small frame to the sender, now or soon (any thread; never waits)."""
        ...


class Inbound:
    """Rooms that may be written to, and their pages as they arrive. Not thread-safe.

    Invariant: a page is delivered at most once, whole, and only from checked frames; a room is
    fed by one connection, the first whose frame was accepted, or by one of each node of its sender.

    A payload may lie in memory that is lent to its connection. Of each connection only one
    unfinished run keeps such memory, since one node's frames of a run follow each other. If the
    other nodes' frames come in another order, payloads are copied: otherwise each could fill its
    memory with parts of runs whose other parts wait for memory.
    """

    def __init__(self, kv: KVSpec, tp_size: int) -> None:
        """kv: of the pool; its num_kv_heads counts stored heads over all tp_size shards."""
        assert kv.num_kv_heads % tp_size == 0
        self._kv = kv
        self._all_shards = range(tp_size)
        self._local_heads = kv.num_kv_heads // tp_size
        stored = kv.stored_dtype
        self._dtype = np.dtype(ml_dtypes.bfloat16 if stored == "bfloat16" else stored)
        # Bytes of one head of one page, all layers.
        self._head_bytes = math.prod(self._shape(1, 1)) * self._dtype.itemsize
        self._rooms: dict[int, _Expected] = {}
        self._owed: Counter[Feeder] = Counter()  # unfinished rooms of each connection
        self._lent: dict[Feeder, _Run] = {}  # the last run that kept memory of a connection

    def expect(
        self, room: int, epoch: int, num_pages: int, shards: Sequence[int] | None = None
    ) -> None:
        """shards: of the room's rank, those that come here; None: all."""
        assert room not in self._rooms, f"room {room} twice"
        own = self._all_shards if shards is None else shards
        self._rooms[room] = _Expected(epoch, num_pages, own, bytearray(num_pages))

    def forget(self, room: int) -> None:
        expected = self._rooms.pop(room, None)
        if expected is not None:
            if expected.runs:
                self._give_up_runs(expected)
            self._settle(expected)

    def _settle(self, expected: _Expected) -> None:
        """Nothing more of this room is owed."""
        if not expected.spoiled:  # then it was settled
            for feeder, has_finished in expected.feeders.items():
                if not has_finished:
                    self._settled(feeder)

    def _settled(self, feeder: Feeder) -> None:
        """The connection owes nothing more of one room."""
        self._owed[feeder] -= 1
        if not self._owed[feeder]:
            del self._owed[feeder]

    def feeders(self, room: int) -> list[Feeder]:
        expected = self._rooms.get(room)
        return [] if expected is None else list(expected.feeders)

    def knows(self, room: int) -> bool:
        return room in self._rooms

    def fed_by(self, feeder: Feeder) -> tuple[int, ...]:
        """Unfinished rooms that this connection feeds, alone or with others."""
        return tuple(
            room
            for room, expected in self._rooms.items()
            if feeder in expected.feeders and not expected.finished
        )

    def owes(self, feeder: Feeder) -> bool:
        return feeder in self._owed

    def check(self, frame: Frame, feeder: Feeder) -> None:
        """Check a PAGES, FINISH or CANCEL header. Raises FrameRefused."""
        expected = self._rooms.get(frame.room)
        if expected is None:
            raise FrameRefused(Refusal.UNKNOWN_ROOM, f"{frame.room} is not expected here")
        if expected.epoch != frame.epoch:
            raise FrameRefused(
                Refusal.STALE_EPOCH, f"{frame.epoch}, this side has {expected.epoch}"
            )
        has_finished = expected.feeders.get(feeder)
        if has_finished is None and not expected.may_be_fed_by(feeder):
            raise FrameRefused(Refusal.FOREIGN, f"room {frame.room} is fed by another connection")
        # While another node still sends, one that has finished may yet give the room up.
        if expected.finished or (has_finished and frame.kind is not Kind.CANCEL):
            raise FrameRefused(Refusal.ORDER, f"{frame.kind.name} after FINISH")
        if expected.spoiled and frame.kind is not Kind.CANCEL:
            raise FrameRefused(Refusal.ORDER, "the room was refused before")
        if frame.kind is Kind.PAGES:
            self._check_pages(frame, expected)
        elif frame.payload_len:
            raise FrameRefused(Refusal.SIZE, f"{frame.kind.name} carries no payload")
        if has_finished is None and not expected.spoiled:
            expected.feeders[feeder] = False
            self._owed[feeder] += 1

    def _check_pages(self, frame: Frame, expected: _Expected) -> None:
        end = frame.page_start + frame.num_pages
        if not 0 < frame.num_pages <= expected.num_pages or end > expected.num_pages:
            raise FrameRefused(
                Refusal.OUT_OF_RANGE,
                f"pages {frame.page_start}..{end} of {expected.num_pages} granted",
            )
        heads_end = frame.dst_start + frame.num_heads
        is_here = frame.dst_shard in expected.shards
        if not is_here or not frame.num_heads or heads_end > self._local_heads:
            raise FrameRefused(
                Refusal.OUT_OF_RANGE,
                f"heads {frame.dst_start}..{heads_end} of shard {frame.dst_shard}, "
                f"here are shards {list(expected.shards)} of {self._local_heads} heads",
            )
        want = frame.num_pages * frame.num_heads * self._head_bytes
        if frame.payload_len != want:
            raise FrameRefused(
                Refusal.SIZE, f"{frame.payload_len} bytes of payload, expected {want}"
            )
        came = expected.delivered.find(1, frame.page_start, end) >= 0
        if came or self._overlaps(frame, expected):
            raise FrameRefused(Refusal.REPLAYED, f"pages {frame.page_start}..{end} came before")

    def _overlaps(self, frame: Frame, expected: _Expected) -> bool:
        """Whether some of these heads are here already, or pages overlap a run cut differently."""
        key = (frame.page_start, frame.num_pages)
        for (start, count), run in expected.runs.items():
            if (start, count) == key:
                heads = slice(frame.dst_start, frame.dst_start + frame.num_heads)
                if run.covered[expected.shards.index(frame.dst_shard), heads].any():
                    return True
            elif start < key[0] + key[1] and key[0] < start + count:
                return True
        return False

    def spoil(self, frame: Frame, feeder: Feeder) -> None:
        """After a refusal, take nothing more for the room if one of its own sent the frame."""
        expected = self._rooms.get(frame.room)
        if expected is None or expected.epoch != frame.epoch:
            return
        if not expected.feeders or feeder in expected.feeders:
            self._settle(expected)
            expected.spoiled = True
            self._give_up_runs(expected)

    def left(self, feeder: Feeder) -> tuple[int, ...]:
        """A connection has ended: returns its unfinished rooms, which are forgotten."""
        rooms = self.fed_by(feeder)
        for room in rooms:
            self.forget(room)
        self._lent.pop(feeder, None)
        return rooms

    def _give_up_runs(self, expected: _Expected) -> None:
        """Nothing will complete them, and their memory may be lent."""
        for run in expected.runs.values():
            run.end()
        expected.runs.clear()

    def pages(
        self, frame: Frame, feeder: Feeder, payload: np.ndarray
    ) -> PagesArrived | HeadCopy | None:
        """Take over a checked frame's payload, u8[n].

        Returns the run it completes, if any, or what has to be copied first.
        """
        expected = self._rooms[frame.room]
        values = payload.view(self._dtype).reshape(self._shape(frame.num_pages, frame.num_heads))
        key = (frame.page_start, frame.num_pages)
        whole = frame.num_heads == self._local_heads
        if whole and len(expected.shards) == 1:
            return self._arrived(frame, expected, [values])
        run = expected.runs.get(key)
        if run is None:
            run = self._new_run(frame.num_pages, len(expected.shards))
            expected.runs[key] = run
        heads = slice(frame.dst_start, frame.dst_start + frame.num_heads)
        at = expected.shards.index(frame.dst_shard)
        run.covered[at, heads] = True
        if whole and self._may_keep(feeder, run):
            run.shards[at] = values
            return self._completed(frame, expected, run)
        run.num_copies += 1
        return HeadCopy(frame, expected, run, run.shards[at][..., heads, :], values)

    def copied(self, copy: HeadCopy) -> PagesArrived | None:
        """A copy was made; returns the run it completes, if any."""
        copy.run.num_copies -= 1
        return self._completed(copy.frame, copy.expected, copy.run)

    def _completed(self, frame: Frame, expected: _Expected, run: _Run) -> PagesArrived | None:
        if run.is_over or run.num_copies or not run.covered.all():
            return None
        del expected.runs[frame.page_start, frame.num_pages]
        return self._arrived(frame, expected, run.end())

    def _arrived(self, frame: Frame, expected: _Expected, shards: list[np.ndarray]) -> PagesArrived:
        end = frame.page_start + frame.num_pages
        expected.delivered[frame.page_start : end] = b"\1" * frame.num_pages
        return PagesArrived(frame.room, frame.page_start, shards)

    def _may_keep(self, feeder: Feeder, run: _Run) -> bool:
        """Whether a run may keep memory of a connection; another that does must be over."""
        other = self._lent.get(feeder)
        if other is not None and other is not run and not other.is_over:
            return False
        self._lent[feeder] = run
        return True

    def finish(self, frame: Frame, feeder: Feeder, num_senders: int) -> bool:
        """Take a checked FINISH; whether it is the last of num_senders, one from each node.

        Raises FrameRefused when pages are missing then, or for a number that cannot be.
        """
        expected = self._rooms[frame.room]
        missing = expected.delivered.count(0)
        self._check_num_senders(expected, num_senders, missing)
        is_last = num_senders == 1 or sum(expected.feeders.values()) + 1 >= num_senders
        if is_last and missing:
            raise FrameRefused(Refusal.ORDER, f"FINISH with {missing} pages missing")
        expected.num_senders = num_senders
        expected.feeders[feeder] = True
        self._settled(feeder)
        expected.finished = is_last
        return is_last

    def _check_num_senders(self, expected: _Expected, num_senders: int, missing: int) -> None:
        """Raises FrameRefused for a number with which the room would wait for nodes for ever."""
        least = most = len(expected.feeders)
        if missing or not expected.num_pages:
            most = len(expected.shards) * self._local_heads
        # Otherwise no further node can come: each sends at least one head of every page.
        if not least <= num_senders <= most:
            raise FrameRefused(
                Refusal.MALFORMED,
                f"FINISH with num_senders {num_senders}, expected {least} to {most}",
            )
        if expected.num_senders not in (0, num_senders):
            raise FrameRefused(
                Refusal.MALFORMED,
                f"FINISH with num_senders {num_senders}, before {expected.num_senders}",
            )

    def _new_run(self, num_pages: int, num_shards: int) -> _Run:
        # Memory that is never written costs nothing: a payload of a whole shard replaces it.
        shape = self._shape(num_pages, self._local_heads)
        return _Run(
            [np.empty(shape, self._dtype) for _ in range(num_shards)],
            np.zeros((num_shards, self._local_heads), bool),
        )

    def _shape(self, num_pages: int, num_heads: int) -> tuple[int, ...]:
        kv = self._kv
        return (kv.num_layers, kv.planes, num_pages, kv.page_size, num_heads, kv.head_dim)
