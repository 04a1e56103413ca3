"""Sends grants to prefill workers: one client for each address granted to lately."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from transfer import wire
from transfer.errors import KvferryError, Unavailable
from transfer.rpc import RpcClient, Security

GRANT_TIMEOUT_S = 5.0
# More than a cluster has workers. A worker that is restarted may have another port, and a client of
# the old one would try to reach it for ever.
MAX_CLIENTS = 1024


class GrantSender:
    """Sends grants without waiting for the answers. Used on the loop thread."""

    def __init__(
        self, security: Security, on_failed: Callable[[tuple[int, ...], str], None]
    ) -> None:
        """on_failed(rooms, why): the call that carried these rooms' grants failed."""
        self._security = security
        self._on_failed = on_failed
        self._clients: dict[str, RpcClient] = {}  # least recently used first
        self._tasks: set[asyncio.Task[None]] = set()

    def send(self, address: str, grants: Sequence[wire.Grant]) -> None:
        """Send all of them in one call."""
        self._begin(self._send(address, tuple(grants)))

    def _client(self, address: str) -> RpcClient:
        """Raises ConfigError while a file of certificates cannot be read."""
        client = self._clients.pop(address, None)
        if client is not None and client.is_backing_off:
            # A client that backs off fails every call at once, even if another worker has already
            # replaced the dead one: requests would use up their attempts within milliseconds.
            self._begin(client.close(GRANT_TIMEOUT_S))
            client = None
        client = client or RpcClient(address, self._security)
        self._clients[address] = client
        if len(self._clients) > MAX_CLIENTS:
            oldest = self._clients.pop(next(iter(self._clients)))
            self._begin(oldest.close())
        return client

    async def _send(self, address: str, grants: tuple[wire.Grant, ...]) -> None:
        client = None
        try:
            client = self._client(address)
            await client.call("Grant", wire.GrantBatch(grants), wire.Empty, GRANT_TIMEOUT_S)
        except KvferryError as error:
            # Once a cut has healed, a connection that lost packets to it, or was being made, may
            # take seconds to notice: the next grant gets another one.
            is_mute = isinstance(error, Unavailable)
            if is_mute and client is not None and self._clients.get(address) is client:
                self._begin(self._clients.pop(address).close(GRANT_TIMEOUT_S))
            self._on_failed(tuple(grant.room for grant in grants), str(error))

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
