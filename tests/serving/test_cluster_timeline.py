"""What timelines show of a real system: pages travel while later chunks compute."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster import Cluster, up

CHUNK = 64
NUM_CHUNKS = 10
PAGE_SIZE = 16


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with up(
        "--context-length=1024",
        f"--page-size={PAGE_SIZE}",
        f"--chunked-prefill-size={CHUNK}",
        "--decode-max-running-requests=2",
    ) as running:
        yield running


def prompt_of(seed: int) -> list[int]:
    """NUM_CHUNKS chunks that share no prefix with those of another seed."""
    return [5 + (seed + 7 * place) % 900 for place in range(NUM_CHUNKS * CHUNK)]


def attempt_of(cluster: Cluster, request_id: str) -> dict[str, Any]:
    """The one attempt of a request whose legs are over."""
    cluster.settled()
    reply = cluster.http.get(f"/requests/{request_id}/timeline")
    assert reply.status_code == 200, reply.text
    (choice,) = reply.json()["choices"]
    (attempt,) = choice["attempts"]
    return {**attempt, "first_token_ms": choice["first_token_ms"]}


@pytest.fixture(scope="module")
def attempt(cluster: Cluster) -> dict[str, Any]:
    # Connect the pair first: on a busy machine that may take as long as all chunks do.
    cluster.post("/generate", {"input_ids": [7], "sampling_params": {"max_new_tokens": 2}})
    body = {
        "input_ids": prompt_of(1),
        "rid": "long",
        "sampling_params": {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True},
    }
    cluster.post("/generate", body)
    return attempt_of(cluster, "long")


def test_every_chunk_but_the_last_travels_while_later_ones_compute(
    attempt: dict[str, Any],
) -> None:
    """By prefill's clock alone. A chunk computes from its dispatch until it is known to be done,
    and its pages travel from then on until the last of them has left the process."""
    chunks = attempt["prefill"]["chunks"]
    assert [chunk["tokens"] for chunk in chunks] == [CHUNK] * NUM_CHUNKS
    for number, chunk in enumerate(chunks[:-1]):
        assert chunk["end_ms"] <= chunk["sent_ms"]
        later = chunks[number + 1 :]
        overlaps = [
            other
            for other in later
            if chunk["end_ms"] < other["end_ms"] and other["start_ms"] < chunk["sent_ms"]
        ]
        assert overlaps, (number, chunk, later)
    # Nor is it a matter of how ends are stamped: most had left before the last was computed.
    left_before_the_end = [c for c in chunks if c["sent_ms"] < chunks[-1]["end_ms"]]
    assert len(left_before_the_end) >= NUM_CHUNKS // 2


def test_moments_are_in_the_order_in_which_a_request_passes(attempt: dict[str, Any]) -> None:
    prefill, decode, moved = attempt["prefill"], attempt["decode"], attempt["prefill"]["transfer"]
    chunks = prefill["chunks"]
    at_prefill = [
        prefill["submit_sent_ms"],
        prefill["queued_ms"],
        chunks[0]["start_ms"],
        chunks[0]["end_ms"],
        moved["first_byte_ms"],
        chunks[-1]["end_ms"],
        prefill["first_token_ms"],
        moved["acked_ms"],
        prefill["ended_ms"],
    ]
    assert at_prefill == sorted(at_prefill)
    assert prefill["granted_ms"] <= chunks[0]["start_ms"]
    at_decode = [
        decode["submit_sent_ms"],
        decode["queued_ms"],
        decode["reserved_ms"],
        decode["first_pages_ms"],
        decode["pages_complete_ms"],
        decode["started_ms"],
        decode["first_step_ms"],
        decode["ended_ms"],
    ]
    assert at_decode == sorted(at_decode)
    assert (prefill["ending"], decode["ending"]) == ("done", "done")
    assert decode["steps"] >= 3


def test_what_travelled_is_what_the_pages_hold(cluster: Cluster, attempt: dict[str, Any]) -> None:
    moved = attempt["prefill"]["transfer"]
    num_pages = NUM_CHUNKS * CHUNK // PAGE_SIZE
    assert moved["backend"] == "shm"
    assert moved["bytes"] % num_pages == 0
    assert moved["frames"] >= NUM_CHUNKS
    again = {
        "input_ids": prompt_of(1),
        "rid": "cached",
        "sampling_params": {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True},
    }
    cluster.post("/generate", again)
    repeated = attempt_of(cluster, "cached")
    cached = repeated["prefill"]
    # Both have all but the last page cached, so this one is computed, and travels.
    assert cached["cached_tokens"] == (num_pages - 1) * PAGE_SIZE
    assert repeated["decode"]["cached_tokens"] == (num_pages - 1) * PAGE_SIZE
    assert [chunk["tokens"] for chunk in cached["chunks"]] == [PAGE_SIZE]
    assert cached["transfer"]["bytes"] == moved["bytes"] // num_pages
