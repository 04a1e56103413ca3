"""Turns the fields of OpenAI's requests, chat and completions, into a `Request`."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec

from serving.arrival import Arrival
from serving.bad_words import check_bad_words, spellings_of
from serving.call_grammar import (
    calls_form,
    calls_or_form,
    must_be_calls,
    named_tool,
    strict_calls_form,
    thought_prefix,
)
from serving.conversation import (
    allowed_tools,
    function_name,
    messages_of,
    named_functions,
    render_prompt,
    text_of,
)
from serving.errors import bad_field, not_served, too_long
from serving.forms import JSON_FORMATS, check_end, form_of
from serving.grammar import Form, grammar_text
from serving.harmony import MARKERS
from serving.model_names import adapter_of, name_of
from serving.openai_answers import chat_answer, completion_answer
from serving.openai_fields import (
    ChatFields,
    CompletionFields,
    OpenAIFields,
    StreamOptions,
)
from serving.parsing import Parsing, begin_with_markers, tools_of
from serving.prompt import Prompt
from serving.protocol import (
    ChoiceAsk,
    Request,
    ServedModel,
    Shown,
    check_logprobs,
    check_room,
    check_size,
    fit_tokens,
    interval_of,
    num_choices,
    ranks_of,
    request_id_of,
    salt_of,
    sampling_of,
    seed_of,
    stops_of,
)
from serving.ranges import check_token_ids, few, id_prompts, in_range
from serving.stream import Spelling
from transfer import wire
from transfer.clock import Clock

DEFAULT_COMPLETION_TOKENS = 16


class _Reader[F: OpenAIFields]:
    """What readers of completions and of chats share."""

    id_prefix: str
    _most: int | None  # tokens of a prompt that are kept, the last ones; None: all
    _shown: Shown
    _sampling: wire.SamplingParams

    def __init__(self, fields: F, model: ServedModel) -> None:
        """Raises ApiError if a field that both have is wrong."""
        self._adapter = adapter_of(fields.model, model)
        self._fields = fields
        self._model = model
        self._n = num_choices(fields.n)
        self._interval = interval_of(fields.stream_interval)
        self._ranks = ranks_of(fields, model)

    def _set_most(self, output: int) -> None:
        """Set how many tokens of a prompt are kept; None: all.

        output: tokens that it has to leave room for. Raises ApiError if there is no such room.
        """
        name, asked = "truncate_prompt_tokens", self._fields.truncate_prompt_tokens
        length, output = self._model.context_length(), max(output, self._fields.min_tokens or 0)
        self._most = max(length - output, 1) if asked == -1 else asked
        if asked is not None and asked != -1:
            in_range(name, asked, 1, None, "-1 (as many as fit), or")
            if asked + output > length > output:
                what = f"{asked} of the prompt before an output of {output} make {asked + output}"
                raise too_long(name, length, what)

    def _set_sampling(self, max_tokens: int | None) -> None:
        """Raises ApiError if a field is wrong. To be called once `_shown` is set."""
        fields, model = self._fields, self._model
        self._bad_words = check_bad_words(fields.bad_words)
        self._sampling = sampling_of(
            fields,
            model,
            model.defaults,
            self._shown,
            max_tokens=max_tokens,
            min_tokens=fields.min_tokens,
        )

    async def _request(
        self, header: str | None, prompts: list[Prompt], max_new_tokens: list[int], grammar: str
    ) -> Request:
        """header: the id that one asks for. max_new_tokens: of each prompt. Raises ApiError."""
        fields = self._fields
        bad_words = await spellings_of(self._bad_words, self._model)
        request_id = request_id_of(header, self.id_prefix, fields.rid, fields.request_id)
        choices = []
        for prompt_idx, prompt in enumerate(prompts):
            for choice in range(self._n):
                own = msgspec.structs.replace(
                    self._sampling,
                    max_new_tokens=max_new_tokens[prompt_idx],
                    seed=seed_of(fields.seed, choice),
                    grammar=grammar,
                    bad_words=bad_words,
                )
                index = prompt_idx * self._n + choice
                choices.append(ChoiceAsk(index, prompt_idx, request_id, prompt, own, self._shown))
        options = fields.stream_options or StreamOptions()
        return Request(
            request_id,
            choices,
            stream=bool(fields.stream),
            stream_interval=self._interval,
            include_usage=bool(options.include_usage),
            continuous_usage=bool(options.continuous_usage_stats),
            cache_salt=salt_of(fields.cache_salt, fields.extra_key),
            ranks=self._ranks,
            adapter=self._adapter,
        )


# --- completions ------------------------------------------------------------------------------


class CompletionReader(_Reader[CompletionFields]):
    """One completions request on its way to a `Request`."""

    id_prefix = "cmpl-"

    def __init__(self, fields: CompletionFields, model: ServedModel) -> None:
        """Raises ApiError if any field is wrong."""
        super().__init__(fields, model)
        self._drop_output = fields.max_tokens == 0 and bool(fields.echo)
        if fields.max_tokens is not None and not self._drop_output:
            in_range("max_tokens", fields.max_tokens, 1, None)
        default = 1 if self._drop_output else DEFAULT_COMPLETION_TOKENS
        self._set_most(fields.max_tokens or default)
        prompt = fields.prompt if self._most is None else _last(fields.prompt, self._most)
        check_size("prompt", prompt, model)
        self._prompts = _prompts_of(prompt, model.vocab_size)
        num_logprobs = check_logprobs("logprobs", fields.logprobs)
        self._shown = _shown(fields, num_logprobs, self._drop_output)
        self._set_sampling(fields.max_tokens)
        self._form = form_of(fields, fields.min_tokens, model.eos_ids, model.tokenizer)
        check_room("prompt", len(self._prompts), self._n, model.config)

    async def finish(self, request_id: str | None) -> Request:
        """Tokenize. request_id: from a header. Raises ApiError when a prompt does not fit."""
        fields, model = self._fields, self._model
        prompts: list[Prompt] = []
        for given in self._prompts:
            if prompts:
                await asyncio.sleep(0)  # short texts are tokenized here, and there may be many
            if isinstance(given, str):
                add_special = fields.add_special_tokens is not False
                most = self._most
                ids = await model.encode_prompt("prompt", given, add_special, most=most)
                if fields.echo and most is not None and len(ids) >= most:
                    front = model.tokenizer.num_added_in_front if add_special else 0
                    given = model.tokenizer.decode(ids[front:], False)
                prompts.append(Prompt(ids, given))
            else:
                text = model.tokenizer.decode(given, False) if fields.echo else ""
                prompts.append(Prompt(given, text))
        grammar = await grammar_text(self._form, model.trial)
        new_tokens = [self._fit(len(prompt.ids)) for prompt in prompts]
        return await self._request(request_id, prompts, new_tokens, grammar)

    def spelling(self, request: Request, arrival: Arrival, clock: Clock) -> Spelling:
        """How to spell the answer."""
        name = name_of(request, self._model)
        return completion_answer(request, self._model.tokenizer, name, arrival.created)

    def _fit(self, num_prompt: int) -> int:
        length = self._model.context_length()
        # A prompt that is only scored generates a token as well, which is not shown.
        asked = 1 if self._drop_output else self._fields.max_tokens
        return fit_tokens(
            num_prompt,
            asked,
            DEFAULT_COMPLETION_TOKENS,
            length,
            "prompt",
            "max_tokens",
            self._fields.min_tokens,
        )


def _last(
    prompt: str | list[str | int | list[int]], most: int
) -> str | list[str | int | list[int]]:
    """The prompt, or prompts, with the last of those ids that are given as ids.

    What is cut off is not looked at: it may be millions of ids.
    """
    if isinstance(prompt, str) or not prompt:
        return prompt
    if isinstance(prompt[0], int):
        return prompt[-most:]
    return [item[-most:] if isinstance(item, list) else item for item in prompt]


def _prompts_of(
    prompt: str | list[str | int | list[int]], vocab_size: int
) -> Sequence[str | list[int]]:
    """The prompts, given as a text, texts, token ids, or lists of token ids."""
    if isinstance(prompt, str):
        texts: list[str] = [prompt]
    else:
        texts = [item for item in prompt if isinstance(item, str)]
        if not texts:
            return id_prompts("prompt", prompt, vocab_size)
        if len(texts) < len(prompt):
            raise bad_field("prompt", "must be of one kind: texts, or token ids, not both")
    if "" in texts:
        raise bad_field("prompt", "must not be empty")
    return texts


# --- chat ---------------------------------------------------------------------------------------


class ChatReader(_Reader[ChatFields]):
    """One chat request on its way to a `Request`."""

    id_prefix = "chatcmpl-"

    def __init__(self, fields: ChatFields, model: ServedModel) -> None:
        """Raises ApiError if any field is wrong."""
        self._given_tools = fields.tools or ()
        tools, choice = allowed_tools(fields)
        fields = msgspec.structs.replace(fields, tools=tools, tool_choice=choice)
        super().__init__(fields, model)
        self._max_name = "max_tokens"
        self._max_tokens = fields.max_tokens
        if fields.max_completion_tokens is not None:
            self._max_name = "max_completion_tokens"
            self._max_tokens = fields.max_completion_tokens
        if self._max_tokens is not None:
            in_range(self._max_name, self._max_tokens, 1, None)
        self._set_most(self._max_tokens or 1)
        ids = fields.input_ids or []
        self._ids = ids if self._most is None else ids[-self._most :]
        if self._ids:
            check_size("input_ids", self._ids, model)
            check_token_ids("input_ids", self._ids, model.vocab_size)
        num_logprobs = check_logprobs("top_logprobs", fields.top_logprobs or 0)
        if not fields.logprobs:
            num_logprobs = -1
        self.parsing = _parsing(fields, model)
        self._shown = _shown(fields, num_logprobs, drop_output=False)
        self._shown = _with_markers(self._shown, self.parsing, model)
        self._set_sampling(self._max_tokens)
        self._form = self._form_of(fields)
        check_room("messages", 1, self._n, model.config)
        self._messages = messages_of(fields, model)

    def _form_of(self, fields: ChatFields) -> Form | None:
        model = self._model
        form = form_of(fields, fields.min_tokens, model.eos_ids, model.tokenizer)
        places = self._places_of_parameters()
        if self.parsing.may_call and form is not None:
            return calls_or_form(form, self.parsing, fields.tools or (), model.tokenizer, places)
        if not self.parsing.must_call:
            return form or self._form_of_strict_calls(fields, places)
        # A response format is about the text, and an answer that must be calls has none. It is not
        # refused, because agents always send one.
        if form is not None and form.field != "response_format":
            raise bad_field("tool_choice", f"a required tool call cannot go with {form.name}")
        only = named_tool(fields.tool_choice)
        form = calls_form(self.parsing, fields.tools or (), only, model.tokenizer, places)
        check_end(form, fields, fields.min_tokens, model.eos_ids)
        return form

    def _form_of_strict_calls(self, fields: ChatFields, places: Mapping[str, str]) -> Form | None:
        if fields.continue_final_message:  # a call may have begun already
            return None
        model = self._model
        form = strict_calls_form(self.parsing, fields.tools or (), model.tokenizer, places)
        if form is not None:
            check_end(form, fields, fields.min_tokens, model.eos_ids)
        return form

    def _places_of_parameters(self) -> Mapping[str, str]:
        """For each function, by name: the path of its parameters in the request."""
        named = enumerate(map(function_name, self._given_tools))
        return {name: f"tools[{i}].function.parameters" for i, name in named if name is not None}

    async def finish(self, request_id: str | None) -> Request:
        """Render and tokenize. Raises ApiError if the template refuses, or the prompt is too long.

        request_id: from a header.
        """
        fields, model = self._fields, self._model
        text, ids = await self._prompt()
        last = self._messages[-1]
        echoes = fields.echo and last["role"] == "assistant"
        shown_text = text_of(last["content"]) if echoes else ""
        begun = text_of(last["content"]) if fields.continue_final_message else ""
        self.parsing = replace(self.parsing, prompt=text, begun=begun)
        prefix = ""
        if self._form is not None and not self._form.whole:
            prefix = thought_prefix(self.parsing, model.tokenizer)
        grammar = await grammar_text(self._form, model.trial, prefix)
        if fields.separate_reasoning is False:  # only the grammar had to know of thoughts
            self.parsing = replace(self.parsing, reasoning="none")
        most = self._fit(len(ids), self._max_tokens, None)
        prompt = Prompt(ids, shown_text, text if fields.return_prompt_text else "")
        return await self._request(request_id, [prompt], [most], grammar)

    async def _prompt(self) -> tuple[str, list[int]]:
        """The prompt's text and ids, which may be given in place of those of the messages."""
        fields, model = self._fields, self._model
        if self._ids:
            return model.tokenizer.decode(self._ids, False), self._ids
        text = await render_prompt(model, self._messages, fields)
        add_special = fields.add_special_tokens is True
        ids = await model.encode_prompt("messages", text, add_special, most=self._most)
        if not ids:
            raise bad_field("messages", "the chat template makes an empty prompt of them")
        return text, ids

    def spelling(self, request: Request, arrival: Arrival, clock: Clock) -> Spelling:
        """How to spell the answer."""
        model = self._model
        name = name_of(request, model)
        return chat_answer(request, model.tokenizer, name, arrival.created, self.parsing)

    def _fit(self, num_prompt: int, asked: int | None, default: int | None) -> int:
        """max_new_tokens, as fit_tokens has it."""
        length, fields = self._model.context_length(), self._fields
        name = "input_ids" if self._ids else "messages"
        return fit_tokens(
            num_prompt, asked, default, length, name, self._max_name, fields.min_tokens
        )


def _parsing(fields: ChatFields, model: ServedModel) -> Parsing:
    """What is parsed out of the answer.

    Raises ApiError for a request that wants reasoning in a way in which no parser gives it, and for
    one that asks for calls where no parser reads them.
    """
    config = model.config
    if config.reasoning_parser != "none" and fields.stream_reasoning is False:
        raise not_served("stream_reasoning")
    if config.reasoning_parser == "gpt-oss" and fields.separate_reasoning is False:
        raise not_served("separate_reasoning")  # without its parser an answer is hardly legible
    if fields.include_reasoning is False and fields.separate_reasoning is False:
        raise bad_field("include_reasoning", "cannot be false where separate_reasoning is")
    must_call = must_be_calls(fields.tool_choice)
    if must_call and config.tool_call_parser == "none":
        raise bad_field("tool_choice", "required tool calls need a server with --tool-call-parser")
    calls = config.tool_call_parser != "none" and fields.tool_choice != "none"
    tools = tools_of(named_functions(fields.tools or ()), config.tool_call_parser) if calls else {}
    may_call = bool(tools) and not must_call and _asks_for_json(fields)
    token_ids = map(model.tokenizer.token_id, MARKERS)
    return Parsing(
        config.reasoning_parser,
        config.tool_call_parser,
        tools,
        one_call=fields.parallel_tool_calls is False,
        must_call=must_call,
        may_call=may_call and begin_with_markers(config.tool_call_parser),
        sealed=config.reasoning_parser == "gpt-oss"
        and all(token_id in model.tokenizer.special_ids for token_id in token_ids),
        reasoning_field=config.reasoning_field,
        shows_reasoning=fields.include_reasoning is not False,
    )


def _asks_for_json(fields: ChatFields) -> bool:
    """Whether the answer is to be JSON, from its very beginning."""
    asked = fields.response_format
    return asked is not None and asked.type in JSON_FORMATS and not fields.continue_final_message


def _with_markers(shown: Shown, parsing: Parsing, model: ServedModel) -> Shown:
    """`shown`, with the text of those special tokens that the parser looks for."""
    special = model.tokenizer.special_ids
    markers = special & {model.tokenizer.token_id(marker) for marker in parsing.markers}
    if parsing.sealed:
        shown = replace(shown, sealed_ids=frozenset(markers))
    if not (markers and shown.skip_special_tokens):
        return shown
    return replace(shown, skip_special_tokens=False, quiet_ids=special - markers)


# --- both -----------------------------------------------------------------------------------------


def _shown(fields: OpenAIFields, num_logprobs: int, drop_output: bool) -> Shown:
    num_prompt_logprobs = own = check_logprobs("prompt_logprobs", fields.prompt_logprobs)
    if fields.echo and isinstance(fields, CompletionFields):
        # An echoed prompt has logprobs like the rest.
        num_prompt_logprobs = max(num_prompt_logprobs, num_logprobs)
    return Shown(
        stops=stops_of(fields.stop),
        include_stop=bool(fields.include_stop_str_in_output or fields.no_stop_trim),
        skip_special_tokens=fields.skip_special_tokens is not False,
        stop_ids=frozenset(few("stop_token_ids", fields.stop_token_ids, wire.MAX_STOP_IDS)),
        num_logprobs=num_logprobs,
        num_prompt_logprobs=num_prompt_logprobs,
        num_own_prompt_logprobs=own,
        echo=bool(fields.echo),
        drop_output=drop_output,
        token_ids=bool(fields.return_token_ids),
        prompt_ids=bool(fields.return_prompt_token_ids),
        meta_info=isinstance(fields, ChatFields) and bool(fields.return_meta_info),
        tokens_as_ids=bool(fields.return_tokens_as_token_ids),
    )
