"""Two data-parallel ranks of two devices each, on both sides: the same tokens as one device alone.

One system serves the whole file: the demo model, decode pages for about three requests a rank, so
that a crowd preempts on both. The ranks of prefill share the experts, those of decode have their
own.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from serving.demo import demo_model_path
from serving.tokenizer import Tokenizer
from tests.cluster import Cluster, up, wait_until
from tests.served import CROWD, TEXTS, crowds, expected, jobs_of


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with up(
        *CROWD,
        "--prefill-dp-size=2",
        "--prefill-tp-size=2",
        "--prefill-ep-size=4",
        "--prefill-load-balance-method=total_tokens",
        "--decode-dp-size=2",
        "--decode-tp-size=2",
        "--decode-max-total-tokens=512",
    ) as running:
        yield running


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_dir(demo_model_path())


def test_a_crowd_on_two_ranks_gets_the_tokens_of_one_process_alone(
    cluster: Cluster, tokenizer: Tokenizer
) -> None:
    jobs = jobs_of(tokenizer, 100)
    want = expected(jobs)
    for _ in range(2):  # the second time prefixes are cached
        answers = crowds(cluster, jobs, want)
    assert any(answer["meta_info"]["cached_tokens"] > 0 for answer in answers)
    for worker in cluster.settled():
        assert all(worker["counters"][f"rank_{rank}_rooms"] > 0 for rank in (0, 1))
        assert worker["compiles_after_ready"] == 0
        assert worker["pages_held"] == 0


def test_prompt_logprobs_are_of_their_own_prompt_on_either_rank(
    cluster: Cluster, tokenizer: Tokenizer
) -> None:
    prompts = [tokenizer.encode(text) for text in TEXTS]
    asks = {"max_new_tokens": 1, "temperature": 0, "return_logprob": True, "logprob_start_len": 0}
    alone = [cluster.generate(ids, **asks)["meta_info"] for ids in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(lambda ids: cluster.generate(ids, **asks)["meta_info"], prompts))
    for ids, answer, same in zip(prompts, answers, alone, strict=True):
        rows, others = answer["input_token_logprobs"], same["input_token_logprobs"]
        assert [id_ for _, id_, _ in rows] == ids
        for row, other in zip(rows[1:], others[1:], strict=True):
            assert row[0] == pytest.approx(other[0], abs=2e-4)


def test_a_flush_empties_the_caches_of_all_ranks(cluster: Cluster, tokenizer: Tokenizer) -> None:
    prompts = [tokenizer.encode(text) for text in TEXTS]
    with ThreadPoolExecutor(len(prompts)) as pool:
        list(pool.map(lambda ids: cluster.generate(ids, max_new_tokens=2), prompts))
    cluster.settled()
    assert cluster.worker("prefill")["pages_cached"] > 0
    assert cluster.http.post("/flush_cache").status_code == 200
    prefill = cluster.worker("prefill")
    assert prefill["pages_cached"] == 0
    assert prefill["load"]["pages_free"] == prefill["load"]["pages_total"]


def test_dictated_ranks_have_the_request_and_decode_knows_prefills(cluster: Cluster) -> None:
    for number, (prefill, decode) in enumerate([(0, 1), (1, 0), (1, 1), (0, 0)] * 2):
        cluster.post(
            "/generate",
            {
                "rid": f"dictated-{number}",
                "input_ids": [number + 3] * 70,
                "sampling_params": {"max_new_tokens": 3},
                "disagg_prefill_dp_rank": prefill,
                "routed_dp_rank": decode,
            },
        )
        legs = legs_of(cluster, f"dictated-{number}")
        assert (legs["prefill"]["dp_rank"], legs["decode"]["dp_rank"]) == (prefill, decode)
        # Nothing waits for a route, so it may come too late to be shown, but it is never wrong.
        assert legs["decode"]["prefill_dp_rank"] in (prefill, None)
    counters = cluster.worker("decode")["counters"]
    assert counters["routes_known"] > 0
    assert "routes_contradicting" not in counters
    reply = cluster.http.post("/generate", json={"text": "a", "routed_dp_rank": 2})
    assert reply.status_code == 400
    message = reply.json()["error"]["message"]
    assert message == "routed_dp_rank: decode has data-parallel ranks 0 to 1, got 2"


def test_the_load_is_told_for_each_rank(cluster: Cluster) -> None:
    for load in cluster.http.get("/get_load").json():
        assert load["dp_size"] == len(load["ranks"]) == 2
        assert load["pages_total"] == sum(rank["pages_total"] for rank in load["ranks"]) > 0


def legs_of(cluster: Cluster, request_id: str) -> dict[str, Any]:
    """The legs of a request's first attempt, once both workers told of them."""
    found: dict[str, Any] = {}

    def told() -> bool:
        body = cluster.http.get(f"/requests/{request_id}/timeline").json()
        found.update(body["choices"][0]["attempts"][0])
        return bool(found["prefill"]["reported"] and found["decode"]["reported"])

    wait_until(told)
    return found
