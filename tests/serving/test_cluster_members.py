"""A worker over three processes, for real: one that dies takes both others with it, and back."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import psutil

from tests.cluster import up, wait_until
from tests.serving.commands import MODEL

FLAGS = (
    "--context-length=128",
    "--page-size=16",
    "--kv-cache-dtype=fp8_e4m3",
    "--chunked-prefill-size=32",
    "--prefill-max-seqs-per-chunk=1",
    "--decode-max-running-requests=3",
    "--decode-nnodes=3",
    "--decode-dp-size=3",
)
SAMPLING = {"temperature": 0.8, "sampling_seed": 5, "max_new_tokens": 100, "ignore_eos": True}


def test_all_nodes_of_a_group_come_back_when_one_of_them_dies() -> None:
    prompts = [[5, 6, 7 + k] for k in range(3)]
    with up(f"--model-path={MODEL}", *FLAGS) as cluster:
        want = [cluster.generate(prompt, **SAMPLING)["output_ids"] for prompt in prompts]
        children = psutil.Process(cluster.process.pid).children()
        victim = next(child for child in children if "--node-rank=1" in child.cmdline())
        with ThreadPoolExecutor(3) as pool:
            answers = [pool.submit(cluster.generate, p, **SAMPLING) for p in prompts]
            wait_until(lambda: cluster.worker("decode")["load"]["running_requests"] == 3)
            os.kill(victim.pid, signal.SIGKILL)
            assert [answer.result(120)["output_ids"] for answer in answers] == want
