"""Parses GPT-OSS's answers: messages, each with a channel, and calls as messages to a tool.

Format: openai/harmony: docs/format.md. A message is `<|channel|>NAME [to=TOOL] ... <|message|>TEXT`
and ends with `<|end|>`, or with a token that ends the answer and is not in its text. Channel
`analysis` is reasoning. A message to `functions.NAME`, or to NAME alone, as models sometimes write,
is a call if the request has that tool. All else is content. In the model's own vocabulary markers
are special tokens; the same text in other tokens, as in a quotation, is then text.
"""

import re
from typing import Final

from serving.marked_text import TOKEN_SEAL, MarkedText, Said, Thought
from serving.tool_calls import Tools, channel_call

_START: Final = "<|start|>"
_MESSAGE: Final = "<|message|>"
_ENDS: Final = ("<|end|>", "<|call|>", "<|return|>")
MARKERS: Final = (_START, _MESSAGE, *_ENDS, "<|channel|>", "<|constrain|>")
_OPENING: Final = (_MESSAGE, *_ENDS)
_CLOSING: Final = (*_ENDS, _START)
_SEALED_OPENING: Final = tuple(marker + TOKEN_SEAL for marker in _OPENING)
_SEALED_CLOSING: Final = tuple(marker + TOKEN_SEAL for marker in _CLOSING)
_CHANNEL: Final = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT: Final = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")


class HarmonyText(MarkedText):
    """See the module."""

    def __init__(self, tools: Tools, prompt: str, sealed: bool) -> None:
        """prompt: it may have opened a message, and begun its text.

        sealed: only markers with a TOKEN_SEAL count.
        """
        super().__init__(tools)
        self._sealed = sealed
        self._channel = ""
        self._recipient = ""
        self._call: list[str] = []
        self._has_spoken: set[type[Thought | Said]] = set()
        self._is_new = True  # none of this message's text was told yet
        self._header: list[str] | None = []  # None: the header is over, text follows
        opened, message, _ = prompt.rpartition(_START)[2].partition(_MESSAGE)
        if message:
            self._open(opened)

    def _markers(self) -> tuple[str, ...]:
        if self._header is None:
            return _SEALED_CLOSING if self._sealed else _CLOSING
        return _SEALED_OPENING if self._sealed else _OPENING

    def _passed(self, text: str) -> None:
        if self._header is not None:
            self._header.append(text)
            return
        text = text.replace(TOKEN_SEAL, "")
        if self._recipient:
            self._call.append(text)
            return
        kind = Thought if self._channel == "analysis" else Said
        if self._is_new and kind in self._has_spoken:
            text = "\n" + text
        self._is_new = False
        self._has_spoken.add(kind)
        self._parts.append(kind(text))

    def _found(self, marker: str) -> None:
        if marker.removesuffix(TOKEN_SEAL) == _MESSAGE:
            self._open("".join(self._header or ()))
            return
        if not "".join(self._call).strip():  # if it is a call, it has no arguments
            self._call = ["{}"]
        self._close()
        if marker.removesuffix(TOKEN_SEAL) == _START:
            self._header = [marker]

    def _over(self) -> None:
        self._close()

    def _open(self, header: str) -> None:
        header = header.replace(TOKEN_SEAL, "")
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        self._channel = channel[1] if channel else ""
        self._recipient = recipient[1] if recipient and recipient[1] in self._tools else ""
        self._call = []
        self._is_new = True
        self._header = None

    def _close(self) -> None:
        header, markers = "".join(self._header or ()), (TOKEN_SEAL,) if self._sealed else MARKERS
        # With a marker it is a header that was cut off; without one it is text in another format.
        if header.strip() and not any(marker in header for marker in markers):
            self._parts.append(Said(header))
        recipient, call = self._recipient, "".join(self._call)
        if recipient:
            self._called(call, lambda: channel_call(recipient, call))
        self._header, self._recipient = [], ""
