"""Flags choose the backend; what cannot work is refused before anything starts."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tests.transfer.samples import KV, SECURITY
from transfer.choice import open_receiver, open_sender
from transfer.errors import ConfigError
from transfer.shm import ShmReceiver, ShmSender
from transfer.slots import FRAME_BYTES
from transfer.tcp import TcpReceiver, TcpSender
from transfer.worker_config import WorkerConfig


def config(backend: str) -> WorkerConfig:
    changes: Any = {"disaggregation_transfer_backend": backend}
    return WorkerConfig(Path("model"), "127.0.0.1:8998", **changes)


@pytest.mark.parametrize(("backend", "is_demand"), [("auto", False), ("shm", True)])
def test_auto_and_shm_offer_shared_memory(backend: str, is_demand: bool) -> None:
    sender = open_sender(config(backend), SECURITY, 1, "prefill-0", print)
    receiver = open_receiver(
        config(backend),
        SECURITY,
        8 * FRAME_BYTES,
        host="127.0.0.1",
        port=0,
        kv=KV,
        on_pages=print,
        on_finish=print,
        on_lost=print,
    )
    assert isinstance(sender, ShmSender)
    assert isinstance(receiver, ShmReceiver)
    assert sender.is_demand is is_demand
    assert receiver.shape.num_slots == 8
    receiver.start()
    assert receiver.offer is not None
    assert receiver.offer.is_demand is is_demand
    receiver.close()


def test_tcp_offers_nothing() -> None:
    sender = open_sender(config("tcp"), SECURITY, 1, "prefill-0", print)
    receiver = open_receiver(
        config("tcp"),
        SECURITY,
        0,
        host="127.0.0.1",
        port=0,
        kv=KV,
        on_pages=print,
        on_finish=print,
        on_lost=print,
    )
    assert type(sender) is TcpSender
    assert type(receiver) is TcpReceiver
    assert receiver.offer is None


@pytest.mark.parametrize(
    ("installed", "why"),
    [(False, r"not installed .*kvferry\[nixl\]"), (True, "cannot use it yet")],
)
def test_nixl_is_refused_with_the_reason_and_what_to_choose(
    monkeypatch: pytest.MonkeyPatch, installed: bool, why: str
) -> None:
    spec = importlib.util.find_spec("json") if installed else None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    with pytest.raises(ConfigError, match=f"nixl.*{why}.*choose auto, tcp or shm"):
        config("nixl")
