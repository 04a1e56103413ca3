"""Flags choose the backend; what cannot work is refused before anything starts."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from model import processors
from tests.transfer.samples import KV, NEEDS_NIXL, SECURITY
from transfer import nixl_agent
from transfer.choice import default_connections, open_receiver, open_sender
from transfer.errors import ConfigError
from transfer.nixl import NixlReceiver, NixlSender
from transfer.shm import ShmReceiver, ShmSender
from transfer.slots import FRAME_BYTES
from transfer.tcp import TcpReceiver, TcpSender
from transfer.worker_config import WorkerConfig


def config(backend: str) -> WorkerConfig:
    changes: Any = {"disaggregation_transfer_backend": backend}
    return WorkerConfig(Path("model"), "127.0.0.1:8998", **changes)


@pytest.mark.parametrize(("backend", "is_demand"), [("auto", False), ("shm", True)])
def test_auto_and_shm_offer_shared_memory(backend: str, is_demand: bool) -> None:
    sender = open_sender(config(backend), SECURITY, 1, 1 << 20, "prefill-0", print)
    receiver = open_receiver(
        config(backend),
        SECURITY,
        8 * FRAME_BYTES,
        host="127.0.0.1",
        port=0,
        kv=KV,
        on_event=print,
        pin=print,
    )
    assert isinstance(sender, ShmSender)
    assert isinstance(receiver, ShmReceiver)
    assert sender.is_demand is is_demand
    assert receiver.shape.num_slots == 8
    assert receiver.pin is receiver.buffers.pin is print
    receiver.start()
    assert receiver.offer is not None
    assert receiver.offer.is_demand is is_demand
    receiver.close()


def test_tcp_offers_nothing() -> None:
    sender = open_sender(config("tcp"), SECURITY, 1, 1 << 20, "prefill-0", print)
    receiver = open_receiver(
        config("tcp"),
        SECURITY,
        0,
        host="127.0.0.1",
        port=0,
        kv=KV,
        on_event=print,
        pin=print,
    )
    assert type(sender) is TcpSender
    assert type(receiver) is TcpReceiver
    assert receiver.offer is None
    assert receiver.buffers.pin is print


@NEEDS_NIXL
def test_nixl_takes_no_other_way() -> None:
    sender = open_sender(config("nixl"), SECURITY, 1, 1 << 20, "prefill-0", print)
    receiver = open_receiver(
        config("nixl"),
        SECURITY,
        8 * FRAME_BYTES,
        host="127.0.0.1",
        port=0,
        kv=KV,
        on_event=print,
    )
    assert type(sender) is NixlSender
    assert type(receiver) is NixlReceiver
    assert receiver.shape.num_slots == 8


def test_nixl_where_it_is_not_installed_is_refused_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"nixl_cu12.* is installed.*requirements-nixl.lock.*auto, tcp or shm"
    ):
        config("nixl")


def test_a_nixl_that_cannot_be_loaded_is_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nixl_agent, "PACKAGES", ("json",))  # it has no such bindings
    with pytest.raises(ConfigError, match=r"json cannot be loaded: .*json._bindings"):
        open_sender(config("nixl"), SECURITY, 1, 1 << 20, "prefill-0", print)


@pytest.mark.parametrize(("available", "connections"), [(1, 1), (2, 1), (3, 1), (4, 2), (64, 2)])
def test_a_pair_has_a_connection_for_each_two_processors(
    available: int, connections: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processors, "available", lambda: available)
    assert default_connections() == connections
