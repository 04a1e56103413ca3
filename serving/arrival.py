"""When a request came in, by both clocks: one to show, one to measure and to wait with."""

from dataclasses import dataclass
from typing import Self

from transfer.clock import Clock


@dataclass(frozen=True)
class Arrival:
    """Whoever subtracts takes monotonic_s: the other clock may be set meanwhile."""

    unix_s: float
    monotonic_s: float

    @classmethod
    def now(cls, clock: Clock) -> Self:
        return cls(clock.now_s(), clock.monotonic_s())

    @property
    def created(self) -> int:
        """As OpenAI's answers have it."""
        return int(self.unix_s)
