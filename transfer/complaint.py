"""Tells of what goes wrong again and again: each way of it once, until it has gone well.

Of ways that follow each other fast some are left out: they come again.
"""

import logging

from transfer.clock import SYSTEM_CLOCK

_MOST_NAMES = 1000
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
