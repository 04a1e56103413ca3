"""Tells of what goes wrong again and again: each way of it once, until it has gone well."""

import logging


class Complaint:
    """One thing that is tried for ever."""

    def __init__(self, log: logging.Logger, what: str) -> None:
        self._log = log
        self._what = what
        self._told = ""

    def tell(self, error: Exception) -> None:
        """It went wrong."""
        if str(error) != self._told:
            self._told = str(error)
            self._log.warning("%s: %s", self._what, error)

    def settle(self) -> None:
        """It went well: the same again will be news."""
        self._told = ""
