"""The `Request` that every API makes of what it reads, and the checks that the APIs share.

The APIs (openai_api, responses_api, sglang_api) first read JSON into structs of their own. Every
error in a field is found before any text is tokenized.
"""

import asyncio
import hashlib
import json
import logging
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from model.config import ModelConfig
from model.tokenizer_files import eos_ids
from serving.config import ServeConfig
from serving.errors import ApiError, bad_field, prompt_too_long, quoted, too_long
from serving.grammar_trial import GrammarTrial
from serving.json_fields import NotServed, refuse_unless
from serving.prompt import Prompt
from serving.ranges import check_token_ids, in_range, mask_of, told
from serving.router import ANY_RANKS, Ranks
from serving.tokenizer import Tokenizer
from serving.turns import Turns
from transfer import wire
from transfer.errors import ConfigError

log = logging.getLogger(__name__)

MAX_CHOICES = 128  # of one prompt
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1024
MAX_REQUEST_ID = 256
# Longer texts are tokenized in a thread, so that the streams of others do not wait for them.
INLINE_CHARACTERS = 4096
_MAX_TEMPLATES_WAITING = 64  # long conversations; each has ten seconds at most
_CHARACTERS_PER_TOKEN = 8  # a text longer than this times the context is counted in parts first


# --- requests ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Shown:
    """What an answer shows of its tokens. Counts of logprobs are -1 for none."""

    stops: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    quiet_ids: frozenset[int] = frozenset()  # show no text even if special tokens are not skipped
    sealed_ids: frozenset[int] = frozenset()  # always show text, followed by a TOKEN_SEAL
    stop_ids: frozenset[int] = frozenset()  # those the client named; eos ids are not among them
    num_logprobs: int = -1
    num_prompt_logprobs: int = -1
    num_own_prompt_logprobs: int = -1  # of these, in a field apart from what is echoed
    prompt_logprobs_start: int = 0
    echo: bool = False
    drop_output: bool = False  # max_tokens 0: one token is generated, but not shown
    token_ids: bool = False
    prompt_ids: bool = False  # in each choice
    meta_info: bool = False
    tokens_as_ids: bool = False  # "token_id:7" in logprobs, in place of its text
    text_in_logprobs: bool = True


@dataclass(frozen=True, slots=True)
class ChoiceAsk:
    """What to generate for one choice; with `n` or a batch a request has several."""

    index: int
    prompt_idx: int  # choices of one prompt share it
    request_id: str
    prompt: Prompt
    sampling: wire.SamplingParams
    shown: Shown


@dataclass(frozen=True, slots=True)
class Request:
    """All choices of one HTTP request, in the order of their indices."""

    request_id: str
    choices: list[ChoiceAsk]
    stream: bool = False
    stream_interval: int | None = None  # None: the server's
    include_usage: bool = False
    continuous_usage: bool = False
    cache_salt: str = ""
    ranks: Ranks = ANY_RANKS
    adapter: str = ""  # as in transfer.wire.Submit


# --- the model being served ---------------------------------------------------------------------


@dataclass(frozen=True)
class SamplingDefaults:
    """Sampling values for what a request leaves out."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


class ServedModel:
    """What one needs to know of the model to read a request."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        config: ServeConfig,
        model_config: ModelConfig,
        workers_context_length: Callable[[], int],
        workers_dp_size: Callable[[wire.Role], int | None] = lambda _: None,
        adapters: Callable[[], tuple[str, ...] | None] = tuple,
    ) -> None:
        """While no worker is seen, workers_context_length is 0, the others are None.

        adapters: their names.
        """
        self.tokenizer = tokenizer
        self.config = config
        self.name = config.model_name
        self.template_kwargs = config.template_kwargs
        self.trial = GrammarTrial(config.model_path, config.queue_timeout_s)
        # Renders long conversations, one at a time: rendering shares the GIL with every stream.
        self.templates = Turns("chat template", _MAX_TEMPLATES_WAITING, config.queue_timeout_s)
        self.vocab_size = model_config.vocab_size
        if tokenizer.vocab_size > self.vocab_size:
            log.warning(
                "%s: token ids of the tokenizer go up to %d, those of the model to %d: prompts "
                "with other tokens are refused",
                config.model_path, tokenizer.vocab_size - 1, self.vocab_size - 1,
            )  # fmt: skip
        self.eos_ids = eos_ids(model_config, tokenizer.eos_id)
        if len(self.eos_ids) > wire.MAX_STOP_IDS:
            what = f"{config.model_path}: {len(self.eos_ids)} tokens end a text (eos_token_id)"
            raise ConfigError(f"{what}; accepted: at most {wire.MAX_STOP_IDS}")
        self.defaults = (
            _defaults_of_model(config, model_config)
            if config.sampling_defaults == "model"
            else SamplingDefaults()
        )
        _check_defaults(self)
        self._own_context_length = model_config.max_position_embeddings
        self._workers_context_length = workers_context_length
        self._workers_dp_size = workers_dp_size
        self.adapters = adapters

    def context_length(self) -> int:
        """The most tokens that one request may have, prompt and output together."""
        length = self._workers_context_length() or self._own_context_length
        return min(length, self.config.context_length or length)

    def rank_of(self, name: str, rank: int | None, role: wire.Role) -> int:
        """The data-parallel rank that a request dictates, or -1.

        Raises ApiError when no worker has it.
        """
        if rank is None:
            return -1
        if rank < 0:
            raise bad_field(name, f"must be at least 0, got {told(rank)}")
        size = self._workers_dp_size(role)
        if size is not None and rank >= size:
            none = f"this cluster has no {role} worker"
            has = f"{role} has data-parallel ranks 0 to {size - 1}" if size else none
            raise bad_field(name, f"{has}, got {told(rank)}")
        return rank

    async def encode_prompt(
        self,
        name: str,
        text: str,
        add_special_tokens: bool,
        threads: Executor | None = None,
        most: int | None = None,
    ) -> list[int]:
        """Ids of a text. A long one is tokenized off the event loop, in the loop's own threads.

        name: the field that has the text. threads: used instead of the loop's own. most: how many
        of the ids are kept, see Tokenizer.last; None: all. Raises ApiError for a token that the
        model does not have, and (code context_length_exceeded) for a text that cannot fit, without
        tokenizing all of it, which might take minutes.
        """
        loop, length = asyncio.get_running_loop(), self.context_length()
        is_long = len(text) > _CHARACTERS_PER_TOKEN * length
        if is_long and most is not None:
            text = await loop.run_in_executor(threads, self.tokenizer.end_of, text, most)
        elif is_long:
            count = self.tokenizer.fewest_tokens
            fewest = await loop.run_in_executor(threads, count, text, length)
            if fewest > length:
                raise prompt_too_long(name, length, f"{fewest} tokens or more")
        encode = self.tokenizer.encode
        if len(text) <= INLINE_CHARACTERS:
            ids = encode(text, add_special_tokens)
        else:
            ids = await loop.run_in_executor(threads, encode, text, add_special_tokens)
        if most is not None:
            ids = self.tokenizer.last(ids, most, add_special_tokens)
        return self.known(name, ids)

    def known(self, name: str, ids: list[int]) -> list[int]:
        """The ids of a field's text. Raises ApiError for a token that the model does not have."""
        # A model would compute something for any number; most tokenizers have no such ids.
        if self.tokenizer.vocab_size > self.vocab_size and max(ids, default=0) >= self.vocab_size:
            strange = next(token_id for token_id in ids if token_id >= self.vocab_size)
            what = f"{quoted(self.tokenizer.token_text(strange))} is token {strange}, and the model"
            raise bad_field(name, f"{what} has only those from 0 to {self.vocab_size - 1}")
        return ids


def _defaults_of_model(config: ServeConfig, model_config: ModelConfig) -> SamplingDefaults:
    """The defaults of generation_config.json; do_sample is ignored, temperature 0 is greedy."""
    file = config.model_path / "generation_config.json"
    found: Any = {}
    if file.exists():
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot read {file}: {error}") from error
    given = {
        "temperature": model_config.default_temperature,
        "top_p": model_config.default_top_p,
        "top_k": model_config.default_top_k,
        "min_p": found.get("min_p"),
        "repetition_penalty": found.get("repetition_penalty"),
    }
    given = {name: value for name, value in given.items() if value is not None}
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{file}: {name} is {value!r}; accepted: a number")
    return SamplingDefaults(**given)


def _check_defaults(model: ServedModel) -> None:
    """Raises ConfigError for a default that would fail every request that does not override it."""
    try:
        fields = SamplingFields()
        sampling_of(fields, model, model.defaults, Shown(), max_tokens=None, min_tokens=None)
    except ApiError as error:
        file = model.config.model_path / "generation_config.json"
        raise ConfigError(f"{file}: {error}") from error


# --- fields that both APIs have -------------------------------------------------------------------


class SamplingFields(msgspec.Struct, kw_only=True):
    """Sampling as both APIs spell it; null counts as absent, unknown fields are ignored."""

    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    stream_interval: int | None = None
    json_schema: str | dict[str, Any] | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | dict[str, Any] | None = None
    spaces_between_special_tokens: Any = None  # served only if true
    stop_regex: NotServed[Any] = None
    custom_params: NotServed[Any] = None


def sampling_of(
    fields: SamplingFields,
    model: ServedModel,
    defaults: SamplingDefaults,
    shown: Shown,
    *,
    max_tokens: int | None,
    min_tokens: int | None,
    min_name: str = "min_tokens",
) -> wire.SamplingParams:
    """The parameters, checked. max_new_tokens and seed are left out: they depend on the choice.

    min_name: what this API calls min_tokens. Raises ApiError.
    """
    refuse_unless(fields, {"spaces_between_special_tokens": True})
    top_k = _or(fields.top_k, defaults.top_k)
    min_tokens = _or(min_tokens, 0)
    sampling = wire.SamplingParams(
        max_new_tokens=0,
        temperature=in_range(
            "temperature", _or(fields.temperature, defaults.temperature), 0.0, None
        ),
        top_k=0 if top_k == -1 else in_range("top_k", top_k, 0, None, "-1 (all), or"),
        top_p=in_range("top_p", _or(fields.top_p, defaults.top_p), 0.0, 1.0, open_low=True),
        min_p=in_range("min_p", _or(fields.min_p, defaults.min_p), 0.0, 1.0),
        frequency_penalty=in_range(
            "frequency_penalty", _or(fields.frequency_penalty, 0.0), -2.0, 2.0
        ),
        presence_penalty=in_range("presence_penalty", _or(fields.presence_penalty, 0.0), -2.0, 2.0),
        repetition_penalty=in_range(
            "repetition_penalty",
            _or(fields.repetition_penalty, defaults.repetition_penalty),
            0.01,  # logits are divided by it
            None,
        ),
        logit_bias=_logit_bias(fields.logit_bias, model.vocab_size),
        stop_token_ids=_stop_token_ids(fields, model),
        min_tokens=in_range(min_name, min_tokens, 0, None),
        allowed=mask_of("allowed_token_ids", fields.allowed_token_ids, model.vocab_size),
        # The workers make one table of top logprobs for prompt and output.
        num_top_logprobs=max(shown.num_logprobs, shown.num_prompt_logprobs),
        prompt_logprobs_start=shown.prompt_logprobs_start if shown.num_prompt_logprobs >= 0 else -1,
    )
    allowed = fields.allowed_token_ids
    if min_tokens and allowed is not None and set(allowed) <= set(sampling.stop_token_ids):
        what = f"only ids that end the text, none of which is drawn before {min_name}"
        raise bad_field("allowed_token_ids", what)
    if max_tokens is not None and min_tokens > max_tokens:
        raise bad_field(min_name, f"{min_tokens} is more than the most tokens asked, {max_tokens}")
    return sampling


def stops_of(stop: str | list[str] | None) -> tuple[str, ...]:
    """Stop strings, checked."""
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > MAX_STOP_STRINGS:
        raise bad_field("stop", f"at most {MAX_STOP_STRINGS} strings, got {len(stops)}")
    if "" in stops:
        raise bad_field("stop", "a stop string must not be empty")
    longest = max(map(len, stops), default=0)
    if longest > MAX_STOP_CHARACTERS:
        raise bad_field("stop", f"at most {MAX_STOP_CHARACTERS} characters, got {longest}")
    return stops


def num_choices(n: int | None) -> int:
    return in_range("n", _or(n, 1), 1, MAX_CHOICES)


def check_room(name: str, num_prompts: int, n: int, config: ServeConfig) -> None:
    """Raises ApiError when one request asks for more generations than are served at once.

    Checked before any text is tokenized: a body may hold a million prompts.
    """
    most = config.max_inflight_requests
    if num_prompts * n > most:
        raise bad_field(
            name if num_prompts > 1 else "n",
            f"{num_prompts} prompts with n = {n} are {num_prompts * n} generations in one "
            f"request, at most {most} are served",
        )


def check_size(name: str, given: str | Sequence[Any], model: ServedModel) -> None:
    """Raises ApiError for more ids, or prompts, than are served in one request.

    Looks at the length and the first item alone: a body may hold ten million items, and looking at
    each would keep every stream waiting.
    """
    if isinstance(given, str) or not given:
        return
    if not isinstance(given[0], int):
        check_room(name, len(given), 1, model.config)
    elif len(given) >= model.context_length():
        raise prompt_too_long(name, model.context_length(), f"{len(given)} tokens")


def interval_of(asked: int | None) -> int | None:
    """Tokens in each piece of a stream after the first; None: the server's setting."""
    return None if asked is None else in_range("stream_interval", asked, 1, None)


def check_logprobs(name: str, count: int | None) -> int:
    """The count of top logprobs, if it is in range; -1 for None. Raises ApiError."""
    return -1 if count is None else in_range(name, count, 0, wire.NUM_TOP_LOGPROBS)


class RankFields(Protocol):
    """Fields that dictate ranks; data_parallel_rank is the older name of routed_dp_rank."""

    disagg_prefill_dp_rank: int | None
    routed_dp_rank: int | None
    data_parallel_rank: int | None


def ranks_of(fields: RankFields, model: ServedModel) -> Ranks:
    """The ranks that a request dictates. Raises ApiError when no worker has them."""
    name = "data_parallel_rank" if fields.routed_dp_rank is None else "routed_dp_rank"
    return Ranks(
        model.rank_of("disagg_prefill_dp_rank", fields.disagg_prefill_dp_rank, "prefill"),
        model.rank_of(name, getattr(fields, name), "decode"),
    )


def seed_of(seed: int | None, choice: int) -> int:
    """A seed for each choice, so that they differ: seed + choice, or 63 random bits."""
    if seed is None:
        return secrets.randbits(63)
    return (seed + choice) & ((1 << 63) - 1)


def salt_of(cache_salt: str | None, extra_key: str | None) -> str:
    """A short text that requests have in common if they share cached prefixes.

    extra_key: SGLang's second name for such a text.
    """
    salt, key = cache_salt or "", extra_key or ""
    if not (salt or key):
        return ""
    # With a length in front, as either may have any character; hashed, as either may be long.
    return hashlib.sha256(f"{len(salt)}:{salt}{key}".encode()).hexdigest()


def request_id_of(
    header: str | None, prefix: str, rid: str | None, request_id: str | None = None
) -> str:
    """`rid` or `request_id` of the body, else X-Request-Id, else one of our own."""
    given = {"rid": rid, "request_id": request_id, "X-Request-Id": header}
    for name, asked in given.items():
        if asked:
            if len(asked) > MAX_REQUEST_ID:
                raise bad_field(name, f"at most {MAX_REQUEST_ID} characters, got {len(asked)}")
            return asked
    return f"{prefix}{secrets.token_hex(16)}"


def fit_tokens(
    num_prompt: int,
    asked: int | None,
    default: int | None,
    context_length: int,
    prompt_name: str,
    max_name: str,
    min_tokens: int | None = None,
    min_name: str = "min_tokens",
) -> int:
    """max_new_tokens of one prompt. default: None takes all that is left of the context.

    Raises ApiError (code context_length_exceeded) naming both numbers. Raises ApiError also if the
    default is less than min_tokens; sampling_of compares min_tokens with a max_tokens that was
    asked.
    """
    left = context_length - num_prompt
    if left < 1:
        raise prompt_too_long(prompt_name, context_length, f"{num_prompt} tokens")
    if asked is None:
        most = left if default is None else min(default, left)
        if (min_tokens or 0) > most:
            message = f"{min_tokens} is more than {most}, the default of {max_name} here"
            raise bad_field(min_name, message)
        return most
    if in_range(max_name, asked, 0, None) > left:
        what = f"{asked} after a prompt of {num_prompt} make {num_prompt + asked}"
        raise too_long(max_name, context_length, what)
    return asked


# --- checks -------------------------------------------------------------------------------------


def _or[T](value: T | None, default: T) -> T:
    return default if value is None else value


def _logit_bias(bias: dict[int, float] | None, vocab_size: int) -> tuple[tuple[int, float], ...]:
    if not bias:
        return ()
    if len(bias) > wire.MAX_LOGIT_BIAS:
        raise bad_field("logit_bias", f"at most {wire.MAX_LOGIT_BIAS} entries, got {len(bias)}")
    check_token_ids("logit_bias", list(bias), vocab_size)
    for token_id, value in bias.items():
        if not -100 <= value <= 100:
            raise bad_field("logit_bias", f"must be -100 to 100, got {value} for token {token_id}")
    return tuple(bias.items())


def _stop_token_ids(fields: SamplingFields, model: ServedModel) -> tuple[int, ...]:
    ids = fields.stop_token_ids or []
    if ids:
        check_token_ids("stop_token_ids", ids, model.vocab_size)
    eos = () if fields.ignore_eos else model.eos_ids
    merged = tuple(dict.fromkeys([*eos, *ids]))
    if len(merged) > wire.MAX_STOP_IDS:
        most = wire.MAX_STOP_IDS - len(eos)
        raise bad_field("stop_token_ids", f"at most {most} beside the model's own, got {len(ids)}")
    return merged
