"""A process that cannot have its threads says so before gRPC or XLA would end it."""

import threading

import pytest

from transfer.errors import KvferryError
from transfer.open_threads import check_room


def test_where_there_is_room_nothing_is_left_of_the_trial() -> None:
    before = set(threading.enumerate())
    check_room(20)
    assert set(threading.enumerate()) <= before  # those of other tests may end meanwhile


def test_where_there_is_none_the_limits_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    before, start = set(threading.enumerate()), threading.Thread.start
    started: list[threading.Thread] = []

    def start_some(thread: threading.Thread) -> None:
        if len(started) >= 3:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_some)
    with pytest.raises(KvferryError, match=r"3 were started, expected at least 20: .*`ulimit -u`"):
        check_room(20)
    assert set(threading.enumerate()) <= before
