"""Text with a model's own markers in it, read from marker to marker, in pieces as it comes.

What may be the beginning of a marker waits for more, so what is told does not depend on how the
text was cut.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field

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

    A call is told when all of it is there. One that cannot be read, or is of no tool that the
    request names, stays text.
    """

    def __init__(self, tools: frozenset[str]) -> None:
        """tools: names of those that may be called."""
        self._tools = tools
        self._told = Told()
        self._text = ""  # fed, and not passed yet

    def feed(self, text: str) -> Told:
        """The next text."""
        self._told = Told()
        self._text += text
        self._walk(is_last=False)
        return self._told

    def finish(self) -> Told:
        """What waited, as no more comes."""
        self._told = Told()
        self._walk(is_last=True)
        self._over()
        return self._told

    def _walk(self, is_last: bool) -> None:
        while self._text:
            markers = self._markers()
            marker, at = _first(self._text, markers)
            if not marker:
                at = len(self._text) - (0 if is_last else _begun(self._text, markers))
            passed, self._text = self._text[:at], self._text[at:]
            if passed:
                self._passed(passed)
                if self._markers() != markers:
                    continue  # what comes next may mean something else now
            if not marker:
                return
            self._text = self._text.removeprefix(marker)
            self._found(marker)

    def _called(self, written: str, read: Callable[[], list[ToolCall]]) -> bool:
        """A call ended; whether it is one. written: by the model, markers included."""
        try:
            calls = read()
        except ValueError:
            calls = []
        if calls and all(call.name in self._tools for call in calls):
            self._told.calls += calls
            return True
        self._told.content += written
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


def _first(text: str, markers: tuple[str, ...]) -> tuple[str, int]:
    """The first marker there, and where; ("", -1) without one."""
    found = [(at, marker) for marker in markers if (at := text.find(marker)) >= 0]
    at, marker = min(found, default=(-1, ""))
    return marker, at


def _begun(text: str, markers: tuple[str, ...]) -> int:
    """How many characters at its end may be the beginning of a marker."""
    lengths = (
        count
        for marker in markers
        for count in range(min(len(marker) - 1, len(text)), 0, -1)
        if text.endswith(marker[:count])
    )
    return max(lengths, default=0)
