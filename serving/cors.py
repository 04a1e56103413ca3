"""Decides which web pages may read this server's answers (CORS, by Starlette's middleware)."""

from collections.abc import Sequence
from typing import Final

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp

from serving.endpoints import error_headers
from serving.errors import ApiError

# Beside those that every page may read.
_EXPOSED: Final = ("X-Request-Id", "Request-Id", "Retry-After")


class Cors(CORSMiddleware):
    """Wraps everything that answers, the API key's check included, so that pages can read errors.

    Before a request with a key, browsers send an OPTIONS request without one. Only the start of a
    stream passes through here: its events use the server's own `send`.
    """

    def __init__(self, app: ASGIApp, origins: Sequence[str]) -> None:
        """origins: as browsers send them; * allows every one."""
        super().__init__(
            app,
            allow_origins=origins,
            allow_methods=("*",),
            allow_headers=("*",),
            expose_headers=_EXPOSED,
        )

    def preflight_response(self, request_headers: Headers) -> Response:
        """The answer to OPTIONS; a refusal has the shape of every other error."""
        response = super().preflight_response(request_headers)
        if response.status_code == 200:
            return response
        error = ApiError(400, bytes(response.body).decode(), code="cors_refused")
        error.headers["Vary"] = response.headers["Vary"]
        return error.response(error_headers({"headers": request_headers.raw}))
