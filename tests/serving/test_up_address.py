"""`kvferry up` asks the address it serves at, and prints it so that a shell and curl take it."""

import socket
from typing import Any

import pytest

from serving import up
from serving.listening import Address, address_of


class Scoped(socket.socket):
    """A socket that is bound to a link-local address, which this machine may not have."""

    def getsockname(self) -> Any:
        return "fe80::1", 8000, 0, 1


def test_a_link_local_address_is_asked_at_its_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def connect(place: tuple[str, int], *_: Any, **__: Any) -> None:
        asked.append(place)
        raise ConnectionRefusedError

    monkeypatch.setattr(socket, "create_connection", connect)
    interface = socket.if_indextoname(1)
    with Scoped(socket.AF_INET6) as sock:
        address = address_of(sock)
    assert str(address) == f"http://[fe80::1%25{interface}]:8000"
    assert up._server_info(address, "") == {}
    assert asked == [(f"fe80::1%{interface}", 8000)]


def test_a_shell_that_expands_brackets_takes_the_printed_command(
    capfd: pytest.CaptureFixture[str],
) -> None:
    up._say_ready(Address("http://[::1]:8000"), "m", "")
    up._say_ready(Address("http://127.0.0.1:8000"), "m", "")
    said = capfd.readouterr().out
    assert "curl -N 'http://[::1]:8000/v1/chat/completions' -H" in said
    assert "curl -N http://127.0.0.1:8000/v1/chat/completions -H" in said
