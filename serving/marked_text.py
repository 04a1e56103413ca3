"""Text with a model's own markers in it, read from marker to marker, in pieces as it comes.

What may be the beginning of a marker waits for more, so what is told does not depend on how the
text was cut.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

from serving.tool_calls import ToolCall


@dataclass(slots=True)
class Told:
    """What a piece of text came to."""

    reasoning: str = ""
    content: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    def __add__(self, more: "Told") -> "Told":
        return Told(
            self.reasoning + more.reasoning, self.content + more.content, self.calls + more.calls
        )


class MarkedText(ABC):
    """The text of one choice. What is looked for depends on where it is.

    Any text takes time that grows as its length does: all streams wait for it. So what grows is
    a list until it is told, and nothing is looked at twice.

    A call is told when all of it is there. One that cannot be read, or is of no tool that the
    request names, stays text.
    """

    def __init__(self, tools: frozenset[str]) -> None:
        """tools: names of those that may be called."""
        self._tools = tools
        # Not told yet.
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._found_calls: list[ToolCall] = []
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
        told = Told("".join(self._reasoning), "".join(self._content), self._found_calls)
        self._reasoning, self._content, self._found_calls = [], [], []
        return told

    def _called(self, written: str, read: Callable[[], list[ToolCall]]) -> bool:
        """A call ended; whether it is one. written: by the model, markers included."""
        try:
            calls = read()
        except (ValueError, RecursionError):
            calls = []
        if calls and all(call.name in self._tools for call in calls):
            self._found_calls += calls
            return True
        self._content.append(written)
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
