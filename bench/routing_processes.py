"""The routing experiment with real processes: the demo model on this host, prompts a tenth as long.

Ranks and workers share the host's cores, so the rows compare ways of choosing at the same rate, not
ranks with workers.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bench.client import Server
from bench.report import Report
from bench.routing import Times, report_times
from bench.routing_cost import RANKS, Arrival, at_rate, plan_arrivals
from bench.serve import run_workload, served_model, started_server
from bench.workload import PlannedRequest, WorkloadConfig

SHORTER = 10  # times shorter than the simulated prompts
OUTPUT_TOKENS = 5
NUM_PROMPTS = 150
LOADS = (0.7, 0.95)  # of saturation
TIMEOUT_S = 300.0
_WARM_UP = 8
_COMMON = (
    "--context-length 2048 --chunked-prefill-size 256 --max-queued-requests 4096 "
    "--max-inflight-requests 1024 --decode-max-running-requests 64 --disable-radix-cache"
)


@dataclass(frozen=True)
class Served:
    """A way of choosing, as the arguments of a server."""

    name: str
    arguments: str


METHODS = ("follow_bootstrap_room", "round_robin", "shortest_queue", "total_tokens")
POLICIES = ("random", "round_robin", "power_of_two", "least_load")
# The first of each list is the baseline of the others.
LATE = [
    Served(method, f"--prefill-dp-size {RANKS} --prefill-load-balance-method {method}")
    for method in METHODS
]
ROUTED = [
    Served(f"router {policy}", f"--prefill {RANKS} --prefill-policy {policy}")
    for policy in POLICIES
]


def run(report: Report, num_seeds: int) -> None:
    """Add rows with every way's TTFT at the same rates: shares of the first way's throughput."""
    seeds = list(range(report.seed, report.seed + num_seeds))
    plans = [plan_arrivals("skewed", NUM_PROMPTS, seed) for seed in seeds]
    at_once = at_rate(plans[0], float("inf"))
    for ways in (LATE, ROUTED):
        rate_per_s = 0.0
        baseline: dict[float, list[Times]] = {}
        for way in ways:
            with started_server([*_COMMON.split(), *way.arguments.split()]) as server:
                model = served_model(server).name
                _ttft_s(server, model, at_once[:_WARM_UP])
                if not rate_per_s:
                    rate_per_s = NUM_PROMPTS / max(_ttft_s(server, model, at_once))
                for load in LOADS:
                    rate = load * rate_per_s
                    times = [Times.of(_ttft_s(server, model, at_rate(p, rate))) for p in plans]
                    baseline.setdefault(load, times)
                    shapes = {
                        "rate_per_s": round(rate, 2),
                        "prompts": NUM_PROMPTS,
                        "shorter": SHORTER,
                        "output_tokens": OUTPUT_TOKENS,
                        "ranks": RANKS,
                        "seeds": num_seeds,
                    }
                    case = f"processes {load:g} {way.name}"
                    report_times(report, case, times, baseline[load], shapes)


def _ttft_s(server: Server, model: str, arrivals: Sequence[Arrival]) -> list[float]:
    """Each prompt's seconds to its first token. Raises RuntimeError if one failed."""
    planned = [_request(arrival) for arrival in arrivals]
    config = WorkloadConfig(rate_per_s=1.0)  # arrivals are planned already
    traces, _ = asyncio.run(run_workload(server, model, planned, config, TIMEOUT_S))
    if failed := [trace.error for trace in traces if not trace.ok]:
        raise RuntimeError(f"{len(failed)} prompts failed: {failed[0]}")
    return [trace.ttft_s for trace in traces]


def _request(arrival: Arrival) -> PlannedRequest:
    num_tokens = max(2, len(arrival.token_ids) // SHORTER)
    rng = np.random.default_rng(int(arrival.token_ids[-1]))
    ids = rng.integers(1, 1000, num_tokens)
    return PlannedRequest(arrival.at_s, tuple(ids.tolist()), OUTPUT_TOKENS)
