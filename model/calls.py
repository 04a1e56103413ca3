"""Calls of an engine to its devices, by name: what a process alone does, and members alike.

An engine is a few programs and the arrays on the device that they pass on. What the host adds to
each call are small arrays; a member that is told the name and the arrays of every call, in order,
has the same programs running as its leader.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Tell = Callable[[str, int, Sequence[np.ndarray]], None]


class Calls:
    """The calls of one engine."""

    def __init__(self) -> None:
        self.tell: Tell | None = None  # the other members; None: there are none, or this is one
        self._known: dict[str, Callable[..., Any]] = {}

    def add(self, name: str, function: Callable[..., Any]) -> None:
        """function(key, *arrays) dispatches; key: of one of its programs."""
        self._known[name] = function

    def __call__(self, name: str, key: int, *arrays: np.ndarray, **own: Any) -> Any:
        """Tell the others, and do the same. own: what only this process has."""
        if self.tell is not None:
            self.tell(name, key, arrays)
        return self.take(name, key, *arrays, **own)

    def take(self, name: str, key: int, *arrays: np.ndarray, **own: Any) -> Any:
        """What was told. Raises KeyError for a name or a key that there is not."""
        return self._known[name](key, *arrays, **own)
