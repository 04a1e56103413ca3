"""Requests of many kinds, and the answers that one process gives to them."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

from serving.demo import demo_model_path
from serving.forms import form_of
from serving.grammar import grammar_text
from serving.grammar_trial import GrammarTrial
from serving.ranges import mask_of
from serving.sglang_api import GenerateSampling
from serving.tokenizer import Tokenizer
from tests.cluster import Cluster
from tests.one_process import CONTEXT, OneProcess
from transfer import wire

# The demo model with a small pool and chunks of a few prompts. Systems with the same sizes compile
# them only once.
CROWD = (
    f"--context-length={CONTEXT}",
    "--page-size=16",
    "--chunked-prefill-size=64",
    "--prefill-max-seqs-per-chunk=4",
    "--decode-max-running-requests=8",
    "--decode-max-total-tokens=640",
    "--max-inflight-requests=64",
)
# For tests whose requests outnumber the slots; these systems share their programs, too.
FEW_SLOTS = (
    f"--context-length={CONTEXT}",
    "--page-size=16",
    "--chunked-prefill-size=32",
    "--prefill-max-seqs-per-chunk=1",
    "--decode-max-running-requests=4",
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
    {"temperature": 1.0, "sampling_seed": 11, "regex": "([A-Z][a-z]{1,7}[,.] ){40}"},
    {"temperature": 1.0, "sampling_seed": 13, "allowed_token_ids": tuple(range(300, 900, 7))},
]


def jobs_of(tokenizer: Tokenizer, max_new_tokens: int) -> list[tuple[list[int], dict[str, Any]]]:
    """Every text with every sampling: prompt ids and what POST /generate takes."""
    return [
        (
            tokenizer.encode(text),
            # A regular expression decides where the text ends: here, past max_new_tokens.
            {"ignore_eos": "regex" not in sampling, **sampling, "max_new_tokens": max_new_tokens},
        )
        for text in TEXTS
        for sampling in SAMPLINGS
    ]


def expected(jobs: list[tuple[list[int], dict[str, Any]]]) -> list[list[int]]:
    """The ids that the demo model generates for each job, in this process alone.

    Systems of several files get the same jobs, so each answer is computed once for all of them.
    """
    return [[*_answer(tuple(ids), tuple(sampling.items()))] for ids, sampling in jobs]


@cache
def _answer(ids: tuple[int, ...], sampling: tuple[tuple[str, Any], ...]) -> list[int]:
    return _one_process().run(ids, _params(dict(sampling)))


@cache
def _one_process() -> OneProcess:
    return OneProcess(demo_model_path())


def _params(values: dict[str, Any]) -> wire.SamplingParams:
    """values: what POST /generate takes. Here every text ignores its end: none is known."""
    values.pop("ignore_eos", None)
    seed, regex = values.pop("sampling_seed", 0), values.pop("regex", None)
    grammar = _grammar(regex) if regex is not None else ""
    allowed = mask_of("allowed_token_ids", values.pop("allowed_token_ids", None), 2048)
    return wire.SamplingParams(seed=seed, grammar=grammar, allowed=allowed, **values)


@cache
def _grammar(regex: str) -> str:
    form = form_of(GenerateSampling(regex=regex), None, [0], Tokenizer.from_dir(demo_model_path()))
    assert form is not None
    trial = GrammarTrial(demo_model_path())
    try:
        return asyncio.run(grammar_text(form, trial))
    finally:
        trial.close()


def crowds(
    cluster: Cluster, jobs: list[tuple[list[int], dict[str, Any]]], want: list[list[int]]
) -> list[Any]:
    """Send all jobs at once, repeatedly, until decode has preempted; returns the last answers.

    Decode's pool is small, but timing decides how many requests meet there.
    """
    before = _preemptions(cluster)
    for _ in range(8):
        with ThreadPoolExecutor(len(jobs)) as pool:
            answers = list(pool.map(lambda job: cluster.generate(job[0], **job[1]), jobs))
        assert [answer["output_ids"] for answer in answers] == want
        if _preemptions(cluster) > before:
            return answers
    raise AssertionError("no crowd was ever too large for the pool")


def _preemptions(cluster: Cluster) -> float:
    return sum(worker["counters"].get("preemptions", 0) for worker in cluster.workers())
