"""Both roles in one process: the same tokens as from two, and no prefill worker anywhere."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any

import pytest

from serving.demo import demo_model_path
from serving.tokenizer import Tokenizer
from tests.cluster import Cluster, up, wait_until
from tests.served import CROWD, TEXTS, crowds, expected, jobs_of


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    flags = [flag for flag in CROWD if not flag.startswith("--prefill")]
    flags += ["--decode-speculative-algorithm=NGRAM", "--decode-speculative-num-draft-tokens=1"]
    with up(*flags, "--colocated", "--decode=2", "--policy=cache_aware") as running:
        yield running


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_dir(demo_model_path())


def test_a_prefix_is_computed_once_until_it_is_flushed(
    cluster: Cluster, tokenizer: Tokenizer
) -> None:
    """This runs first: a worker that was busy a moment ago is avoided, whatever its cache has."""
    ids = tokenizer.encode(TEXTS[2])
    whole = (len(ids) - 1) // 16 * 16
    assert cluster.http.post("/flush_cache").status_code == 200
    answers = [cluster.generate(ids, temperature=0, max_new_tokens=4) for _ in range(3)]
    assert cluster.http.post("/flush_cache").status_code == 200
    answers.append(cluster.generate(ids, temperature=0, max_new_tokens=4))
    cached = [answer["meta_info"]["cached_tokens"] for answer in answers]
    assert cached == [0, whole, whole, 0]
    assert all(answer["output_ids"] == answers[0]["output_ids"] for answer in answers)


def test_a_crowd_gets_the_tokens_of_one_process_alone(
    cluster: Cluster, tokenizer: Tokenizer
) -> None:
    jobs = jobs_of(tokenizer, 60)
    assert max(len(ids) for ids, _ in jobs) > 64, "one that takes several chunks"
    crowds(cluster, jobs, expected(jobs))
    workers = cluster.settled()
    assert [worker["role"] for worker in workers] == ["decode", "decode"]
    for worker in workers:
        assert worker["counters"]["local_prefills"] > 0
        assert worker["compiles_after_ready"] == 0
        assert worker["pages_held"] == 0
        assert worker["load"]["pages_free"] == worker["load"]["pages_total"]


def test_drafts_are_tried_and_accepted_and_the_tokens_are_those_of_one_process(
    cluster: Cluster, tokenizer: Tokenizer
) -> None:
    ids = tokenizer.encode(TEXTS[0]) * 3
    (want,) = expected([(ids, {"temperature": 0, "max_new_tokens": 100})])
    # On a busy host, one slow step with drafts stops drafting for some hundred steps.
    for _ in range(60):
        answer = cluster.generate(ids, temperature=0, max_new_tokens=100, ignore_eos=True)
        assert answer["output_ids"] == want
        made, accepted = drafts_of(cluster)
        if 0 < accepted < made:
            return
    pytest.fail(f"{accepted} of {made} drafts were accepted")


def drafts_of(cluster: Cluster) -> tuple[int, int]:
    """Draft tokens made and accepted so far."""
    counters = [worker["counters"] for worker in cluster.workers()]
    names = "draft_tokens", "accepted_draft_tokens"
    made, accepted = (sum(each.get(name, 0) for each in counters) for name in names)
    return made, accepted


def test_a_timeline_has_the_chunks_that_decode_computed(cluster: Cluster) -> None:
    rid, sampling = "chunks-of-its-own", {"temperature": 0, "max_new_tokens": 4}
    ids = list(range(5, 155))
    cluster.post("/generate", {"rid": rid, "input_ids": ids, "sampling_params": sampling})
    wait_until(lambda: leg_of(cluster, rid)["reported"])
    leg = leg_of(cluster, rid)
    assert [chunk["tokens"] for chunk in leg["chunks"]] == [64, 64, 22]
    ends = [leg["first_pages_ms"]]
    for chunk in leg["chunks"]:
        assert leg["first_pages_ms"] <= chunk["start_ms"] < chunk["end_ms"]
        assert chunk["handed_over_ms"] is chunk["sent_ms"] is None
        ends.append(chunk["end_ms"])
    assert ends == sorted(ends)
    assert ends[-1] <= leg["pages_complete_ms"]


def leg_of(cluster: Cluster, rid: str) -> Any:
    timeline = cluster.http.get(f"/requests/{rid}/timeline").json()
    ((attempt,),) = (choice["attempts"] for choice in timeline["choices"])
    assert attempt["prefill"] is None
    return attempt["decode"]


def test_a_rank_of_prefill_cannot_be_dictated(cluster: Cluster) -> None:
    reply = cluster.http.post("/generate", json={"input_ids": [5], "disagg_prefill_dp_rank": 0})
    assert reply.status_code == 400
    assert "this cluster has no prefill worker, got 0" in reply.text


def test_a_killed_worker_is_a_pause_not_another_text(
    cluster: Cluster, tokenizer: Tokenizer
) -> None:
    jobs = jobs_of(tokenizer, 100)
    want = expected(jobs)
    epochs = {worker["epoch"] for worker in cluster.workers()}
    doomed = cluster.children()["decode"]
    begun = count(1)

    def began() -> None:
        if next(begun) == len(jobs) // 2:  # at either worker, mostly
            doomed.kill()

    with ThreadPoolExecutor(len(jobs)) as pool:
        answers = [pool.submit(cluster.stream, ids, began, **sampling) for ids, sampling in jobs]
        assert [answer.result(120) for answer in answers] == want
    wait_until(lambda: len({w["epoch"] for w in cluster.workers()} - epochs) == 1, 120)
