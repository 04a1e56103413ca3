"""Both ends of every backend, for the tests of what all of them promise."""

from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest

from tests.contract.transfer_ends import Ends, LoopbackEnds, NixlEnds, Open, ShmEnds, TcpEnds
from tests.transfer.samples import NEEDS_NIXL


@pytest.fixture(
    params=[LoopbackEnds, TcpEnds, ShmEnds, pytest.param(NixlEnds, marks=NEEDS_NIXL)],
    ids=["loopback", "tcp", "shm", "nixl"],
)
def open_ends(request: pytest.FixtureRequest) -> Iterator[Open]:
    """Makes pairs of ends and closes them after the test."""
    with ExitStack() as stack:

        def make(**settings: Any) -> Ends:
            ends: Ends = stack.enter_context(closing(request.param(**settings)))
            return ends

        yield make


@pytest.fixture
def ends(open_ends: Open) -> Ends:
    return open_ends()
