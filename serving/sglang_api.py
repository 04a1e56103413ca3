"""SGLang's own POST /generate: reads requests, and spells answers whole or as cumulative events.

Field names and meanings: SGLang's documentation of its native API and sampling parameters.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import orjson

from serving.arrival import Arrival
from serving.choice import INLINE_LOGPROBS, Choice, Entry, Piece, num_prompt_logprobs
from serving.errors import ApiError, bad_field, error_event, not_served
from serving.forms import form_of
from serving.grammar import grammar_text
from serving.json_bytes import dumps
from serving.json_fields import NotServed, read_json, refuse, refuse_unless
from serving.meta_info import meta_of, token_logprobs, top_logprobs
from serving.model_names import adapter_of
from serving.openai_answers import DONE, event
from serving.prompt import Prompt
from serving.protocol import (
    ChoiceAsk,
    Request,
    SamplingDefaults,
    SamplingFields,
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
from serving.ranges import few, id_prompts, told
from serving.stream import Frame, Spelling
from serving.tokenizer import Tokenizer
from transfer import wire
from transfer.clock import Clock

DEFAULT_NEW_TOKENS = 128
MIN_NAME = "min_new_tokens"


class GenerateSampling(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """`sampling_params` of one prompt. As in SGLang, unknown names are refused here."""

    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    sampling_seed: int | None = None
    beam_width: Any = None  # not served


class GenerateFields(msgspec.Struct, kw_only=True):
    """POST /generate. A field that may be a list then has one entry a prompt."""

    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    sampling_params: GenerateSampling | list[GenerateSampling] | None = None
    stream: bool | None = None
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: int | list[int] | None = None
    top_logprobs_num: int | list[int] | None = None
    return_text_in_logprobs: bool | None = None
    rid: str | list[str] | None = None
    cache_salt: str | None = None
    extra_key: str | None = None
    lora_path: str | list[str | None] | None = None
    routed_dp_rank: int | None = None
    data_parallel_rank: int | None = None
    disagg_prefill_dp_rank: int | None = None
    max_thinking_tokens: Any = None  # not served
    input_embeds: NotServed[Any] = None
    image_data: NotServed[Any] = None
    audio_data: NotServed[Any] = None
    video_data: NotServed[Any] = None
    token_ids_logprob: NotServed[Any] = None
    custom_logit_processor: NotServed[Any] = None
    return_hidden_states: NotServed[Any] = None
    session_params: NotServed[Any] = None
    lora_id: NotServed[Any] = None
    positional_embed_overrides: NotServed[Any] = None
    multi_item_delimiter_indices: NotServed[Any] = None
    require_reasoning: NotServed[Any] = None
    return_sampling_mask: NotServed[Any] = None
    return_flat_raw_top_logprobs: NotServed[Any] = None
    return_flat_raw_output_top_logprobs: NotServed[Any] = None
    return_routed_experts: NotServed[Any] = None
    return_indexer_topk: NotServed[Any] = None
    return_entropy: NotServed[Any] = None
    return_prompt_token_ids: NotServed[Any] = None
    watermark: NotServed[Any] = None


_generates = msgspec.json.Decoder(GenerateFields)


def read_generate(body: bytes) -> GenerateFields:
    """Parse the body and check what can be checked without a model. Raises ApiError."""
    fields = read_json(_generates, body)
    refuse(fields)
    if fields.max_thinking_tokens is not None:  # 0 would be no thought
        raise not_served("max_thinking_tokens")
    if (fields.text is None) == (fields.input_ids is None):
        raise bad_field("text", "expected exactly one of text and input_ids")
    return fields


class GenerateReader:
    """One /generate request on its way to a `Request`."""

    def __init__(self, fields: GenerateFields, model: ServedModel) -> None:
        """Raises ApiError if any field is wrong."""
        self._fields = fields
        self._model = model
        check_size("text", fields.text or "", model)
        check_size("input_ids", fields.input_ids or "", model)
        self._prompts, self._is_batch = _prompts_of(fields, model.vocab_size)
        num_prompts = len(self._prompts)
        given = _each("sampling_params", fields.sampling_params, num_prompts)
        self._params = [GenerateSampling() if params is None else params for params in given]
        returns = _each("return_logprob", fields.return_logprob, num_prompts)
        starts = _each("logprob_start_len", fields.logprob_start_len, num_prompts)
        tops = _each("top_logprobs_num", fields.top_logprobs_num, num_prompts)
        self._rids = _each("rid", fields.rid, num_prompts)
        self._n = _same("n", [num_choices(params.n) for params in self._params])
        intervals = [interval_of(params.stream_interval) for params in self._params]
        self._interval = _same("stream_interval", intervals)
        self._prompt_name = "text" if fields.text is not None else "input_ids"
        check_room(self._prompt_name, num_prompts, self._n, model.config)
        self._shown = [
            _shown(params, bool(wanted), start, top, fields)
            for params, wanted, start, top in zip(self._params, returns, starts, tops, strict=True)
        ]
        self._ranks = ranks_of(fields, model)
        named = _each("lora_path", fields.lora_path, num_prompts)
        self._adapter = adapter_of(_same("lora_path", named), model, "lora_path")
        self._sampling = [
            self._sampling_of(params, shown)
            for params, shown in zip(self._params, self._shown, strict=True)
        ]
        ends, tokenizer = model.eos_ids, model.tokenizer
        self._forms = [
            form_of(params, params.min_new_tokens, ends, tokenizer, MIN_NAME)
            for params in self._params
        ]

    def _sampling_of(self, params: GenerateSampling, shown: Shown) -> Any:
        max_new = params.max_new_tokens
        if max_new is not None and max_new < 0:
            raise bad_field("max_new_tokens", f"must be at least 0, got {told(max_new)}")
        refuse(params)
        refuse_unless(params, {"beam_width": 1})
        return sampling_of(
            params,
            self._model,
            SamplingDefaults(),
            shown,
            max_tokens=max_new,
            min_tokens=params.min_new_tokens,
            min_name=MIN_NAME,
        )

    async def finish(self, request_id: str | None) -> Request:
        """Tokenize. Raises ApiError when a prompt does not fit."""
        fields, model = self._fields, self._model
        choices: list[ChoiceAsk] = []
        for prompt_idx, given in enumerate(self._prompts):
            if prompt_idx:
                await asyncio.sleep(0)  # short texts are tokenized here, and there may be many
            if isinstance(given, str):
                ids = await model.encode_prompt(self._prompt_name, given, True)
            else:
                ids = given
            params = self._params[prompt_idx]
            shown = self._shown[prompt_idx]
            max_new = fit_tokens(
                len(ids),
                1 if shown.drop_output else params.max_new_tokens,
                DEFAULT_NEW_TOKENS,
                model.context_length(),
                self._prompt_name,
                "max_new_tokens",
                params.min_new_tokens,
                MIN_NAME,
            )
            if shown.prompt_logprobs_start > len(ids):
                raise bad_field(
                    "logprob_start_len",
                    f"{shown.prompt_logprobs_start} is past the prompt of {len(ids)} tokens",
                )
            # One header cannot name several prompts.
            header = None if self._is_batch else request_id
            grammar = await grammar_text(self._forms[prompt_idx], model.trial)
            own_id = request_id_of(header, "", self._rids[prompt_idx])
            prompt = Prompt(ids)
            for choice in range(self._n):
                sampling = msgspec.structs.replace(
                    self._sampling[prompt_idx],
                    max_new_tokens=max_new,
                    seed=seed_of(params.sampling_seed, choice),
                    grammar=grammar,
                )
                index = prompt_idx * self._n + choice
                choices.append(ChoiceAsk(index, prompt_idx, own_id, prompt, sampling, shown))
        self._is_batch = self._is_batch or self._n > 1
        return Request(
            choices[0].request_id,
            choices,
            stream=bool(fields.stream),
            stream_interval=self._interval,
            cache_salt=salt_of(fields.cache_salt, fields.extra_key),
            ranks=self._ranks,
            adapter=self._adapter,
        )

    def spelling(self, request: Request, arrival: Arrival, clock: Clock) -> Spelling:
        """How to spell the answer."""
        return GenerateAnswer(self._model.tokenizer, self._is_batch, arrival.monotonic_s, clock)


def _prompts_of(fields: GenerateFields, vocab_size: int) -> tuple[Sequence[str | list[int]], bool]:
    """The prompts, and whether they came as a batch."""
    if fields.text is not None:
        texts = [fields.text] if isinstance(fields.text, str) else fields.text
        if not texts or "" in texts:
            raise bad_field("text", "must not be empty")
        return texts, not isinstance(fields.text, str)
    given = fields.input_ids or []
    lists = id_prompts("input_ids", given, vocab_size)
    return lists, not isinstance(given[0], int)


def _each[T](name: str, value: T | list[T] | list[T | None] | None, count: int) -> list[T | None]:
    """One value a prompt, from a field that may be a list."""
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise bad_field(name, f"expected one entry for each of {count} prompts, got {len(value)}")
    return list(value)


def _same[T](name: str, values: Sequence[T]) -> T:
    """The value that all prompts of a batch have, as it is one of the whole answer."""
    if any(value != values[0] for value in values):
        raise bad_field(name, "must be the same for all prompts of a batch")
    return values[0]


def _shown(
    params: GenerateSampling,
    wanted: bool,
    start: int | None,
    top: int | None,
    fields: GenerateFields,
) -> Shown:
    num_logprobs = check_logprobs("top_logprobs_num", top or 0) if wanted else -1
    if start is not None and start < -1:
        raise bad_field("logprob_start_len", f"must be at least -1, got {told(start)}")
    of_prompt = wanted and start is not None and start >= 0
    return Shown(
        stops=stops_of(params.stop),
        include_stop=bool(params.no_stop_trim),
        skip_special_tokens=params.skip_special_tokens is not False,
        stop_ids=frozenset(few("stop_token_ids", params.stop_token_ids, wire.MAX_STOP_IDS)),
        num_logprobs=num_logprobs,
        num_prompt_logprobs=num_logprobs if of_prompt else -1,
        prompt_logprobs_start=start if of_prompt and start is not None else 0,
        drop_output=params.max_new_tokens == 0,
        token_ids=True,
        text_in_logprobs=bool(fields.return_text_in_logprobs),
    )


# --- answers --------------------------------------------------------------------------------------


class _Logprobs:
    """Entries as JSON. Each is spelled only once, though every event repeats them all."""

    def __init__(self, text_of: Callable[[int], str | None]) -> None:
        self._text_of = text_of
        self._count = 0
        self._tokens: list[bytes] = []
        self._tops: list[bytes] = []

    def take(self, entries: Sequence[Entry]) -> None:
        """Add new entries."""
        if not entries:
            return
        self._count += len(entries)
        self._tokens.append(dumps(token_logprobs(entries, self._text_of))[1:-1])
        self._tops.append(dumps(top_logprobs(entries, self._text_of))[1:-1])

    def take_once(self, entries: Sequence[Entry]) -> None:
        """Add those entries of a growing list that were not added before."""
        if self._count < len(entries):
            self.take(entries[self._count :])

    @property
    def tokens(self) -> orjson.Fragment:
        return orjson.Fragment(b"[%b]" % b",".join(self._tokens))

    @property
    def tops(self) -> orjson.Fragment:
        return orjson.Fragment(b"[%b]" % b",".join(self._tops))


class _SoFar:
    """Everything that was sent of one choice so far."""

    def __init__(self, choice: Choice, tokenizer: Tokenizer) -> None:
        shown = choice.ask.shown

        def text_of(token_id: int) -> str | None:
            return tokenizer.token_text(token_id) if shown.text_in_logprobs else None

        self._choice = choice
        self.text = ""
        self.ids: list[int] = []
        self.prompt = _Logprobs(text_of)
        self.output = _Logprobs(text_of)

    def take(self, piece: Piece) -> None:
        self.text += piece.text
        self.ids += piece.ids
        self.prompt.take_once(self._choice.prompt_entries)
        self.output.take(piece.entries)


class GenerateAnswer:
    """Spells the answer; events repeat all text and ids so far (serving.stream.Events)."""

    is_cumulative = True

    def __init__(
        self, tokenizer: Tokenizer, is_batch: bool, arrival_s: float, clock: Clock
    ) -> None:
        """is_batch: the answer is a list, and events carry an index. arrival_s: monotonic."""
        self._tokenizer = tokenizer
        self._is_batch = is_batch
        self._arrival_s = arrival_s
        self._clock = clock
        self._so_far: dict[int, _SoFar] = {}

    def whole(self, choices: Sequence[Choice]) -> bytes:
        """The body of an answer that is not streamed: an object, or a list of them for a batch."""
        items = [self._item(choice, self._with(choice, choice.drain())) for choice in choices]
        return dumps(items if self._is_batch else items[0])

    def opening(self, choice: Choice) -> bytes:
        self._with(choice, Piece())  # its prompt, which every event repeats
        return b""

    def frame(self, choice: Choice) -> Frame | None:
        return None

    def piece(self, choice: Choice, piece: Piece) -> bytes:
        item = self._item(choice, self._with(choice, piece))
        return event({"index": choice.ask.index, **item} if self._is_batch else item)

    def finish(self, choice: Choice, rest: Piece) -> bytes:
        return self.piece(choice, rest)

    def closing(self, choices: Sequence[Choice]) -> bytes:
        return DONE

    def failed(self, choice: Choice, error: ApiError) -> bytes:
        return error_event(error)

    def _with(self, choice: Choice, piece: Piece) -> _SoFar:
        """Everything of the choice so far, this piece included."""
        so_far = self._so_far.get(choice.ask.index)
        if so_far is None:
            so_far = self._so_far[choice.ask.index] = _SoFar(choice, self._tokenizer)
        so_far.take(piece)
        return so_far

    def _item(self, choice: Choice, so_far: _SoFar) -> dict[str, Any]:
        return {
            "text": so_far.text,
            "output_ids": so_far.ids,
            "meta_info": self._meta_info(choice, so_far),
        }

    def _meta_info(self, choice: Choice, so_far: _SoFar) -> dict[str, Any]:
        shown = choice.ask.shown
        meta = meta_of(choice)
        meta["e2e_latency"] = self._clock.monotonic_s() - self._arrival_s
        if shown.num_logprobs >= 0:
            told = {"output": so_far.output}
            # Long ones come only with the last event: megabytes with every token would keep all
            # streams waiting.
            is_long = num_prompt_logprobs(choice.ask) > INLINE_LOGPROBS
            if choice.finish_reason is not None or not is_long:
                told["input"] = so_far.prompt
            for name, entries in told.items():
                meta[f"{name}_token_logprobs"] = entries.tokens
                if shown.num_logprobs > 0:
                    meta[f"{name}_top_logprobs"] = entries.tops
        return meta
