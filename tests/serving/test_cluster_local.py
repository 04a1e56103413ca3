"""Short prompts that decode computes itself: the same tokens, and prefill hears nothing of them."""

from collections.abc import Iterator
from typing import Any

import pytest

from serving.demo import demo_model_path
from serving.tokenizer import Tokenizer
from tests.cluster import Cluster, up
from tests.served import CROWD, TEXTS, crowds, expected, jobs_of

LOCAL_TOKENS = 40


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with up(
        *CROWD,
        f"--decode-local-prefill-tokens={LOCAL_TOKENS}",
        "--decode-dp-size=2",
        "--decode-tp-size=2",
        "--decode-max-total-tokens=512",
        "--decode-speculative-algorithm=NGRAM",
    ) as running:
        yield running


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_dir(demo_model_path())


def test_a_crowd_of_both_kinds_gets_the_tokens_of_one_process_alone(
    cluster: Cluster, tokenizer: Tokenizer
) -> None:
    lengths = [len(tokenizer.encode(text)) for text in TEXTS]
    assert min(lengths) <= LOCAL_TOKENS < max(lengths)
    jobs = jobs_of(tokenizer, 100)
    # A preempted request comes back with what it wrote so far, which may make it too long.
    crowds(cluster, jobs, expected(jobs))
    decode, prefill = cluster.worker("decode"), cluster.worker("prefill")
    assert decode["counters"]["local_prefills"] > 0
    assert prefill["counters"]["tokens_computed"] > 0
    for worker in cluster.settled():
        assert worker["compiles_after_ready"] == 0
        assert worker["pages_held"] == 0


def test_one_token_and_logprobs_come_from_decode_as_from_prefill(
    cluster: Cluster, tokenizer: Tokenizer
) -> None:
    ids = tokenizer.encode(TEXTS[1])
    before = cluster.worker("prefill")["counters"]
    asks = {"temperature": 0, "return_logprob": True, "top_logprobs_num": 3}
    one = cluster.generate(ids, max_new_tokens=1, **asks)
    two = cluster.generate(ids, max_new_tokens=2, logprob_start_len=0, **asks)
    assert cluster.worker("prefill")["counters"] == before
    # A request that names a prefill rank goes to prefill.
    whole = cluster.post(
        "/generate",
        {
            "input_ids": ids,
            "sampling_params": {"temperature": 0, "max_new_tokens": 2},
            "return_logprob": True,
            "top_logprobs_num": 3,
            "logprob_start_len": 0,
            "disagg_prefill_dp_rank": 0,
        },
    )
    assert cluster.worker("prefill")["counters"] != before
    assert two["output_ids"] == whole["output_ids"]
    assert one["output_ids"] == whole["output_ids"][:1]
    for name in ("output_token_logprobs", "output_top_logprobs"):
        wanted = flat(whole["meta_info"][name])
        for answer in (one, two):
            found = flat(answer["meta_info"][name])
            assert found == pytest.approx(wanted[: len(found)], abs=2e-4)
    for name in ("input_token_logprobs", "input_top_logprobs"):
        wanted = flat(whole["meta_info"][name])
        assert len(wanted) >= len(ids)
        assert flat(two["meta_info"][name]) == pytest.approx(wanted, abs=2e-4)


def flat(rows: list[Any]) -> list[float]:
    """All numbers of nested rows, in order."""
    numbers: list[float] = []
    for row in rows:
        numbers += flat(row) if isinstance(row, list) else [row] if row is not None else []
    return numbers
