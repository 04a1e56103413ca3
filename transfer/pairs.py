"""What a sender moved, by backend and receiver: the figures behind the transfer metrics."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from transfer import wire

MAX_PAIRS = 64  # an address changes with each restart of a worker; the oldest are forgotten
_RECENT_FRAMES = 64


@dataclass(slots=True)
class _Pair:
    num_bytes: int = 0
    seconds: float = 0.0
    recent: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_RECENT_FRAMES))


class Pairs:
    """Totals by (backend, address of the receiver). Used under its sender's lock."""

    def __init__(self) -> None:
        self._pairs: dict[tuple[str, str], _Pair] = {}  # the one used last at the end

    def add(self, backend: str, address: str, num_bytes: int, took_s: float) -> None:
        """Add a frame of pages that took took_s to write, without any wait before that."""
        pair = self._pairs.pop((backend, address), None) or _Pair()
        self._pairs[backend, address] = pair
        pair.num_bytes += num_bytes
        pair.seconds += took_s
        pair.recent.append((num_bytes, took_s))
        if len(self._pairs) > MAX_PAIRS:
            del self._pairs[next(iter(self._pairs))]

    def told(self) -> tuple[wire.TransferPair, ...]:
        """For the answer to Info."""
        return tuple(
            wire.TransferPair(backend, address, pair.num_bytes, pair.seconds, _rate(pair.recent))
            for (backend, address), pair in sorted(self._pairs.items())
        )


def summed(pairs: Iterable[wire.TransferPair]) -> tuple[wire.TransferPair, ...]:
    """One for each backend and receiver: what all nodes of a worker wrote to it."""
    found: dict[tuple[str, str], wire.TransferPair] = {}
    for pair in pairs:
        key = pair.backend, pair.peer
        other = found.get(key, wire.TransferPair(*key, 0, 0.0, 0.0))
        found[key] = wire.TransferPair(
            *key,
            pair.num_bytes + other.num_bytes,
            pair.seconds + other.seconds,
            pair.recent_bytes_per_s + other.recent_bytes_per_s,
        )
    return tuple(found.values())


def _rate(recent: deque[tuple[int, float]]) -> float:
    """Bytes a second; 0.0 while no time has been measured."""
    seconds = sum(took_s for _, took_s in recent)
    return sum(num_bytes for num_bytes, _ in recent) / seconds if seconds else 0.0
