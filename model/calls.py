"""A worker's calls by name, to its devices and to ship pages, so that every node can make the same.

An engine is a few programs and the device arrays that they hand on. The host adds only small arrays
to each call, so a member that is told the name and the arrays of every call, in order, runs the
same programs as its leader. What it does with pages beside them is told in the same order.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Tell = Callable[[str, int, Sequence[np.ndarray]], None]


class Calls:
    """The calls of one worker."""

    def __init__(self) -> None:
        self.tell: Tell | None = None  # tells the other members; None unless this one leads some
        self._known: dict[str, Callable[..., Any]] = {}
        self._at_once: set[str] = set()

    def add(self, name: str, function: Callable[..., Any], at_once: bool = False) -> None:
        """function(key, *arrays) makes a call, such as one of several programs; key says which.

        at_once: a member makes this call when it is told, on another thread, rather than behind
        calls that wait for its devices.
        """
        self._known[name] = function
        if at_once:
            self._at_once.add(name)

    def is_at_once(self, name: str) -> bool:
        return name in self._at_once

    def __call__(self, name: str, key: int, *arrays: np.ndarray, **own: Any) -> Any:
        """Tell the other members, then make the call. own: what only this process has."""
        if self.tell is not None:
            self.tell(name, key, arrays)
        return self.take(name, key, *arrays, **own)

    def take(self, name: str, key: int, *arrays: np.ndarray, **own: Any) -> Any:
        """Make a call that was told. Raises KeyError for an unknown name or key."""
        return self._known[name](key, *arrays, **own)
