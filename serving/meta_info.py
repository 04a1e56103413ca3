"""What SGLang tells of a choice in `meta_info`, in /generate and in chats that ask for it."""

from collections.abc import Callable, Sequence
from typing import Any

from serving.choice import Choice, Entry


def meta_of(choice: Choice) -> dict[str, Any]:
    """The choice's id, counts, and how it ended: None while it goes on."""
    return {
        "id": choice.ask.request_id,
        "finish_reason": _finish_reason(choice),
        "prompt_tokens": len(choice.ask.prompt.ids),
        "completion_tokens": choice.num_tokens,
        "cached_tokens": choice.cached_tokens,
    }


def token_logprobs(
    entries: Sequence[Entry], text_of: Callable[[int], str | None]
) -> list[list[Any]]:
    """[logprob, id, text] of each token."""
    return [[entry.logprob, entry.token_id, text_of(entry.token_id)] for entry in entries]


def top_logprobs(
    entries: Sequence[Entry], text_of: Callable[[int], str | None]
) -> list[list[list[Any]] | None]:
    """The same of each token's alternatives; None where there are none."""
    return [
        [[value, token_id, text_of(token_id)] for token_id, value in entry.top] or None
        for entry in entries
    ]


def _finish_reason(choice: Choice) -> dict[str, Any] | None:
    reason = choice.finish_reason
    if reason is None:
        return None
    if reason == "stop":
        matched = choice.last_id if choice.matched is None else choice.matched
        return {"type": "stop", "matched": matched}
    if reason == "length":
        shown = choice.ask.shown
        length = 0 if shown.drop_output else choice.ask.sampling.max_new_tokens
        return {"type": "length", "length": length}
    return {"type": "abort", "message": "aborted"}
