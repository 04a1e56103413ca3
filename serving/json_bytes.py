"""Encodes answers as JSON: what UTF-8 cannot hold becomes U+FFFD instead of an error."""

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
    """The same as a fragment, which orjson puts into other JSON as it is.

    Data from clients may have integers of any size, and more levels than orjson takes. Raises
    RecursionError for more levels than Python takes.
    """
    try:
        # orjson's result takes at least 4 KB, however short it is; a copy takes its own size.
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
