"""Real workers: what decode has of a prompt is not sent again, and the text stays the same."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np

from tests.cluster import up, wait_until
from tests.served import CROWD, expected

PREFIX_TOKENS, PAGE_SIZE = 240, 16


def test_requests_with_one_beginning_share_the_pages_of_it_in_decodes_pool() -> None:
    rng = np.random.default_rng(5)
    prefix = rng.integers(5, 250, PREFIX_TOKENS).tolist()
    # Six prompts of 17 pages each, where decode has 40: only because they share they run at once.
    prompts = [[*prefix, *rng.integers(5, 250, 20).tolist()] for _ in range(6)]
    jobs = [(ids, {"temperature": 0, "max_new_tokens": 24}) for ids in prompts]
    want = expected(jobs)
    with up(*CROWD, "--prefill-tp-size=2") as cluster:
        first = cluster.generate(jobs[0][0], **jobs[0][1], ignore_eos=True)
        assert first["output_ids"] == want[0]
        before = cluster.worker("prefill")["counters"]["pages_sent"]
        with ThreadPoolExecutor(len(jobs)) as pool:
            answers = list(
                pool.map(lambda job: cluster.generate(job[0], **job[1], ignore_eos=True), jobs)
            )
        assert [answer["output_ids"] for answer in answers] == want
        decode, prefill = (cluster.worker(role)["counters"] for role in ("decode", "prefill"))
        pages = PREFIX_TOKENS // PAGE_SIZE
        assert decode["pages_shared"] == (pages + 1) + 5 * pages
        assert prefill["pages_sent"] - before == 1 + 5 * 2
        assert "preemptions" not in decode
        for worker in cluster.settled():
            assert worker["compiles_after_ready"] == 0
            assert worker["pages_held"] == 0
        assert cluster.http.post("/flush_cache").status_code == 200
        wait_until(lambda: cluster.worker("decode")["pages_cached"] == 0)
        again = cluster.generate(jobs[0][0], **jobs[0][1], ignore_eos=True)
        assert again["output_ids"] == want[0]
        assert cluster.worker("decode")["counters"]["pages_shared"] == decode["pages_shared"]
