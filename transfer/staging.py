"""Memory of the receiver that a sender fills: slots, each owned by one end at a time.

The receiver allocates it anew for each connection (`LentSlots`), and the sender keeps track of the
slots that it owns (`FillableSlots`). Within a host both map the memory (`SharedSlots`,
`BorrowedSlots`); transfer/nixl.py reaches it in another way.

Shared memory is passed as a file descriptor. No file names it, so it is gone once both ends have
released it, however they end. It is sealed: neither end can shrink it while the other uses it.

Invariant: a slot is the sender's until a frame names it, and the receiver's from then on until a
CREDIT names it. What a sender writes late, after its connection was given up, lands in memory
that nobody reads: the next connection has its own.
"""

import fcntl
import mmap
import os
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from functools import partial

import numpy as np

from transfer import wire
from transfer.buffers import PinMemory
from transfer.errors import BadMessage, ConfigError

_SEALS = (
    getattr(fcntl, "F_SEAL_SHRINK", 0)
    | getattr(fcntl, "F_SEAL_GROW", 0)
    | getattr(fcntl, "F_SEAL_SEAL", 0)
)
_ENOUGH_BYTES = 128 << 20
# References to lent views, kept so that `_free` runs even after the connection is gone.
_VIEWS: dict[int, "weakref.ref[np.ndarray]"] = {}
_MOST_CREDITED = 8192  # in one message, whose size has a bound
_LEAST_FREED = 4  # slots that one CREDIT reports at least: one message for several frames


class SlotShape(wire.Message, frozen=True):
    """Meta of MEMORY: num_slots consecutive slots of slot_bytes each."""

    slot_bytes: int
    num_slots: int

    @property
    def num_bytes(self) -> int:
        return self.slot_bytes * self.num_slots


class InSlot(wire.Message, frozen=True):
    """Meta of PAGES whose payload lies in the receiver's memory, at the beginning of a slot."""

    slot: int


class Credit(wire.Message, frozen=True):
    """Meta of CREDIT: slots that may be written again."""

    slots: bytes  # i32[n]


def can_share_memory() -> bool:
    """Whether this platform has sealed anonymous memory files."""
    return hasattr(os, "memfd_create") and hasattr(fcntl, "F_ADD_SEALS")


def slot_shape(page_bytes: int, tp_size: int, frame_bytes: int, staging_bytes: int) -> SlotShape:
    """Slots that hold frame_bytes, or one shard's page if that is more.

    page_bytes: of one page of one shard. staging_bytes: of all slots; 0 = enough. Raises
    ConfigError when it holds fewer than two frames for each shard: a run of pages is kept until
    the last shard's part is there.
    """
    slot_bytes = -(-max(page_bytes, frame_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE
    least = 2 * tp_size * slot_bytes
    staging_bytes = staging_bytes or max(_ENOUGH_BYTES, 2 * least)
    if staging_bytes < least:
        raise ConfigError(
            f"--transfer-staging-bytes must be at least {least} for pages of {page_bytes} bytes "
            f"in {tp_size} shards, got {staging_bytes}"
        )
    return SlotShape(slot_bytes, staging_bytes // slot_bytes)


class LentSlots:
    """The receiver's end: gives views of what the sender wrote."""

    def __init__(self, shape: SlotShape, memory: mmap.mmap, on_freed: Callable[[], None]) -> None:
        """memory: shape.num_bytes. on_freed: enough slots for a CREDIT are free (any thread)."""
        self.shape = shape
        self._memory = memory
        self._bytes = np.frombuffer(memory, np.uint8)
        self._on_freed: Callable[[], None] | None = on_freed
        self._held = bytearray(shape.num_slots)  # 1: the receiver's
        self._freed: deque[int] = deque()
        self._least_freed = max(1, min(_LEAST_FREED, shape.num_slots // 4))

    def take(self, slot: int, num_bytes: int) -> np.ndarray:
        """u8[num_bytes] of a slot that the sender filled; freed with the last view of it.

        Raises BadMessage for a slot that the sender did not own.
        """
        if not 0 <= slot < self.shape.num_slots or self._held[slot]:
            raise BadMessage(f"slot {slot} of {self.shape.num_slots} is not the sender's")
        if num_bytes > self.shape.slot_bytes:
            raise BadMessage(f"{num_bytes} bytes in a slot of {self.shape.slot_bytes}")
        self._held[slot] = 1
        # A view made through the buffer protocol stays the base of every view made of it, so it
        # is collected only after all of them.
        start = slot * self.shape.slot_bytes
        lent = np.frombuffer(memoryview(self._bytes), np.uint8, num_bytes, start)
        view = weakref.ref(lent, partial(self._free, slot))
        _VIEWS[id(view)] = view
        return lent

    def close(self) -> None:
        """Release the memory, which is gone with the last view of it."""
        del self._memory, self._bytes
        self._on_freed = None

    def _free(self, slot: int, view: object) -> None:
        """The last view of a slot is gone (any thread)."""
        del _VIEWS[id(view)]
        self._freed.append(slot)
        told = self._on_freed
        if told is not None and len(self._freed) >= self._least_freed:
            told()

    def credit(self) -> Credit | None:
        """The next CREDIT; None while too few slots are free for a message (one thread)."""
        if len(self._freed) < self._least_freed:
            return None
        slots = [self._freed.popleft() for _ in range(min(len(self._freed), _MOST_CREDITED))]
        for slot in slots:
            self._held[slot] = 0
        return Credit(wire.pack_i32(slots))


class SharedSlots(LentSlots):
    """Slots in memory that the sender maps too."""

    def __init__(
        self, shape: SlotShape, on_freed: Callable[[], None], pin: PinMemory | None = None
    ) -> None:
        """Raises OSError when the memory cannot be allocated."""
        self.fd = os.memfd_create("kvferry-pages", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, shape.num_bytes)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
            memory = mmap.mmap(self.fd, shape.num_bytes)
        except OSError:
            os.close(self.fd)
            raise
        super().__init__(shape, memory, on_freed)
        if pin is not None:
            pin(self._bytes)

    def close_fd(self) -> None:
        """Close the descriptor: the sender has it, and this end has its mapping."""
        os.close(self.fd)


class FillableSlots(ABC):
    """The sender's end: keeps track of the slots that it owns.

    Used by one thread at a time, except for `take_back`, which another may call meanwhile.
    """

    def __init__(self, shape: SlotShape) -> None:
        self._shape = shape
        # The slot that came back last is written first: it is still in the caches.
        self._free = list(reversed(range(shape.num_slots)))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def fits(self, num_bytes: int) -> bool:
        """Whether num_bytes can be written now."""
        return bool(self._free) and num_bytes <= self._shape.slot_bytes

    @abstractmethod
    def write(self, pages: np.ndarray) -> tuple[int, memoryview]:
        """Write pages of any shape and dtype into a free slot; returns (slot, its bytes).

        Raises BadMessage when the pages do not fit in a slot.
        """

    def keep(self, slot: int) -> None:
        """Take back a slot whose frame was not sent."""
        self._free.append(slot)

    def close(self) -> None:
        """The connection is over: nothing can be written any more."""
        self._free.clear()

    def take_back(self, credit: Credit) -> None:
        """Own these slots again. Raises BadMessage for a slot that was not given away."""
        slots = wire.unpack_i32(credit.slots).tolist()
        free = set(self._free)  # a slot taken meanwhile leaves it, but no credit names that one yet
        if len(set(slots)) != len(slots) or not all(
            0 <= slot < self._shape.num_slots and slot not in free for slot in slots
        ):
            raise BadMessage(f"credit for slots {slots}, which are not the receiver's")
        self._free.extend(slots)

    def _next(self, num_bytes: int) -> int:
        """Take a free slot to give away. Raises BadMessage when num_bytes exceed a slot."""
        if num_bytes > self._shape.slot_bytes:
            raise BadMessage(
                f"a frame of {num_bytes} bytes, the receiver's slots have {self._shape.slot_bytes}"
            )
        return self._free.pop()


class BorrowedSlots(FillableSlots):
    """The sender's end of shared memory: writes pages where the receiver reads them."""

    def __init__(self, fd: int, shape: SlotShape) -> None:
        """fd: of the memory; closed here. Raises BadMessage when it does not match shape."""
        try:
            if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
                raise BadMessage("the memory of the receiver is not sealed")
            size = os.fstat(fd).st_size
            if size != shape.num_bytes or shape.num_slots < 1:
                raise BadMessage(f"{size} bytes of shared memory, {shape.num_bytes} announced")
            self._memory = np.frombuffer(mmap.mmap(fd, size), np.uint8)
        except OSError as error:
            raise BadMessage(f"cannot use the memory of the receiver: {error}") from error
        finally:
            os.close(fd)
        super().__init__(shape)

    def write(self, pages: np.ndarray) -> tuple[int, memoryview]:
        slot = self._next(pages.nbytes)
        start = slot * self._shape.slot_bytes
        target = self._memory[start : start + pages.nbytes]
        copy_bytes(pages, target)
        return slot, memoryview(target)


def copy_bytes(pages: np.ndarray, target: np.ndarray) -> None:
    """Copy pages, maybe a slice of a larger array, to target, u8[pages.nbytes]."""
    np.copyto(target.view(pages.dtype).reshape(pages.shape), pages)
