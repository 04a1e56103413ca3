"""Requests of many kinds, and what one process alone answers to them."""

from typing import Any

from serving.tokenizer import Tokenizer
from tests.one_process import CONTEXT, OneProcess
from transfer import wire

# A small pool and many requests: some of a crowd are preempted. The demo model.
CROWD = (
    f"--context-length={CONTEXT}",
    "--page-size=16",
    "--chunked-prefill-size=64",
    "--decode-max-running-requests=8",
    "--max-inflight-requests=64",
)

TEXTS = [
    "The ferry leaves the harbour at dawn and",
    "A page is",
    "Why does the cache keep what was read before? Because " * 8,
    "Tell me of the night crossing, the lights of the other shore, and of the pilot who",
]

SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.8, "sampling_seed": 7},
    {"temperature": 1.0, "sampling_seed": 2**40 + 1, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    {
        "temperature": 0.7,
        "sampling_seed": 3,
        "frequency_penalty": 0.6,
        "presence_penalty": 0.3,
        "repetition_penalty": 1.2,
    },
]


def _params(sampling: dict[str, Any], max_new_tokens: int) -> wire.SamplingParams:
    values = dict(sampling)
    seed = values.pop("sampling_seed", 0)
    return wire.SamplingParams(max_new_tokens=max_new_tokens, seed=seed, **values)


def jobs_of(tokenizer: Tokenizer, max_new_tokens: int) -> list[tuple[list[int], dict[str, Any]]]:
    """Every text with every sampling: prompt ids and what POST /generate takes."""
    return [
        (tokenizer.encode(text), {**sampling, "max_new_tokens": max_new_tokens, "ignore_eos": True})
        for text in TEXTS
        for sampling in SAMPLINGS
    ]


def expected(
    one_process: OneProcess, jobs: list[tuple[list[int], dict[str, Any]]]
) -> list[list[int]]:
    """Generated ids of each job."""
    answers = []
    for ids, sampling in jobs:
        values = {k: v for k, v in sampling.items() if k not in ("max_new_tokens", "ignore_eos")}
        answers.append(one_process.run(ids, _params(values, sampling["max_new_tokens"])))
    return answers
