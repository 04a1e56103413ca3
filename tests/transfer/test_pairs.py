"""Traffic is reported by backend and peer, for a bounded number of peers."""

import pytest

from transfer.pairs import MAX_PAIRS, Pairs


def test_bytes_and_seconds_add_up_by_way_and_peer():
    pairs = Pairs()
    for way, peer, num_bytes, took_s in (
        ("shm", "a", 100, 0.5),
        ("tcp", "a", 10, 1.0),
        ("shm", "a", 300, 1.5),
        ("shm", "b", 7, 0.0),
    ):
        pairs.add(way, peer, num_bytes, took_s)
    told = [
        (pair.backend, pair.peer, pair.num_bytes, pair.seconds, pair.recent_bytes_per_s)
        for pair in pairs.told()
    ]
    assert told == [
        ("shm", "a", 400, 2.0, 200.0),
        ("shm", "b", 7, 0.0, 0.0),
        ("tcp", "a", 10, 1.0, 10.0),
    ]


def test_the_rate_is_that_of_the_last_frames():
    pairs = Pairs()
    for took_s in [100.0] * 10 + [0.25] * 64:
        pairs.add("tcp", "a", 1000, took_s)
    (told,) = pairs.told()
    assert told.recent_bytes_per_s == pytest.approx(4000.0)
    assert told.num_bytes == 74_000


def test_the_peers_used_last_are_kept():
    pairs = Pairs()
    for idx in range(MAX_PAIRS):
        pairs.add("tcp", str(idx), 1, 1.0)
    pairs.add("tcp", "0", 1, 1.0)
    pairs.add("tcp", "new", 1, 1.0)
    peers = {pair.peer for pair in pairs.told()}
    assert len(peers) == MAX_PAIRS
    assert peers >= {"0", "new"}
    assert "1" not in peers
