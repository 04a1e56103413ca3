"""The HTTP application: which path has which route, the API key, and how errors are answered."""

import hmac
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request as HttpRequest
from starlette.responses import RedirectResponse, Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from model.config import ModelConfig
from serving.admin import Admin
from serving.bodies import Bodies
from serving.config import ServeConfig
from serving.cors import Cors
from serving.dispatch import Dispatcher
from serving.endpoints import (
    MESSAGES_PATHS,
    RAW_SEND,
    Generate,
    chat,
    completion,
    error_headers,
    generate,
    invocation,
    messages,
    responses,
)
from serving.errors import ApiError
from serving.front import Front
from serving.protocol import ServedModel
from serving.siblings import Siblings
from serving.tokenizer import Tokenizer
from transfer.clock import SYSTEM_CLOCK, Clock

# Served without a key: probes and scrapers have none.
OPEN_PATHS = frozenset({"/health", "/ping", "/metrics"})


def create_front(
    dispatcher: Dispatcher,
    tokenizer: Tokenizer,
    config: ServeConfig,
    model_config: ModelConfig,
    clock: Clock = SYSTEM_CLOCK,
) -> Front:
    """What the routes work with.

    config: the server's; the dispatcher has this process's share of its limits, within which one
    request has to fit.
    """
    told = dispatcher.context_length, dispatcher.dp_size, dispatcher.adapters
    model = ServedModel(tokenizer, dispatcher.config, model_config, *told)
    dispatcher.metrics.gauge(
        "num_queue_grammars", "Grammars waiting to be tried", lambda: model.trial.num_waiting
    )
    dispatcher.metrics.gauge(
        "num_queue_conversations",
        "Long conversations waiting for the chat template",
        lambda: model.templates.num_waiting,
    )
    return Front(dispatcher, model, config, clock)


def app_of(front: Front, siblings: Siblings | None = None) -> Starlette:
    """The application. siblings: None in a process that serves alone; the caller starts them."""
    config = front.config
    admin = Admin(front, siblings)

    async def answer_unrouted(request: HttpRequest, error: Exception) -> Response:
        await front.bodies.skip(request.scope, request.receive)
        return _redirection(app, request, error) or _answer_http_error(request, error)

    routes = [
        Route("/v1/chat/completions", Generate(front, chat), methods=["POST"]),
        Route("/v1/completions", Generate(front, completion), methods=["POST"]),
        Route("/v1/responses", Generate(front, responses), methods=["POST"]),
        Route("/v1/responses/input_tokens", admin.count_input, methods=["POST"]),
        Route("/v1/messages", Generate(front, messages), methods=["POST"]),
        Route("/v1/messages/count_tokens", admin.count_message, methods=["POST"]),
        Route("/invocations", Generate(front, invocation), methods=["POST"]),
        Route("/generate", Generate(front, generate), methods=["POST"]),
        Route("/v1/models", admin.models),
        Route("/v1/models/", admin.models),
        Route("/v1/models/{name:path}", admin.one_model),
        Route("/tokenize", admin.tokenize, methods=["POST"]),
        Route("/detokenize", admin.detokenize, methods=["POST"]),
        Route("/health", admin.health),
        Route("/ping", admin.health, methods=["GET", "POST"]),  # SageMaker's
        Route("/health_generate", admin.health_generate),
        Route("/get_model_info", admin.model_info),
        Route("/model_info", admin.model_info),
        Route("/get_server_info", admin.server_info),
        Route("/server_info", admin.server_info),
        Route("/get_load", admin.load),
        Route("/v1/loads", admin.loads),
        Route("/load", admin.server_load),
        Route("/version", admin.version),
        Route("/flush_cache", admin.flush_cache, methods=["GET", "POST"]),
        Route("/reset_prefix_cache", admin.reset_prefix_cache, methods=["POST"]),
        Route("/abort_request", admin.abort_request, methods=["POST"]),
        Route("/start_profile", admin.start_profile, methods=["POST"]),
        Route("/stop_profile", admin.stop_profile, methods=["POST"]),
        Route("/drain", admin.drain, methods=["POST"]),
        Route("/requests/{request_id:path}/timeline", admin.timeline),
    ]
    if config.enable_metrics:
        routes.append(Route("/metrics", admin.metrics))
    if config.enable_tokenizer_info_endpoint:
        routes.append(Route("/tokenizer_info", admin.tokenizer_info))
    app = _App(
        config.allowed_origins,
        routes=routes,
        middleware=[
            Middleware(_ApiKey, front.bodies, config.api_key)
            if config.api_key
            else Middleware(_NamedPages, front.bodies, config.allowed_origins)
        ],
        exception_handlers={**ERROR_ANSWERS, HTTPException: answer_unrouted},
    )
    # Starlette's would name a host and a scheme, which behind a proxy are not those of the client.
    app.router.redirect_slashes = False
    return app


class _App(Starlette):
    """Keeps the server's own `send`, so that tokens bypass wrappers that only watch the start."""

    def __init__(self, allowed_origins: Sequence[str], **options: Any) -> None:
        """options: Starlette's."""
        super().__init__(**options)
        self._allowed_origins = allowed_origins

    def build_middleware_stack(self) -> ASGIApp:
        """Put CORS outermost: Starlette would put it inside what answers faults with a 500."""
        stack = super().build_middleware_stack()
        return Cors(stack, self._allowed_origins) if self._allowed_origins else stack

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[RAW_SEND] = send
        try:
            await super().__call__(scope, receive, send)
        finally:
            del scope[RAW_SEND]  # the server's `send` refers to the scope: a cycle


class _ApiKey:
    """Asks for the key everywhere but on the open paths.

    It comes as `Authorization: Bearer <key>` or, from Anthropic's clients, as `x-api-key: <key>`.
    """

    def __init__(self, app: ASGIApp, bodies: Bodies, api_key: str) -> None:
        self._app = app
        self._bodies = bodies
        self._expected = f"bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            headers = dict(scope["headers"])
            scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
            bare = headers.get(b"x-api-key", b"").strip()
            given = (scheme.lower() + b" " + key.strip(), b"bearer " + bare)
            if not any(hmac.compare_digest(one, self._expected) for one in given):
                message = "expected a header Authorization: Bearer"
                if key or bare:
                    message = "the API key is wrong"
                error = ApiError(401, message, code="invalid_api_key")
                error.headers["WWW-Authenticate"] = "Bearer"
                await self._bodies.skip(scope, receive)
                await _response(error, scope)(scope, receive, send)
                return
        await self._app(scope, receive, send)


class _NamedPages:
    """Without a key: refuses what a browser sends for a page that --allowed-origins does not name.

    CORS withholds only answers. A page may send a form or a text to any server, and some other
    server's name may be made to mean this one, which nothing in such a request shows.
    """

    def __init__(self, app: ASGIApp, bodies: Bodies, allowed_origins: Sequence[str]) -> None:
        self._app = app
        self._bodies = bodies
        self._allowed = {origin.encode() for origin in allowed_origins}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS and self._is_strange(scope):
            message = (
                "a web page that --allowed-origins does not name may not use this server, "
                "which has no --api-key"
            )
            await self._bodies.skip(scope, receive)
            error = ApiError(403, message, code="origin_refused")
            await _response(error, scope)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _is_strange(self, scope: Scope) -> bool:
        if b"*" in self._allowed:
            return False
        headers = dict(scope["headers"])
        origin = headers.get(b"origin")
        if origin is not None:
            return origin not in self._allowed
        # A page's image or script has no origin. Following a link is up to who sits there.
        is_from_elsewhere = headers.get(b"sec-fetch-site") in (b"cross-site", b"same-site")
        return is_from_elsewhere and headers.get(b"sec-fetch-mode") != b"navigate"


def _response(error: ApiError, scope: Scope) -> Response:
    return error.response(error_headers(scope), for_messages=scope["path"] in MESSAGES_PATHS)


def _answer_api_error(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, ApiError), f"registered for ApiError, got {error!r}"
    return _response(error, request.scope)


def _answer_http_error(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException), f"registered for HTTPException, got {error!r}"
    what = f"{request.method} {request.url.path}"
    told = {404: f"there is no {what}", 405: f"{what} is not allowed"}
    message = told.get(error.status_code, str(error.detail))
    answer = ApiError(error.status_code, message, headers=dict(error.headers or {}))
    return _response(answer, request.scope)


def _redirection(app: Starlette, request: HttpRequest, error: Exception) -> Response | None:
    """Of a path without a route: to the route that it has without a slash at its end, if any.

    Relative to the path itself: a proxy may have put another in front of it, too.
    """
    path, slash = request.scope["path"][:-1], request.scope["path"][-1:]
    if slash != "/" or not isinstance(error, HTTPException) or error.status_code != 404:
        return None
    there = {**request.scope, "path": path}
    if all(route.matches(there)[0] is Match.NONE for route in app.routes):
        return None
    query = f"?{request.url.query}" if request.url.query else ""
    to = f"../{quote(path.rpartition('/')[2], safe='')}{query}"
    return RedirectResponse(to, headers=error_headers(request.scope))


def _answer_fault(request: HttpRequest, error: Exception) -> Response:
    # The server logs the error with its traceback; a client has no use for it.
    answer = ApiError(500, "internal error", code="internal")
    return _response(answer, request.scope)


ERROR_ANSWERS = {
    ApiError: _answer_api_error,
    HTTPException: _answer_http_error,
    Exception: _answer_fault,
}
