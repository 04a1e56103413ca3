"""What the two ends of every data plane share: the frame, and the events that they tell.

A sender (prefill) pushes frames into rooms that the receiver (decode) expects:

    CHALLENGE <-   HELLO ->   WELCOME <-         each end proves that it knows the cluster token
    PAGES ->  ...  FINISH ->  ACK <-             one room, all well
    PAGES ->  NACK <-                            refused: unknown, stale, corrupt, out of range
    CANCEL ->                                    the sender gives the room up
    PING ->   PONG <-                            signs of life while rooms are open
    MEMORY <-   CREDIT <-                        the receiver's slots; slots that are free again

Frames of one room are in order on one connection. A frame is header, meta, payload and digest
(xxh3-64 of all before it). The digest comes last so that both ends can compute it while the
payload passes through their caches. Lengths are checked against the room before they are used.
When the payload lies in memory that both ends share, header, meta and digest travel without it,
and the digest covers a sample of it.
"""

import enum
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal, NamedTuple

import msgspec
import numpy as np
import xxhash

from transfer import wire
from transfer.errors import BadMessage, Code
from transfer.numbers import AtLeastOne, Count

MAGIC = b"KVF1"
MAX_META_BYTES = 1 << 16
MAX_PAYLOAD_BYTES = 1 << 31
# magic, version, kind, room, epoch, page_start, num_pages, dst_shard, dst_start, num_heads,
# meta_len, payload_len
_HEADER = struct.Struct("<4sHHqqIIIIIIQ")
HEADER_BYTES = _HEADER.size
_DIGEST = struct.Struct("<Q")
DIGEST_BYTES = _DIGEST.size
NO_PAYLOAD = memoryview(b"")
_WHOLE_BYTES = 64 << 10
_SAMPLED_EACH = 4096  # a page of memory, the least that is mapped, kept or lost as a unit
_SAMPLE_BYTES = 64  # a cache line, the least that is read
_LINE = np.dtype(f"V{_SAMPLE_BYTES}")
_LINES_EACH = _SAMPLED_EACH // _SAMPLE_BYTES


class Kind(enum.IntEnum):
    """The kind of a frame."""

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
    MEMORY = 11
    CREDIT = 12


_KINDS = {int(kind): kind for kind in Kind}


class Frame(msgspec.Struct, frozen=True, gc=False):
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

    def pack(self, meta_len: int | None = None, payload_len: int | None = None) -> bytes:
        """HEADER_BYTES bytes. meta_len, payload_len: used instead of the frame's own."""
        return _HEADER.pack(
            MAGIC,
            wire.WIRE_VERSION,
            self.kind,
            self.room,
            self.epoch,
            self.page_start,
            self.num_pages,
            self.dst_shard,
            self.dst_start,
            self.num_heads,
            self.meta_len if meta_len is None else meta_len,
            self.payload_len if payload_len is None else payload_len,
        )

    @staticmethod
    def unpack(data: bytes | bytearray | memoryview) -> "Frame":
        """Raises BadMessage unless data is a header of ours with sane lengths."""
        if len(data) != HEADER_BYTES:
            raise BadMessage(f"a frame header has {HEADER_BYTES} bytes, got {len(data)}")
        return Frame.unpack_from(data, 0)

    @staticmethod
    def unpack_from(data: bytes | bytearray | memoryview, at: int) -> "Frame":
        """As `unpack`, of the HEADER_BYTES bytes that begin at `at`."""
        magic, version, number, *rest = _HEADER.unpack_from(data, at)
        if magic != MAGIC:
            raise BadMessage(f"a frame begins with {MAGIC!r}, got {magic!r}")
        if version != wire.WIRE_VERSION:
            raise BadMessage(f"frame version {version}, this side speaks {wire.WIRE_VERSION}")
        kind = _KINDS.get(number)
        if kind is None:
            raise BadMessage(f"unknown frame kind {number}")
        frame = Frame(kind, *rest)
        if frame.meta_len > MAX_META_BYTES or frame.payload_len > MAX_PAYLOAD_BYTES:
            raise BadMessage(
                f"oversize frame: meta {frame.meta_len}, payload {frame.payload_len} bytes"
            )
        return frame


class Digest:
    """The digest at the end of a frame, computed piece by piece."""

    def __init__(self, head: bytes) -> None:
        """head: header and meta."""
        self._state = xxhash.xxh3_64(head)

    def update(self, part: memoryview) -> None:
        self._state.update(part)

    def pack(self) -> bytes:
        """DIGEST_BYTES bytes."""
        return _DIGEST.pack(self._state.intdigest())


def digest_at_once(head: bytes, payload: memoryview, is_sampled: bool = False) -> bytes:
    """The digest of a frame whose whole payload is in memory. head: header and meta.

    is_sampled: the payload lies in memory that both ends share. Up to 64 KiB all of it counts; of
    more, the beginning of each 4 KiB and the end. That detects bytes of another frame, late bytes
    and missing ones at no cost. Single flipped bits are left to the memory itself, as in the page
    pools.
    """
    if len(payload) <= _WHOLE_BYTES:
        whole = b"".join((head, payload)) if len(payload) else head
        return _DIGEST.pack(xxhash.xxh3_64_intdigest(whole))
    digest = Digest(head)
    if is_sampled:
        lines = np.frombuffer(payload, _LINE, len(payload) // _SAMPLED_EACH * _LINES_EACH)
        digest.update(memoryview(lines[::_LINES_EACH].tobytes()))
        digest.update(payload[-_SAMPLE_BYTES:])
    else:
        digest.update(payload)
    return digest.pack()


def whole_frame(frame: Frame, meta: bytes = b"", payload: Sequence[memoryview] = ()) -> bytearray:
    """A frame as it travels. Its lengths are set here, whatever `frame` has."""
    head = frame.pack(len(meta), sum(len(part) for part in payload)) + meta
    data = bytearray().join((head, *payload))
    data += digest_at_once(bytes(data), NO_PAYLOAD)
    return data


def without_payload(
    frame: Frame, meta: bytes = b"", payload: memoryview = NO_PAYLOAD, is_sampled: bool = False
) -> bytes:
    """A frame as it travels when meta says where its payload, if any, lies."""
    head = frame.pack(len(meta), len(payload)) + meta
    return head + digest_at_once(head, payload, is_sampled)


class FirstToken(wire.Message, frozen=True):
    """Meta of FINISH: where decode continues."""

    token_id: Count
    token_idx: Count
    num_tokens: Count  # tokens whose kv the pages hold
    # RUNNING; STOP and LENGTH leave nothing to decode.
    finished: Annotated[int, msgspec.Meta(ge=wire.RUNNING, le=wire.LENGTH)] = wire.RUNNING
    num_senders: AtLeastOne = 1  # nodes of prefill that send parts of the room to this address


class Source(NamedTuple):
    """Where frames come from: a worker, and which of its nodes."""

    sender_id: str
    node: int = 0


class Refused(wire.Message, frozen=True):
    """Meta of NACK."""

    code: str
    message: str


@dataclass(slots=True)
class Shipped:
    """What was sent for one room. Times are monotonic seconds; 0.0: not yet."""

    way: str = ""  # tcp, shm, ...
    num_bytes: int = 0
    num_frames: int = 0
    first_s: float = 0.0  # the first page frame begins to leave
    last_s: float = 0.0
    acked_s: float = 0.0
    page_ends: dict[int, float] = field(default_factory=dict)  # end of a frame's pages -> when sent


@dataclass(slots=True)
class SenderEvent:
    """How a room's transfer ended: one event for each room that was not cancelled.

    lost: the connection to the receiver is gone. unsent: this side could open no connection.
    """

    kind: Literal["acked", "nacked", "lost", "unsent"]
    room: int
    message: str = ""
    code: str = ""  # transfer.errors.Code, when nacked
    shipped: Shipped | None = field(default=None, compare=False)


@dataclass(frozen=True)
class PagesArrived:
    """A run of pages is complete.

    shards: one array per shard that came here, [layers, planes, n, page_size, heads of the shard,
    head_dim], now the listener's.
    """

    room: int
    page_start: int
    shards: list[np.ndarray]

    @property
    def num_pages(self) -> int:
        return self.shards[0].shape[2]


@dataclass(frozen=True)
class Arrived:
    """A run of pages is complete at a node that does not lead, and waits there."""

    room: int
    page_start: int
    num_pages: int


@dataclass(frozen=True)
class Finished:
    """All pages of the grant were delivered; decode continues from `first`."""

    room: int
    first: FirstToken


@dataclass(frozen=True)
class SenderLost:
    """Rooms whose pages will not be completed.

    code: GONE if the sender gave them up, PEER_LOST if the connection to it is gone.
    """

    rooms: tuple[int, ...]
    message: str
    code: Code


ReceiverEvent = PagesArrived | Finished | SenderLost
ReceivedEvent = ReceiverEvent | Arrived  # at any node
OnSenderEvent = Callable[[SenderEvent], None]
OnReceiverEvent = Callable[[ReceiverEvent], None]
