"""Turns ids into text as they come: never splits a character, and holds back stop strings.

A byte-level vocabulary gives every token its bytes, so a stream is an incremental UTF-8
decoder over a table: O(1) a token, and for a token of whole characters one list lookup.
Other vocabularies (sentencepiece's, with its spaces and byte fallback) go through the
library's decoder over a window of the last few tokens.
"""

import codecs
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from serving.json_bytes import dumps
from serving.marked_text import TOKEN_SEAL

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

_MAX_CHARACTER_BYTES = 4
WINDOW_HELD_TOKENS = 2 * _MAX_CHARACTER_BYTES  # after so many the bytes are not UTF-8
_WINDOW_BEFORE_TOKENS = 8  # of the prompt: one that has text would do, but some have none


@dataclass(frozen=True)
class TokenTable:
    """What each id of a byte-level vocabulary adds to the text; ids past the end add nothing.

    texts[id] is None when the bytes are not whole characters. json[id] is that text as it is inside
    of a JSON string; None until `push_json` first needs it, and always where texts[id] is None.
    """

    texts: list[str | None]
    raw: list[bytes]
    json: list[bytes | None] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "json", [None] * len(self.raw))

    @classmethod
    def of(cls, raw: list[bytes]) -> "TokenTable":
        return cls([_whole_text(data) for data in raw], raw)

    def without(self, token_ids: frozenset[int]) -> "TokenTable":
        """A copy in which some ids add nothing."""
        texts, raw = list(self.texts), list(self.raw)
        for token_id in token_ids:
            texts[token_id], raw[token_id] = "", b""
        return TokenTable(texts, raw)


@dataclass(frozen=True)
class WindowDecoder:
    """How to decode where tokens have no bytes of their own."""

    decode: Callable[[list[int]], str]
    adds_text: Callable[[int], bool]  # False: the id is skipped, or not in the vocabulary


class IncrementalDetokenizer:
    """The text of one stream: its pieces and the flush join into what its ids add to the prompt's.

    Make one with `Tokenizer.stream`.
    """

    __slots__ = ("_json", "_pending", "_raw", "_size", "_texts", "_window")

    def __init__(self, source: TokenTable | WindowDecoder, before: Sequence[int] = ()) -> None:
        """before: the prompt's ids."""
        self._pending = b""  # start of a character
        self._window: _Window | None = None
        self._texts: list[str | None] = []
        self._raw: list[bytes] = []
        self._json: list[bytes | None] = []
        if isinstance(source, TokenTable):
            self._texts, self._raw, self._json = source.texts, source.raw, source.json
        else:
            self._window = _Window(source, before)
        self._size = len(self._texts)

    @property
    def whole_texts(self) -> list[str | None] | None:
        """By id, what `push` of that id alone would return now without any change of state.

        None, for the list or an id, where only `push` can tell.
        """
        return self._texts if not self._pending and self._window is None else None

    @property
    def whole_json(self) -> list[bytes | None] | None:
        """The same as it is inside of a JSON string, for the ids that `push_json` has met."""
        return self._json if not self._pending and self._window is None else None

    def push_json(self, ids: Sequence[int]) -> bytes:
        """As `push`, but returns the text as it is inside of a JSON string."""
        whole = self.whole_json
        if whole is None:
            return dumps(self.push(ids))[1:-1]
        try:
            return b"".join([whole[token_id] for token_id in ids])  # type: ignore[misc]
        except (IndexError, TypeError):  # past the vocabulary; half a character, or not known yet
            pass
        for token_id in ids:
            if token_id < self._size and whole[token_id] is None:
                text = self._texts[token_id]
                if text is not None:
                    whole[token_id] = dumps(text)[1:-1]
        return dumps(self.push(ids))[1:-1]

    def push(self, ids: Sequence[int]) -> str:
        """Take the next ids, each >= 0; return the text that can be shown now."""
        if len(ids) == 1:
            return self._push_one(ids[0])
        return "".join([self._push_one(token_id) for token_id in ids])

    def flush(self) -> str:
        """The rest, when no more ids come; an unfinished character becomes U+FFFD."""
        if self._window is not None:
            return self._window.flush()
        rest = self._pending.decode("utf-8", "replace")
        self._pending = b""
        return rest

    def _push_one(self, token_id: int) -> str:
        if self._window is not None:
            return self._window.push(token_id)
        if token_id >= self._size:
            return ""
        if not self._pending:
            text = self._texts[token_id]
            if text is not None:
                return text
        data = self._pending + self._raw[token_id]
        text, used = codecs.utf_8_decode(data, "replace", False)
        pending = data[used:]
        if len(pending) == 2 and b"\xed\xa0" <= pending <= b"\xed\xbf":
            # Half of a surrogate: Python waits for the rest, but it is never a character.
            text, pending = text + 2 * REPLACEMENT, b""
        self._pending = pending
        return text


class _Window:
    """Decodes the ids shown last, then again with the new ones: the difference is new text.

    The ids shown last, at first the prompt's, stay in front because a decoder may treat a first
    token differently (sentencepiece drops its space).
    """

    __slots__ = ("_decoder", "_ids", "_num_shown", "_shown")

    def __init__(self, decoder: WindowDecoder, before: Sequence[int]) -> None:
        self._decoder = decoder
        near = [i for i in before[-_WINDOW_BEFORE_TOKENS:] if decoder.adds_text(i)]
        # If only bytes are near, the first few may end a character, which spoils all of them.
        for start in range(_MAX_CHARACTER_BYTES):
            self._ids = near[start:]
            self._shown = decoder.decode(self._ids)  # the decoding of ids[:num_shown]
            while self._shown.endswith(REPLACEMENT):  # half a character: what follows can't end it
                self._ids.pop()
                self._shown = decoder.decode(self._ids)
            if self._ids:
                break
        self._num_shown = len(self._ids)  # ids[:num_shown] are shown, ids[num_shown:] held

    def push(self, token_id: int) -> str:
        if not self._decoder.adds_text(token_id):
            return ""
        self._ids.append(token_id)
        text = self._decoder.decode(self._ids)
        num_held = len(self._ids) - self._num_shown
        if text.endswith(REPLACEMENT) and num_held <= WINDOW_HELD_TOKENS:
            return ""
        return self._show(text)

    def flush(self) -> str:
        return self._show(self._decoder.decode(self._ids)) if self._ids else ""

    def _show(self, text: str) -> str:
        piece = text[len(self._shown) :]
        if self._num_shown < len(self._ids):
            del self._ids[: self._num_shown]
            self._num_shown = len(self._ids)
            self._shown = self._decoder.decode(self._ids)
        return piece


class StopStrings:
    """Watches one stream for stop strings; holds back text that may be the start of one.

    The match is the one that ends first, and of those the longest; so it does not depend on
    where the text was cut into pieces. A TOKEN_SEAL in the text is passed over: a stop string may
    have a marker anywhere. Source of the automaton: Knuth, Morris, Pratt, "Fast
    pattern matching in strings", SIAM J. Comput. 6(2), 1977.
    """

    __slots__ = ("_fallbacks", "_firsts", "_held", "_include", "_matched", "_states", "_stops")

    def __init__(self, stops: tuple[str, ...], include: bool) -> None:
        """stops: none of them empty (ValueError). include: show the stop string itself too."""
        if "" in stops:
            raise ValueError("expected stop strings of at least one character, got an empty one")
        self._stops = stops
        self._firsts = frozenset(stop[0] for stop in stops)
        self._fallbacks = [_fallbacks_of(stop) for stop in stops]
        self._states = [0] * len(stops)  # characters of each stop that the text ends with
        self._held = ""
        self._include = include
        self._matched: str | None = None

    def feed(self, text: str) -> tuple[str, str | None]:
        """Take the next text. Returns what to show now, and the stop string once one is found.

        After a match all further text is dropped.
        """
        if self._matched is not None:
            return "", self._matched
        if not self._held and self._firsts.isdisjoint(text):
            return text, None
        num_held = len(self._held)
        text = self._held + text
        for end in range(num_held, len(text)):
            stop = self._step(text[end])
            if stop is not None:
                self._matched = stop
                self._held = ""
                shown = end + 1 if self._include else _start_of_last(text, end + 1, len(stop))
                return text[:shown], stop
        cut = _start_of_last(text, len(text), max(self._states))
        self._held = text[cut:]
        return text[:cut], None

    def flush(self) -> str:
        """The text held back, when no more comes."""
        rest, self._held = self._held, ""
        self._states = [0] * len(self._stops)
        return rest

    def _step(self, character: str) -> str | None:
        """Advance every automaton by a character; the longest stop that ends here, if any."""
        found: str | None = None
        if character == TOKEN_SEAL:
            return None
        for index, stop in enumerate(self._stops):
            state = self._states[index]
            while state and stop[state] != character:
                state = self._fallbacks[index][state]
            if stop[state] == character:
                state += 1
            if state == len(stop):
                if found is None or len(stop) > len(found):
                    found = stop
                state = self._fallbacks[index][state]
            self._states[index] = state
        return found


def _start_of_last(text: str, end: int, count: int) -> int:
    """Where the last `count` characters of text[:end] begin, with no TOKEN_SEAL counted."""
    start = end - count
    while (short := count - (end - start) + text.count(TOKEN_SEAL, start, end)) > 0:
        start -= short
    return start


@lru_cache(maxsize=64)  # all choices of a request have the same
def _fallbacks_of(stop: str) -> Sequence[int]:
    """[n]: length of the longest proper prefix of stop[:n] that is also its suffix."""
    fallbacks = [0, 0]
    for character in stop[1:]:
        state = fallbacks[-1]
        while state and stop[state] != character:
            state = fallbacks[state]
        fallbacks.append(state + 1 if stop[state] == character else 0)
    return fallbacks


def _whole_text(data: bytes) -> str | None:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return None
