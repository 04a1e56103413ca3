"""One client's request to an API process: what the client was told, and how it ended."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import httpx
import httpx2  # the official client's HTTP library
import openai

from tests.faults.asks import Answer, Ask

End = Literal[
    "done",  # the whole answer
    "refused",  # a status, with a time after which to try again
    "failed",  # another status, or the stream's last frame is an error
    "broken",  # the connection ended
    "late",  # none of these in time
    "garbled",  # something else: a frame after the last, two errors, ...
]


@dataclass
class Told:
    """What one attempt of a client received."""

    answer: Answer = field(default_factory=lambda: Answer(""))
    end: End = "late"
    status: int = 0
    message: str = ""
    code: str = ""
    sent_s: float = 0.0
    first_s: float = 0.0  # when the first token came; 0.0 = none
    ended_s: float = 0.0
    frames: int = 0  # those that carried tokens
    changed: asyncio.Event = field(default_factory=asyncio.Event, repr=False)

    def token(self, text: str) -> None:
        self.answer = replace(self.answer, text=self.answer.text + text)
        self.heard()

    def heard(self) -> None:
        self.frames += 1
        self.first_s = self.first_s or time.monotonic()
        self.changed.set()


class Client:
    """Talks to one API process over its Unix socket."""

    def __init__(self, uds: Path, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        transport = httpx.AsyncHTTPTransport(
            uds=str(uds), limits=httpx.Limits(max_keepalive_connections=0)
        )
        self._http = httpx.AsyncClient(
            transport=transport, base_url="http://localhost", timeout=timeout_s
        )
        official = httpx2.AsyncHTTPTransport(
            uds=str(uds), limits=httpx2.Limits(max_keepalive_connections=0)
        )
        self._openai = openai.AsyncOpenAI(
            base_url="http://localhost/v1",
            api_key="none",
            http_client=httpx2.AsyncClient(transport=official, timeout=timeout_s),
            max_retries=0,
        )

    async def close(self) -> None:
        await self._http.aclose()
        await self._openai.close()

    async def ask(self, ask: Ask, salt: str, request_id: str, told: Told) -> None:
        """Fill in `told` as events arrive; never raises for what the server does."""
        told.sent_s = time.monotonic()
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._ask(ask, salt, request_id, told)
        except TimeoutError:
            told.end = "late"
        except (httpx.TransportError, httpx2.TransportError, openai.APIConnectionError) as error:
            told.end, told.message = "broken", f"{type(error).__name__}: {error}"
        except openai.APIStatusError as error:
            _refused(told, error.response)
        except openai.APIError as error:  # an error frame, as the official client raises it
            body = error.body if isinstance(error.body, dict) else {}
            told.end, told.message = "failed", error.message
            told.code = str(body.get("code"))
        told.ended_s = time.monotonic()
        told.changed.set()

    async def _ask(self, ask: Ask, salt: str, request_id: str, told: Told) -> None:
        body = ask.body(salt)
        headers = {"x-request-id": request_id}
        if ask.route == "chat":
            await self._chat(body, headers, told)
        elif ask.route == "responses":
            await self._responses(body, headers, told)
        elif ask.route == "whole":
            await self._whole(body, headers, told)
        else:
            path = "/generate" if ask.route == "generate" else "/v1/completions"
            async with self._http.stream("POST", path, json=body, headers=headers) as reply:
                if reply.status_code != 200:
                    await reply.aread()
                    _refused(told, reply)
                    return
                await _read_events(_events(reply), ask, told)

    async def _whole(self, body: dict[str, Any], headers: dict[str, str], told: Told) -> None:
        reply = await self._http.post("/v1/completions", json=body, headers=headers)
        if reply.status_code != 200:
            _refused(told, reply)
            return
        told.heard()
        said = reply.json()
        choice, usage = said["choices"][0], said["usage"]
        told.answer = Answer(choice["text"], (), choice["finish_reason"], *_counts(usage))
        told.end = "done"

    async def _chat(self, body: dict[str, Any], headers: dict[str, str], told: Told) -> None:
        stream = await self._openai.chat.completions.create(
            model="demo_model", extra_headers=headers, **body
        )
        async for chunk in stream:
            for choice in chunk.choices:
                if choice.delta.content:
                    told.token(choice.delta.content)
                if choice.finish_reason:
                    told.answer = replace(told.answer, finish=choice.finish_reason)
            if chunk.usage is not None:
                counts = _counts(chunk.usage.model_dump())
                told.answer = replace(
                    told.answer, prompt_tokens=counts[0], completion_tokens=counts[1]
                )
                told.end = "done"
        if told.end != "done":
            # The official client does not distinguish a stream that broke off from one that ended.
            told.end, told.message = "broken", "the stream ended early"

    async def _responses(self, body: dict[str, Any], headers: dict[str, str], told: Told) -> None:
        stream = await self._openai.responses.create(
            model="demo_model", extra_headers=headers, **body
        )
        num_events = 0
        async for event in stream:
            assert event.sequence_number == num_events, event
            num_events += 1
            if told.end != "late":
                told.end, told.message = "garbled", f"after the last event: {event}"
            elif event.type == "response.output_text.delta":
                told.token(event.delta)
            elif event.type in ("response.completed", "response.incomplete"):
                _take_response(event.response, told)
            elif event.type == "response.failed":
                error = event.response.error
                told.end, told.message, told.code = "failed", error.message, error.code
                if error.message == "the server is shutting down":  # OpenAI has one code for all
                    told.code = "shutting_down"
        if told.end == "late":
            told.end, told.message = "broken", "the stream ended early"


def _take_response(response: Any, told: Told) -> None:
    """The last event repeats the whole answer."""
    assert response.output_text == told.answer.text, (response.output_text, told.answer.text)
    finish = {"completed": "stop", "incomplete": "length"}[response.status]
    usage = response.usage
    told.answer = Answer(told.answer.text, (), finish, usage.input_tokens, usage.output_tokens)
    told.end = "done"


async def _events(reply: httpx.Response) -> AsyncIterator[str]:
    async for line in reply.aiter_lines():
        if line.startswith("data: "):
            yield line.removeprefix("data: ")
        elif line:
            raise AssertionError(f"no event: {line!r}")


async def _read_events(events: AsyncIterator[str], ask: Ask, told: Told) -> None:
    async for data in events:
        if told.end in ("done", "failed"):
            told.end, told.message = "garbled", f"after the last event: {data[:200]}"
            return
        if data == "[DONE]":
            told.end = "done"
            continue
        event = json.loads(data)
        if "error" in event:
            told.end, told.message = "failed", event["error"]["message"]
            told.code = str(event["error"]["code"])
        elif ask.route == "generate":
            _take_generate(event, told)
        else:
            _take_completion(event, told)
    if told.end == "late":
        told.end, told.message = "broken", "the stream ended early"


def _take_completion(event: dict[str, Any], told: Told) -> None:
    for choice in event["choices"]:
        if choice["text"]:
            told.token(choice["text"])
        if choice["finish_reason"]:
            told.answer = replace(told.answer, finish=choice["finish_reason"])
    if event.get("usage"):
        prompt, completion = _counts(event["usage"])
        told.answer = replace(told.answer, prompt_tokens=prompt, completion_tokens=completion)


def _take_generate(event: dict[str, Any], told: Told) -> None:
    """Its events repeat everything so far."""
    meta = event["meta_info"]
    finish = meta["finish_reason"] or {}
    answer = Answer(
        event["text"],
        tuple(event["output_ids"]),
        finish.get("type", ""),
        meta["prompt_tokens"],
        meta["completion_tokens"],
    )
    if not told.answer.begins(answer):
        raise AssertionError(f"took back what it said: {told.answer} then {answer}")
    told.answer = answer
    told.heard()


def _counts(usage: dict[str, Any]) -> tuple[int, int]:
    return usage["prompt_tokens"], usage["completion_tokens"]


def _refused(told: Told, reply: httpx.Response | httpx2.Response) -> None:
    try:
        error = reply.json()["error"]
    except (ValueError, KeyError):
        error = {"message": reply.text[:200], "code": "none"}
    told.status = reply.status_code
    told.message, told.code = str(error["message"]), str(error["code"])
    told.end = "refused" if "retry-after" in reply.headers else "failed"
