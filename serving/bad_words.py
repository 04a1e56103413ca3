"""Words that an answer must not have: what a request may name, and the tokens that spell them."""

import asyncio
from collections.abc import Iterator, Sequence

from serving.errors import bad_field, quoted
from serving.protocol import INLINE_CHARACTERS, ServedModel
from serving.ranges import few
from transfer import wire

MAX_CHARACTERS = 256  # of a word
_NAME = "bad_words"

Spellings = tuple[tuple[int, ...], ...]


def check_bad_words(words: Sequence[str] | None) -> tuple[str, ...]:
    """The words, each once. Raises ApiError."""
    words = tuple(dict.fromkeys(few(_NAME, words, wire.MAX_BAD_WORDS)))
    if "" in words:
        raise bad_field(_NAME, "a word must not be empty")
    longest = max(map(len, words), default=0)
    if longest > MAX_CHARACTERS:
        raise bad_field(_NAME, f"at most {MAX_CHARACTERS} characters in a word, got {longest}")
    return words


async def spellings_of(words: Sequence[str], model: ServedModel) -> Spellings:
    """The sequences of tokens that must not be drawn.

    words: checked. Raises ApiError for more sequences, or longer ones, than are served, and for a
    word of which the tokenizer makes nothing.
    """
    if sum(map(len, words)) <= INLINE_CHARACTERS:
        spellings = _spellings(words, model)
    else:
        loop = asyncio.get_running_loop()
        spellings = await loop.run_in_executor(None, _spellings, words, model)
    if len(spellings) > wire.MAX_BAD_WORDS:
        what = f"at most {wire.MAX_BAD_WORDS} sequences of tokens, got {len(spellings)}"
        raise bad_field(_NAME, f"{what}: a word has one at the beginning and one behind a space")
    return spellings


def _spellings(words: Sequence[str], model: ServedModel) -> Spellings:
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        for spelling in _of_word(word, model):
            if not 0 < len(spelling) <= wire.MAX_BAD_WORD_TOKENS:
                what = f"{quoted(word)} has {len(spelling)} tokens"
                raise bad_field(_NAME, f"{what}, a word has 1 to {wire.MAX_BAD_WORD_TOKENS}")
            found[spelling] = None
    return tuple(found)


def _of_word(word: str, model: ServedModel) -> Iterator[tuple[int, ...]]:
    """A word at the beginning of a text, behind a space, and as it is given.

    vLLM leaves out the second where it has more or fewer tokens than the first, so that the usual
    spelling of many words in the middle of a text may be drawn. Here it is left out only where it
    ends with the first, which then forbids it already.
    """

    def encoded(text: str) -> tuple[int, ...]:
        ids = model.tokenizer.encode(text, add_special_tokens=False)
        return tuple(model.known(_NAME, ids))

    yield encoded(word)
    if bare := word.lstrip():
        plain, spaced = encoded(bare), encoded(f" {bare}")
        yield plain
        if spaced[-len(plain) :] != plain:
            yield spaced
