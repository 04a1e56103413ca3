"""Compares what one device computes for small checkpoints with the numbers recorded for them."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file

from bench.report import Report
from bench.surroundings import ROOT
from model.attention import ChunkBatch
from model.buckets import pages_for
from model.config import ModelConfig
from model.kv import init_pool
from model.programs import Program, compile_all
from model.replicated import decode_hidden, logits, prefill_hidden
from model.sharding import make_mesh
from model.transformer import Model
from model.weights import load_params

FOLDER = ROOT / "tests" / "goldens"
PAGE_SIZE = 16
TOKENS = 144  # one padded chunk holds the longest prompt
NUM_PAGES = 10  # enough for that prompt and its continuation
LOGIT_TOLERANCE = 2e-4  # as the fixtures' README has it for float32
# By checkpoint, how far correct bfloat16 is from float32: the mean distance of a position's logits,
# its median over positions, and of that the largest among several correct ways to compute. Half as
# much again is a fair limit. A mean over positions would tell nothing, because some change experts.
BFLOAT16_MEDIANS = {
    "deepseek_v2": 0.041,
    "deepseek_v3": 0.061,
    "dots1": 0.024,
    "ernie4_5": 0.015,
    "ernie4_5_moe": 0.014,
    "glm4_moe": 0.026,
    "gpt_oss": 0.093,
    "hunyuan_v1_dense": 0.012,
    "hunyuan_v1_moe": 0.016,
    "hy_v3": 0.037,
    "llama": 0.036,
    "minimax_m2": 0.023,
    "mixtral": 0.040,
    "qwen2_moe": 0.019,
    "qwen3": 0.011,
    "qwen3_moe": 0.053,
    "solar_open": 0.050,
}


@dataclass(frozen=True)
class Outcome:
    """One checkpoint: largest distance of a logit, number of prompts, and of equal continuations.

    median: over positions, of the mean distance of a position's logits.
    """

    error: float
    prompts: int
    same: int
    median: float


def check_goldens(report: Report, dtype: str = "float32") -> bool:
    """Run every checkpoint found and report it; returns whether all agree.

    dtype: in bfloat16, only checkpoints of BFLOAT16_MEDIANS run.
    Raises FileNotFoundError when the fixtures are not there.
    """
    found = sorted(path.parent.name for path in FOLDER.glob("*/golden.json"))
    if not found:
        raise FileNotFoundError(f"no golden fixtures in {FOLDER}: run from a clone")
    good = True
    chosen = [name for name in found if dtype == "float32" or name in BFLOAT16_MEDIANS]
    # Most of the time goes into compiling two programs for each, so that too is done side by side.
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        outcomes = pool.map(lambda name: check_golden(FOLDER / name, dtype), chosen)
        for name, outcome in zip(chosen, outcomes, strict=True):
            good = _report(report, name, outcome, dtype) and good
    return good


def _report(report: Report, name: str, outcome: Outcome, dtype: str) -> bool:
    shapes = {"golden": name, "dtype": dtype}
    if dtype != "float32":
        most = 1.5 * BFLOAT16_MEDIANS[name]
        report.add(f"{name} {dtype}", "median", outcome.median, "error", most, shapes=shapes)
        return outcome.median < most
    report.add(name, "largest logit error", outcome.error, "error", LOGIT_TOLERANCE, shapes=shapes)
    different = outcome.prompts - outcome.same
    report.add(name, "greedy texts that differ", different, "failed", shapes=shapes)
    return outcome.error < LOGIT_TOLERANCE and not different


def check_golden(folder: Path, dtype: str = "float32") -> Outcome:
    """Prefill and greedily continue every prompt of one fixture."""
    numbers = load_file(folder / "golden.safetensors")
    info = json.loads((folder / "golden.json").read_text(encoding="utf-8"))
    cfg = ModelConfig.from_dir(folder / "model")
    network = Model.create(cfg, make_mesh(1, 1, jax.devices()[:1]), dtype, PAGE_SIZE)
    runner = _Runner(network, load_params(folder / "model", network))
    distances, same = [], 0
    for prompt in info["prompts"]:
        name, first = prompt["name"], prompt["first_logit_position"]
        got, ids = runner.run(prompt["ids"], len(prompt["greedy_ids"]))
        distances.append(np.abs(got[first:] - numbers[f"{name}.logits"]))
        same += ids == prompt["greedy_ids"]
    found = np.concatenate(distances)
    median = float(np.median(found.mean(axis=-1)))
    return Outcome(float(found.max()), len(info["prompts"]), same, median)


class _Runner:
    """One prompt at a time through the two programs."""

    def __init__(self, network: Model, params: Any) -> None:
        self._network = network
        self._params = params
        taken = params, init_pool(network.kv_spec(), NUM_PAGES, network.mesh)
        chunk, token = (partial(function, network) for function in (_chunk_logits, _token_logits))
        self._prefill = Program("prefill", chunk, (*taken, _one_chunk([0])), donate=(1,))
        self._decode = Program("decode", token, (*taken, *_one_token(0, 0)), donate=(1,))
        compile_all([self._prefill, self._decode])

    def run(self, prompt: list[int], new_tokens: int) -> tuple[np.ndarray, list[int]]:
        """Logits f32[len(prompt), vocab] and the greedy continuation."""
        pool = init_pool(self._network.kv_spec(), NUM_PAGES, self._network.mesh)
        scores, pool = self._prefill(self._params, pool, _one_chunk(prompt))
        got = np.asarray(scores)[: len(prompt)]
        ids = [int(got[-1].argmax())]
        for position in range(len(prompt), len(prompt) + new_tokens - 1):
            scores, pool = self._decode(self._params, pool, *_one_token(ids[-1], position))
            ids.append(int(np.asarray(scores)[0].argmax()))
        return got, ids


def _chunk_logits(model: Model, params: Any, pool: Any, batch: ChunkBatch) -> tuple[Any, Any]:
    hidden, pool = prefill_hidden(model, params, pool, batch)
    return logits(model, params, hidden), pool


def _token_logits(model: Model, params: Any, pool: Any, *row: Any) -> tuple[Any, Any]:
    hidden, pool = decode_hidden(model, params, pool, *row)
    return logits(model, params, hidden), pool


def _one_token(token_id: int, position: int) -> tuple[jax.Array, ...]:
    """The arguments of a step for the one sequence: ids, positions, page table, kv index."""
    kv_idx = _kv_idx(np.array([position]))
    rows = (np.array([token_id]), np.array([position]), _pages()[None], kv_idx)
    return tuple(jnp.asarray(row.astype(np.int32)) for row in rows)


def _pages() -> np.ndarray:
    """Pages of the one sequence, shuffled."""
    return np.random.default_rng(3).permutation(NUM_PAGES).astype(np.int32)


def _kv_idx(positions: np.ndarray) -> np.ndarray:
    kv_idx: np.ndarray = _pages()[positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
    return kv_idx


def _one_chunk(prompt: list[int]) -> ChunkBatch:
    """The prompt as one sequence, padded to TOKENS."""
    length = len(prompt)
    used = pages_for(length, PAGE_SIZE)
    token_ids, seq_idx = np.zeros(TOKENS, np.int32), np.ones(TOKENS, np.int32)
    token_ids[:length], seq_idx[:length] = prompt, 0
    positions = np.arange(TOKENS, dtype=np.int32)
    inside = np.minimum(positions, length - 1)
    kv_idx = np.where(positions < length, _kv_idx(inside), NUM_PAGES * PAGE_SIZE)
    pages = np.arange(NUM_PAGES, dtype=np.int32)
    columns = (
        token_ids,
        inside,
        seq_idx,
        kv_idx,
        _pages(),
        (pages >= used).astype(np.int32),
        pages * PAGE_SIZE,
        np.array(used),
    )
    return ChunkBatch(*(jnp.asarray(column.astype(np.int32)) for column in columns))
