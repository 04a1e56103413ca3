"""Two data-parallel ranks of two devices each, on both sides: the same tokens as one device alone.

One system serves the whole file: the demo model, decode pages for about three requests a rank, so
that a crowd preempts on both.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from serving.demo import demo_model_path
from serving.tokenizer import Tokenizer
from tests.cluster import Cluster, up
from tests.one_process import CONTEXT, OneProcess
from tests.served import TEXTS, expected, jobs_of


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with up(
        f"--context-length={CONTEXT}",
        "--page-size=16",
        "--prefill-dp-size=2",
        "--prefill-tp-size=2",
        "--chunked-prefill-size=64",
        "--prefill-max-seqs-per-chunk=4",
        "--prefill-load-balance-method=total_tokens",
        "--decode-dp-size=2",
        "--decode-tp-size=2",
        "--decode-max-running-requests=8",
        "--decode-max-total-tokens=512",
        "--max-inflight-requests=64",
    ) as running:
        yield running


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_dir(demo_model_path())


def test_a_crowd_on_two_ranks_gets_the_tokens_of_one_process_alone(
    cluster: Cluster, tokenizer: Tokenizer
) -> None:
    jobs = jobs_of(tokenizer, 60)
    want = expected(OneProcess(demo_model_path()), jobs)
    for _ in range(2):  # the second time prefixes are cached
        with ThreadPoolExecutor(len(jobs)) as pool:
            crowd = list(pool.map(lambda job: cluster.generate(job[0], **job[1]), jobs))
        assert [answer["output_ids"] for answer in crowd] == want
    assert any(answer["meta_info"]["cached_tokens"] > 0 for answer in crowd)
    assert cluster.worker("decode")["counters"]["preemptions"] > 0
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
