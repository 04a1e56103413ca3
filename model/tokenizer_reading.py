"""What every form of a tokenizer's files is read with: texts, tokens, and the one error."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")
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


def more_special_tokens(config: Mapping[str, Any]) -> list[str]:
    """Those without a name of their own; transformers 5 has another field for them.

    Raises TokenizerError.
    """
    name = "extra_special_tokens"
    if isinstance(config.get(name) or {}, dict):  # it names them, or has none
        name = "additional_special_tokens"
    listed = config.get(name) or []
    if not isinstance(listed, list):
        raise TokenizerError(
            f"tokenizer_config.json: {name} is {listed!r}; accepted: a list of tokens"
        )
    return [token_text(token) for token in listed]


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _added_token(token: Any) -> tokenizers.AddedToken:
    return tokenizers.AddedToken(
        token["content"], **{name: token[name] for name in _TOKEN_FLAGS if name in token}
    )
