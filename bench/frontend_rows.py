"""Collects what the front end benchmark measures in a round, and makes rows of several rounds."""

import os
import shlex
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bench.frontend_cases import PEER_NAMES, Case, Design
from bench.frontend_plan import Cell
from bench.report import Report

UNITS = {
    "output": "tok/s",
    "chunks": "chunk/s",
    "cpu per token": "us",
    "load's cpu per token": "us",
    "ttft p50": "ms",
    "ttft p99": "ms",
    "lag p50": "ms",
    "lag p99": "ms",
    "peak rss": "MiB",
}
# Metrics of the product that are also compared with those of other designs of the same run.
_BESIDE_METRICS = {"paced": ("output", "ttft p50", "lag p99")}


@dataclass
class Measured:
    """Sums and samples of one round. Times in seconds; load_cpu_s: of engine and client."""

    tokens: int = 0  # after each stream's first
    pieces: int = 0
    taken_s: float = 0.0
    server_cpu_s: float = 0.0
    load_cpu_s: float = 0.0
    ttft_s: list[float] = field(default_factory=list)
    lag_s: list[np.ndarray] = field(default_factory=list)
    piece_bytes: int = 0
    peak_rss_mib: float = 0.0

    def add(self, cell: Cell, heard: dict[str, Any], told: dict[str, Any], path: Path) -> None:
        """Add one play of all streams. heard: from the client, whose table is at path; told: from
        the engine."""
        table = np.load(path)
        sent_s, token_s = table[:, 0], table[:, 1:]
        emitted_s = np.empty_like(token_s)
        emitted_s[:, 0] = told["first_s"]
        emitted_s[:, 1:] = told["step_s"]
        self.lag_s.append((token_s - emitted_s)[:, 1:].ravel())
        self.ttft_s += (token_s[:, 0] - sent_s).tolist()
        self.tokens += cell.num_streams * (cell.output_tokens - 1)
        self.pieces += heard["pieces"] - cell.num_streams
        self.taken_s += heard["end_s"] - told["step_s"][0]
        self.piece_bytes = heard["piece_bytes"]

    def values(self) -> dict[str, float]:
        """The value of each metric of UNITS."""
        lag_s = np.concatenate(self.lag_s)
        p50_s, p99_s = np.quantile(lag_s, (0.5, 0.99), method="inverted_cdf").tolist()
        return {
            "output": self.tokens / self.taken_s,
            "chunks": self.pieces / self.taken_s,
            "cpu per token": self.server_cpu_s / self.tokens * 1e6,
            "load's cpu per token": self.load_cpu_s / self.tokens * 1e6,
            "ttft p50": float(np.percentile(self.ttft_s, 50)) * 1e3,
            "ttft p99": float(np.percentile(self.ttft_s, 99)) * 1e3,
            "lag p50": p50_s * 1e3,
            "lag p99": p99_s * 1e3,
            "peak rss": self.peak_rss_mib,
        }


def report_case(
    report: Report,
    case: Case,
    measured: Mapping[Design, Sequence[Measured]],
    more_args: Sequence[str],
) -> None:
    """Rows of a case, medians over rounds. The baseline is the case's first design."""
    medians = {design: _medians(rounds) for design, rounds in measured.items()}
    first = case.designs[0]
    for design in case.designs:
        name = f"{case.cell.name} {design.name}"
        shapes = case.cell_of(design).to_json() | {
            "design": design.name,
            "baseline": first.name,
            "rounds": case.rounds,
            "tokens": case.tokens,
            "rounds_s": [round(one.taken_s, 3) for one in measured[design]],
            "piece_bytes": measured[design][0].piece_bytes,
            "server_args": shlex.join(
                [*design.server_args, *(more_args if design.is_product else ())]
            ),
            "load_average_1m": round(os.getloadavg()[0], 2),
        }
        for metric, unit in UNITS.items():
            value, baseline = medians[design][metric], medians[first][metric]
            report.add(name, metric, value, unit, baseline=baseline, shapes=shapes)
        for other in _beside(design, case):
            for metric in _BESIDE_METRICS.get(case.cell.drive, ("output",)):
                report.add(
                    name,
                    f"{metric} of {other.name}",
                    medians[design][metric],
                    UNITS[metric],
                    baseline=medians[other][metric],
                    shapes=shapes | {"baseline": other.name},
                )


def _beside(design: Design, case: Case) -> list[Design]:
    """The other designs that a design of the product is compared with.

    With one token per event those are designs that have that too; at other intervals, and for
    `auto`, it is the product with one token per event.
    """
    if not design.is_product:
        return []
    names = ("grouped+json", *PEER_NAMES, "floor") if design.interval == 1 else ("all",)
    return [other for other in case.designs[1:] if other.name in names]


def _medians(rounds: Sequence[Measured]) -> dict[str, float]:
    values = [one.values() for one in rounds]
    return {metric: statistics.median(value[metric] for value in values) for metric in UNITS}
