"""Tells of what goes wrong again and again: each way of it once, until it has gone well."""

import logging

_MOST_NAMES = 1000


class Complaint:
    """One thing that is tried for ever."""

    def __init__(self, log: logging.Logger, what: str) -> None:
        self._log = log
        self._what = what
        self._told = ""

    def tell(self, error: Exception | str) -> None:
        """It went wrong."""
        if str(error) != self._told:
            self._told = str(error)
            self._log.warning("%s: %s", self._what, error)

    def settle(self) -> None:
        """It went well: the same again will be news."""
        self._told = ""


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
