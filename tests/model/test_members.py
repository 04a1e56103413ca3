"""Processes that share a mesh join each other, or say why they did not."""

import contextlib
import socket
import threading
from typing import Any

import jax
import pytest
from jax.experimental import multihost_utils

from model import members
from model.errors import ModelError, NodeLost
from tests.ports import free_port
from tests.transfer.children import child, said


def test_whoever_waits_too_long_for_the_others_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()
    monkeypatch.setattr(jax.distributed, "initialize", lambda *_, **__: over.wait(20))
    monkeypatch.setattr(members, "_JOIN_S", 0.05)
    with pytest.raises(
        NodeLost, match=r"2 nodes did not come together: not all of them joined within"
    ):
        members.join("a:1", 2, 0)
    over.set()


def test_what_jax_says_of_a_meeting_that_failed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("no such host")

    monkeypatch.setattr(jax.distributed, "initialize", fails)
    with pytest.raises(NodeLost, match="2 nodes did not come together: no such host"):
        members.join("a:1", 2, 1)


def _joined_alone(monkeypatch: pytest.MonkeyPatch, crosses_hosts: bool) -> list[str]:
    """Join with nobody. Returns what was said to all."""
    said_to_all: list[str] = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda *_, **__: None)
    monkeypatch.setattr(members, "texts_of_all", said_to_all.append)
    members.join("a:1", 1, 0, crosses_hosts)
    return said_to_all


def test_devices_of_nodes_connect_before_weights_are_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert len(_joined_alone(monkeypatch, False)) == 1


@pytest.mark.parametrize(
    ("address", "crosses_hosts", "is_refused"),
    [
        ("127.0.1.1", True, True),
        ("::1", True, True),
        ("127.0.1.1", False, False),
        ("10.1.2.3", True, False),
        (None, True, False),
    ],
)
def test_a_host_whose_name_others_cannot_use_is_refused_where_they_would(
    address: str | None, crosses_hosts: bool, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(name: str, *_: object, **__: object) -> list[Any]:
        assert name == socket.gethostname()
        if address is None:
            raise socket.gaierror(socket.EAI_NONAME, "unknown")
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (each, 0)) for each in (address, "")]

    monkeypatch.setattr(socket, "getaddrinfo", found)
    if is_refused:
        with pytest.raises(ModelError, match=rf"stands for {address}, .* in /etc/hosts"):
            _joined_alone(monkeypatch, crosses_hosts)
    else:
        assert _joined_alone(monkeypatch, crosses_hosts)


_NODE = """
import sys
from model import errors, members
from model.devices import prepare_devices
member, address = int(sys.argv[1]), sys.argv[2]
prepare_devices(2 + member)
try:
    members.join(address, 2, member)
except errors.ModelError as error:
    print(error, flush=True)
sys.stdin.read()
"""


def test_nodes_with_other_numbers_of_devices_all_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XLA_FLAGS")
    address = f"127.0.0.1:{free_port()}"
    with contextlib.ExitStack() as running:
        nodes = [running.enter_context(child(_NODE, str(rank), address)) for rank in (0, 1)]
        for node in nodes:
            assert said(node) == "devices of the nodes: 2, 3; every node must have the same number"


def test_a_process_alone_agrees_with_itself() -> None:
    assert members.texts_of_all("é") == ["é"]
    assert members.least_of_all(7) == 7
    assert members.any_of_all(True)
    assert not members.any_of_all(False)
    assert members.is_leader()
    assert list(members.first_devices(3)) == jax.devices()[:3]


def test_a_node_that_is_gone_while_all_agree_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: object) -> None:
        raise ValueError("Connection closed by peer")

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(multihost_utils, "process_allgather", fails)
    with pytest.raises(NodeLost, match=r"another node is lost, .*: Connection closed by peer"):
        members.texts_of_all("a")
