"""Counts an answer's `usage`: tokens of prompts, answers and thoughts, as OpenAI names them."""

from collections.abc import Sequence
from typing import Any

from serving.choice import Choice
from serving.protocol import INLINE_CHARACTERS
from serving.tokenizer import Tokenizer


def usage_of(choices: Sequence[Choice], num_thought: int | None = None) -> dict[str, Any]:
    """The `usage` of an answer. A prompt counts once, however many choices it has.

    cached_tokens of a prompt is the least that any of its choices found in a cache, since every
    token beyond that was computed at least once. num_thought: tokens of thoughts; None where
    thoughts are not told apart.
    """
    cached: dict[int, int] = {}
    num_prompt: dict[int, int] = {}
    for choice in choices:
        prompt_idx = choice.ask.prompt_idx
        num_prompt[prompt_idx] = len(choice.ask.prompt.ids)
        least = min(cached.get(prompt_idx, choice.cached_tokens), choice.cached_tokens)
        cached[prompt_idx] = least
    prompt_tokens = sum(num_prompt.values())
    completion_tokens = sum(choice.num_tokens for choice in choices)
    usage: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(cached.values())},
    }
    if num_thought is not None:
        usage["completion_tokens_details"] = {"reasoning_tokens": num_thought}
    return usage


class Thoughts:
    """Counts the tokens of one choice's thoughts, for its usage."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._texts: list[str] = []  # not tokenized yet
        self._num_characters = 0  # of these
        self._num_tokens = 0

    def add(self, text: str) -> None:
        """Add text. A long thought is tokenized in parts, so that streams do not wait for long."""
        self._texts.append(text)
        self._num_characters += len(text)
        if self._num_characters >= INLINE_CHARACTERS:
            self._tokenize()

    def num_tokens(self, choice: Choice) -> int:
        """Tokens of all text added, which is tokenized again for this."""
        if self._texts:
            self._tokenize()
        # Tokenized again, the text may have more tokens than were drawn: a token that is only part
        # of a character became several.
        return min(self._num_tokens, choice.num_tokens)

    def _tokenize(self) -> None:
        texts, self._texts, self._num_characters = self._texts, [], 0
        self._num_tokens += len(self._tokenizer.encode("".join(texts), False))
