"""A name of the tests that may stand for one address and later for another."""

import grpc.aio
import pytest

from tests.ports import free_port

NAME = "moved.test:8998"


def addresses_by_name(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The addresses that channels opened from now on have; NAME is one where nobody listens.

    A channel keeps its address. gRPC itself asks again when calls fail, but up to 2 minutes later.
    """
    addresses = {NAME: f"127.0.0.1:{free_port()}"}
    insecure_channel = grpc.aio.insecure_channel
    monkeypatch.setattr(
        grpc.aio,
        "insecure_channel",
        lambda target, **options: insecure_channel(addresses.get(target, target), **options),
    )
    return addresses
