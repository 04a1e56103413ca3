"""Addresses of this host: written, read and bound by one rule for what a name stands for."""

import contextlib
import ipaddress
import socket
from collections.abc import Iterator
from typing import Any

from transfer.errors import ConfigError


def bind(host: str, port: int, flag: str, reuse_port: bool = False) -> socket.socket:
    """A socket bound to one address, that of `address_of`.

    Raises ConfigError, naming the flag, when a socket listens there. Others may be bound to the
    address as well until one of them listens; `listen` raises for the rest.
    reuse_port: share the address with listening sockets of this user that were bound the same way.
    """
    family, address = address_of(host, port)
    sock = socket.socket(family)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, reuse_port)
    with _taking(sock, host, port, flag):
        sock.bind(address)
    return sock


def address_of(host: str, port: int) -> tuple[socket.AddressFamily, tuple[Any, ...]]:
    """What to bind for a host: the first IPv4 address of a name, or of IPv6 where it has no other.

    A host that has no address comes back as it is: to bind it raises the error that says why.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return socket.AF_INET, (host, port)
    family, _, _, _, address = min(found, key=lambda one: one[0] != socket.AF_INET)
    return family, address


def is_loopback(host: str) -> bool:
    """Whether only this host's own processes reach it by that name."""
    _, address = address_of(host, 0)
    with contextlib.suppress(ValueError):  # a name without an address
        return ipaddress.ip_address(address[0].partition("%")[0]).is_loopback
    return False


def bound_to(sock: socket.socket) -> tuple[str, int]:
    """Host and port of a bound socket: the address in digits, a link-local one with its scope."""
    host, port = socket.getnameinfo(
        sock.getsockname(), socket.NI_NUMERICHOST | socket.NI_NUMERICSERV
    )
    return host, int(port)


def listen(sock: socket.socket, host: str, port: int, flag: str, backlog: int) -> socket.socket:
    """Make a bound socket listen; returns it. On failure closes it and raises ConfigError."""
    with _taking(sock, host, port, flag):
        sock.listen(backlog)
    return sock


@contextlib.contextmanager
def _taking(sock: socket.socket, host: str, port: int, flag: str) -> Iterator[None]:
    try:
        yield
    except (OSError, TypeError) as error:  # the latter for a text that can be no host's name
        sock.close()
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"cannot listen on {host_port(host, port)}: {why}; choose another {flag} or --host"
        ) from error


def host_port(host: str, port: int) -> str:
    """Both as one, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_host_port(address: str) -> tuple[str, int]:
    """Both apart, the host without brackets. Raises ValueError for anything but host:port.

    IPv6 has to have brackets, and nothing else may: gRPC would read `::1:8998` as a host alone, and
    call it at another port.
    """
    given, _, port = address.rpartition(":")
    host = given[1:-1] if given[:1] == "[" and given[-1:] == "]" else given
    is_bare = not set(host) & set("[]/") and (":" in host) == (host != given)
    if not host or not is_bare or not port.isdecimal() or not 0 < int(port) <= 65535:
        raise ValueError(f"expected host:port, or [host]:port for IPv6, got {address!r}")
    return host, int(port)
