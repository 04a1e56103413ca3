"""Structural tags: answers of fixed texts, forms, and free text that runs until one of them begins.

The formats are xgrammar's (mlc-ai/xgrammar: docs, structural_tag.md): one `format`, or `structures`
with `triggers` as in its first version. SGLang and vLLM take both.

Free text is written together with what ends it, because it has to stop where that first appears:
as one lazy rule if the end is a text. A marker, which is a token that no text spells, ends it by
itself; other markers may stand in it, unless they are special tokens, which are never shown.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

import msgspec

from serving.errors import quoted
from serving.grammar import (
    MAX_GBNF_WORK,
    Form,
    Part,
    gbnf_work,
    grammar_rules,
    json_rules,
    quoted_terminal,
    regex_rules,
    wrong,
)
from serving.tokenizer import Tokenizer
from transfer.wire import MAX_GRAMMAR_BYTES

_MAX_PARTS: Final = 512
# Characters that writing may handle, on the event loop: a tag of some kilobytes can name a thousand
# ends after each of a thousand formats.
_MAX_WORK: Final = 8 * MAX_GRAMMAR_BYTES
_TEXT: Final = "TEXT: /(?s:.*)/"

# Texts that end what comes before them. Empty: the end of the answer does. None: something that is
# no text comes next, and nothing before it may be free text.
Ends = tuple[str, ...] | None


class _Format(msgspec.Struct, forbid_unknown_fields=True, tag_field="type"):
    """One format. Fields that are not listed are refused."""


class ConstString(_Format, tag="const_string"):
    value: str


class JsonSchema(_Format, tag="json_schema"):
    json_schema: dict[str, Any]
    style: Literal["json"] = "json"


class Regex(_Format, tag="regex"):
    pattern: str


class Grammar(_Format, tag="grammar"):
    grammar: str


class AnyText(_Format, tag="any_text"):
    excludes: tuple[str, ...] = ()


class Sequenced(_Format, tag="sequence"):
    elements: list["Format"]


class Or(_Format, tag="or"):
    elements: list["Format"]


class Optional(_Format, tag="optional"):
    content: "Format"


class Star(_Format, tag="star"):
    content: "Format"


class Plus(_Format, tag="plus"):
    content: "Format"


class Repeat(_Format, tag="repeat"):
    """max: -1 = any number."""

    min: int
    max: int
    content: "Format"


class Tag(_Format, tag="tag"):
    begin: str
    content: "Format"
    end: str | tuple[str, ...]


class TriggeredTags(_Format, tag="triggered_tags"):
    triggers: list[str]
    tags: list[Tag]
    at_least_one: bool = False
    stop_after_first: bool = False
    excludes: tuple[str, ...] = ()


class TagsWithSeparator(_Format, tag="tags_with_separator"):
    tags: list[Tag]
    separator: str
    at_least_one: bool = False
    stop_after_first: bool = False


Format = (
    ConstString
    | JsonSchema
    | Regex
    | Grammar
    | AnyText
    | Sequenced
    | Or
    | Optional
    | Star
    | Plus
    | Repeat
    | Tag
    | TriggeredTags
    | TagsWithSeparator
)


class Structure(msgspec.Struct, forbid_unknown_fields=True):
    """A tag of the first version. schema: null = any JSON."""

    begin: str
    end: str
    schema: str | dict[str, Any] | None = None


class StructuralTag(msgspec.Struct, forbid_unknown_fields=True):
    """Either `format`, or `structures` and `triggers`."""

    type: Literal["structural_tag"] = "structural_tag"
    format: Format | None = None
    structures: list[Structure] | None = None
    triggers: list[str] | None = None


def structural_tag_form(name: str, asked: str | Mapping[str, Any], tokenizer: Tokenizer) -> Form:
    """The form of a structural tag. name: the field that has it, as an object or as its JSON.

    Raises ApiError.
    """
    try:
        document = msgspec.json.decode(asked) if isinstance(asked, str) else asked
        tag = msgspec.convert(document, StructuralTag)
    except (msgspec.DecodeError, RecursionError) as error:
        raise wrong(name, f"expected a structural tag: {error}") from error
    writer = _Writer(tokenizer, name)
    try:
        start = writer.whole(tag)
    except RecursionError as error:
        raise wrong(name, "it is nested too deeply") from error
    lines = [f"start: {start}", _TEXT, *writer.lines]
    return Form(name, {"lark_grammar": "\n".join(lines) + "\n"}, tuple(writer.parts))


class _Writer:
    """Writes expressions of Lark, and collects the rules and the grammars that they name."""

    def __init__(self, tokenizer: Tokenizer, name: str) -> None:
        self.lines: list[str] = []
        self.parts: list[Part] = []
        self._name = name
        self._markers = tokenizer.markers
        self._shown = {i for i in self._markers.values() if i not in tokenizer.special_ids}
        # The longest first: one marker may begin with another.
        longest = sorted(self._markers, key=len, reverse=True)
        self._marker = re.compile(f"({'|'.join(map(re.escape, longest))})" if longest else "(?!)")
        self._names: dict[str, str] = {}
        self._left = MAX_GRAMMAR_BYTES  # for all parts together; writing stops where they exceed it
        self._work_left = _MAX_WORK

    def whole(self, tag: StructuralTag) -> str:
        name = self._name
        if tag.format is not None and tag.structures is None and tag.triggers is None:
            return self.then(tag.format, (), f"{name}.format")
        if tag.format is None and tag.structures is not None and tag.triggers is not None:
            placed = self._placed(tag.structures, f"{name}.structures")
            return self._triggered(tag.triggers, placed, (), name)
        raise wrong(name, "expected either format, or structures and triggers")

    def then(self, form: Format, ends: Ends, place: str) -> str:
        """The expression of a format and of what ends it."""
        expression = self._then(form, ends, place)
        self._work(len(expression))
        return expression

    def _then(self, form: Format, ends: Ends, place: str) -> str:
        match form:
            case AnyText(excludes):
                return self._free(self._text_before(ends or (), excludes), ends, place)
            case TriggeredTags(triggers, tags, at_least_one, stop_after_first, excludes):
                placed = self._placed(tags, f"{place}.tags")
                return self._triggered(
                    triggers, placed, ends, place, at_least_one, stop_after_first, excludes
                )
            case Sequenced(elements) if elements:
                *before, (where, last) = self._placed(elements, f"{place}.elements").items()
                written = [self.then(each, None, path) for path, each in before]
                return " ".join([*written, self.then(last, ends, where)])
            case Or(elements) if elements:
                either = self._placed(elements, f"{place}.elements").items()
                return _any(self.then(each, ends, path) for path, each in either)
            case Optional(content):
                given, closing = self.then(content, ends, f"{place}.content"), self._closing(ends)
                return _any([given, closing]) if closing else f"({given})?"
            case Tag() if not form.end:
                return self._tag(form, ends, place)
        return f"{self._bounded(form, place)} {self._closing(ends)}"

    def _bounded(self, form: Format, place: str) -> str:
        """The expression of a format that ends by itself."""
        match form:
            case ConstString(value):
                if not value:
                    raise wrong(f"{place}.value", "expected a text that is not empty")
                return self._text(value)
            case JsonSchema(schema):
                return self._schema(schema, f"{place}.json_schema")
            case Regex(pattern):
                where = f"{place}.pattern"
                return self._part(regex_rules(where, pattern), where)
            case Grammar(grammar):
                where = f"{place}.grammar"
                self._work(gbnf_work(grammar) * _MAX_WORK // MAX_GBNF_WORK)
                return self._part(grammar_rules(where, grammar), where)
            case Star(content):
                return f"({self.then(content, None, f'{place}.content')})*"
            case Plus(content):
                return f"({self.then(content, None, f'{place}.content')})+"
            case Repeat(least, most, content):
                if not (least >= 0 and (most == -1 or max(1, least) <= most)):
                    raise wrong(place, f"expected 0 <= min <= max, got {least} and {most}")
                times = f"{least}," if most == -1 else f"{least},{most}"
                return f"({self.then(content, None, f'{place}.content')}){{{times}}}"
            case Tag():
                return self._tag(form, None, place)
            case TagsWithSeparator(tags, separator, at_least_one, stop_after_first):
                placed = self._placed(tags, f"{place}.tags")
                one = _any(self._tag(tag, None, where) for where, tag in placed.items())
                if not stop_after_first:
                    one = f"{one} ({self._text(separator)} {one})*"
                return one if at_least_one else f"({one})?"
        raise wrong(f"{place}.elements", "expected at least one")

    def _tag(
        self, tag: Tag | Structure, ends: Ends, place: str, after_trigger: str | None = None
    ) -> str:
        """The expression of a tag. ends: what ends it if it has no end of its own.

        after_trigger: the rest of its beginning, if a trigger has been written.
        """
        own = (tag.end,) if isinstance(tag.end, str) else tag.end
        if len(own) > 1 and "" in own:
            raise wrong(f"{place}.end", "expected texts that are not empty")
        ends = tuple(filter(None, own)) or ends
        begin = tag.begin if after_trigger is None else after_trigger
        if isinstance(tag, Structure):
            schema = {} if tag.schema is None else tag.schema
            content = f"{self._schema(schema, f'{place}.schema')} {self._closing(ends)}"
        else:
            content = self.then(tag.content, ends, f"{place}.content")
        return f"{self._text(begin)} {content}"

    def _triggered(
        self,
        triggers: Sequence[str],
        tags: Mapping[str, Tag | Structure],
        ends: Ends,
        place: str,
        at_least_one: bool = False,
        stop_after_first: bool = False,
        excludes: Sequence[str] = (),
    ) -> str:
        """Free text and tags in turns. tags: by their place."""
        after: dict[str, list[str]] = {trigger: [] for trigger in triggers}
        self._work(len(tags) * len(after))
        for where, tag in tags.items():
            trigger = self._trigger_of(tag.begin, after, where)
            after[trigger].append(self._tag(tag, None, where, tag.begin.removeprefix(trigger)))
        text = self._text_before([*after, *(ends or ())], excludes)
        firsts, laters = [], []
        for trigger, rests in after.items():
            if not rests:
                raise wrong(f"{place}.triggers", f"no tag begins with {quoted(trigger)}")
            rest = self._rule(_any(rests))
            firsts.append(f"{self._text(trigger)} {rest}")
            laters.append(f"{self._until(text, trigger)} {rest}")
        if not laters:
            raise wrong(f"{place}.triggers", "expected at least one")
        first, later = _any(firsts), _any(laters)
        if at_least_one and stop_after_first:
            return f"{first} {self._closing(ends)}"
        last = self._free(text, ends, place)
        if stop_after_first:
            return _any([f"{later} {self._closing(ends)}", last])
        return f"{first if at_least_one else ''} {later}* {last}"

    def _trigger_of(self, begin: str, triggers: Iterable[str], place: str) -> str:
        fitting = [trigger for trigger in triggers if trigger and begin.startswith(trigger)]
        if len(fitting) != 1:
            what = f"expected to begin with one of the triggers, got {quoted(begin)}"
            raise wrong(f"{place}.begin", what)
        (trigger,) = fitting
        self._search(begin)
        for marker in self._marker.finditer(begin):
            # Free text holds no such token, so nothing but the tag could follow it.
            if marker.start() < len(trigger) and marker.end() != len(trigger):
                what = f"its trigger must end with {quoted(marker[0])}, a token of this model"
                raise wrong(f"{place}.begin", what)
        return trigger

    def _text_before(self, ends: Iterable[str], excludes: Sequence[str]) -> "_FreeText":
        """Free text that one of these ends."""
        ends = tuple(ends)
        for each in (*ends, *excludes):
            self._search(each)
        terminal = "TEXT"
        if spelled := [each for each in excludes if each and not self._marker.search(each)]:
            without = " | ".join(map(quoted_terminal, spelled))
            terminal = self._rule(f"TEXT & ~(TEXT ({without}) TEXT)", "TEXT{}")
        found = [self._marker.search(each) for each in (*ends, *excludes)]
        ids = self._shown - {self._markers[marker[0]] for marker in found if marker}
        between = f"<[{','.join(map(str, sorted(ids)))}]>" if ids else ""
        return _FreeText(terminal, self._rule(f"({terminal} {between})*") if ids else "")

    def _free(self, text: "_FreeText", ends: Ends, place: str) -> str:
        """The expression of free text and of what ends it."""
        if ends is None:
            what = "free text ends with a tag or with the answer, and nothing comes between"
            raise wrong(place, what)
        if not ends:
            return f"{text.before} {text.terminal}"
        return _any(self._until(text, end) for end in ends)

    def _until(self, text: "_FreeText", end: str) -> str:
        """Free text up to where its end first appears, and that end."""
        before, *marker_and_rest = self._marker.split(end, maxsplit=1)
        terminal = text.terminal
        if not marker_and_rest:
            until = self._rule(f"{terminal} {quoted_terminal(end)}", "until{}[lazy]")
            return f"{text.before} {until}"
        if before:
            terminal = self._rule(f"{terminal} {quoted_terminal(before)}", "TEXT{}")
        return f"{text.before} {terminal} {self._text(''.join(marker_and_rest))}"

    def _closing(self, ends: Ends) -> str:
        return self._rule(_any(map(self._text, ends))) if ends else ""

    def _text(self, text: str) -> str:
        self._search(text)
        pieces = [piece for piece in self._marker.split(text) if piece]
        return " ".join(
            f"<[{self._markers[piece]}]>" if piece in self._markers else quoted_terminal(piece)
            for piece in pieces
        )

    def _schema(self, schema: str | dict[str, Any], place: str) -> str:
        return self._part(json_rules(place, schema, lenient=True), place)

    def _part(self, rules: Mapping[str, Any], place: str) -> str:
        part = Part({"name": f"part{len(self.parts)}", **rules}, place)
        self._left -= len(json.dumps(part.rules))
        if self._left < 0 or len(self.parts) == _MAX_PARTS:
            what = f"at most {_MAX_PARTS} schemas and grammars of {MAX_GRAMMAR_BYTES} characters"
            raise wrong(place, f"{what} together")
        self.parts.append(part)
        return f"@{part.rules['name']}"

    def _placed[T](self, items: Sequence[T], place: str) -> dict[str, T]:
        """The items of a list, each by its path in the request."""
        self._work(len(items) * len(place))
        return {f"{place}[{i}]": item for i, item in enumerate(items)}

    def _search(self, text: str) -> None:
        """Count the work of a search for markers: at each "<" the search tries all of them."""
        self._work(len(text) + text.count("<") * len(self._markers) // 8)

    def _work(self, characters: int) -> None:
        """Count work before, or just after, it is done. Raises ApiError when it is too much."""
        self._work_left -= characters
        if self._work_left < 0:
            raise wrong(self._name, "it is too long, or has too many ends for too many formats")

    def _rule(self, body: str, head: str = "rule{}") -> str:
        """The name of a rule with this body. head: its name and options; {} is a number."""
        self._work(len(body))
        rule = f"{head}: {body}"
        if rule not in self._names:
            head = head.format(len(self._names))
            self._names[rule] = head.partition("[")[0]
            self.lines.append(f"{head}: {body}")
        return self._names[rule]


class _FreeText(NamedTuple):
    """terminal: text without markers. before: such text and markers in turns; may be empty."""

    terminal: str
    before: str


def _any(expressions: Iterable[str]) -> str:
    return f"({' | '.join(expressions)})"
