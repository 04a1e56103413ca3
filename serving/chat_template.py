"""Renders a checkpoint's chat template: from messages to the text that its model was trained on.

Templates are jinja2 programs by the publisher of the checkpoint, so they run in a sandbox that can
change nothing. They are written for the environment that transformers gives them:
trim_blocks, lstrip_blocks, loop controls, `raise_exception`, `strftime_now`, a `tojson` that
escapes nothing, and `generation` blocks, which mark text and are otherwise transparent.
"""

import contextlib
import json
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from transfer.clock import SYSTEM_CLOCK, Clock

# Marks where the last message ends. Its last character shows whether the template trims.
CONTINUE_MARK = "\N{LEFT-POINTING ANGLE BRACKET}continue here\N{RIGHT-POINTING ANGLE BRACKET} "
# Variables of a template that chat_template_kwargs may not set: requests have fields for them, or
# we set them.
RESERVED_KWARGS = frozenset(
    {"messages", "tools", "add_generation_prompt", "continue_final_message", "self", "documents"}
)


class ChatTemplateError(ValueError):
    """The messages do not fit the template; the message is the template's own."""


class ChatTemplate:
    """One compiled template."""

    def __init__(self, source: str, clock: Clock = SYSTEM_CLOCK) -> None:
        """Raises ChatTemplateError when the source is not valid jinja2."""
        self.source = source
        self._clock = clock
        environment = _Environment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = self._strftime_now
        try:
            self._template = environment.from_string(source)
        except Exception as error:
            # Not jinja2's alone: what it makes of a template may be no Python, may nest too deeply
            # for Python's compiler, or may have a number that is too long to be written.
            raise ChatTemplateError(f"chat template does not parse: {error}") from error
        # By default a chain of mappings, which every rendering would walk in Python.
        self._template.globals = dict(self._template.globals)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """The text of a conversation.

        continue_final_message: end right after the last message's content, so that the model
        goes on with it. Raises ChatTemplateError when the template refuses or fails.
        """
        if continue_final_message:
            messages = _mark_end(messages)
        try:
            pieces = self._template.generate(messages=messages, **variables)
            text = "".join(_until_stopped(pieces))
            text.encode()  # a lone surrogate, which an escape in the template makes, fails here
        except jinja2.TemplateError as error:
            raise ChatTemplateError(str(error)) from error
        except Exception as error:
            # Foreign code ran on a client's data: whatever failed, the request is at fault.
            kind = type(error).__name__
            raise ChatTemplateError(f"chat template failed: {kind}: {error}") from error
        return _cut_at_mark(text) if continue_final_message else text

    def _strftime_now(self, form: str) -> str:
        return datetime.fromtimestamp(self._clock.now_s(), tz=UTC).astimezone().strftime(form)


class _Told(threading.local):
    """The event that stops this thread's rendering."""

    stop: threading.Event | None = None


_told = _Told()


@contextlib.contextmanager
def until(stop: threading.Event) -> Iterator[None]:
    """Within the block, this thread's renderings raise ChatTemplateError once `stop` is set.

    A template stops at the next text that it prints or field that it looks up; a loop that does
    neither goes on.
    """
    _told.stop = stop
    try:
        yield
    finally:
        _told.stop = None


class _Environment(ImmutableSandboxedEnvironment):
    """Checks whether to stop wherever a template looks up a field."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        _check_stop()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        _check_stop()
        return super().getitem(obj, argument)


def _until_stopped(pieces: Iterable[str]) -> Iterator[str]:
    for piece in pieces:
        _check_stop()
        yield piece


def _check_stop() -> None:
    if _told.stop is not None and _told.stop.is_set():
        raise jinja2.TemplateError("the chat template takes too long for a conversation like this")


class _GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}` renders its body, in a scope of its own."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _mark_end(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The messages with a mark at the end of the last one's content."""
    if not messages:
        raise ChatTemplateError("continue_final_message needs at least one message")
    last = dict(messages[-1])
    content = last.get("content")
    if isinstance(content, str):
        last["content"] = content + CONTINUE_MARK
    elif isinstance(content, list) and content and isinstance(content[-1].get("text"), str):
        part = {**content[-1], "text": content[-1]["text"] + CONTINUE_MARK}
        last["content"] = [*content[:-1], part]
    else:
        raise ChatTemplateError("continue_final_message needs a last message that ends in text")
    return [*messages[:-1], last]


def _cut_at_mark(text: str) -> str:
    end = text.rfind(CONTINUE_MARK.strip())
    if end < 0:
        raise ChatTemplateError("the chat template leaves the last message out: cannot continue it")
    # A template that trims contents would have trimmed the end of this content too.
    return text[:end] if text.startswith(CONTINUE_MARK, end) else text[:end].rstrip()


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes HTML.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
