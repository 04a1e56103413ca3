"""Real workers whose pools cannot hold all prefixes: what the host kept gives the same text."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.cluster import Cluster, up
from tests.one_process import CONTEXT
from tests.served import CROWD, expected

GPT_OSS = Path(__file__).resolve().parents[1] / "goldens" / "gpt_oss"
ROUNDS = 3


def _counter(cluster: Cluster, name: str, role: str = "prefill") -> float:
    return cluster.worker(role)["counters"].get(name, 0)


def test_prefixes_come_back_on_whichever_rank_and_every_text_is_that_of_one_process_alone() -> None:
    rng = np.random.default_rng(3)
    jobs = [(rng.integers(5, 250, 400).tolist(), {"temperature": 0, "max_new_tokens": 8})]
    jobs += [
        (rng.integers(5, 250, 300 + at).tolist(), {"temperature": 0, "max_new_tokens": 8})
        for at in range(4)
    ]
    want = expected(jobs)
    with up(
        *CROWD,
        "--prefill-dp-size=2",
        "--prefill-tp-size=2",
        f"--prefill-max-total-tokens={CONTEXT}",
        "--enable-hierarchical-cache",
        "--hicache-ratio=4",
    ) as cluster:
        for at in range(ROUNDS):
            answers = [cluster.generate(ids, **asks, ignore_eos=True) for ids, asks in jobs]
            assert [answer["output_ids"] for answer in answers] == want
            cached = [answer["meta_info"]["cached_tokens"] for answer in answers]
            reusable = [(len(ids) - 1) // 16 * 16 for ids, _ in jobs]
            assert cached == ([0] * len(jobs) if at == 0 else reusable)
        assert _counter(cluster, "host_pages_restored") > 0
        metrics = cluster.http.get("/metrics").text
        assert 'kvferry_worker_stat{name="host_pages",' in metrics
        for worker in cluster.settled():
            assert worker["compiles_after_ready"] == 0
            assert worker["pages_held"] == 0
        assert cluster.http.post("/flush_cache").status_code == 200
        assert _counter(cluster, "host_pages") == 0
        again = cluster.generate(jobs[0][0], **jobs[0][1], ignore_eos=True)
        assert again["output_ids"] == want[0]
        assert again["meta_info"]["cached_tokens"] == 0


@pytest.mark.parametrize(
    ("role", "flags"),
    [
        (
            "prefill",
            (
                "--prefill-max-seqs-per-chunk=1",
                "--prefill-nnodes=2",
                "--prefill-tp-size=2",
                "--prefill-max-total-tokens=128",
            ),
        ),
        ("decode", ("--colocated", "--max-total-tokens=128")),
    ],
    ids=["prefill of two processes", "both roles in one process"],
)
def test_pages_of_windows_at_a_byte_a_number_come_back(role: str, flags: tuple[str, ...]) -> None:
    prompts = json.loads((GPT_OSS / "golden.json").read_text())["prompts"]
    base = max((prompt["ids"] for prompt in prompts), key=len)
    rng = np.random.default_rng(4)
    asked = [(rng.permutation(np.tile(base, 128))[:100]).tolist() for _ in range(3)]
    with up(
        f"--model-path={GPT_OSS / 'model'}",
        "--context-length=128",
        "--page-size=16",
        "--kv-cache-dtype=fp8_e4m3",
        "--chunked-prefill-size=64",
        *flags,
        "--decode-max-running-requests=1",
        "--enable-hierarchical-cache",
        "--hicache-ratio=4",
        few_steps=True,
    ) as cluster:
        first, *again = (
            [cluster.generate(ids, temperature=0, max_new_tokens=6) for ids in asked]
            for _ in range(ROUNDS)
        )
        for answers in again:
            for answer, before in zip(answers, first, strict=True):
                assert answer["output_ids"] == before["output_ids"]
                assert answer["meta_info"]["cached_tokens"] == 96
                assert before["meta_info"]["cached_tokens"] == 0
        assert _counter(cluster, "host_pages_restored", role) > 0
        for worker in cluster.settled():
            assert worker["compiles_after_ready"] == 0
            assert worker["pages_held"] == 0
