"""What moves pages: the frame, the two ends of a backend, and the checks every backend shares.

A sender (prefill) pushes frames into rooms that the receiver (decode) expects:

    CHALLENGE <-   HELLO ->   WELCOME <-         each proves to know the cluster token
    PAGES ->  ...  FINISH ->  ACK <-             one room, well
    PAGES ->  NACK <-                            refused: unknown, stale, corrupt, out of range
    CANCEL ->                                    the sender gives the room up
    PING ->   PONG <-                            signs of life while rooms are open

Frames of one room are in order on one connection. The digest covers header, meta and payload.
"""

import enum
import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

import ml_dtypes
import numpy as np
import xxhash

from model.config import KVSpec
from transfer import wire
from transfer.errors import BadMessage, FrameRefused
from transfer.layout import HeadRun

MAGIC = b"KVF1"
MAX_META_BYTES = 1 << 16
MAX_PAYLOAD_BYTES = 1 << 31
# magic, version, kind, room, epoch, page_start, num_pages, dst_shard, dst_start, num_heads,
# meta_len, payload_len, digest
_HEADER = struct.Struct("<4sHHqqIIIIIIQQ")
HEADER_BYTES = _HEADER.size


class Kind(enum.IntEnum):
    """What a frame is."""

    CHALLENGE = 1
    HELLO = 2
    WELCOME = 3
    PAGES = 4
    FINISH = 5
    CANCEL = 6
    ACK = 7
    NACK = 8
    PING = 9
    PONG = 10


@dataclass(frozen=True, slots=True)
class Frame:
    """A frame's header. page_start counts within the room's granted pages."""

    kind: Kind
    room: int = 0
    epoch: int = 0
    page_start: int = 0
    num_pages: int = 0
    dst_shard: int = 0
    dst_start: int = 0
    num_heads: int = 0
    meta_len: int = 0
    payload_len: int = 0
    digest: int = 0

    def pack(self) -> bytes:
        """HEADER_BYTES bytes."""
        return _HEADER.pack(
            MAGIC,
            wire.WIRE_VERSION,
            int(self.kind),
            self.room,
            self.epoch,
            self.page_start,
            self.num_pages,
            self.dst_shard,
            self.dst_start,
            self.num_heads,
            self.meta_len,
            self.payload_len,
            self.digest,
        )

    @staticmethod
    def unpack(data: bytes | bytearray | memoryview) -> "Frame":
        """Raises BadMessage when these are not a header of ours with sane lengths."""
        if len(data) != HEADER_BYTES:
            raise BadMessage(f"a frame header has {HEADER_BYTES} bytes, got {len(data)}")
        magic, version, kind, *rest = _HEADER.unpack(data)
        if magic != MAGIC:
            raise BadMessage(f"a frame begins with {MAGIC!r}, got {magic!r}")
        if version != wire.WIRE_VERSION:
            raise BadMessage(f"frame version {version}, this side speaks {wire.WIRE_VERSION}")
        try:
            frame = Frame(Kind(kind), *rest)
        except ValueError as error:
            raise BadMessage(f"unknown frame kind {kind}") from error
        if frame.meta_len > MAX_META_BYTES or frame.payload_len > MAX_PAYLOAD_BYTES:
            raise BadMessage(
                f"oversize frame: meta {frame.meta_len}, payload {frame.payload_len} bytes"
            )
        return frame

    def sealed(self, meta: bytes, payload: memoryview | bytes = b"") -> "Frame":
        """This frame with lengths and digest for these contents."""
        bare = replace(self, meta_len=len(meta), payload_len=len(payload), digest=0)
        return replace(bare, digest=digest_of(bare, meta, payload))

    def check_digest(self, meta: bytes, payload: memoryview | bytes) -> None:
        """Raises FrameRefused when the contents are not those that were sealed."""
        if digest_of(replace(self, digest=0), meta, payload) != self.digest:
            raise FrameRefused("digest mismatch")


def digest_of(frame: Frame, meta: bytes, payload: memoryview | bytes) -> int:
    """xxh3-64 over header (digest 0), meta and payload."""
    state = xxhash.xxh3_64(frame.pack())
    state.update(meta)
    state.update(payload)
    return state.intdigest()


class FirstToken(wire.Message):
    """Meta of FINISH: where decode goes on."""

    token_id: int
    token_idx: int
    num_tokens: int  # tokens whose kv the pages hold
    finished: int = wire.RUNNING  # or STOP, LENGTH: nothing to decode


class Refused(wire.Message):
    """Meta of NACK."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class SenderEvent:
    """How a room's transfer ended, told once for each room that was not cancelled."""

    kind: Literal["acked", "nacked", "lost"]
    room: int
    message: str = ""


class PageSender(Protocol):
    """Prefill's end. Methods may be called from any thread and never block."""

    def send_pages(
        self,
        grant: wire.Grant,
        page_start: int,
        shards: Sequence[np.ndarray],
        runs: Sequence[HeadRun],
    ) -> None:
        """Queue a run of pages.

        shards: one per source shard, [layers, 2, n, page_size, heads of the shard, head_dim],
        kept alive and unchanged until sent. Fills pages page_start .. page_start+n-1 of the
        grant. runs: which heads go where (transfer.layout.plan_heads).
        """
        ...

    def finish(self, grant: wire.Grant, first: FirstToken) -> None:
        """Queue the end of a room behind its pages."""
        ...

    def cancel(self, room: int) -> None:
        """Drop what is queued of a room and tell the receiver. No event follows."""
        ...

    @property
    def in_flight_bytes(self) -> int:
        """Bytes queued and not yet handed to the network."""
        ...

    def close(self) -> None: ...


class PageReceiver(Protocol):
    """Decode's end. Callbacks (on_pages, on_finish, on_lost) come from threads of its own."""

    @property
    def counters(self) -> Counter[str]:
        """frames, bytes and refusals by reason."""
        ...

    def start(self) -> str:
        """Begin to take frames; returns the data address that goes into grants."""
        ...

    def expect(self, room: int, epoch: int, num_pages: int) -> None:
        """Take frames of this room from now on."""
        ...

    def forget(self, room: int) -> None:
        """Refuse frames of this room from now on. Unknown rooms are ignored."""
        ...

    def ack(self, room: int) -> None:
        """Tell the sender that all arrived. Call before forget."""
        ...

    def close(self) -> None: ...


# --- the receiving side's checks and assembly, the same for every backend -----------------------


@dataclass(slots=True)
class _Run:
    """Pages of which some heads are still on their way."""

    shards: list[np.ndarray]
    covered: np.ndarray  # bool[tp_size, heads of a shard]


@dataclass(slots=True)
class _Expected:
    epoch: int
    num_pages: int
    delivered: np.ndarray  # bool[num_pages]
    runs: dict[tuple[int, int], _Run] = field(default_factory=dict)
    first: FirstToken | None = None


@dataclass(frozen=True, slots=True)
class Arrived:
    """A run of pages, complete: one array per shard, [layers, 2, n, page_size, heads, dim]."""

    page_start: int
    shards: list[np.ndarray]


class Inbound:
    """Rooms that may be written to, and what has come of each. Not thread-safe."""

    def __init__(self, kv: KVSpec, tp_size: int) -> None:
        self._kv = kv
        self._tp_size = tp_size
        self._local_heads = kv.num_kv_heads // tp_size
        self._dtype = np.dtype(_numpy_dtype(kv.dtype))
        self._rooms: dict[int, _Expected] = {}

    def expect(self, room: int, epoch: int, num_pages: int) -> None:
        assert room not in self._rooms, f"room {room} twice"
        self._rooms[room] = _Expected(epoch, num_pages, np.zeros(num_pages, bool))

    def forget(self, room: int) -> None:
        self._rooms.pop(room, None)

    def check(self, frame: Frame) -> None:
        """Judge a PAGES, FINISH or CANCEL header before its payload is read.

        Raises FrameRefused; its first word is the reason that is counted.
        """
        expected = self._rooms.get(frame.room)
        if expected is None:
            raise FrameRefused(f"unknown_room: {frame.room} is not expected here")
        if expected.epoch != frame.epoch:
            raise FrameRefused(f"stale_epoch: {frame.epoch}, this side has {expected.epoch}")
        if frame.kind is Kind.PAGES:
            self._check_pages(frame, expected)
        elif frame.payload_len:
            raise FrameRefused(f"payload: {frame.kind.name} carries none")

    def _check_pages(self, frame: Frame, expected: _Expected) -> None:
        end = frame.page_start + frame.num_pages
        if not 0 < frame.num_pages <= expected.num_pages or end > expected.num_pages:
            raise FrameRefused(
                f"out_of_range: pages {frame.page_start}..{end} of {expected.num_pages} granted"
            )
        heads_end = frame.dst_start + frame.num_heads
        if frame.dst_shard >= self._tp_size or not frame.num_heads or heads_end > self._local_heads:
            raise FrameRefused(
                f"out_of_range: heads {frame.dst_start}..{heads_end} of shard {frame.dst_shard}, "
                f"there are {self._tp_size} shards of {self._local_heads}"
            )
        want = int(np.prod(self._shape(frame.num_pages, frame.num_heads))) * self._dtype.itemsize
        if frame.payload_len != want:
            raise FrameRefused(f"size: {frame.payload_len} bytes of payload, expected {want}")
        if expected.first is not None:
            raise FrameRefused("order: pages after FINISH")
        span = slice(frame.page_start, end)
        if expected.delivered[span].any() or self._overlaps(frame, expected):
            raise FrameRefused(f"replayed: pages {frame.page_start}..{end} came before")

    def _overlaps(self, frame: Frame, expected: _Expected) -> bool:
        """Whether these heads of these pages are here already, in whole or in part."""
        key = (frame.page_start, frame.num_pages)
        for (start, count), run in expected.runs.items():
            if (start, count) == key:
                heads = slice(frame.dst_start, frame.dst_start + frame.num_heads)
                if run.covered[frame.dst_shard, heads].any():
                    return True
            elif start < key[0] + key[1] and key[0] < start + count:
                return True
        return False

    def pages(self, frame: Frame, payload: np.ndarray) -> Arrived | None:
        """Take a checked frame's payload (u8[n]); the run it completes, if it does.

        The room may have been forgotten since `check`: None then.
        """
        expected = self._rooms.get(frame.room)
        if expected is None or expected.epoch != frame.epoch:
            return None
        values = payload.view(self._dtype).reshape(self._shape(frame.num_pages, frame.num_heads))
        key = (frame.page_start, frame.num_pages)
        if self._tp_size == 1 and frame.num_heads == self._local_heads:
            shards = [values]
        else:
            run = expected.runs.get(key)
            if run is None:
                run = expected.runs[key] = self._new_run(frame.num_pages)
            heads = slice(frame.dst_start, frame.dst_start + frame.num_heads)
            if frame.num_heads == self._local_heads:
                run.shards[frame.dst_shard] = values
            else:
                run.shards[frame.dst_shard][..., heads, :] = values
            run.covered[frame.dst_shard, heads] = True
            if not run.covered.all():
                return None
            del expected.runs[key]
            shards = run.shards
        expected.delivered[frame.page_start : frame.page_start + frame.num_pages] = True
        return Arrived(frame.page_start, shards)

    def finish(self, frame: Frame, first: FirstToken) -> bool:
        """Take a checked FINISH. Raises FrameRefused when pages are missing."""
        expected = self._rooms.get(frame.room)
        if expected is None or expected.epoch != frame.epoch:
            return False
        if not expected.delivered.all():
            missing = int((~expected.delivered).sum())
            raise FrameRefused(f"order: FINISH with {missing} pages missing")
        expected.first = first
        return True

    def _new_run(self, num_pages: int) -> _Run:
        shape = self._shape(num_pages, self._local_heads)
        return _Run(
            [np.empty(shape, self._dtype) for _ in range(self._tp_size)],
            np.zeros((self._tp_size, self._local_heads), bool),
        )

    def _shape(self, num_pages: int, num_heads: int) -> tuple[int, ...]:
        kv = self._kv
        return (kv.num_layers, 2, num_pages, kv.page_size, num_heads, kv.head_dim)


def cut_frames(
    grant: wire.Grant,
    page_start: int,
    shards: Sequence[np.ndarray],
    runs: Sequence[HeadRun],
    max_frame_bytes: int,
) -> list[tuple[Frame, np.ndarray]]:
    """Frames (not sealed) and their payload arrays for a run of pages.

    Cuts are at the same pages for all shards, so that the receiver can put shards together.
    """
    num_pages = shards[0].shape[2]
    most_heads = max(run.num_heads for run in runs)
    layers, two, _, page_size, _, head_dim = shards[0].shape
    page_bytes = layers * two * page_size * head_dim * shards[0].itemsize * most_heads
    per_frame = max(1, min(num_pages, max_frame_bytes // page_bytes))
    frames = []
    for at in range(0, num_pages, per_frame):
        end = min(at + per_frame, num_pages)
        for run in runs:
            heads = slice(run.src_start, run.src_start + run.num_heads)
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
            frames.append((frame, shards[run.src_shard][:, :, at:end, :, heads]))
    return frames


def as_bytes(array: np.ndarray) -> memoryview:
    """The bytes of an array, copied only when it is not contiguous."""
    return memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8))


def _numpy_dtype(name: str) -> type:
    return ml_dtypes.bfloat16 if name == "bfloat16" else np.dtype(name).type
