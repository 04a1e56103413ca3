"""Addresses of this host, taken: by one rule of what a name stands for, whoever listens there."""

import contextlib
import socket
from collections.abc import Iterator

from transfer.errors import ConfigError


def bind(host: str, port: int, flag: str, reuse_port: bool = False) -> socket.socket:
    """A socket bound to the one address that the host's name stands for: IPv6 where it is a number.

    Raises ConfigError, naming the flag, when somebody listens there. Others may be bound beside it
    until one of them listens: `listen` tells which of them has it.
    reuse_port: beside sockets of this user that listen, and were bound so.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, reuse_port)
    with _taking(sock, host, port, flag):
        sock.bind((host, port))
    return sock


def listen(sock: socket.socket, host: str, port: int, flag: str, backlog: int) -> socket.socket:
    """The bound socket, which listens now. Raises ConfigError as `bind`, and closes it then."""
    with _taking(sock, host, port, flag):
        sock.listen(backlog)
    return sock


@contextlib.contextmanager
def _taking(sock: socket.socket, host: str, port: int, flag: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        sock.close()
        where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        raise ConfigError(
            f"cannot listen on {where}: {error.strerror}; choose another {flag} or --host"
        ) from error
