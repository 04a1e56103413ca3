"""A seat among several API processes: told by the environment, with a share of the limits."""

from pathlib import Path

import pytest

from serving.config import ServeConfig
from serving.seat import Seat


@pytest.mark.parametrize(
    ("inflight", "queued", "num_processes"), [(256, 1024, 4), (7, 0, 3), (2, 1, 2), (5, 2, 5)]
)
def test_the_shares_add_up_to_the_limits(inflight: int, queued: int, num_processes: int) -> None:
    config = ServeConfig(
        Path("m"),
        "127.0.0.1:1",
        max_inflight_requests=inflight,
        max_queued_requests=queued,
        api_workers=num_processes,
    )
    parts = [Seat(i, num_processes, "folder").share_of(config) for i in range(num_processes)]
    assert sum(part.max_inflight_requests for part in parts) == inflight
    assert sum(part.max_queued_requests for part in parts) == queued
    own = [part.max_inflight_requests for part in parts]
    assert max(own) - min(own) <= 1
    assert min(own) >= 1


def test_the_environment_brings_a_seat_to_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Seat.from_environment() is None
    seat = Seat(1, 3, "/a folder", 5)
    for name, value in seat.environment():
        monkeypatch.setenv(name, value)
    assert Seat.from_environment() == seat
