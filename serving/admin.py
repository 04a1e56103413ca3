"""The routes beside generation: health, models, tokens, the cluster's state, abort and flush."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
import orjson
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from serving.answer import WholeAnswer
from serving.bodies import Body
from serving.conversation import allowed_tools, messages_of, render_prompt
from serving.errors import ApiError, bad_field, quoted, unavailable
from serving.front import Front, while_client_waits
from serving.json_bytes import spelled
from serving.json_fields import NotServed, read_json, refuse
from serving.loads import loads_answer
from serving.messages_api import MessagesReader
from serving.messages_fields import read_count
from serving.metrics import CONTENT_TYPE
from serving.model_names import adapter_of
from serving.openai_api import ChatReader
from serving.prompt import Prompt
from serving.protocol import ChoiceAsk, Request, Shown
from serving.ranges import check_token_ids
from serving.responses_api import ResponsesReader
from serving.responses_fields import read_responses
from serving.siblings import Siblings
from transfer import wire
from transfer.errors import RpcError

MAX_PROMPTS = 16_384  # of one /tokenize
MAX_TOKENS = 1 << 20  # of one /detokenize
INLINE_TOKENS = 4096  # more are decoded in a thread, so that the event loop can serve streams


class TokenizeFields(msgspec.Struct, kw_only=True):
    """POST /tokenize: a prompt, several, or a conversation."""

    prompt: str | list[str] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    model: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: NotServed[Any] = None


class DetokenizeFields(msgspec.Struct):
    """POST /detokenize."""

    tokens: list[int | list[int]]
    model: str | None = None
    skip_special_tokens: bool | None = None


class AbortFields(msgspec.Struct):
    """POST /abort_request."""

    rid: str | None = None
    abort_all: bool | None = None


class ProfileFields(msgspec.Struct):
    """POST /start_profile: SGLang's fields. Other fields, and `activities`, are not read."""

    output_dir: NotServed[str] = None
    start_step: NotServed[Any] = None
    num_steps: NotServed[Any] = None
    profile_by_stage: NotServed[bool] = None
    profile_stages: NotServed[Any] = None
    profile_prefix: NotServed[str] = None
    merge_profiles: NotServed[bool] = None
    with_stack: NotServed[bool] = None


class DrainFields(msgspec.Struct):
    """POST /drain."""

    worker_id: str


_PROBE_LOOKS_S = 0.02
_tokenizes = msgspec.json.Decoder(TokenizeFields)
_detokenizes = msgspec.json.Decoder(DetokenizeFields)
_aborts = msgspec.json.Decoder(AbortFields)
_profiles = msgspec.json.Decoder(ProfileFields)
_drains = msgspec.json.Decoder(DrainFields)


class Admin:
    """One method per route."""

    def __init__(self, front: Front, siblings: Siblings | None = None) -> None:
        """siblings: None in a process that serves alone."""
        self._front = front
        self._siblings = siblings or Siblings(front)
        self._model = front.model
        self._dispatcher = front.dispatcher
        self._created = int(front.clock.now_s())
        # A thread of its own, so that prompts of requests do not queue behind these texts.
        self._threads = ThreadPoolExecutor(1, "admin-tokens")

    # --- health ---

    async def health(self, request: HttpRequest) -> Response:
        """200 while each needed role has workers that take work and one that makes progress."""
        self._front.require_ready()
        stuck = self._dispatcher.roles_without_progress()
        if stuck:
            message = f"no {' and no '.join(stuck)} worker makes progress"
            raise unavailable(message, "no_progress")
        return Response()

    async def health_generate(self, request: HttpRequest) -> Response:
        """200 as soon as any request gets a token; 503 when none does for --progress-timeout.

        The probe itself skips the queue, and a full server answers with the tokens of others.
        """
        self._front.require_ready()
        clock, seen = self._front.clock, self._dispatcher.rows_taken
        end_s = clock.monotonic_s() + self._front.config.progress_timeout_s
        probe = asyncio.ensure_future(self._generate_one(request))
        try:
            while not probe.done() and self._dispatcher.rows_taken == seen:
                if clock.monotonic_s() > end_s:
                    raise unavailable("no token of any request has arrived", "no_progress")
                await asyncio.wait((probe,), timeout=_PROBE_LOOKS_S)
            if self._dispatcher.rows_taken == seen:
                probe.result()
        finally:
            probe.cancel()
            await asyncio.gather(probe, return_exceptions=True)
        return Response()

    async def _generate_one(self, request: HttpRequest) -> None:
        ask = ChoiceAsk(
            0,
            0,
            "health",
            Prompt([next(iter(self._model.eos_ids), 0)]),
            wire.SamplingParams(max_new_tokens=1, temperature=0.0),
            Shown(),
        )
        asked = Request(ask.request_id, [ask])
        answer = WholeAnswer(self._front.choices(asked), self._dispatcher)
        arrival_s = self._front.clock.monotonic_s()
        await self._front.runner.run(asked, answer, arrival_s, request.receive, is_probe=True)

    async def metrics(self, request: HttpRequest) -> Response:
        """The metrics of every process of this server, and those of the cluster once."""
        text = await self._dispatcher.metrics_text(await self._siblings.metrics())
        return Response(text, headers={"content-type": CONTENT_TYPE})

    # --- the model ---

    async def models(self, request: HttpRequest) -> Response:
        names = "", *(self._model.adapters() or ())
        return _json({"object": "list", "data": [self._card(name) for name in names]})

    async def one_model(self, request: HttpRequest) -> Response:
        adapter = adapter_of(request.path_params["name"], self._model)
        return _json(self._card(adapter))

    async def model_info(self, request: HttpRequest) -> Response:
        path = str(self._front.config.model_path)
        return _json(
            {
                "model_path": path,
                "tokenizer_path": path,
                "served_model_name": self._model.name,
                "is_generation": True,
                "preferred_sampling_params": None,
                "max_model_len": self._model.context_length(),
                "vocab_size": self._model.vocab_size,
            }
        )

    def _card(self, adapter: str) -> dict[str, Any]:
        """adapter: "" for the model alone."""
        name = adapter or self._model.name
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "kvferry",
            "root": name,
            "parent": self._model.name if adapter else None,
            "max_model_len": self._model.context_length(),
        }

    # --- tokens ---

    async def tokenize(self, request: HttpRequest) -> Response:
        """Token ids of a prompt, as /v1/completions makes them, or of a conversation, as chat."""
        async with self._body(request) as body:
            fields = read_json(_tokenizes, body)
            del body
            refuse(fields)
            adapter_of(fields.model, self._model)
            if (fields.prompt is None) == (fields.messages is None):
                raise bad_field("prompt", "expected exactly one of prompt and messages")
            timeout_s = self._front.config.request_timeout_s
            data = await while_client_waits(self._tokenized(fields), request.receive, timeout_s)
        return Response() if data is None else _json(data)  # None: the client has left

    async def _tokenized(self, fields: TokenizeFields) -> dict[str, Any]:
        add_special = fields.add_special_tokens
        if fields.messages is not None:
            tools, choice = allowed_tools(fields)
            fields = msgspec.structs.replace(fields, tools=tools, tool_choice=choice)
            texts = [await render_prompt(self._model, messages_of(fields, self._model), fields)]
            lists = await self._encode("messages", texts, add_special is True)
        else:
            texts = [fields.prompt] if isinstance(fields.prompt, str) else fields.prompt or []
            lists = await self._encode("prompt", texts, add_special is not False)
        is_batch = isinstance(fields.prompt, list)
        data: dict[str, Any] = {
            "tokens": lists if is_batch else lists[0],
            "count": [len(ids) for ids in lists] if is_batch else len(lists[0]),
            "max_model_len": self._model.context_length(),
            "token_strs": None,
        }
        if fields.return_token_strs:
            strings = await self._beside(self._strings_of, lists)
            data["token_strs"] = strings if is_batch else strings[0]
        return data

    async def count_input(self, request: HttpRequest) -> Response:
        """How many tokens /v1/responses would read of the same request (OpenAI's API reference)."""
        count = await self._count(
            request, lambda body: ResponsesReader(read_responses(body), self._model)
        )
        return _json({"object": "response.input_tokens", "input_tokens": count})

    async def count_message(self, request: HttpRequest) -> Response:
        """The same for /v1/messages (Anthropic's API reference)."""
        count = await self._count(
            request, lambda body: MessagesReader(read_count(body), self._model)
        )
        return _json({"input_tokens": count})

    async def _count(self, request: HttpRequest, read: Callable[[bytes], ChatReader]) -> int:
        """The number of tokens in the prompt of the request; 0 if the client has left."""
        async with self._body(request) as body:
            reader = read(body)
            del body
            timeout_s = self._front.config.request_timeout_s
            asked = await while_client_waits(reader.finish(None), request.receive, timeout_s)
        return 0 if asked is None else len(asked.choices[0].prompt.ids)

    async def _encode(self, name: str, texts: Sequence[str], add_special: bool) -> list[list[int]]:
        if len(texts) > MAX_PROMPTS:
            raise bad_field(name, f"at most {MAX_PROMPTS} prompts, got {len(texts)}")
        lists: list[list[int]] = []
        for text in texts:
            if lists:
                await asyncio.sleep(0)  # short texts are encoded on the loop; there may be many
            ids = await self._model.encode_prompt(name, text, add_special, self._threads)
            lists.append(ids)
        return lists

    def _strings_of(self, lists: Sequence[Sequence[int]]) -> list[list[str]]:
        return [[self._model.tokenizer.token_text(i) for i in ids] for ids in lists]

    async def tokenizer_info(self, request: HttpRequest) -> Response:
        """tokenizer_config.json, for clients that render chats themselves."""
        info = self._model.tokenizer.info
        if info["eos_token"] is None and self._model.eos_ids:  # generation_config.json has one
            eos = self._model.tokenizer.token_text(self._model.eos_ids[0])
            info = {**info, "eos_token": eos}
        return _json(spelled(info))  # model_max_length is often 10**30, too much for orjson

    async def detokenize(self, request: HttpRequest) -> Response:
        """The text of token ids, with special tokens unless skip_special_tokens is set."""
        async with self._body(request) as body:
            fields = read_json(_detokenizes, body)
            del body
            adapter_of(fields.model, self._model)
            count = len(fields.tokens)
            if count <= MAX_TOKENS:
                count += sum(len(item) for item in fields.tokens if isinstance(item, list))
            if count > MAX_TOKENS:
                raise bad_field("tokens", f"at most {MAX_TOKENS} token ids, got {count}")
            if count <= INLINE_TOKENS:
                texts = self._texts_of(fields)
            else:
                texts = await self._beside(self._texts_of, fields)
        return _json({"prompt": texts, "text": texts})

    def _texts_of(self, fields: DetokenizeFields) -> str | list[str]:
        flat = [item for item in fields.tokens if isinstance(item, int)]
        if flat and len(flat) < len(fields.tokens):
            raise bad_field("tokens", "must be token ids, or lists of them, not both")
        nested = [item for item in fields.tokens if not isinstance(item, int)]
        if nested:
            return [self._decode(fields, ids) for ids in nested]
        return self._decode(fields, flat)

    def _decode(self, fields: DetokenizeFields, ids: Sequence[int]) -> str:
        if ids:
            check_token_ids("tokens", ids, self._model.vocab_size)
        return self._model.tokenizer.decode(ids, bool(fields.skip_special_tokens))

    # --- the cluster ---

    async def server_info(self, request: HttpRequest) -> Response:
        """The server's configuration, its processes, and what every worker says."""
        config = dataclasses.asdict(self._front.config)
        del config["api_key"]
        config["served_model_name"] = self._front.config.model_name  # the one in force
        states = await self._siblings.states()
        totals = {
            "ready": all(state.ready for state in states),
            "running": sum(state.running for state in states),
            "queued": sum(state.queued for state in states),
            "process": self._siblings.process,  # the one that answers
            "processes": [msgspec.structs.asdict(state) for state in states],
        }
        return _json({**config, **await self._dispatcher.server_info(), **totals})

    async def load(self, request: HttpRequest) -> Response:
        """Every worker's load as of its last heartbeat."""
        loads = [
            {
                "worker_id": member.info.worker_id,
                "role": member.info.role,
                "draining": member.draining,
                "dp_size": member.info.dp_size,
                "ranks": [msgspec.structs.asdict(load) for load in member.ranks],
                **msgspec.structs.asdict(member.load),
            }
            for member in self._dispatcher.members()
        ]
        return _json(loads)

    async def loads(self, request: HttpRequest) -> Response:
        """The same loads in SGLang's format, for its routers."""
        now_s, members = self._front.clock.now_s(), self._dispatcher.members()
        return _json(loads_answer(members, now_s, request.query_params))

    async def server_load(self, request: HttpRequest) -> Response:
        """vLLM's one number: running and waiting generations in all processes."""
        states = await self._siblings.states()
        return _json({"server_load": sum(state.running + state.queued for state in states)})

    async def version(self, request: HttpRequest) -> Response:
        return _json({"version": metadata.version("kvferry")})

    async def flush_cache(self, request: HttpRequest) -> Response:
        """200 when every worker dropped its cached prefixes, else 400 with what they said."""
        flushed, message = await self._flush()
        return Response(message + "\n", 200 if flushed else 400, media_type="text/plain")

    async def reset_prefix_cache(self, request: HttpRequest) -> Response:
        """vLLM's name for flush_cache; the response has no body on success."""
        flushed, message = await self._flush()
        if not flushed:
            raise ApiError(400, f"not every prefix was dropped: {message}", code="not_flushed")
        return Response()

    async def _flush(self) -> tuple[bool, str]:
        flushed, message = await self._dispatcher.flush_cache()
        await self._siblings.flushed()
        return flushed, message

    async def abort_request(self, request: HttpRequest) -> Response:
        """{"rid": id} or {"abort_all": true}. Their clients get finish_reason "abort"."""
        async with self._body(request) as body:
            fields = read_json(_aborts, body)
        if not fields.abort_all and not fields.rid:
            raise bad_field("rid", "expected a request's id, or abort_all")
        aborted = await self._siblings.abort(None if fields.abort_all else fields.rid)
        return _json({"success": True, "aborted": aborted})

    async def timeline(self, request: HttpRequest) -> Response:
        """What happened to one of the latest requests, running or ended, and when."""
        request_id = request.path_params["request_id"]
        body = await self._siblings.timeline(request_id)
        if body is None:
            kept = self._front.config.timeline_requests
            message = f"no request {request_id!r} among the latest {kept} of a process"
            if not kept:
                message = "this server keeps no timelines: --timeline-requests is 0"
            raise ApiError(404, message, "request_id", "request_not_found")
        return Response(body, media_type="application/json")

    async def start_profile(self, request: HttpRequest) -> Response:
        """200 when at least one worker has begun a profile; each ends by itself after a while."""
        async with self._body(request) as body:
            if body:
                refuse(read_json(_profiles, body))
        return await self._profile(True, "no profile has begun")

    async def stop_profile(self, request: HttpRequest) -> Response:
        """200 when at least one worker's profile is written."""
        return await self._profile(False, "no profile was written")

    async def _profile(self, start: bool, nothing: str) -> Response:
        self._front.require_ready()
        folders, refusals = await self._dispatcher.profile(start)
        if not folders:
            why = "; ".join(f"{worker_id}: {told}" for worker_id, told in refusals.items())
            raise ApiError(400, f"{nothing}. {why}", code="no_profile")
        return _json({"success": not refusals, "folders": folders, "refusals": refusals})

    async def drain(self, request: HttpRequest) -> Response:
        """{"worker_id": id}: that worker takes nothing new, finishes its work and leaves."""
        async with self._body(request) as body:
            worker_id = read_json(_drains, body).worker_id
        try:
            reply = await self._dispatcher.drain(worker_id)
        except KeyError:
            known = ", ".join(self._dispatcher.worker_ids()) or "none"
            message = f"worker_id: there is no worker {quoted(worker_id)}; there are: {known}"
            raise ApiError(404, message, "worker_id", "worker_not_found") from None
        except RpcError as error:
            message = f"{worker_id} did not answer: {error}"
            raise ApiError(503, message, "worker_id", "worker_unavailable") from error
        return _json(
            {
                "worker_id": worker_id,
                "draining": True,
                "began": reply.began,
                "rooms": reply.rooms,
                "drain_timeout_s": reply.timeout_s,
            }
        )

    async def _beside[T, R](self, call: Callable[[T], R], given: T) -> R:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call, given)

    @contextlib.asynccontextmanager
    async def _body(self, request: HttpRequest) -> AsyncIterator[bytes]:
        """The request's body, whose memory counts until the block ends; counts the block's 429s."""
        try:
            with Body(self._front.bodies) as held:
                yield await held.read(request.scope, request.receive) or b""
        except ApiError as error:
            raise self._front.runner.counted(error) from None


def _json(data: Any) -> Response:
    return Response(orjson.dumps(data, default=_spell), media_type="application/json")


def _spell(value: object) -> str:
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"cannot write {type(value).__name__} as JSON")
