"""Grants on their way to prefill workers: one client for each address granted to lately."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from transfer import wire
from transfer.errors import KvferryError
from transfer.rpc import RpcClient, Security

GRANT_TIMEOUT_S = 5.0
# Above the workers of a cluster. Each that is started anew may have another port, and a client of
# the old one would try to reach it for ever.
MAX_CLIENTS = 1024


class GrantSender:
    """Sends grants without waiting for them. Used on the loop."""

    def __init__(
        self, security: Security, on_failed: Callable[[tuple[int, ...], str], None]
    ) -> None:
        """on_failed(rooms, why): that call did not get there."""
        self._security = security
        self._on_failed = on_failed
        self._clients: dict[str, RpcClient] = {}  # the latest used last
        self._tasks: set[asyncio.Task[None]] = set()

    def send(self, address: str, grants: Sequence[wire.Grant]) -> None:
        """One call with all of them."""
        self._begin(self._send(address, tuple(grants)))

    def _client(self, address: str) -> RpcClient:
        """Raises ConfigError while a file of certificates cannot be read."""
        client = self._clients.pop(address, None)
        if client is not None and client.is_backing_off:
            # A worker that has just taken the place of a dead one would not even be asked, and
            # its requests use up their attempts within milliseconds.
            self._begin(client.close(GRANT_TIMEOUT_S))
            client = None
        client = client or RpcClient(address, self._security)
        self._clients[address] = client
        if len(self._clients) > MAX_CLIENTS:
            oldest = self._clients.pop(next(iter(self._clients)))
            self._begin(oldest.close())
        return client

    async def _send(self, address: str, grants: tuple[wire.Grant, ...]) -> None:
        try:
            await self._client(address).call(
                "Grant", wire.GrantBatch(grants), wire.Empty, GRANT_TIMEOUT_S
            )
        except KvferryError as error:
            self._on_failed(tuple(grant.room for grant in grants), str(error))

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
