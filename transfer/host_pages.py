"""Pages of prefixes in the host's memory: those that a worker's prefix caches had to evict.

Invariant: a page is found only while its bytes are here, or will be before they are read. Pages are
found through the chain of digests of their prefix (transfer/prefix_cache.py), and those used
longest ago make room first, so within a chain the tail goes first. All data-parallel ranks whose
shards are on the same nodes share what is here.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence

import numpy as np

from transfer.buffers import BufferPool, PinMemory

Place = tuple[int, int]  # a slot of the host's memory, and which of its page's groups


class HostPages:
    """Which pages are here, and where, of a fixed number of each group of layers."""

    def __init__(self, num_pages: int, groups: int = 1) -> None:
        """groups: see model.config.KVSpec."""
        assert num_pages > 0
        self.num_pages = num_pages
        self.groups = groups
        self._free = list(range(num_pages - 1, -1, -1))
        self._slots: OrderedDict[bytes, int] = OrderedDict()  # oldest first
        self._num_groups = [0] * num_pages  # by slot: how many of a page's groups are here

    def __len__(self) -> int:
        """Pages of each group that are here."""
        return len(self._slots)

    def __contains__(self, digest: bytes) -> bool:
        slot = self._slots.get(digest)
        return slot is not None and self._num_groups[slot] == self.groups

    def num_found(self, chain: Iterable[bytes]) -> int:
        """How many of the first pages of a chain are here, without a gap."""
        num_pages = 0
        for digest in chain:
            if digest not in self:
                break
            num_pages += 1
        return num_pages

    def touch(self, chain: Sequence[bytes]) -> None:
        """Those of these pages that are here are used now."""
        for digest in reversed(chain):
            if digest in self._slots:
                self._slots.move_to_end(digest)

    def put(self, digest: bytes, group: int, besides: Collection[bytes] = ()) -> Place | None:
        """Where to copy a page to, at once: the groups of a digest in order.

        What was used longest ago makes room, but nothing in `besides`; None if that leaves no room,
        or if the page of an earlier group had to make room meanwhile.
        """
        slot = self._slots.get(digest)
        if slot is None:
            slot = self._room(besides) if group == 0 else None
            if slot is None:
                return None
            self._slots[digest], self._num_groups[slot] = slot, 0
        self._num_groups[slot] = max(self._num_groups[slot], group + 1)
        self._slots.move_to_end(digest)
        return slot, group

    def place_of(self, digest: bytes, group: int) -> Place:
        """Where a page is that is here."""
        return self._slots[digest], group

    def clear(self) -> int:
        """Forget all pages; returns how many of each group were here."""
        num_pages = len(self)
        self._free += self._slots.values()
        self._slots.clear()
        return num_pages

    def _room(self, besides: Collection[bytes]) -> int | None:
        """A slot to fill, or None."""
        if self._free:
            return self._free.pop()
        oldest = next((digest for digest in self._slots if digest not in besides), None)
        return None if oldest is None else self._slots.pop(oldest)


class HostMemory:
    """What one node has of the pages: its shards of them, allocated at once and touched."""

    def __init__(
        self,
        num_pages: int,
        num_shards: int,
        shape: tuple[int, ...],
        dtype: str,
        groups: int = 1,
        idle_bytes: int = 0,
        pin: PinMemory | None = None,
    ) -> None:
        """shape: of one shard's page, [layers, planes, page_size, kv heads, head_dim].

        num_shards: devices of a rank that this node has. groups: see model.config.KVSpec.
        idle_bytes: of the memory in which pages leave, how much is kept for the next ones. pin:
        called for such memory. Raises MemoryError when the host has too little.
        """
        self._shape, self._dtype = shape, np.dtype(dtype)
        shape_of_all = num_pages, groups, *shape
        self._shards = [np.empty(shape_of_all, self._dtype) for _ in range(num_shards)]
        for memory in self._shards:
            memory.fill(0)  # taken from the host now rather than amid traffic
        self._buffers = BufferPool(idle_bytes, pin)

    def store(self, place: Place, shards: Sequence[np.ndarray]) -> None:
        """Copy a page here. shards: one for each of this node, of the shape of a page."""
        for memory, shard in zip(self._shards, shards, strict=True):
            memory[place] = shard

    def fetch(self, places: Sequence[Place]) -> list[np.ndarray]:
        """Copies of pages, by shard: [layers, planes, n, page_size, kv heads, head_dim].

        The arrays are the caller's.
        """
        layers, planes, *rest = self._shape
        shape = layers, planes, len(places), *rest
        num_bytes = int(np.prod(shape)) * self._dtype.itemsize
        found = []
        for memory in self._shards:
            copies = self._buffers.take(num_bytes).view(self._dtype).reshape(shape)
            for at, place in enumerate(places):
                copies[:, :, at] = memory[place]
            found.append(copies)
        return found
