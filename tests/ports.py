"""Ports for test servers that are told theirs before they start."""

import random
import socket
from collections.abc import Iterator
from pathlib import Path


def free_port() -> int:
    """A free port that no other call in this process has returned."""
    for port in _PORTS:
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                sock.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
    raise RuntimeError("no port is left")


def _ports() -> Iterator[int]:
    """Each candidate port once, in random order.

    Only ports below the range from which the system assigns ephemeral ones: it could give such a
    port to another socket between the choice here and the server's start.
    """
    told = Path("/proc/sys/net/ipv4/ip_local_port_range")
    first_given = int(told.read_text().split()[0]) if told.exists() else 32768
    ports = list(range(min(10000, first_given // 2), first_given))
    random.shuffle(ports)
    return iter(ports)


_PORTS = _ports()
