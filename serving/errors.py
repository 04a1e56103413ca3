"""Defines what a client is told when its request fails: a status, and a body in OpenAI's shape.

The routes of Anthropic's API have its shape and types instead.

    code (transfer/errors)   status   type
    bad_request, too_long      400    invalid_request_error
    aborted                    400    invalid_request_error
    queue_full                 429    rate_limit_error, with Retry-After
    deadline                   504    timeout_error
    peer_lost, shutting_down   503    service_unavailable_error, with Retry-After
    internal                   500    server_error

Other codes stay between workers and this process: a request that meets one moves to other workers,
and ends as peer_lost when it cannot.

Once the first byte of a stream is out no status can be sent, so the same body leaves as the
stream's last event (`error_event`).
"""

import re
from collections.abc import Mapping
from typing import Any

import msgspec
import orjson
from starlette.responses import Response

from transfer.errors import Code, RequestError

RETRY_AFTER_S = 1
NO_HEADERS: Mapping[str, str] = {}
_MAX_MESSAGE = 1000  # characters; the wrong part of a body may be as long as the body
_MAX_QUOTED = 100

_STATUS = {
    Code.BAD_REQUEST: 400,
    Code.TOO_LONG: 400,
    Code.ABORTED: 400,
    Code.QUEUE_FULL: 429,
    Code.DEADLINE: 504,
    Code.PEER_LOST: 503,
    Code.SHUTTING_DOWN: 503,
    Code.DRAINING: 503,
    Code.STALE: 503,
    Code.GONE: 503,
    Code.INTERNAL: 500,
}
# Types that are not those of a whole class of statuses: invalid_request_error, and above 499
# server_error, or api_error in Anthropic's API.
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
# As Anthropic's API has them.
_MESSAGES_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
# The codes that Anthropic's clients act on; its errors have no others.
_MESSAGES_CODES = {"thread_unsupported_request"}
# The type by which OpenAI's clients, and proxies that fall back on another model, see that the
# request is at fault.
_TYPES_OF_CODES = {"model_not_found": "invalid_request_error"}
# Where msgspec says the fault is: "... - at `$.messages[0].role`", or "`key` in `$.logit_bias`".
_PLACE = re.compile(r" - at (?:`[^`$]*` in )?`\$\.?([^`]*)`$")
_MISSING = re.compile(r"missing required field `([^`]+)`")
_UNKNOWN = re.compile(r"contains unknown field `([^`]+)`")


class ApiError(Exception):
    """An answer other than 200. param: the field of the request at fault."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        if len(message) > _MAX_MESSAGE:
            message = f"{message[:_MAX_MESSAGE]}..."
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers or {}

    def reworded(self, message: str, param: str | None) -> "ApiError":
        """The same error in other words."""
        return ApiError(self.status, message, param, self.code, self.headers)

    def body(self) -> dict[str, Any]:
        """{"error": {"message", "type", "param", "code"}}, as OpenAI's clients read it."""
        default = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = _TYPES_OF_CODES.get(self.code or "") or _TYPES.get(self.status, default)
        return {
            "error": {
                "message": self.message,
                "type": kind,
                "param": self.param,
                "code": self.code,
            }
        }

    def messages_body(self) -> dict[str, Any]:
        """{"type": "error", "error": {"type", "message"}}, as Anthropic's clients read it.

        With a code that they act on, `error` also has `details`: {"error_code"}.
        """
        default = "api_error" if self.status >= 500 else "invalid_request_error"
        kind = _MESSAGES_TYPES.get(self.status, default)
        error: dict[str, Any] = {"type": kind, "message": self.message}
        if self.code in _MESSAGES_CODES:
            error["details"] = {"error_code": self.code}
        return {"type": "error", "error": error}

    def response(
        self, headers: Mapping[str, str] = NO_HEADERS, *, for_messages: bool = False
    ) -> Response:
        """headers: beside the error's own. for_messages: in the shape of Anthropic's API."""
        return Response(
            orjson.dumps(self.messages_body() if for_messages else self.body()),
            self.status,
            {**self.headers, **headers},
            media_type="application/json",
        )


def bad_field(param: str, message: str, code: str = "invalid_value") -> ApiError:
    """A field of the request holds what we do not take; the message names it too."""
    return ApiError(400, f"{param}: {message}", param, code)


def too_long(param: str, context_length: int, what: str) -> ApiError:
    """A request does not fit the context. what: which part of it is too much.

    The wording is that of other servers: clients (litellm, agno) look for it, not for the code, to
    fall back to another model or to cut the conversation.
    """
    limit = f"this model's maximum context length is {context_length} tokens, prompt and output"
    return bad_field(param, f"{limit} together; {what}", "context_length_exceeded")


def prompt_too_long(param: str, context_length: int, size: str) -> ApiError:
    """A prompt that leaves no room for an answer. size: what it has too many of.

    In Anthropic's API clients look for "prompt is too long", and some do in OpenAI's.
    """
    return too_long(param, context_length, f"the prompt is too long, with {size}")


def wrong_type(where: str, expected: str) -> ApiError:
    """A field holds a value of the wrong type. where: its path, which begins with its name."""
    return ApiError(400, f"{where}: expected {expected}", _first_name(where), "invalid_type")


def missing_field(name: str) -> ApiError:
    """A field that a request must have is absent. name: its path."""
    return ApiError(400, f"{name}: this field is required", name, "missing_field")


def no_text(where: str, part: Any) -> ApiError:
    """A part of a message is an image, a file or the like. where: its path."""
    kind = part.get("type") if isinstance(part, dict) else None
    message = f"{where}: this server takes text only, got {quoted(kind or type(part).__name__)}"
    return ApiError(400, message, _first_name(where), "unsupported_parameter")


def quoted(value: Any) -> str:
    """A JSON value for a message; only the type of an object or array, which may be huge."""
    if isinstance(value, str) and len(value) > _MAX_QUOTED:
        return f"{value[:_MAX_QUOTED]!r}..."
    return type(value).__name__ if isinstance(value, dict | list) else repr(value)


def not_served(name: str) -> ApiError:
    """A feature that would change the answer and that we do not have.

    name: of a field, or of one inside it, whose own name clients know.
    """
    message = f"{name}: this server does not support it"
    return ApiError(400, message, name.partition(".")[0], "unsupported_parameter")


def unavailable(message: str, code: str, headers: Mapping[str, str] = NO_HEADERS) -> ApiError:
    """A request that may succeed when it is sent again."""
    return ApiError(503, message, code=code, headers={"Retry-After": str(RETRY_AFTER_S), **headers})


def without_frames(error: RequestError) -> RequestError:
    """The error without its traceback.

    Where a task raised it, a frame of the traceback refers to the task, and the task to the error:
    a cycle that would keep the request, with all of its prompt, until the garbage collector runs.
    """
    error.__traceback__ = None
    return error


def from_request_error(error: RequestError) -> ApiError:
    """What a failed generation becomes over HTTP; the error loses its traceback."""
    without_frames(error)
    status = _STATUS[error.code]
    headers = {"Retry-After": str(RETRY_AFTER_S)} if status in (429, 503) else {}
    return ApiError(status, error.message, code=str(error.code), headers=headers)


def from_decode_error(error: msgspec.DecodeError) -> ApiError:
    """A body that is no JSON, or JSON of another shape; the field at fault is named."""
    if not isinstance(error, msgspec.ValidationError):
        reason = str(error)
        if "truncated" in reason:  # msgspec says the same of both
            reason = f"{reason}, or a string ends with half of a surrogate pair"
        return ApiError(400, f"the body is not valid JSON: {reason}", code="invalid_json")
    text = str(error)
    place = _PLACE.search(text)
    param = place.group(1) if place else ""
    missing = _MISSING.search(text)
    if missing:
        param = f"{param}.{missing.group(1)}" if param else missing.group(1)
        return missing_field(param)
    if not param:
        return ApiError(400, f"the body must be a JSON object: {text}", code="invalid_type")
    # The top-level field is what clients know by name; the message has the whole path.
    field = _first_name(param)
    unknown = _UNKNOWN.search(text)
    if unknown:
        name = unknown.group(1)
        message = f"{quoted(name)} is no field of {param}"
        known = name if len(name) <= _MAX_QUOTED else field
        return ApiError(400, message, known, "unsupported_parameter")
    reason = text[: place.start()] if place else text
    return ApiError(400, f"{param}: {reason}", field, "invalid_type")


def _first_name(path: str) -> str:
    return re.split(r"[.\[]", path, maxsplit=1)[0]


def error_event(error: ApiError) -> bytes:
    """The last event of a stream that fails after its first byte."""
    return b"data: " + orjson.dumps(error.body()) + b"\n\n"


def messages_error_event(error: ApiError) -> bytes:
    """The same as Anthropic's API has it."""
    return b"event: error\ndata: " + orjson.dumps(error.messages_body()) + b"\n\n"
