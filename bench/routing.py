"""`kvferry bench routing`: time to the first token for each way in which a prompt gets its rank."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.report import Report
from bench.routing_cost import (
    CHUNK_TOKENS,
    MEAN_TOKENS,
    OUTPUT_TOKENS,
    RANKS,
    Arrival,
    ChunkCost,
    Lengths,
    at_rate,
    plan_arrivals,
)
from bench.routing_sim import LAYOUTS, Layout, Simulation, Way
from prefill.balancer import METHODS, Method
from serving.config import Policy

LOADS = (0.7, 0.95, 1.1)  # of saturation
POLICIES: tuple[Policy, ...] = ("least_load", "power_of_two", "round_robin", "random")
BASELINE = "follow drawn"


@dataclass(frozen=True)
class Times:
    """Milliseconds to the first token in one run."""

    mean: float
    p50: float
    p99: float

    @classmethod
    def of(cls, ttft_s: Sequence[float]) -> "Times":
        values = 1e3 * np.asarray(ttft_s)
        p50, p99 = np.percentile(values, [50, 99])
        return cls(float(values.mean()), float(p50), float(p99))


def report_times(
    report: Report,
    case: str,
    times: Sequence[Times],
    baseline: Sequence[Times],
    shapes: dict[str, Any],
) -> None:
    """Add the means of runs, beside those of the baseline's runs unless they are the baseline."""
    for name in ("mean", "p50", "p99"):
        value, beside = (
            statistics.mean(getattr(one, name) for one in runs) for runs in (times, baseline)
        )
        base = None if times is baseline else beside
        report.add(case, f"ttft {name}", value, "ms", base, shapes=shapes)


def ways(lengths: Lengths) -> dict[str, Way]:
    """Every way by its name, the baseline first; cache-aware ways only for shared prefixes."""
    late: list[Method] = [m for m in METHODS if m != "follow_bootstrap_room"]
    policies = POLICIES
    if lengths == "shared":
        policies = (*POLICIES, "cache_aware")
    else:
        late.remove("prefix_aware")
    found = {
        BASELINE: Way("group", "follow_bootstrap_room", random_rooms=True),
        "follow counted": Way("group", "follow_bootstrap_room"),
    }
    found |= {method: Way("group", method) for method in late}
    prefix: dict[Layout, str] = {"group": "router", "groups": "groups"}
    for layout in LAYOUTS:
        found |= {f"{prefix[layout]} {policy}": Way(layout, None, policy) for policy in policies}
    return found


def saturation(arrivals: Sequence[Arrival], cost: ChunkCost) -> float:
    """Prompts a second that one group computes when all of them wait from the start."""
    at_once = at_rate(arrivals, float("inf"))
    return len(arrivals) / max(Simulation(Way("group", "total_tokens"), at_once, cost, 0).run())


def run(report: Report, only: Sequence[Lengths], num_requests: int, num_seeds: int) -> None:
    """Add rows for every way at every load: means over seeds, compared with the baseline's."""
    cost = ChunkCost()
    seeds = list(range(report.seed, report.seed + num_seeds))
    for lengths in only:
        plans = [plan_arrivals(lengths, num_requests, seed) for seed in seeds]
        rates = [saturation(plan, cost) for plan in plans]
        for load in LOADS:
            shapes: dict[str, Any] = {
                "lengths": lengths,
                "load": load,
                "rate_per_s": round(load * statistics.mean(rates), 2),
                "input_tokens": MEAN_TOKENS,
                "output_tokens": OUTPUT_TOKENS,
                "ranks": RANKS,
                "chunk_tokens": CHUNK_TOKENS,
                "requests": num_requests,
                "seeds": seeds,
            }
            loaded = [at_rate(plan, load * rate) for plan, rate in zip(plans, rates, strict=True)]
            baseline: list[Times] = []
            for name, way in ways(lengths).items():
                times = [
                    Times.of(Simulation(way, arrivals, cost, seed).run())
                    for seed, arrivals in zip(seeds, loaded, strict=True)
                ]
                baseline = baseline or times
                case = f"{lengths} {load:g} {name}"
                report_times(report, case, times, baseline, shapes)
                if times is not baseline:
                    pairs = zip(times, baseline, strict=True)
                    worst = max(one.mean / other.mean for one, other in pairs)
                    report.add(case, "worst seed's mean", 100 * worst, "% TTFT", shapes=shapes)
