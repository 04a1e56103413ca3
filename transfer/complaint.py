"""Logs failures that recur: each kind once, until the operation succeeds again.

Different failures in quick succession are not all logged: they come again. What strangers do, as
often as they like, is counted.
"""

import logging
import math

from transfer.clock import SYSTEM_CLOCK, Clock

_MOST_NAMES = 1000
_MINUTE_S = 60.0
_QUIET_S = 1.0  # between two lines: a peer may go wrong in a new way each time


class Complaint:
    """Logs the failures of one operation that is retried for ever."""

    def __init__(self, log: logging.Logger, what: str) -> None:
        self._log = log
        self._what = what
        self._told, self._told_s = "", -_QUIET_S

    def tell(self, error: Exception | str) -> None:
        """The operation failed."""
        now_s = SYSTEM_CLOCK.monotonic_s()
        if str(error) != self._told and now_s - self._told_s >= _QUIET_S:
            self._told, self._told_s = str(error), now_s
            self._log.warning("%s: %s", self._what, error)

    def settle(self) -> None:
        """The operation succeeded: the same failure will be news again."""
        self._told, self._told_s = "", -_QUIET_S


class Complaints:
    """A Complaint for each of many operations that are retried for ever, by name (any thread)."""

    def __init__(self, log: logging.Logger, what: str) -> None:
        self._log = log
        self._what = what
        self._named: dict[str, Complaint] = {}

    def of(self, name: str) -> Complaint:
        """The Complaint of this name; its lines begin with `what` and the name."""
        if name not in self._named and len(self._named) >= _MOST_NAMES:
            self._named.clear()  # some failures are logged twice then
        return self._named.setdefault(name, Complaint(self._log, f"{self._what}: {name}"))


class Tally:
    """Counts one thing that strangers do: logs the first, then at most one line a minute."""

    def __init__(self, log: logging.Logger, what: str, clock: Clock = SYSTEM_CLOCK) -> None:
        """what: the message, with a %d for the number of times."""
        self._log = log
        self._what = what
        self._clock = clock
        self._untold = 0
        self._told_s = -math.inf

    def tell(self, last: str) -> None:
        """It happened again, this time by peer `last`."""
        self._untold += 1
        now_s = self._clock.monotonic_s()
        since_s = now_s - self._told_s
        if since_s >= _MINUTE_S:
            within = f" in {since_s:.0f} s" if math.isfinite(since_s) else ""
            self._log.warning(f"{self._what}%s, the last from %s", self._untold, within, last)
            self._untold, self._told_s = 0, now_s
