"""Turns the messages of a request into the text of a prompt."""

import itertools
import json
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final, Protocol

from serving.chat_template import RESERVED_KWARGS, ChatTemplateError, until
from serving.errors import (
    ApiError,
    bad_field,
    from_request_error,
    no_text,
    prompt_too_long,
    quoted,
    wrong_type,
)
from serving.protocol import ServedModel
from serving.tokenizer import TemplateHabits
from transfer.errors import RequestError

_INLINE_PARTS = 32  # messages, parts, tools and the like: up to so many need no thread to render
_INLINE_VALUES = 2048  # all that is in them
_MAX_RENDER_S: Final = 10.0
# Parts of a content by their type: where each has its text.
_TEXTS = {"input_text": "text", "output_text": "text", "refusal": "refusal", "text": "text"}
MAX_PARTS = 16_384  # content parts and tool calls of a conversation; tools; documents; kwargs


class PromptFields(Protocol):
    """The fields that make a conversation's prompt, in chat and tokenize requests."""

    messages: list[dict[str, Any]] | None
    tools: list[dict[str, Any]] | None
    tool_choice: str | dict[str, Any] | None
    chat_template_kwargs: dict[str, Any] | None
    reasoning_effort: str | None
    documents: list[dict[str, Any]] | None
    add_generation_prompt: bool | None
    continue_final_message: bool | None


def messages_of(fields: PromptFields, model: ServedModel) -> list[dict[str, Any]]:
    """The messages, checked, as the model's template expects them. Raises ApiError."""
    if not fields.messages:
        raise bad_field("messages", "must have at least one message")
    _check_number(fields, fields.messages, model.context_length())
    if fields.add_generation_prompt and fields.continue_final_message:
        raise bad_field("continue_final_message", "cannot go with add_generation_prompt")
    wrong = RESERVED_KWARGS & (fields.chat_template_kwargs or {}).keys()
    if wrong:
        raise bad_field("chat_template_kwargs", f"must not set {', '.join(sorted(wrong))}")
    named_functions(fields.tools or ())  # checks them: a template takes anything
    habits = model.tokenizer.habits[_offered(fields) is not None]
    messages = [_message(message, i, model, habits) for i, message in enumerate(fields.messages)]
    if not habits.takes_systems:
        messages = _with_one_system(messages)
    last = messages[-1]
    if fields.continue_final_message and last["role"] == "assistant" and last["content"]:
        last["content"] = text_of(last["content"])  # it is the text that the answer goes on with
    return messages


def allowed_tools(
    fields: PromptFields,
) -> tuple[list[dict[str, Any]] | None, str | dict[str, Any] | None]:
    """(tools, tool_choice); for a choice of type `allowed_tools`: the tools it names, its mode.

    Raises ApiError for a malformed `allowed_tools`.
    """
    choice = fields.tool_choice
    if not (isinstance(choice, dict) and choice.get("type") == "allowed_tools"):
        return fields.tools, choice
    match choice.get("allowed_tools"):
        case {"mode": "auto" | "required" as mode, "tools": [*named]}:
            names = [function_name(tool) for tool in named]
        case _:
            names = [None]
    if None in names:
        tool = '{"type": "function", "function": {"name": ...}}'
        form = f'{{"mode": "auto" or "required", "tools": [{tool}, ...]}}'
        what = f'expected {{"type": "allowed_tools", "allowed_tools": {form}}}'
        raise bad_field("tool_choice", f"{what}, got {quoted(choice)}")
    named_functions(fields.tools or ())  # checks them
    return [tool for tool in fields.tools or () if function_name(tool) in names] or None, mode


def function_name(tool: Any) -> str | None:
    """The name of the function that a tool is, or that a choice names; None for others."""
    match tool:
        case {"function": {"name": str(name)}}:
            return name
    return None


def text_of(content: str | list[dict[str, Any]] | None) -> str:
    """A message's content as one text; "" for null, as in a message of calls alone."""
    if content is None:
        return ""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def text_at(given: Any, name: str, where: str) -> str:
    """The text under that name in an object of a request. where: its path. Raises ApiError."""
    value = given.get(name) if isinstance(given, dict) else None
    if not isinstance(value, str):
        raise wrong_type(f"{where}.{name}", f"text, got {quoted(value)}")
    return value


def text_part(part: Any, where: str) -> dict[str, Any]:
    """A part of a content as templates know it. where: its path. Raises ApiError if not text."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str) or kind not in _TEXTS:
        raise no_text(where, part)
    return {"type": "text", "text": text_at(part, _TEXTS[kind], where)}


def named_functions(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The functions that a request offers.

    Raises ApiError for a malformed one, and for a `custom` tool: its calls are no JSON, so no
    parser would find them. Other types are the template's business.
    """
    found = []
    for place, tool in enumerate(tools):
        kind = tool.get("type")
        if kind == "custom":
            what = f"tools[{place}].type: expected 'function', got 'custom'"
            message = f"{what}: this server takes no calls but those of functions"
            raise ApiError(400, message, "tools", "unsupported_parameter")
        if kind in (None, "function"):
            where, function = f"tools[{place}].function", tool.get("function")
            if not isinstance(function, dict):
                raise wrong_type(where, f"an object, got {quoted(function)}")
            check_function(function, where)
            found.append(function)
    return found


def check_function(function: Mapping[str, Any], where: str) -> None:
    """Check the types of its name, its parameters and `strict`. Raises ApiError.

    where: the function's path.
    """
    text_at(function, "name", where)
    parameters, strict = function.get("parameters"), function.get("strict")
    if not isinstance(parameters, dict | None):
        raise wrong_type(f"{where}.parameters", f"an object, got {quoted(parameters)}")
    if not isinstance(strict, bool | None):
        raise wrong_type(f"{where}.strict", f"a boolean, got {quoted(strict)}")


def render(model: ServedModel, messages: Sequence[Mapping[str, Any]], fields: PromptFields) -> str:
    """The prompt of a conversation. Raises ApiError with the template's own words."""
    kwargs = dict(model.template_kwargs)
    if (effort := fields.reasoning_effort) is not None:
        # Few templates know efforts; more can turn thinking off or on, under one of these names.
        thinks = effort != "none"
        kwargs |= {"reasoning_effort": effort, "enable_thinking": thinks, "thinking": thinks}
    kwargs |= fields.chat_template_kwargs or {}
    if fields.documents is not None:
        kwargs["documents"] = fields.documents
    try:
        return model.tokenizer.apply_chat_template(
            messages,
            _offered(fields),
            fields.add_generation_prompt is not False,
            fields.continue_final_message is True,
            **kwargs,
        )
    except ChatTemplateError as error:
        raise bad_field("messages", str(error)) from error


def _offered(fields: PromptFields) -> list[dict[str, Any]] | None:
    """The tools that the chat template sees."""
    return None if fields.tool_choice == "none" else fields.tools or None


async def render_prompt(
    model: ServedModel, messages: Sequence[Mapping[str, Any]], fields: PromptFields
) -> str:
    """As `render`, but a long conversation is rendered in a thread, off the event loop.

    For each message a template may look at all later ones, as GPT-OSS's does after calls: seconds
    for a thousand messages. Some print a tool's properties one by one. A rendering is stopped after
    _MAX_RENDER_S, as others wait for the thread. Raises ApiError as `render` does, and 429 when too
    many wait.
    """
    named = fields.tools, fields.documents, fields.chat_template_kwargs
    count = len(messages) + _num_parts(messages) + sum(len(items or ()) for items in named)
    if count <= _INLINE_PARTS and _has_few_values([messages, *named]):
        return render(model, messages, fields)
    stop = threading.Event()
    rendering = partial(_render_until, stop, model, messages, fields)
    try:
        return await model.templates.run(rendering)
    except RequestError as error:
        raise from_request_error(error) from error
    finally:
        stop.set()


def _render_until(
    stop: threading.Event,
    model: ServedModel,
    messages: Sequence[Mapping[str, Any]],
    fields: PromptFields,
) -> str:
    timer = threading.Timer(_MAX_RENDER_S, stop.set)
    timer.daemon = True
    timer.start()
    try:
        with until(stop):
            return render(model, messages, fields)
    finally:
        timer.cancel()


def _num_parts(messages: Sequence[Mapping[str, Any]]) -> int:
    """How many content parts and tool calls the messages have."""
    lists = (message.get(name) for message in messages for name in ("content", "tool_calls"))
    return sum(len(items) for items in lists if isinstance(items, list))


def _has_few_values(waiting: list[Any]) -> bool:
    """Whether these lists and objects have few values in all, however deep."""
    left = _INLINE_VALUES
    while waiting:
        one = waiting.pop()
        if isinstance(one, list | dict):
            left -= len(one)
            if left < 0:
                return False
            waiting += one.values() if isinstance(one, dict) else one
    return True


def _check_number(
    fields: PromptFields, messages: Sequence[Mapping[str, Any]], context_length: int
) -> None:
    """Raise ApiError for too many items: a template takes seconds for a million of anything.

    Each message makes at least one token, so there can be at most context_length of them.
    """
    if len(messages) > context_length:
        raise prompt_too_long("messages", context_length, f"{len(messages)} messages")
    count = _num_parts(messages)
    for name in ("tools", "documents", "chat_template_kwargs"):
        items = getattr(fields, name)
        if items and len(items) > MAX_PARTS:
            raise bad_field(name, f"at most {MAX_PARTS}, got {len(items)}")
    if count > MAX_PARTS:
        what = f"at most {MAX_PARTS} content parts and tool calls, got {count}"
        raise bad_field("messages", what)


def _message(
    message: dict[str, Any], place: int, model: ServedModel, habits: TemplateHabits
) -> dict[str, Any]:
    where = f"messages[{place}]"
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise wrong_type(f"{where}.role", f"a role's name, got {quoted(role)}")
    # Templates ask whether a message has a field, and do not expect null in it; but clients send
    # an answer back with all of its fields, most of them null.
    message = {name: value for name, value in message.items() if value is not None}
    content = message.get("content")
    if role == "assistant" and content in (None, "") and "refusal" in message:
        content = message["refusal"]
        if not isinstance(content, str):
            raise wrong_type(f"{where}.refusal", f"text, got {quoted(content)}")
    calls = message.pop("tool_calls", None) or []
    if isinstance(content, list):
        parts = [text_part(part, f"{where}.content[{i}]") for i, part in enumerate(content)]
        takes = role in habits.takes_parts and any(part["text"] for part in parts)
        content = parts if takes else text_of(parts)
    if message.get("function_call") and not calls:
        what = "unsupported; expected tool_calls, and messages of role tool"
        raise bad_field(f"{where}.function_call", what, "unsupported_parameter")
    if content in (None, "") and calls:
        content = habits.call_form.content
    elif content is None and role != "user":
        content = ""  # an answer without text that comes back, or a tool that returned nothing
    elif not isinstance(content, str | list):
        kind = type(content).__name__ if content is not None else "null"
        raise wrong_type(f"{where}.content", f"text, got {kind}")
    message["content"] = content
    if role == "assistant":
        _name_thought(message)
    if role == "developer":
        message["role"] = habits.developer_role
    if calls:
        if not isinstance(calls, list):
            raise wrong_type(f"{where}.tool_calls", f"a list, got {type(calls).__name__}")
        as_text = habits.call_form.arguments_as_text
        message["tool_calls"] = [_tool_call(x, f"{where}.tool_calls", as_text) for x in calls]
        if model.config.reasoning_parser == "gpt-oss" and not content:
            # Its template prints the thought before a call, and looks for it under this name.
            message["thinking"] = message.get("thinking") or message.get("reasoning_content") or ""
    return message


def _with_one_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with those of the system and developers at their beginning made one."""
    roles = ("system", "developer")
    head = list(itertools.takewhile(lambda message: message["role"] in roles, messages))
    if len(head) < 2:
        return messages
    content = "\n\n".join(text_of(message["content"]) for message in head)
    return [{**head[0], "content": content}, *messages[len(head) :]]


def _name_thought(message: dict[str, Any]) -> None:
    """Put a message's thought under the name that templates know, whatever its client calls it.

    vLLM and others name it `reasoning` in their answers, and clients send it back like that.
    """
    names = ("reasoning_content", "thinking", "reasoning")
    told = [text for name in names if isinstance(text := message.get(name), str) and text]
    if told:
        message["reasoning_content"] = told[0]


def _tool_call(call: Any, where: str, as_text: bool) -> dict[str, Any]:
    """A call with its arguments as an object, which most templates print; clients send text.

    as_text: this model's template joins texts, so the arguments have to be one.
    """
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise wrong_type(where, "functions")
    name, given = function.get("name"), function.get("arguments")
    arguments = {} if given is None else given
    if isinstance(given, str):
        try:
            arguments = json.loads(given or "{}")
            if "\\u" in given:  # only an escape can make a lone surrogate, which fails here
                json.dumps(arguments, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            what = f"arguments of {quoted(name)} that UTF-8 can hold, got a lone surrogate"
            raise wrong_type(where, what) from error
        except (ValueError, RecursionError) as error:
            raise wrong_type(where, f"JSON as arguments of {quoted(name)}") from error
    if as_text:
        text = json.dumps(arguments or {}, ensure_ascii=False)
        arguments = given if isinstance(given, str) and given else text
    return {**call, "function": {**function, "arguments": arguments}}
