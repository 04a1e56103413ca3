"""JSON as bytes, for answers: what UTF-8 cannot hold becomes U+FFFD instead of an error."""

import json
from typing import Any

import orjson


def dumps(data: Any) -> bytes:
    """Compact JSON of strings, numbers, lists and dicts."""
    try:
        return orjson.dumps(data)
    except TypeError:  # mostly a lone surrogate; anything else fails again
        return orjson.dumps(_without_surrogates(data))


def spelled(data: Any) -> orjson.Fragment:
    """The same, to be put into others as it is.

    What clients sent may have integers of any size, and more levels than orjson knows. Raises
    RecursionError for more than Python knows.
    """
    try:
        # What orjson returns has 4 KB at least, however short it is: a copy has its own size.
        return orjson.Fragment(bytes(memoryview(dumps(data))))
    except (TypeError, RecursionError):
        text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
        return orjson.Fragment(text.encode(errors="replace"))


def _without_surrogates(data: Any) -> Any:
    if isinstance(data, str):
        # Through UTF-16, which joins the pairs that are characters after all.
        return data.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    if isinstance(data, dict):
        return {_without_surrogates(key): _without_surrogates(item) for key, item in data.items()}
    if isinstance(data, list | tuple):
        return [_without_surrogates(item) for item in data]
    return data
