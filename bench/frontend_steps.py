"""Paces the steps of a round: the part that all engines of the front end benchmark share.

It needs only numpy and uvloop, as an engine may run in the environment of another project's server.
"""

import asyncio
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import uvloop

from bench.frontend_plan import STEER, Cell, pieces_of, say, told

_PATIENCE_S = 180.0  # for the steps of a round, beyond the time that their pace takes


class Round:
    """The requests that arrived and the steps that left in a round. Times are monotonic seconds."""

    def __init__(self, cell: Cell) -> None:
        self.cell = cell
        self.rooms = np.zeros(cell.num_streams, np.int64)
        self.first_s = [0.0] * cell.num_streams
        self.step_s: list[float] = []
        self.complete = asyncio.Event()  # every stream can go on
        self._num_begun = 0
        self._num_ready = 0

    def begin(self, streams: Sequence[int], now_s: float) -> None:
        """The first tokens of these streams leave now."""
        for stream in streams:
            self.first_s[stream] = now_s
        self._num_begun += len(streams)
        self._check()

    def ready(self, num_streams: int) -> None:
        """Decode has the requests of `num_streams` more streams."""
        self._num_ready += num_streams
        self._check()

    def _check(self) -> None:
        if min(self._num_begun, self._num_ready) == self.cell.num_streams:
            self.complete.set()


class Way(Protocol):
    """How tokens get to the server under test."""

    async def start(self) -> dict[str, Any]:
        """Connect or listen; returns what the parent must know."""
        ...

    def begin(self, cell: Cell) -> Round:
        """A round begins: requests of these streams come soon."""
        ...

    def emit(self, token_idx: int) -> None:
        """One token for every stream of the round."""
        ...


async def pace(way: Way, current: Round, steering: socket.socket) -> None:
    """Send all tokens after the first, as frontend_plan.Drive says."""
    await current.complete.wait()
    cell = current.cell
    next_s = time.monotonic()
    held_pieces = 1
    for token_idx in range(1, cell.output_tokens):
        current.step_s.append(time.monotonic())
        way.emit(token_idx)
        if cell.drive == "paced":
            next_s += cell.step_s
            await asyncio.sleep(max(0.0, next_s - time.monotonic()))
            continue
        await asyncio.sleep(0)  # for the step to leave
        if cell.drive == "backlog":
            continue
        pieces = pieces_of(token_idx + 1, cell.interval)
        if pieces > held_pieces and token_idx < cell.output_tokens - 1:
            held_pieces = pieces
            await _held(steering, cell.num_streams * (1 + pieces) - cell.num_streams // 4)


async def _held(steering: socket.socket, num_events: int) -> None:
    """Wait until the client holds so many events."""
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(steering, STEER.pack(num_events))
    await loop.sock_recv(steering, 1)


async def serve(steering: socket.socket, way_of: Callable[[dict[str, Any]], Way]) -> None:
    """Run rounds until no more are asked for. way_of: makes the `Way` from the first request."""
    steering.setblocking(False)
    way = way_of(await asyncio.to_thread(told))
    say(**await way.start())
    while ask := await asyncio.to_thread(told):
        current = way.begin(Cell(**ask["cell"]))
        say(ready=True)
        await asyncio.to_thread(told)  # every stream has its first token
        cell = current.cell
        patience_s = _PATIENCE_S + cell.output_tokens * cell.step_s
        try:
            async with asyncio.timeout(patience_s):
                await pace(way, current, steering)
        except TimeoutError:
            say(error=f"{len(current.step_s)} steps left in {patience_s:g} s, and no more")
            return
        say(first_s=current.first_s, step_s=current.step_s)


def run(steering: socket.socket, way_of: Callable[[dict[str, Any]], Way]) -> None:
    """`serve` on a loop of its own."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(steering, way_of))
