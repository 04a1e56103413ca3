"""Sends steps to another project's front end; a module for each project knows its messages.

Runs in that project's environment, as does everything that it imports.
"""

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from bench.endings import end_with
from bench.frontend_plan import Cell, inherited_socket, stream_of, token_at
from bench.frontend_steps import Round, run


class Messages(Protocol):
    """The messages between a front end and its engine. Requests are of the front end's own type."""

    async def take(self) -> list[Any]:
        """Wait for new requests and return them, at least one; answers anything else itself."""
        ...

    def name(self, request: Any) -> str:
        """The id that the client gave the request."""
        ...

    def send(self, requests: Sequence[Any], token_ids: Sequence[int], idx: int, last: bool) -> None:
        """Send token idx of each request in one message, as a real engine sends a step."""
        ...


class PeerSteps:
    """A `Way` (bench.frontend_steps): first tokens leave as requests come, the others when told."""

    def __init__(self, messages: Messages, token_ids: Sequence[int]) -> None:
        self._messages = messages
        self._ids = token_ids
        self._round: Round | None = None
        self._requests: dict[int, Any] = {}  # by stream, of this round
        self._taking: asyncio.Task[None] | None = None

    async def start(self) -> dict[str, Any]:
        self._taking = asyncio.create_task(self._take())
        return {}

    def begin(self, cell: Cell) -> Round:
        self._round = Round(cell)
        self._requests = {}
        return self._round

    def emit(self, token_idx: int) -> None:
        self._send(range(len(self._requests)), token_idx)

    async def _take(self) -> None:
        while True:
            requests = await self._messages.take()
            assert self._round is not None, "a request outside of a round"
            came = {stream_of(self._messages.name(request)): request for request in requests}
            self._requests |= came
            self._round.begin([*came], time.monotonic())
            self._send([*came], 0)
            self._round.ready(len(came))

    def _send(self, streams: Sequence[int], token_idx: int) -> None:
        assert self._round is not None, "a step outside of a round"
        ids = [self._ids[token_at(stream, token_idx, len(self._ids))] for stream in streams]
        requests = [self._requests[stream] for stream in streams]
        last = token_idx == self._round.cell.output_tokens - 1
        self._messages.send(requests, ids, token_idx, last)


def tell_addresses(notify_fd: int, from_server: str, to_server: str) -> None:
    """Tell the benchmark where the engine hears this server, and where the server hears it."""
    line = json.dumps({"from_server": from_server, "to_server": to_server}) + "\n"
    os.write(notify_fd, line.encode())
    os.close(notify_fd)


def main(
    serve: Callable[[int, str, str], None], new_messages: Callable[[str, str], Messages]
) -> None:
    """A project's module as a program: `serve NOTIFY_FD LIFELINE_FD MODEL PORT | engine FD`.

    serve: runs the front end, given NOTIFY_FD, MODEL and PORT. new_messages: makes what speaks to
    it, given the addresses of `tell_addresses`.
    """
    if sys.argv[1] == "serve":
        end_with(int(sys.argv[3]))
        serve(int(sys.argv[2]), *sys.argv[4:])
        return

    def way_of(setup: dict[str, Any]) -> PeerSteps:
        return PeerSteps(new_messages(setup["from_server"], setup["to_server"]), setup["ids"])

    run(inherited_socket(sys.argv[2]), way_of)
