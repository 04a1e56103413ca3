"""Recorded numbers over HTTP, with prefill and decode in separate processes, on every mesh."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.cluster import Cluster, environment, up

GOLDENS = Path(__file__).resolve().parents[1] / "goldens"
ATOL = 2e-4
STEPS = 24

# Each checkpoint on another pair of meshes. mixtral is read from Orbax; qwen3 has no prefix cache;
# llama, qwen3_moe and gpt_oss have several data-parallel ranks; mixtral and qwen3_moe have copies
# of experts; qwen3_moe and gpt_oss move experts; llama and gpt_oss have a mesh over two processes;
# llama computes short prompts at decode; gpt_oss drafts, into pages of windows that wrap around.
SYSTEMS = {
    "llama": (
        "--prefill-dp-size=2",
        "--prefill-load-balance-method=prefix_aware",
        "--decode-dp-size=2",
        "--decode-nnodes=2",
        "--decode-local-prefill-tokens=40",
    ),
    "qwen3": ("--prefill-tp-size=1", "--decode-tp-size=4", "--disable-radix-cache"),
    "mixtral": (
        "--prefill-tp-size=2",
        "--prefill-ep-size=2",
        "--prefill-ep-num-redundant-experts=4",
        "--decode-tp-size=1",
    ),
    "qwen3_moe": (
        "--prefill-tp-size=2",
        "--decode-dp-size=2",
        "--decode-tp-size=2",
        "--decode-ep-size=4",
        "--decode-ep-num-redundant-experts=8",
        "--decode-enable-eplb",
        "--decode-eplb-rebalance-num-iterations=10",
    ),
    "gpt_oss": (
        "--prefill-tp-size=2",
        "--prefill-ep-size=2",
        "--prefill-nnodes=2",
        "--prefill-enable-eplb",
        "--prefill-eplb-rebalance-num-iterations=1",
        "--prefill-eplb-rebalance-layers-per-chunk=0",
        "--decode-dp-size=2",
        "--decode-speculative-algorithm=NGRAM",
    ),
    "deepseek_v3": ("--prefill-tp-size=2", "--decode-tp-size=4", "--decode-ep-size=2"),
    "minimax_m2": ("--prefill-tp-size=4", "--decode-tp-size=2", "--decode-ep-size=2"),
    "ernie4_5_moe": ("--prefill-tp-size=2", "--prefill-ep-size=2", "--decode-tp-size=1"),
}
# Systems whose every program is compiled as on a user's server; see tests/compiling.py.
AS_USERS = {"qwen3_moe", "gpt_oss", "deepseek_v3"}


@pytest.fixture(scope="module", params=SYSTEMS)
def system(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Cluster]]:
    name: str = request.param
    path = GOLDENS / name / "model"
    if name == "mixtral":
        path = _converted(path, tmp_path_factory.mktemp("orbax") / name)
    with up(
        f"--model-path={path}",
        # Few programs: compiling is what takes time here.
        "--chunked-prefill-size=16",
        "--decode-max-running-requests=2",
        *SYSTEMS[name],
        as_users=name in AS_USERS,
    ) as cluster:
        yield name, cluster


def _converted(path: Path, out: Path) -> Path:
    command = (sys.executable, "-m", "serving.launch", "convert", "--model-path", path, "--output")
    argv = [str(word) for word in (*command, out)]
    subprocess.run(argv, check=True, env=environment(), timeout=120)
    return out


def _golden(name: str) -> tuple[list[dict[str, Any]], dict[str, np.ndarray]]:
    info = json.loads((GOLDENS / name / "golden.json").read_text())
    return info["prompts"], load_file(GOLDENS / name / "golden.safetensors")


def test_greedy_ids_and_logprobs_are_the_recorded_ones(system: tuple[str, Cluster]) -> None:
    name, cluster = system
    prompts, numbers = _golden(name)
    for prompt in prompts:
        answer = cluster.generate(
            prompt["ids"],
            max_new_tokens=STEPS,
            temperature=0,
            return_logprob=True,
            top_logprobs_num=5,
        )
        assert answer["output_ids"] == prompt["greedy_ids"], prompt["name"]
        tops = answer["meta_info"]["output_top_logprobs"]
        key = f"{prompt['name']}.greedy"
        assert [[id_ for _, id_, _ in top] for top in tops] == numbers[f"{key}.top5_ids"].tolist()
        logprobs = np.array([[logprob for logprob, _, _ in top] for top in tops])
        assert np.abs(logprobs - numbers[f"{key}.top5_logprobs"]).max() < ATOL


def test_prompt_logprobs_are_the_recorded_ones(system: tuple[str, Cluster]) -> None:
    name, cluster = system
    prompts, numbers = _golden(name)
    for prompt in prompts[1:]:
        answer = cluster.generate(
            prompt["ids"], max_new_tokens=1, temperature=0, return_logprob=True, logprob_start_len=0
        )
        rows = answer["meta_info"]["input_token_logprobs"]
        assert [id_ for _, id_, _ in rows] == prompt["ids"]
        assert rows[0][0] is None
        logits = numbers[f"{prompt['name']}.logits"].astype(np.float64)
        first = prompt["first_logit_position"]
        wide = logits - np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1, keepdims=True))
        wide -= logits.max(1, keepdims=True)
        want = [
            wide[position - first, prompt["ids"][position + 1]]
            for position in range(first, len(prompt["ids"]) - 1)
        ]
        got = [logprob for logprob, _, _ in rows[first + 1 :]]
        assert np.abs(np.array(got) - np.array(want)).max() < ATOL


def test_a_prefix_hit_is_reported_and_changes_no_token(system: tuple[str, Cluster]) -> None:
    name, cluster = system
    prompts, _ = _golden(name)
    longest = prompts[-1]
    for _ in range(2):
        answer = cluster.generate(longest["ids"], max_new_tokens=STEPS, temperature=0)
        assert answer["output_ids"] == longest["greedy_ids"]
    cached = answer["meta_info"]["cached_tokens"]
    # 130 tokens fill 8 pages of 16; qwen3 runs with the cache turned off.
    assert cached == (0 if name == "qwen3" else 128)


def test_nothing_compiles_after_ready_and_pages_return(system: tuple[str, Cluster]) -> None:
    name, cluster = system
    for worker in cluster.settled():
        if f"--{worker['role']}-enable-eplb" in SYSTEMS[name]:
            assert worker["counters"]["eplb_rebalances"] > 0
            assert worker["counters"]["eplb_experts_moved"] > 0
        assert worker["compiles_after_ready"] == 0
        assert worker["pages_held"] == 0
