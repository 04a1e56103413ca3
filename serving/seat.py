"""The seat of one of a server's HTTP processes: its number, its share of the limits, its folder."""

import os
from dataclasses import replace
from typing import Self
from urllib.parse import quote

import msgspec

from serving.config import ServeConfig

_ENV = "KVFERRY_API_SEAT"


class Seat(msgspec.Struct, frozen=True):
    """What the parent of several API processes tells each of them.

    process: 0 <= process < num_processes. folder: private to the server. listen_fd: the inherited
    Unix socket, which all processes share; -1 with a port, which each binds itself.
    """

    process: int
    num_processes: int
    folder: str
    listen_fd: int = -1

    @classmethod
    def from_environment(cls) -> Self | None:
        """None in a process that serves alone."""
        text = os.environ.get(_ENV)
        return None if text is None else msgspec.json.decode(text, type=cls)

    def environment(self) -> tuple[tuple[str, str], ...]:
        """The environment variables that pass the seat to its process."""
        return ((_ENV, msgspec.json.encode(self).decode()),)

    def address_of(self, process: int) -> str:
        """The address where that process answers the others, as gRPC reads it: part of a URI."""
        return f"unix:{quote(self.folder)}/{process}"

    def share_of(self, config: ServeConfig) -> ServeConfig:
        """The config with this process's part of the server's limits; all parts add up to them."""
        return replace(
            config,
            max_inflight_requests=self._part(config.max_inflight_requests),
            max_queued_requests=self._part(config.max_queued_requests),
            api_workers=1,  # the limits above are those of one process
        )

    def _part(self, total: int) -> int:
        part, rest = divmod(total, self.num_processes)
        return part + (self.process < rest)
