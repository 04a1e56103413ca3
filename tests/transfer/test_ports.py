"""Addresses of hosts as text: apart and together again, and what is none or cannot be bound."""

import socket
from typing import Any

import pytest

from transfer.errors import ConfigError
from transfer.ports import bind, bound_to, host_port, split_host_port


@pytest.mark.parametrize(
    ("host", "port"), [("host", 80), ("10.0.0.1", 8998), ("::1", 1), ("fe80::1%eth0", 65535)]
)
def test_an_address_comes_apart_as_it_was_put_together(host: str, port: int) -> None:
    assert split_host_port(host_port(host, port)) == (host, port)


@pytest.mark.parametrize("address", ["::1:8998", "[::1:8998", "::1]:8998", "[]:1", "[host]:1"])
def test_brackets_are_around_ipv6_and_nothing_else(address: str) -> None:
    """gRPC calls the host ::1:8998 for the first, at the port of HTTPS."""
    with pytest.raises(ValueError, match=r"expected host:port, or \[host\]:port for IPv6, got"):
        split_host_port(address)


@pytest.mark.parametrize(
    ("host", "why"),
    [("ü..b", "encoding of hostname failed"), ("no such host", "Name or service not known")],
)
def test_a_host_that_cannot_be_is_refused_with_both_flags(host: str, why: str) -> None:
    with pytest.raises(ConfigError) as caught:
        bind(host, 0, "--port")
    said = f"cannot listen on {host}:0: {why}; choose another --port or --host"
    assert str(caught.value) == said


def test_a_bound_address_is_told_in_digits_with_its_scope() -> None:
    class Scoped(socket.socket):
        def getsockname(self) -> Any:
            return "fe80::1", 8998, 0, 1

    with Scoped(socket.AF_INET6) as scoped:
        assert bound_to(scoped) == (f"fe80::1%{socket.if_indextoname(1)}", 8998)
    with bind("localhost", 0, "--port") as sock:
        assert bound_to(sock) == ("127.0.0.1", sock.getsockname()[1])
