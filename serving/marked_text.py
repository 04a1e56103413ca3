"""Text with a model's own markers in it, read from marker to marker, in pieces as it comes.

What may be the beginning of a marker waits for more, so what is told does not depend on how the
text was cut.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

from serving.tool_calls import ToolCall, Tools


@dataclass(frozen=True, slots=True)
class Thought:
    """Text of a thought."""

    text: str


@dataclass(frozen=True, slots=True)
class Said:
    """Text of the answer."""

    text: str


@dataclass(slots=True)
class Told:
    """What a piece of text came to, in its order."""

    parts: list[Thought | Said | ToolCall] = field(default_factory=list)

    @property
    def reasoning(self) -> str:
        """All that was thought."""
        return "".join(part.text for part in self.parts if isinstance(part, Thought))

    @property
    def content(self) -> str:
        """All that was said."""
        return "".join(part.text for part in self.parts if isinstance(part, Said))

    @property
    def calls(self) -> list[ToolCall]:
        return [part for part in self.parts if isinstance(part, ToolCall)]

    def __add__(self, more: "Told") -> "Told":
        return Told(self.parts + more.parts)


class MarkedText(ABC):
    """The text of one choice. What is looked for depends on where it is.

    Any text takes time that grows as its length does: all streams wait for it. So what grows is
    a list until it is told, and nothing is looked at twice.

    A call is told when all of it is there. One that cannot be read, or is of no tool that the
    request names, stays text.
    """

    def __init__(self, tools: Tools) -> None:
        """tools: those that may be called."""
        self._tools = tools
        self._parts: list[Thought | Said | ToolCall] = []  # not told yet
        self._text = ""  # fed, and not passed yet

    def feed(self, text: str) -> Told:
        """The next text."""
        self._text += text
        self._walk(is_last=False)
        return self._tell()

    def finish(self) -> Told:
        """What waited, as no more comes."""
        self._walk(is_last=True)
        self._over()
        return self._tell()

    def _walk(self, is_last: bool) -> None:
        text, at = self._text, 0  # what is before `at` is passed
        while at < len(text):
            markers = self._markers()
            first = _any_of(markers).search(text, at)
            if first:
                end = first.start()
            else:
                end = len(text) - (0 if is_last else _begun(text, at, markers))
            if end > at:
                self._passed(text[at:end])
                at = end
                if self._markers() != markers:
                    continue  # what comes next may mean something else now
            if not first:
                break
            at = first.end()
            self._found(first[0])
        self._text = text[at:]

    def _tell(self) -> Told:
        told, self._parts = Told(self._parts), []
        return told

    def _called(self, written: str, read: Callable[[], list[ToolCall]]) -> bool:
        """A call ended; whether it is one. written: by the model, markers included."""
        try:
            calls = read()
        except (ValueError, RecursionError):
            calls = []
        if calls and all(call.name in self._tools for call in calls):
            self._parts += calls
            return True
        self._parts.append(Said(written))
        return False

    @abstractmethod
    def _markers(self) -> tuple[str, ...]:
        """What to look for from here on."""

    @abstractmethod
    def _passed(self, text: str) -> None:
        """Text up to the next marker, or a part of it."""

    @abstractmethod
    def _found(self, marker: str) -> None: ...

    @abstractmethod
    def _over(self) -> None:
        """The text ends here."""


@cache
def _any_of(markers: tuple[str, ...]) -> re.Pattern[str]:
    """Finds the first of them, of which none begins another. None are found nowhere."""
    return re.compile("|".join(map(re.escape, markers)) or "(?!)")


def _begun(text: str, at: int, markers: tuple[str, ...]) -> int:
    """How many characters at its end, from `at` on, may be the beginning of a marker."""
    lengths = (
        count
        for marker in markers
        for count in range(min(len(marker) - 1, len(text) - at), 0, -1)
        if text.endswith(marker[:count])
    )
    return max(lengths, default=0)
