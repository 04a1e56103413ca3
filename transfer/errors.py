"""Failures that travel between processes.

    KvferryError
    ├── ConfigError              refuse to start: one line, exit code 2
    ├── RpcError                 a control call did not succeed
    │   ├── Unavailable          the peer is not there, or went away during the call
    │   ├── Unauthenticated      wrong or missing cluster token
    │   ├── Incompatible         both sides work, but not with each other
    │   │   └── Superseded       a later epoch of this worker is alive
    │   └── BadMessage           malformed, foreign or of another version
    ├── TransferError            pages did not arrive
    │   ├── PeerLost             the connection died
    │   └── FrameRefused         epoch, room, range or order was wrong
    └── RequestError             this one request cannot be served; carries a `Code`

A `RequestError` crosses the wire as its code and message inside a `RoomEvent`;
`serving/errors.py` maps the code to an HTTP status.
"""

import enum


class Code(enum.StrEnum):
    """Why a request failed, as it crosses the wire."""

    BAD_REQUEST = "bad_request"
    TOO_LONG = "too_long"
    QUEUE_FULL = "queue_full"
    DEADLINE = "deadline"
    ABORTED = "aborted"
    PEER_LOST = "peer_lost"
    SHUTTING_DOWN = "shutting_down"
    DRAINING = "draining"  # handed on by a worker that is leaving: no error
    STALE = "stale"
    GONE = "gone"  # the other worker gave the room up, and reports the reason itself
    INTERNAL = "internal"

    @property
    def retryable(self) -> bool:
        """Whether another pair of workers may succeed where this one failed."""
        return self in (
            Code.QUEUE_FULL,
            Code.PEER_LOST,
            Code.SHUTTING_DOWN,
            Code.DRAINING,
            Code.STALE,
            Code.GONE,
        )


class KvferryError(Exception):
    """Root of every error of ours."""


class ConfigError(KvferryError):
    """A flag, a file or this machine does not allow a start. The message is one line."""


class RpcError(KvferryError):
    """A control call did not succeed."""


class Unavailable(RpcError):
    """The peer is not there, or went away during the call."""


class Unauthenticated(RpcError):
    """The cluster token is wrong or missing."""


class Incompatible(RpcError):
    """Both sides work, but not with each other; the message names both values."""


class Superseded(Incompatible):
    """A later epoch of the same worker is alive."""


class BadMessage(RpcError):
    """Malformed, foreign or of another version."""


class TransferError(KvferryError):
    """Pages did not arrive."""


class PeerLost(TransferError):
    """The data connection died."""


class Refusal(enum.StrEnum):
    """Why a frame is refused, as it is counted."""

    UNKNOWN_ROOM = "unknown_room"
    STALE_EPOCH = "stale_epoch"
    FOREIGN = "foreign"  # another connection feeds the room
    ORDER = "order"
    SIZE = "size"
    OUT_OF_RANGE = "out_of_range"
    REPLAYED = "replayed"
    MALFORMED = "malformed"


class FrameRefused(TransferError):
    """A frame has a wrong epoch, room, range or order."""

    def __init__(self, reason: Refusal, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


class RequestError(KvferryError):
    """This one request cannot be served."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
