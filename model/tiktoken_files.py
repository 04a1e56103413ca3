"""Moonshot's form of a tokenizer: tiktoken.model, whose special tokens tokenizer_config.json names.

tiktoken has no merges. It joins the two neighbours that form the token of the lowest rank, the
leftmost of several, until no two form a token. Here every pair that forms a token is a merge, and
merges are in the order of their tokens' ranks. The result is the same, although the merges of one
token also have an order among themselves: only one of them ever occurs. Suppose that neighbours l
and r are about to become t. Nothing was joined across the ends of t before, or l would not begin
and r would not end there. So all joins between the ends happened as if t stood alone, where they
are always the same.
"""

import binascii
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from model.byte_level import spelled
from model.tokenizer_reading import TokenizerError, added_tokens, one_line

TIKTOKEN_FILE: Final = "tiktoken.model"
_CLASS: Final = "TikTokenTokenizer"
_NUM_SPECIAL: Final = 256  # ids after those of the file, whether they have a name or not
# Some versions of the class have two more, for which no checkpoint has rows: they are left out.
_NUM_WITHOUT_ROWS: Final = 2

# Where a text is cut before BPE. Letters of _HEAD may begin a word, those of _TAIL continue it; Han
# characters, which the first alternative takes in runs, are in neither.
_HEAD: Final = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_TAIL: Final = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_BEFORE: Final = r"[^\r\n\p{L}\p{N}]?"
_CONTRACTION: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
# Source: moonshotai/Kimi-K2-Instruct: tokenization_kimi.py.
_PATTERN: Final = "|".join(
    [
        r"[\p{Han}]+",
        f"{_BEFORE}{_HEAD}*{_TAIL}+{_CONTRACTION}",
        f"{_BEFORE}{_HEAD}+{_TAIL}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)


def read_tiktoken(folder: Path, config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """Read tiktoken.model. config: tokenizer_config.json. Raises TokenizerError."""
    name = config.get("tokenizer_class")
    if name != _CLASS:  # the file does not say where texts are cut: the class does
        raise TokenizerError(
            f"{folder / 'tokenizer_config.json'}: tokenizer_class is {name!r}; "
            f"accepted beside {TIKTOKEN_FILE}: {_CLASS}"
        )
    tokens = [spelled(token) for token in _read_tokens(folder / TIKTOKEN_FILE)]
    ranks = {token: rank for rank, token in enumerate(tokens)}
    # tiktoken looks up a whole piece first, and may find a token that no merges form.
    bpe = models.BPE(vocab=ranks, merges=_merges(tokens, ranks), ignore_merges=True)
    backend = tokenizers.Tokenizer(bpe)
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    _add_special(backend, len(tokens), config)
    return backend


# --- the file -------------------------------------------------------------------------------------


def _read_tokens(file: Path) -> list[bytes]:
    """Tokens by rank. Raises TokenizerError."""
    try:
        lines = file.read_bytes().splitlines()
    except OSError as error:
        raise TokenizerError(f"cannot read {file}: {one_line(error)}") from error
    ranks: dict[bytes, int] = {}
    tokens: dict[int, bytes] = {}
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            encoded, rank_text = line.split()
            token, rank = binascii.a2b_base64(encoded, strict_mode=True), int(rank_text)
        except ValueError as error:
            what = f"expected a token in base64 and its rank, got {line[:60]!r}"
            raise TokenizerError(f"{file}: line {number}: {what}: {one_line(error)}") from error
        if not token:
            raise TokenizerError(f"{file}: line {number}: the token is empty")
        if token in ranks or rank in tokens:
            what = f"rank {rank}" if rank in tokens else f"token {token!r}"
            raise TokenizerError(f"{file}: line {number}: {what} for the second time")
        ranks[token], tokens[rank] = rank, token
    _check_whole(file, tokens, ranks)
    return [tokens[rank] for rank in range(len(tokens))]


def _check_whole(file: Path, tokens: Mapping[int, bytes], ranks: Mapping[bytes, int]) -> None:
    missing = next((rank for rank in range(len(tokens)) if rank not in tokens), None)
    if missing is not None:
        raise TokenizerError(
            f"{file}: {len(tokens)} tokens, but none of rank {missing}; expected every rank below"
        )
    without = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if without:
        raise TokenizerError(
            f"{file}: no token for {len(without)} of the 256 bytes, the first {without[0]:#04x}"
        )


# --- merges ---------------------------------------------------------------------------------------


def _merges(tokens: Sequence[str], ranks: Mapping[str, int]) -> list[tuple[str, str]]:
    """All pairs that would form each token, in the order of ranks.

    Leaving out those that never occur would take as long as all other reading.
    """
    return [
        (token[:at], token[at:])
        for token in tokens
        for at in range(1, len(token))
        if token[:at] in ranks and token[at:] in ranks
    ]


# --- special tokens -------------------------------------------------------------------------------


def _add_special(backend: tokenizers.Tokenizer, num_tokens: int, config: Mapping[str, Any]) -> None:
    """Add the special tokens after the file's. Raises TokenizerError."""
    listed = added_tokens(config)
    where, ends_at = "tokenizer_config.json: added_tokens_decoder", num_tokens + _NUM_SPECIAL
    for token_id in listed:
        if not num_tokens <= token_id < ends_at + _NUM_WITHOUT_ROWS:
            raise TokenizerError(
                f"{where} has {token_id}; expected {num_tokens} to {ends_at - 1}, "
                f"behind the {num_tokens} tokens of {TIKTOKEN_FILE}"
            )
    special = {
        token_id: listed.get(token_id)
        or tokenizers.AddedToken(f"<|reserved_token_{token_id}|>", special=True)
        for token_id in range(num_tokens, ends_at)
    }
    backend.add_tokens([*special.values()])
    for token_id, token in special.items():
        if (got := backend.token_to_id(token.content)) != token_id:
            raise TokenizerError(f"{where} has {token.content!r} as {token_id}, but it is {got}")
