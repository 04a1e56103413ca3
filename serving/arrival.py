"""Records when a request came in, by both clocks: one to show, one to measure and wait with."""

from dataclasses import dataclass
from typing import Self

from transfer.clock import Clock


@dataclass(frozen=True)
class Arrival:
    """Subtract only monotonic_s: the other clock may be set between two readings."""

    unix_s: float
    monotonic_s: float

    @classmethod
    def now(cls, clock: Clock) -> Self:
        return cls(clock.now_s(), clock.monotonic_s())

    @property
    def created(self) -> int:
        """Whole seconds, as in OpenAI's answers."""
        return int(self.unix_s)
