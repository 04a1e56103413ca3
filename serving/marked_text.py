"""Base of the incremental parsers that split a model's text at its own markers.

Text that may be the beginning of a marker is held back until more arrives, so the result does not
depend on how the text was cut into pieces.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Final

from serving.tool_calls import ToolCall, Tools

# Put after a marker that the model wrote as one token, for parsers that heed only these. Half a
# surrogate, which is in no text that ids decode to.
TOKEN_SEAL: Final = "\udc00"


@dataclass(frozen=True, slots=True)
class Thought:
    """Text of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class Said:
    """Text of the answer."""

    text: str


@dataclass(slots=True)
class Told:
    """What parsing a piece of text yielded, in the order of the text."""

    parts: list[Thought | Said | ToolCall] = field(default_factory=list)

    @property
    def reasoning(self) -> str:
        """The text of all thoughts."""
        return "".join(part.text for part in self.parts if isinstance(part, Thought))

    @property
    def content(self) -> str:
        """The text of the answer itself."""
        return "".join(part.text for part in self.parts if isinstance(part, Said))

    @property
    def calls(self) -> list[ToolCall]:
        return [part for part in self.parts if isinstance(part, ToolCall)]

    def __add__(self, more: "Told") -> "Told":
        return Told(self.parts + more.parts)


class MarkedText(ABC):
    """Parses the text of one choice. Which markers it looks for depends on where it is.

    All streams wait while it parses, so parsing is linear in the length of any text: whatever
    grows is a list until it is returned, and no text is scanned twice.

    A call is returned once it is complete. A call that cannot be parsed, or that names a tool
    which the request does not offer, stays text.
    """

    def __init__(self, tools: Tools) -> None:
        """tools: the tools that the model may call."""
        self._tools = tools
        self._parts: list[Thought | Said | ToolCall] = []  # not returned yet
        self._text = ""  # fed, but held back

    def feed(self, text: str) -> Told:
        """Parse the next piece of text."""
        self._text += text
        self._walk(is_last=False)
        return self._tell()

    def finish(self) -> Told:
        """Parse what was held back, as the text has ended."""
        self._walk(is_last=True)
        self._over()
        return self._tell()

    def _walk(self, is_last: bool) -> None:
        text, at = self._text, 0  # text before `at` is done
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
                    continue  # the markers changed: search again
            if not first:
                break
            at = first.end()
            self._found(first[0])
        self._text = text[at:]

    def _tell(self) -> Told:
        told, self._parts = Told(self._parts), []
        return told

    def _called(self, written: str, read: Callable[[], list[ToolCall]]) -> bool:
        """Add the calls that `read` finds, or `written` as text; whether there were calls.

        written: the whole call as the model wrote it, markers included.
        """
        try:
            calls = read()
        except (ValueError, RecursionError):
            calls = []
        if calls and all(call.name in self._tools for call in calls):
            self._parts += calls
            return True
        self._say(written)
        return False

    def _say(self, text: str) -> None:
        """Add text of the answer."""
        self._parts.append(Said(text))

    @abstractmethod
    def _markers(self) -> tuple[str, ...]:
        """The markers to look for from here on."""

    @abstractmethod
    def _passed(self, text: str) -> None:
        """Handle text before the next marker, which may come in several parts."""

    @abstractmethod
    def _found(self, marker: str) -> None: ...

    @abstractmethod
    def _over(self) -> None:
        """Handle the end of the text."""


@cache
def _any_of(markers: tuple[str, ...]) -> re.Pattern[str]:
    """A pattern that finds the first of these markers; without markers it matches nowhere.

    No marker may be a prefix of another.
    """
    return re.compile("|".join(map(re.escape, markers)) or "(?!)")


def _begun(text: str, at: int, markers: tuple[str, ...]) -> int:
    """How many characters at the end of `text`, from `at` on, may be the beginning of a marker."""
    lengths = (
        count
        for marker in markers
        for count in range(min(len(marker) - 1, len(text) - at), 0, -1)
        if text.endswith(marker[:count])
    )
    return max(lengths, default=0)
