"""How routes reach the registry and leave it: news of one worker in, pushed to every reader."""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable

from transfer import wire
from transfer.errors import RpcError
from transfer.routes import RouteNews, RouteTable

log = logging.getLogger(__name__)

MAX_WAITING = 256  # messages for one reader; one that is so far behind is told everything anew
RETRY_S = 0.2


class RouteFeeds:
    """The readers of one table. Used on the registry's loop."""

    def __init__(self, table: RouteTable) -> None:
        self._table = table
        self._feeds: set[_Feed] = set()

    def __len__(self) -> int:
        return len(self._feeds)

    def tell(self, routes: wire.Routes) -> None:
        """The table has taken this in."""
        for feed in self._feeds:
            feed.offer(routes)

    async def follow(self) -> AsyncGenerator[wire.Routes]:
        """All that is known, then what comes, until the reader goes."""
        feed = _Feed(self._table)
        self._feeds.add(feed)
        try:
            while True:
                yield await feed.take()
        finally:
            self._feeds.discard(feed)


class _Feed:
    """What waits to leave for one reader."""

    def __init__(self, table: RouteTable) -> None:
        self._table = table
        self._waiting = deque(table.snapshot())
        self._changed = asyncio.Event()

    def offer(self, routes: wire.Routes) -> None:
        if len(self._waiting) < MAX_WAITING:
            self._waiting.append(routes)
        else:
            self._waiting = deque(self._table.snapshot())
        self._changed.set()

    async def take(self) -> wire.Routes:
        while not self._waiting:
            self._changed.clear()
            await self._changed.wait()
        return self._waiting.popleft()


class TurnRoutes:
    """What one turn of an engine has to tell of its rooms. Used on the engine thread."""

    def __init__(self) -> None:
        self._bound: list[tuple[int, int]] = []
        self._ended: list[int] = []

    def bound(self, room: int, rank: int) -> None:
        self._bound.append((room, rank))

    def ended(self, room: int) -> None:
        self._ended.append(room)

    def take(self) -> tuple[list[tuple[int, int]], list[int]] | None:
        """Rooms with their ranks, and rooms that are over; None when there are neither."""
        if not (self._bound or self._ended):
            return None
        taken = self._bound, self._ended
        self._bound, self._ended = [], []
        return taken


class RoutePublisher:
    """Tells the registry of one worker's routes. Used on the worker's loop.

    One call at a time: what comes meanwhile leaves together with the next. While the registry is
    away nothing is kept but what is live, and all of that is told once it is back.
    """

    def __init__(
        self,
        worker_id: str,
        epoch: int,
        put: Callable[[wire.Routes], Awaitable[wire.RoutesReply]],
    ) -> None:
        self._news = RouteNews(worker_id, epoch)
        self._put = put
        self._changed = asyncio.Event()
        self._complaint = ""

    def feed(self, bound: Iterable[tuple[int, int]], ended: Iterable[int]) -> None:
        """Of one turn: rooms with their ranks, and rooms that are over."""
        self._news.add(bound, ended)
        self._changed.set()

    def registered(self) -> None:
        """The registry has just taken this worker in, and may know none of its routes."""
        self._news.tell_all()
        self._changed.set()

    async def run(self) -> None:
        """Tell until cancelled."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            routes = self._news.take()
            if routes is not None:
                await self._tell(routes)

    async def _tell(self, routes: wire.Routes) -> None:
        try:
            reply = await self._put(routes)
        except RpcError as error:
            self._complain(error)
            self._news.tell_all()
            await asyncio.sleep(RETRY_S)
            self._changed.set()
        else:
            self._complaint = ""
            if not reply.known:  # `registered` is called once it is
                self._news.tell_all()

    def _complain(self, error: RpcError) -> None:
        if str(error) != self._complaint:
            self._complaint = str(error)
            log.warning("routes are not told: %s", error)
