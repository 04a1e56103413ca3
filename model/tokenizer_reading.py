"""Helpers that read every form of a tokenizer's files: texts, tokens, and their one error."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from model.fields import is_endless

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")
CONFIG_FILE = "tokenizer_config.json"
# Fields that list tokens without names. Transformers 5 has the second, which may be an object.
LISTS_OF_TOKENS = ("additional_special_tokens", "extra_special_tokens")
_OBJECTS_OF_TOKENS = ("extra_special_tokens", "model_specific_special_tokens")
_TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


class TokenizerError(ValueError):
    """A tokenizer's file is missing or malformed; one line with the file's name."""


def read_text(file: Path) -> str:
    if is_endless(file):
        raise TokenizerError(f"{file}: a pipe, socket or device; expected a file")
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


def token_text(token: Any, file: str = CONFIG_FILE) -> str:
    """A token of that file: text, or an object with its content. Raises TokenizerError."""
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str):
        raise TokenizerError(f"{file}: expected a token's text, got {token!r}")
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON can write half of a surrogate pair
        what = f"expected a token's text that UTF-8 can hold, got a lone surrogate in {token!r}"
        raise TokenizerError(f"{file}: {what}") from error
    return text


def special_token(token: Any, file: str = CONFIG_FILE) -> tokenizers.AddedToken:
    """A special token of that file, with the flags of its object. Raises TokenizerError."""
    said = token if isinstance(token, dict) else {}
    try:
        return _added_token({**said, "content": token_text(token, file), "special": True})
    except TypeError as error:
        what = f"expected a token's flags, got {one_line(error)} in {token!r}"
        raise TokenizerError(f"{file}: {what}") from error


def named_tokens(config: Mapping[str, Any], file: str = CONFIG_FILE) -> dict[str, Any]:
    """Special tokens by their names, each as the file has it. Raises TokenizerError.

    Besides the usual ones, these are the tokens that only this model has: any other field called a
    token, such as image_token, and all that an object of tokens names, under any name.
    """
    found = {
        name: token
        for name, token in config.items()
        if name.endswith("_token") and _is_token(token)
    }
    for field in _OBJECTS_OF_TOKENS:
        named = config.get(field) or {}
        if isinstance(named, dict):
            found |= named
        elif field not in LISTS_OF_TOKENS:
            raise TokenizerError(f"{file}: {field} is {named!r}; accepted: an object of tokens")
    usual = {name: config[name] for name in NAMED_TOKENS if config.get(name)}
    found = {name: token for name, token in found.items() if name not in NAMED_TOKENS} | usual
    for token in found.values():
        token_text(token, file)
    return found


def more_special_tokens(config: Mapping[str, Any], file: str = CONFIG_FILE) -> list[Any]:
    """Special tokens without a name, each as the file has it. Raises TokenizerError."""
    name, accepted = "extra_special_tokens", "a list of tokens, or an object of them"
    if isinstance(config.get(name) or {}, dict):  # it names them, or has none
        name, accepted = "additional_special_tokens", "a list of tokens"
    listed = config.get(name) or []
    if not isinstance(listed, list):
        raise TokenizerError(f"{file}: {name} is {listed!r}; accepted: {accepted}")
    for token in listed:
        token_text(token, file)
    return listed


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def _is_token(value: Any) -> bool:
    return isinstance(value.get("content") if isinstance(value, dict) else value, str)


def _added_token(token: Any) -> tokenizers.AddedToken:
    return tokenizers.AddedToken(
        token["content"], **{name: token[name] for name in _TOKEN_FLAGS if name in token}
    )
