"""Turns text into ids and back, and conversations into text, as a checkpoint's files define it."""

import itertools
import os
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

from model.byte_level import token_bytes
from model.tokenizer_files import read_tokenizer
from model.tokenizer_reading import (
    TokenizerError,
    more_special_tokens,
    named_tokens,
    one_line,
    read_text,
    token_text,
)
from serving.chat_template import RESERVED_KWARGS, ChatTemplate, ChatTemplateError
from serving.detokenizer import IncrementalDetokenizer, TokenTable, WindowDecoder
from transfer.clock import SYSTEM_CLOCK, Clock

# Read at each call. Texts come one by one, which the library's threads, one for each processor, do
# not make faster; where a container allows no more threads, every call would fail.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")
_PART_CHARACTERS = 1 << 16  # of a long text, tokenized at a time to count them
_SPLIT_BY_A_CUT = 128  # the most tokens that cutting a text in two parts can add
NO_CONFIG: Mapping[str, Any] = {}
# Passed to a template while it is probed. It has none of the strings that the probes look for.
_PROBE_TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "Where."}},
            "required": ["city"],
        },
    },
}
_PROBE_ASKS: Mapping[str, Any] = {"role": "user", "content": "x"}
_PROBE_RESULT: Mapping[str, Any] = {
    "role": "tool",
    "tool_call_id": "probe0123",
    "name": "probe_name",
}
_Probe = Sequence[Mapping[str, Any]]
_FILES = ("vocab_file", "merges_file", "tokenizer_file")  # of tokenizer_config.json


class CallForm(NamedTuple):
    """The form in which a chat template takes a message with tool calls and no content."""

    content: str | None = ""
    arguments_as_text: bool = False


class TemplateHabits(NamedTuple):
    """Which form a chat template takes of messages that may have several.

    call_form: the first form in which it prints a call; the usual form if it prints none.
    DeepSeek's templates join arguments as text, and older ones print calls only if content is null.
    developer_role: the role under which to pass a developer's message; "system" if the template
    leaves developer messages out. takes_parts: the roles of which it joins the parts of a content
    itself. takes_systems: whether it prints every one of several messages of the system, or of a
    developer, before the first of the user.
    """

    call_form: CallForm
    developer_role: str
    takes_parts: frozenset[str]
    takes_systems: bool


class Tokenizer:
    """The tokenizer of one checkpoint; it never changes, so it is safe to share.

    vocab_size: one more than the highest id. special_ids: ids that decode to nothing when
    special tokens are skipped. eos_id: of tokenizer_config.json, None when it has none;
    generation_config.json may name further ids that end a text.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: Mapping[str, Any],
        templates: Mapping[str, ChatTemplate],
        is_byte_level: bool,
        sorts_tools: bool = False,
        config: Mapping[str, Any] = NO_CONFIG,
    ) -> None:
        """Use `from_dir`. special_tokens: what the template sees, such as bos_token.

        config: tokenizer_config.json, which `info` shows.
        """
        self._backend = backend
        self._special_tokens = dict(special_tokens)
        self._templates = dict(templates)
        self._sorts_tools = sorts_tools
        self._config = config
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        # By text: tokens that a grammar names by their id, because for llguidance no text is one.
        self.markers = {
            token.content: token_id
            for token_id, token in added.items()
            if token.special or (token.content.startswith("<") and token.content.endswith(">"))
        }
        vocab = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocab.values(), default=-1) + 1
        eos = self._special_tokens.get("eos_token")
        self.eos_id = None if eos is None else backend.token_to_id(eos)
        self._keeping: TokenTable | WindowDecoder
        self._skipping: TokenTable | WindowDecoder
        if is_byte_level:
            raw = [b""] * self.vocab_size
            for token, token_id in vocab.items():
                raw[token_id] = token_bytes(token)
            self._keeping = TokenTable.of(raw)
            self._skipping = self._keeping.without(self.special_ids)
        else:
            self._keeping = self._window_decoder(skip_special_tokens=False)
            self._skipping = self._window_decoder(skip_special_tokens=True)

    @classmethod
    def from_dir(
        cls, path: str | Path, chat_template: str | Path = "", clock: Clock = SYSTEM_CLOCK
    ) -> "Tokenizer":
        """Read tokenizer_config.json, tokenizer.json or tiktoken.model, and chat template files.

        The last may be missing. chat_template: a file to read instead of them; "" = none. clock:
        for templates that print today's date. Raises TokenizerError.
        """
        folder = Path(path)
        files = read_tokenizer(folder)
        config = files.config
        special_tokens: dict[str, Any] = {
            name: token_text(token)
            for name, token in named_tokens(config).items()
            if name not in RESERVED_KWARGS  # a checkpoint may call them anything
        }
        if more := more_special_tokens(config):
            special_tokens["additional_special_tokens"] = [token_text(token) for token in more]
        given = Path(chat_template) if chat_template else None
        templates = _read_templates(folder, config, given, clock)
        is_byte_level = _is_byte_level(files.decoder)
        sorts = files.sorts_tools
        return cls(files.backend, special_tokens, templates, is_byte_level, sorts, config)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text; special tokens written in it count as such.

        Raises ValueError when the text has lone surrogates, which no UTF-8 has.
        """
        try:
            # The fast variant leaves out offsets, which nobody reads: it takes a third of the time,
            # most of it without the GIL.
            batch = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            return batch[0].ids
        except TypeError as error:
            raise ValueError("expected text that UTF-8 can hold, got a lone surrogate") from error

    def fewest_tokens(self, text: str, enough: int) -> int:
        """A lower bound on the number of tokens in a text; stops counting beyond `enough`.

        Counted in parts: a text of megabytes in one piece takes minutes, and a hundred times its
        size in memory. Raises ValueError as `encode`.
        """
        found = fewest = 0
        for number, at in enumerate(range(0, len(text), _PART_CHARACTERS)):
            found += len(self.encode(text[at : at + _PART_CHARACTERS], add_special_tokens=False))
            fewest = max(fewest, found - number * _SPLIT_BY_A_CUT)
            if fewest > enough:
                break
        return fewest

    def end_of(self, text: str, enough: int) -> str:
        """The end of a text, with at least `enough` tokens; all of it if it has fewer.

        The last `enough` tokens of the end are those of the whole text. Counted in parts, as by
        `fewest_tokens`. Raises ValueError as `encode`.
        """
        at, fewest = len(text), -_SPLIT_BY_A_CUT  # the first tokens after the cut may differ
        while at > 0 and fewest < enough:
            start = max(0, at - _PART_CHARACTERS)
            part = self.encode(text[start:at], add_special_tokens=False)
            fewest += len(part) - _SPLIT_BY_A_CUT
            at = start
        return text[at:]

    def last(self, ids: list[int], most: int, has_added: bool) -> list[int]:
        """The last `most` ids of an encoded text.

        has_added: it was encoded with special tokens. Those in front of the text stay, and count.
        """
        if len(ids) <= most:
            return ids
        front = min(self.num_added_in_front if has_added else 0, most)
        return ids[:front] + ids[len(ids) - most + front :]

    @cached_property
    def num_added_in_front(self) -> int:
        """How many special tokens `encode` adds before a text."""
        (encoded,) = self._backend.encode_batch_fast(["a"], add_special_tokens=True)
        return sum(1 for _ in itertools.takewhile(bool, encoded.special_tokens_mask))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ids; those outside the vocabulary add nothing. Raises ValueError below 0."""
        if ids and min(ids) < 0:
            raise ValueError(f"expected token ids >= 0, got {min(ids)}")
        table = self._skipping if skip_special_tokens else self._keeping
        if isinstance(table, TokenTable):
            raw, size = table.raw, self.vocab_size
            data = b"".join([raw[token_id] for token_id in ids if token_id < size])
            return data.decode("utf-8", "replace")
        known = [token_id for token_id in ids if token_id < self.vocab_size]
        return self._backend.decode(known, skip_special_tokens=skip_special_tokens)

    def stream(
        self, skip_special_tokens: bool = True, before: Sequence[int] = ()
    ) -> IncrementalDetokenizer:
        """A new stream of text. before: ids of the prompt, whose text it continues."""
        source = self._skipping if skip_special_tokens else self._keeping
        return IncrementalDetokenizer(source, before)

    def token_id(self, token: str) -> int | None:
        """Id of one vocabulary entry as its file spells it."""
        return self._backend.token_to_id(token)

    def token_text(self, token_id: int) -> str:
        """One token as text, U+FFFD for parts of characters; "" outside the vocabulary."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The true bytes of one token, even when they are no whole character."""
        if not 0 <= token_id < self.vocab_size:
            return b""
        if isinstance(self._keeping, TokenTable):
            return self._keeping.raw[token_id]
        token = self._backend.id_to_token(token_id)
        return b"" if token is None else _sentencepiece_bytes(token)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """The prompt of a conversation; encode it with add_special_tokens=False.

        continue_final_message: end inside the last message; add_generation_prompt is then
        off. kwargs: further variables for the template. Raises ChatTemplateError when the
        checkpoint has no template, or the template raises, with its message.
        """
        template = self._templates.get("tool_use") if tools else None
        template = template or self._templates.get("default")
        if template is None:
            raise ChatTemplateError("this model has no chat template")
        variables = {
            **self._special_tokens,
            "documents": None,
            **kwargs,
            "tools": _in_order(tools) if self._sorts_tools else tools,
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
        }
        return template.render(messages, continue_final_message, **variables)

    @cached_property
    def info(self) -> Mapping[str, Any]:
        """tokenizer_config.json with tokens as texts and the chat template that is in use.

        Names of files are left out. eos_token, bos_token, pad_token and chat_template are None
        where there is none.
        """
        template = self._templates.get("default")
        named = ("eos_token", "bos_token", "pad_token")
        given = self._config.get("tokenizer_class")
        return {
            **{name: _plain(value) for name, value in self._config.items() if name not in _FILES},
            **{name: self._special_tokens.get(name) for name in named},
            "chat_template": None if template is None else template.source,
            # The class with which transformers reads any tokenizer.json.
            "tokenizer_class": given if isinstance(given, str) else "PreTrainedTokenizerFast",
        }

    @cached_property
    def habits(self) -> tuple[TemplateHabits, TemplateHabits]:
        """The habits of the template for chats without tools, and of that for chats with tools."""
        return self._habits(None), self._habits([_PROBE_TOOL])

    def _habits(self, tools: Sequence[Mapping[str, Any]] | None) -> TemplateHabits:
        forms = [CallForm(content, as_text) for as_text in (False, True) for content in ("", None)]
        call_form = next((form for form in forms if self._prints_call(form, tools)), forms[0])
        said = [{"role": "developer", "content": "probe"}, _PROBE_ASKS]
        role = "developer" if "probe" in self._probed(said, tools) else "system"
        takes_parts = {
            name
            for name, probes in _part_probes(call_form, role).items()
            if self._takes_parts(probes, tools)
        }
        takes_systems = self._takes_systems(role, tools)
        return TemplateHabits(call_form, role, frozenset(takes_parts), takes_systems)

    def _takes_systems(
        self, developer_role: str, tools: Sequence[Mapping[str, Any]] | None
    ) -> bool:
        """Whether it prints two messages in a row, each of the system or of a developer."""
        for roles in itertools.product({"system", developer_role}, repeat=2):
            said = [{"role": role, "content": f"probe{i}"} for i, role in enumerate(roles)]
            text = self._probed([*said, _PROBE_ASKS], tools)
            if "probe0" not in text or "probe1" not in text:
                return False
        return True

    def _takes_parts(
        self, probes: Sequence[_Probe], tools: Sequence[Mapping[str, Any]] | None
    ) -> bool:
        """Whether it prints two parts wherever it prints a text; if it prints the first alone, no.

        probes: conversations in which one message has no content yet.
        """
        found = []
        for probe in probes:
            shown = self._probed(_with_content(probe, "part0 part1"), tools)
            if "part0" in shown:
                parts = [{"type": "text", "text": text} for text in ("part0", "part1")]
                text = self._probed(_with_content(probe, parts), tools)
                prints_both = "part1" in text.partition("part0")[2]
                # More of these than with a text: it prints the objects.
                names = ("'text'", '"text"')
                found.append(prints_both and all(text.count(x) <= shown.count(x) for x in names))
        return bool(found) and all(found)

    def _prints_call(self, form: CallForm, tools: Sequence[Mapping[str, Any]] | None) -> bool:
        """Probe with one call. A template that prints the object as Python does wants text."""
        calls = {"role": "assistant", "content": form.content, **_probe_calls(form)}
        text = self._probed([_PROBE_ASKS, calls, {**_PROBE_RESULT, "content": "probe"}], tools)
        return "probe_key" in text and "'probe_key'" not in text

    def _probed(self, probe: _Probe, tools: Sequence[Mapping[str, Any]] | None) -> str:
        """What the template makes of a conversation; "" if it refuses it."""
        try:
            return self.apply_chat_template(probe, tools)
        except ChatTemplateError:
            return ""

    def _window_decoder(self, skip_special_tokens: bool) -> WindowDecoder:
        skipped = self.special_ids if skip_special_tokens else frozenset()
        return WindowDecoder(
            decode=lambda ids: self._backend.decode(ids, skip_special_tokens=skip_special_tokens),
            adds_text=lambda token_id: token_id < self.vocab_size and token_id not in skipped,
        )


# --- probes -----------------------------------------------------------------------------------


def _probe_calls(form: CallForm) -> dict[str, Any]:
    """The field of a message with a call."""
    arguments = '{"probe_key": 1}' if form.arguments_as_text else {"probe_key": 1}
    function = {"name": "probe_name", "arguments": arguments}
    return {"tool_calls": [{"id": "probe0123", "type": "function", "function": function}]}


def _part_probes(form: CallForm, developer_role: str) -> dict[str, list[_Probe]]:
    """By role, conversations with a message of that role that has no content yet."""
    asks, calls = _PROBE_ASKS, {"role": "assistant", **_probe_calls(form)}
    system, developer = {"role": "system"}, {"role": developer_role}
    return {
        "user": [[{"role": "user"}]],
        "system": [[system, asks], [asks, system, asks]],
        "developer": [[developer, asks], [asks, developer, asks]],
        "assistant": [
            [asks, {"role": "assistant"}, asks],
            [asks, calls, {**_PROBE_RESULT, "content": "probe"}],
        ],
        "tool": [[asks, {**calls, "content": form.content}, _PROBE_RESULT]],
    }


def _with_content(probe: _Probe, content: Any) -> _Probe:
    return [{"content": content, **message} for message in probe]


# --- files ------------------------------------------------------------------------------------


def _read_templates(
    folder: Path, config: Mapping[str, Any], given: Path | None, clock: Clock
) -> dict[str, ChatTemplate]:
    """Templates by name, or the given one for all chats.

    Separate files, the newer way, take precedence over tokenizer_config.json:
    chat_template.jinja, and in additional_chat_templates the one for chats with tools, if it is
    not empty. No chat uses any other template, so the others are not read.
    """
    file = given or folder / "chat_template.jinja"
    sources: dict[str, tuple[Path, Any]] = {}
    for_tools = folder / "additional_chat_templates" / "tool_use.jinja"
    if not given and for_tools.exists() and (text := read_text(for_tools)).strip():
        sources["tool_use"] = for_tools, text
    if given or file.exists():
        sources["default"] = file, read_text(file)
    else:
        file = folder / "tokenizer_config.json"
        said = config.get("chat_template")
        if isinstance(said, list):  # several, each with a name
            named = {str(e.get("name")): e.get("template") for e in said if isinstance(e, dict)}
            used = {name: (file, named[name]) for name in ("default", "tool_use") if name in named}
            sources = used | sources
        elif said is not None:
            sources["default"] = file, said
    return _compiled(sources, clock)


def _compiled(sources: Mapping[str, tuple[Path, Any]], clock: Clock) -> dict[str, ChatTemplate]:
    templates = {}
    for name, (file, source) in sources.items():
        if not isinstance(source, str):
            raise TokenizerError(
                f"{file}: expected the chat template as text, got {type(source).__name__}"
            )
        try:
            source.encode()
            templates[name] = ChatTemplate(source, clock)
        except UnicodeEncodeError as error:  # JSON can write half of a surrogate pair
            what = "expected a chat template that UTF-8 can hold, got a lone surrogate"
            raise TokenizerError(f"{file}: {what} at character {error.start}") from error
        except ChatTemplateError as error:
            raise TokenizerError(f"{file}: {one_line(error)}") from error
    return templates


def _plain(value: Any) -> Any:
    """A value of tokenizer_config.json with its tokens as texts."""
    if isinstance(value, dict):
        if isinstance(value.get("content"), str):
            return value["content"]
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def _in_order(tools: Any) -> Any:
    try:
        return _sorted_keys(tools)
    except RecursionError:
        raise ChatTemplateError("tools have objects within each other without end") from None


def _sorted_keys(value: Any) -> Any:
    """A copy of the value in which the keys of all objects are sorted."""
    if isinstance(value, Mapping):
        return {key: _sorted_keys(value[key]) for key in sorted(value)}
    if isinstance(value, list | tuple):
        return [_sorted_keys(each) for each in value]
    return value


# --- bytes of tokens --------------------------------------------------------------------------


def _sentencepiece_bytes(token: str) -> bytes:
    """The bytes of a SentencePiece token: <0xE4> is a byte, U+2581 is a space."""
    if BYTE_TOKEN.fullmatch(token):
        return bytes([int(token[3:5], 16)])
    return token.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()


def _is_byte_level(decoder: Any) -> bool:
    """Whether the decoder only joins the bytes of its tokens."""
    if not isinstance(decoder, dict):
        return False
    if decoder.get("type") == "Sequence":
        parts = decoder.get("decoders")
        return isinstance(parts, list) and len(parts) == 1 and _is_byte_level(parts[0])
    return decoder.get("type") == "ByteLevel"
