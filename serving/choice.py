"""One choice of an answer: takes its generation's tokens, and holds what is to be shown of them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from serving.detokenizer import IncrementalDetokenizer, StopStrings
from serving.errors import ApiError
from serving.generation import FinishReason, Tokens, Top
from serving.marked_text import TOKEN_SEAL
from serving.protocol import INLINE_CHARACTERS, ChoiceAsk
from serving.tokenizer import Tokenizer
from transfer import wire
from transfer.errors import BadMessage

# For all prompts of a request, alternatives counted, because they are encoded in one piece.
MAX_PROMPT_LOGPROBS = 1 << 20
# Encoded on the event loop, alternatives counted, at some 1 us each; a thread encodes more, so that
# the streams of others go on.
INLINE_LOGPROBS = 1 << 12
# JSON has no infinity; a logprob this low says "never" as well.
LOWEST_LOGPROB = -9999.0


@dataclass(slots=True)
class Entry:
    """One position and its logprobs. logprob: None for the first token of a prompt.

    num_chars: length of the text that this token made showable; stop strings hold some back.
    num_decoded: length of the text that its bytes complete, held back or not.
    """

    token_id: int
    logprob: float | None
    top: Top
    num_chars: int = 0
    num_decoded: int = 0


@dataclass(slots=True)
class Piece:
    """Text and tokens that were not shown yet. entries: [] unless logprobs were asked for."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)


class Choice:
    """The state of one choice, from its first token to its finish reason.

    Text and tokens may diverge: a stop token and a matched stop string are tokens without text,
    half a character waits for its other half, and text that may begin a stop string waits for more.
    `stop_reason` is the stop string or the stop id that ended the choice.
    """

    __slots__ = (
        "_detokenizer",
        "_prompt_entries",
        "_prompt_logprobs",
        "_quiet_ids",
        "_sealed_ids",
        "_stops",
        "_texts",
        "ask",
        "cached_tokens",
        "finish_reason",
        "last_id",
        "matched",
        "num_tokens",
        "pending",
        "stop_reason",
        "text_only",
    )

    def __init__(self, ask: ChoiceAsk, tokenizer: Tokenizer) -> None:
        shown = ask.shown
        self.ask = ask
        self.num_tokens = 0  # generated, as usage counts them
        self.cached_tokens = 0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self.matched: str | None = None  # the stop string found: nothing more will be shown
        self.last_id = -1
        self.pending = Piece()
        self._prompt_logprobs = _NO_LOGPROBS
        self._prompt_entries: list[Entry] | None = []  # None: made on first use
        self._detokenizer = tokenizer.stream(shown.skip_special_tokens, ask.prompt.ids)
        self._texts = self._detokenizer.whole_texts  # while no character is cut
        self._stops = StopStrings(shown.stops, shown.include_stop) if shown.stops else None
        # Stop ids whose text must not show. Special ones have no text when these are skipped.
        quiet = frozenset(ask.sampling.stop_token_ids) if not shown.include_stop else frozenset()
        if shown.skip_special_tokens:
            quiet -= tokenizer.special_ids
        self._sealed_ids = shown.sealed_ids
        quiet = (quiet | shown.quiet_ids) - shown.sealed_ids
        self._quiet_ids = quiet
        # No token needs a look of its own, so several may be taken at once.
        needs_look = self._stops is not None or quiet or self._sealed_ids
        self.text_only = self.plain and not needs_look

    @property
    def plain(self) -> bool:
        """Whether its tokens are shown as text alone."""
        shown = self.ask.shown
        return not (shown.token_ids or shown.num_logprobs >= 0 or shown.drop_output)

    def prefilled(self, cached_tokens: int, logprobs: wire.PromptLogprobs | None) -> None:
        """The prompt is computed. logprobs: of its positions, if the request asked for them.

        Raises BadMessage when the arrays disagree in length.
        """
        self.cached_tokens = cached_tokens
        if self.ask.shown.num_prompt_logprobs >= 0:
            self._prompt_entries = None
            if logprobs is not None:
                self._prompt_logprobs = _unpacked(logprobs)

    @property
    def prompt_entries(self) -> list[Entry]:
        """From shown.prompt_logprobs_start on; [] if not asked for, or not computed yet.

        Made on first use, which takes long for many: see INLINE_LOGPROBS.
        """
        if self._prompt_entries is None:
            self._prompt_entries = list(self._made_prompt_entries())
        return self._prompt_entries

    def _made_prompt_entries(self) -> Iterator[Entry]:
        shown, ids, told = self.ask.shown, self.ask.prompt.ids, self._prompt_logprobs
        k = shown.num_prompt_logprobs
        values = _finite(told.values).tolist()
        top_ids, tops = told.top_ids[:, :k].tolist(), _finite(told.tops[:, :k]).tolist()
        for position in range(shown.prompt_logprobs_start, len(ids)):
            row = position - told.start
            if position and 0 <= row < len(values):
                top = list(zip(top_ids[row], tops[row], strict=True))
                yield Entry(ids[position], values[row], top)
            else:
                yield Entry(ids[position], None, [])

    def take(self, tokens: Tokens) -> str:
        """Take the next tokens; return the text that can be shown now. Ignored after a match."""
        ids = tokens.ids
        if self.text_only:
            self.num_tokens += len(ids)
            self.last_id = last_id = ids[-1]
            texts = self._texts
            if texts is not None and len(ids) == 1 and last_id < len(texts):
                text = texts[last_id]
                if text is not None:
                    return text
            text = self._detokenizer.push(ids)
            self._texts = self._detokenizer.whole_texts
            return text
        return "".join([self._take_one(tokens, place) for place in range(len(ids))])

    @property
    def detokenizer(self) -> IncrementalDetokenizer:
        """A caller that pushes into it instead of calling `take` must call `took`."""
        return self._detokenizer

    def took(self, num_tokens: int, last_id: int) -> None:
        """The caller pushed tokens: num_tokens so far in all, the last of them last_id."""
        self.num_tokens = num_tokens
        self.last_id = last_id
        self._texts = self._detokenizer.whole_texts

    def finish(self, reason: FinishReason) -> str:
        """No more tokens come; returns the rest of the text."""
        self.finish_reason = reason
        if self.matched is not None:
            return ""
        if reason == "stop" and self.last_id in self.ask.shown.stop_ids:
            self.stop_reason = self.last_id
        if self.ask.shown.drop_output:
            self.finish_reason = "abort" if reason == "abort" else "length"
            return ""
        rest = self._detokenizer.flush()
        if self._stops is not None:
            rest = self._shown(rest) if rest else ""
            if self.matched is None:
                rest += self._stops.flush()
        return rest

    def drain(self) -> Piece:
        """Return what is pending, and start anew."""
        piece, self.pending = self.pending, Piece()
        return piece

    def _take_one(self, tokens: Tokens, place: int) -> str:
        shown = self.ask.shown
        if self.matched is not None or shown.drop_output:
            return ""
        token_id = tokens.ids[place]
        index = self.num_tokens
        self.num_tokens += 1
        self.last_id = token_id
        if shown.token_ids:
            self.pending.ids.append(token_id)
        text = ""
        num_decoded = 0
        if token_id not in self._quiet_ids:
            text = self._detokenizer.push((token_id,))
            num_decoded = len(text)
            if token_id in self._sealed_ids:
                text += TOKEN_SEAL
            # Stop strings count only in what comes after min_tokens.
            if index >= self.ask.sampling.min_tokens:
                text = self._shown(text)
        if shown.num_logprobs >= 0 and tokens.logprobs is not None:
            logprob = _finite_one(tokens.logprobs[place])
            top = _best(None if tokens.top is None else tokens.top[place], shown.num_logprobs)
            self.pending.entries.append(Entry(token_id, logprob, top, len(text), num_decoded))
        return text

    def _shown(self, text: str) -> str:
        """The part of the text that passes the stop strings."""
        if self._stops is None:
            return text
        text, self.matched = self._stops.feed(text)
        if self.matched is not None:
            self.stop_reason = self.matched
            self.finish_reason = "stop"
        return text


def check_prompt_logprobs(choices: Sequence[ChoiceAsk]) -> None:
    """Raises ApiError (400) for more logprobs of prompts than an answer may hold."""
    count = sum(map(num_prompt_logprobs, choices))
    if count > MAX_PROMPT_LOGPROBS:
        raise ApiError(
            400,
            f"expected at most {MAX_PROMPT_LOGPROBS} logprobs of prompts, alternatives and all "
            f"choices counted, got {count}: ask fewer prompts, choices or alternatives at once",
            code="invalid_value",
        )


def is_long_to_spell(choices: Sequence["Choice"]) -> bool:
    """Whether encoding a whole answer of these choices is work for a thread."""
    if sum(len(choice.pending.text) for choice in choices) > INLINE_CHARACTERS:
        return True  # parsers search the text for markers, and thoughts are tokenized again
    num_logprobs = sum(
        len(choice.pending.entries) * (1 + choice.ask.shown.num_logprobs)
        + num_prompt_logprobs(choice.ask)
        for choice in choices
    )
    return num_logprobs > INLINE_LOGPROBS


def num_prompt_logprobs(ask: ChoiceAsk) -> int:
    """How many logprobs of its prompt the answer shows, alternatives counted."""
    positions = len(ask.prompt.ids) - ask.shown.prompt_logprobs_start
    return positions * (1 + ask.shown.num_prompt_logprobs)


class _PromptLogprobs(NamedTuple):
    """Positions start to start + n - 1."""

    start: int
    values: np.ndarray  # f32[n]
    top_ids: np.ndarray  # i32[n, k], best first
    tops: np.ndarray  # f32[n, k]


_NO_LOGPROBS = _PromptLogprobs(0, np.zeros(0, "f4"), np.zeros((0, 0), "i4"), np.zeros((0, 0), "f4"))


def _unpacked(logprobs: wire.PromptLogprobs) -> _PromptLogprobs:
    values = wire.unpack_f32(logprobs.logprobs)
    top_ids = wire.unpack_i32(logprobs.top_ids)
    tops = wire.unpack_f32(logprobs.top_logprobs)
    n = len(values)
    if len(top_ids) != len(tops) or (n and len(top_ids) % n):
        raise BadMessage(f"prompt logprobs: {n} values, {len(top_ids)} top ids")
    if not n:
        return _NO_LOGPROBS
    return _PromptLogprobs(logprobs.start, values, top_ids.reshape(n, -1), tops.reshape(n, -1))


def _best(top: Top | None, count: int) -> Top:
    return [(token_id, _finite_one(logprob)) for token_id, logprob in (top or ())[:count]]


def _finite(logprobs: np.ndarray) -> np.ndarray:
    return np.fmax(LOWEST_LOGPROB, logprobs)  # also in place of a NaN


def _finite_one(logprob: float) -> float:
    return max(LOWEST_LOGPROB, logprob)  # also in place of a NaN
