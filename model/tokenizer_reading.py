"""What every form of a tokenizer's files is read with: texts, tokens, and the one error."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

_TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


class TokenizerError(ValueError):
    """A tokenizer's file is missing or malformed; one line with the file's name."""


def read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"cannot read {file}: {one_line(error)}") from error


def added_tokens(config: Mapping[str, Any]) -> dict[int, tokenizers.AddedToken]:
    """What tokenizer_config.json lists as added_tokens_decoder. Raises TokenizerError."""
    listed = config.get("added_tokens_decoder") or {}
    try:
        return {int(token_id): _added_token(token) for token_id, token in listed.items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        what = "tokenizer_config.json: added_tokens_decoder: expected tokens by their ids"
        raise TokenizerError(f"{what}, got {one_line(error)}") from error


def token_text(token: Any) -> str:
    """A token of tokenizer_config.json: text, or an object with its content."""
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str):
        raise TokenizerError(f"tokenizer_config.json: expected a token's text, got {token!r}")
    return text


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _added_token(token: Any) -> tokenizers.AddedToken:
    return tokenizers.AddedToken(
        token["content"], **{name: token[name] for name in _TOKEN_FLAGS if name in token}
    )
