"""Tells of what goes wrong again and again: each way of it once, until it has gone well.

Of ways that follow each other fast some are left out: they come again. What strangers do, as often
as they like, is counted.
"""

import logging
import math

from transfer.clock import SYSTEM_CLOCK, Clock

_MOST_NAMES = 1000
_MINUTE_S = 60.0
_QUIET_S = 1.0  # between two lines: a peer may go wrong in a new way each time


class Complaint:
    """One thing that is tried for ever."""

    def __init__(self, log: logging.Logger, what: str) -> None:
        self._log = log
        self._what = what
        self._told, self._told_s = "", -_QUIET_S

    def tell(self, error: Exception | str) -> None:
        """It went wrong."""
        now_s = SYSTEM_CLOCK.monotonic_s()
        if str(error) != self._told and now_s - self._told_s >= _QUIET_S:
            self._told, self._told_s = str(error), now_s
            self._log.warning("%s: %s", self._what, error)

    def settle(self) -> None:
        """It went well: the same again will be news."""
        self._told, self._told_s = "", -_QUIET_S


class Complaints:
    """A complaint for each of many that are tried for ever, by name (any thread)."""

    def __init__(self, log: logging.Logger, what: str) -> None:
        self._log = log
        self._what = what
        self._named: dict[str, Complaint] = {}

    def of(self, name: str) -> Complaint:
        """The one of this name, whose lines begin with what goes wrong and the name."""
        if name not in self._named and len(self._named) >= _MOST_NAMES:
            self._named.clear()  # some is told twice then
        return self._named.setdefault(name, Complaint(self._log, f"{self._what}: {name}"))


class Tally:
    """One thing that strangers do: the first is told of, and of more once a minute at most."""

    def __init__(self, log: logging.Logger, what: str, clock: Clock = SYSTEM_CLOCK) -> None:
        """what: with a %d where their number goes."""
        self._log = log
        self._what = what
        self._clock = clock
        self._untold = 0
        self._told_s = -math.inf

    def tell(self, last: str) -> None:
        """Once more, by that peer."""
        self._untold += 1
        now_s = self._clock.monotonic_s()
        since_s = now_s - self._told_s
        if since_s >= _MINUTE_S:
            within = f" in {since_s:.0f} s" if math.isfinite(since_s) else ""
            self._log.warning(f"{self._what}%s, the last of %s", self._untold, within, last)
            self._untold, self._told_s = 0, now_s
