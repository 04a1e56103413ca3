"""The tokenizer of a checkpoint: tokenizer.json or tiktoken.model, and tokenizer_config.json."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

from model.config import ModelConfig
from model.tiktoken_files import TIKTOKEN_FILE, read_tiktoken
from model.tokenizer_reading import (
    CONFIG_FILE,
    LISTS_OF_TOKENS,
    TokenizerError,
    added_tokens,
    more_special_tokens,
    named_tokens,
    one_line,
    read_text,
    special_token,
    token_text,
)

_SENTENCEPIECE_FILE = "tokenizer.model"
# Classes whose flags decide which tokens surround a text, whatever tokenizer.json has, which is
# nothing in DeepSeek's checkpoints. Other classes ignore the same flags. Source:
# huggingface/transformers 4: src/transformers/models/llama/tokenization_llama_fast.py.
_OBEYS_FLAGS = (
    "LlamaTokenizer",
    "LlamaTokenizerFast",
    "CodeLlamaTokenizer",
    "CodeLlamaTokenizerFast",
)
_MOST_ID = (1 << 22) - 1  # tables have a place for every id; a higher one is a mistake
_TEXT = "Hello!"
# The decoder of a byte-level vocabulary, as tokenizer.json would have it.
_BYTE_LEVEL = {"type": "ByteLevel"}


class TokenizerFiles(NamedTuple):
    """A tokenizer as it was read.

    config: tokenizer_config.json, with the tokens of special_tokens_map.json where it is obeyed.
    decoder: as tokenizer.json has it. sorts_tools: whether its class sorts the keys of tools before
    the chat template sees them.
    """

    backend: tokenizers.Tokenizer
    config: Mapping[str, Any]
    decoder: Any
    sorts_tools: bool = False

    @property
    def eos_id(self) -> int | None:
        """The token that tokenizer_config.json says ends a text."""
        named = self.config.get("eos_token")
        return self.backend.token_to_id(token_text(named)) if named else None


def read_tokenizer(folder: Path) -> TokenizerFiles:
    """Read the tokenizer of a checkpoint. Raises TokenizerError."""
    config = _with_special_tokens(folder, _read_with_special_tokens(folder / CONFIG_FILE))
    file = folder / "tokenizer.json"
    if (folder / TIKTOKEN_FILE).exists() and not file.exists():
        return TokenizerFiles(read_tiktoken(folder, config), config, _BYTE_LEVEL, sorts_tools=True)
    if not file.exists() and (folder / _SENTENCEPIECE_FILE).exists():
        raise TokenizerError(
            f"{folder} has {_SENTENCEPIECE_FILE} alone, and tokenizer.json is needed; transformers "
            "writes it: AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
        )
    text = read_text(file)
    backend, said = _parsed(file, text), json.loads(text)
    _check_ids(file, said)
    _add_tokens(backend, added_tokens(config))
    _find_special_tokens(backend, config)
    if config.get("tokenizer_class") in _OBEYS_FLAGS:
        _put_around(backend, config)
    # Files may carry settings from training, which would cut or fill prompts silently.
    backend.no_truncation()
    backend.no_padding()
    _try(file, backend)
    return TokenizerFiles(backend, config, said.get("decoder"))


def eos_ids(config: ModelConfig, eos_id: int | None) -> tuple[int, ...]:
    """Tokens that end a text. eos_id: what the tokenizer's files say."""
    ends = config.eos_token_ids if eos_id is None else (*config.eos_token_ids, eos_id)
    return tuple(dict.fromkeys(ends))


def _parsed(file: Path, text: str) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_str(text)
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # where the library panics, it raises what is no Exception
        raise TokenizerError(f"{file} is no tokenizer: {one_line(error)}") from error


def _try(file: Path, backend: tokenizers.Tokenizer) -> None:
    """Encode a text once: some of what a file lacks shows only then. Raises TokenizerError."""
    try:
        backend.encode_batch_fast([_TEXT], add_special_tokens=True)
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # as above
        raise TokenizerError(f"{file} cannot encode {_TEXT!r}: {one_line(error)}") from error


def _check_ids(file: Path, said: Mapping[str, Any]) -> None:
    """Raises TokenizerError for a token whose id is far beyond that of any vocabulary."""
    vocab = said["model"].get("vocab")
    if not isinstance(vocab, dict):  # a list: ids are places in it
        return
    token = max(vocab, key=vocab.__getitem__, default=None)
    if token is not None and vocab[token] > _MOST_ID:
        what = f"token {token!r} has the id {vocab[token]}; accepted: up to {_MOST_ID}"
        raise TokenizerError(f"{file}: {what}")


def _read_json_object(file: Path) -> dict[str, Any]:
    text = read_text(file)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{file} is no JSON: {one_line(error)}") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{file}: expected an object, got {type(value).__name__}")
    return value


def _with_special_tokens(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """The configuration with what special_tokens_map.json says. Raises TokenizerError.

    Older checkpoints name their special tokens there, maybe only there, and it takes precedence;
    lists are joined. Where tokenizer_config.json lists added tokens, as in later checkpoints, the
    other file is only a copy, and not read.
    Source: huggingface/transformers: src/transformers/tokenization_utils_base.py.
    """
    file = folder / "special_tokens_map.json"
    if config.get("added_tokens_decoder") is not None or not file.exists():
        return config
    said = {name: x for name, x in _read_with_special_tokens(file).items() if x is not None}
    for name in LISTS_OF_TOKENS:
        before, listed = config.get(name), said.get(name)
        if isinstance(before, list) and isinstance(listed, list):
            texts = [token_text(token) for token in before]
            said[name] = [*before, *(x for x in listed if token_text(x) not in texts)]
    return config | said


def _read_with_special_tokens(file: Path) -> dict[str, Any]:
    """A file's object, with its special tokens checked while an error can still name the file."""
    said = _read_json_object(file)
    _special_tokens(said, str(file))
    return said


def _special_tokens(
    config: Mapping[str, Any], file: str = CONFIG_FILE
) -> list[tokenizers.AddedToken]:
    """Whatever the file calls special, with a name or without. Raises TokenizerError."""
    said = [*named_tokens(config, file).values(), *more_special_tokens(config, file)]
    return [special_token(token, file) for token in said]


def _add_tokens(backend: tokenizers.Tokenizer, said: Mapping[int, tokenizers.AddedToken]) -> None:
    """Take the added tokens of tokenizer_config.json, which transformers prefers to the others.

    tokenizer.json may lack some of them, or not know that they are special. Raises TokenizerError.
    """
    known = backend.get_added_tokens_decoder()
    for token_id in said.keys() & known.keys():
        # A token is special if either file says so.
        said[token_id].special |= known[token_id].special
    other = {i: said[i] for i in sorted(said) if repr(known.get(i)) != repr(said[i])}
    backend.add_tokens([*other.values()])
    for token_id, token in other.items():
        if (got := backend.token_to_id(token.content)) != token_id:
            raise TokenizerError(
                f"tokenizer_config.json: added_tokens_decoder has {token.content!r} as {token_id}, "
                f"tokenizer.json as {got}"
            )


def _find_special_tokens(backend: tokenizers.Tokenizer, config: Mapping[str, Any]) -> None:
    """Have special tokens that are only entries of the vocabulary found whole in texts, too.

    As transformers does. Those that are no entries are left out: the model knows none of them.
    """
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    wanted = {token.content: token for token in reversed(_special_tokens(config))}
    inside = [x for x in wanted if x not in known and backend.token_to_id(x) is not None]
    backend.add_special_tokens([wanted[x] for x in inside])


def _put_around(backend: tokenizers.Tokenizer, config: Mapping[str, Any]) -> None:
    """Obey add_bos_token (by default true) and add_eos_token (false). Raises TokenizerError."""
    bos = _marker(backend, config, "bos", by_default=True)
    eos = _marker(backend, config, "eos", by_default=False)
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single=[*(each["id"] for each in bos), "$A", *(each["id"] for each in eos)],
        special_tokens=bos + eos,
    )


def _marker(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], name: str, by_default: bool
) -> list[dict[str, Any]]:
    """The bos or eos token, if it is wanted and there is one. Raises TokenizerError."""
    flag = f"add_{name}_token"
    said = config.get(flag)
    if said not in (None, True, False):
        raise TokenizerError(f"tokenizer_config.json: {flag} is {said!r}; accepted: true or false")
    named = config.get(f"{name}_token")
    text = token_text(named) if named else None
    token_id = None if text is None else backend.token_to_id(text)
    if token_id is None:
        if said:
            what = f"{name}_token is {text!r}, which is no token of tokenizer.json"
            raise TokenizerError(f"tokenizer_config.json: {flag} is true, but {what}")
        return []
    if not (by_default if said is None else said):
        return []
    return [{"id": name, "ids": [token_id], "tokens": [text]}]
