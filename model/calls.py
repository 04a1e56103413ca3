"""An engine's calls to its devices, by name, so that every member of a mesh can make the same.

An engine is a few programs and the device arrays that they hand on. The host adds only small arrays
to each call, so a member that is told the name and the arrays of every call, in order, runs the
same programs as its leader.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Tell = Callable[[str, int, Sequence[np.ndarray]], None]


class Calls:
    """The calls of one engine."""

    def __init__(self) -> None:
        self.tell: Tell | None = None  # tells the other members; None unless this one leads some
        self._known: dict[str, Callable[..., Any]] = {}

    def add(self, name: str, function: Callable[..., Any]) -> None:
        """function(key, *arrays) dispatches one of its programs; key says which."""
        self._known[name] = function

    def __call__(self, name: str, key: int, *arrays: np.ndarray, **own: Any) -> Any:
        """Tell the other members, then make the call. own: what only this process has."""
        if self.tell is not None:
            self.tell(name, key, arrays)
        return self.take(name, key, *arrays, **own)

    def take(self, name: str, key: int, *arrays: np.ndarray, **own: Any) -> Any:
        """Make a call that was told. Raises KeyError for an unknown name or key."""
        return self._known[name](key, *arrays, **own)
