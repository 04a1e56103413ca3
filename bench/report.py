"""Rows: what every benchmark writes, how they are printed, and how two runs are compared.

A row is one JSON object on one line. A number without commit, device, versions, shapes and seed
is a rumour, so a row cannot be made without them.
"""

import dataclasses
import json
import math
import statistics
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, TextIO

import msgspec

from bench.surroundings import Surroundings

Direction = Literal["higher", "lower", "neither"]
Verdict = Literal["better", "worse", "same", "differs", "only before", "only after"]

# Which way is better. A unit that is not here cannot be reported.
UNITS: dict[str, Direction] = {
    "tok/s": "higher",
    "req/s": "higher",
    "chunk/s": "higher",
    "GB/s": "higher",
    "TFLOP/s": "higher",
    "share": "higher",
    "s": "lower",
    "ms": "lower",
    "us": "lower",
    "CPU s/GB": "lower",
    "error": "lower",
    "failed": "lower",
    "% TTFT": "lower",
    "GB": "neither",
    "MB": "neither",
    "MiB": "neither",
    "GFLOP": "neither",
    "count": "neither",
    "text": "neither",
}


class BadRows(ValueError):
    """A file of rows that cannot be read; the message names file and line."""


class Key(NamedTuple):
    """What makes two rows of two runs the same measurement."""

    bench: str
    case: str
    metric: str
    unit: str


@dataclass(frozen=True)
class Row:
    """One measured value. ratio = value / baseline, both from the same run."""

    bench: str
    case: str
    metric: str
    value: float
    unit: str
    commit: str
    device: str
    versions: dict[str, str]
    shapes: dict[str, Any]
    seed: int
    baseline: float | None = None
    ratio: float | None = None

    def __post_init__(self) -> None:
        if self.unit not in UNITS:
            raise ValueError(f"unit {self.unit!r} of {self.metric}; known: {', '.join(UNITS)}")
        if not math.isfinite(self.value):
            raise ValueError(f"{self.bench} {self.case} {self.metric}: value is {self.value}")

    @property
    def key(self) -> Key:
        return Key(self.bench, self.case, self.metric, self.unit)

    def to_json(self) -> str:
        """One line; absent optional fields are left out."""
        values = dataclasses.asdict(self)
        return json.dumps({k: v for k, v in values.items() if v is not None}, allow_nan=False)


@dataclass
class Report:
    """Rows of one benchmark as they come: printed as a table, appended to the file at once."""

    bench: str
    surroundings: Surroundings
    seed: int = 0
    json_path: Path | None = None
    out: TextIO = field(default_factory=lambda: sys.stdout)
    rows: list[Row] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Raises OSError if the file cannot be written, before anything is measured."""
        if self.json_path is not None:
            self.json_path.open("a", encoding="utf-8").close()

    def add(
        self,
        case: str,
        metric: str,
        value: float,
        unit: str,
        baseline: float | None = None,
        *,
        shapes: dict[str, Any],
    ) -> Row:
        """Record, print and store one row. A run that is killed keeps what it has measured.

        Where one of the two cannot be done, because a disk is full or a reader has left, the other
        is done all the same.
        """
        row = Row(
            bench=self.bench,
            case=case,
            metric=metric,
            value=float(value),
            unit=unit,
            commit=self.surroundings.commit,
            device=self.surroundings.device,
            versions=self.surroundings.versions,
            shapes=shapes,
            seed=self.seed,
            baseline=None if baseline is None else float(baseline),
            ratio=float(value) / float(baseline) if baseline else None,
        )
        self.rows.append(row)
        try:
            if len(self.rows) == 1:
                print(HEADER, file=self.out)
            print(format_row(row), file=self.out, flush=True)
        finally:
            if self.json_path is not None:
                with self.json_path.open("a", encoding="utf-8") as file:
                    file.write(row.to_json() + "\n")
        return row


# Entries of a row's shapes that were found, not asked for.
_FOUND = frozenset({"rounds_s", "load_average_1m", "piece_bytes"})
HEADER = (
    f"{'bench':10} {'case':34} {'metric':22} {'value':>12} {'unit':9} {'baseline':>11} {'ratio':>7}"
)


def format_number(value: float | None) -> str:
    """Four significant digits, empty for None."""
    if value is None:
        return ""
    if value == 0 or 1e-3 <= abs(value) < 1e7:
        digits = 3 if value == 0 else max(0, 3 - math.floor(math.log10(abs(value))))
        return f"{value:,.{digits}f}"
    return f"{value:.3e}"


def format_row(row: Row) -> str:
    """One line of the table under HEADER."""
    ratio = "" if row.ratio is None else f"{row.ratio:.3f}"
    return (
        f"{row.bench:10} {row.case:34} {row.metric:22} {format_number(row.value):>12} "
        f"{row.unit:9} {format_number(row.baseline):>11} {ratio:>7}"
    ).rstrip()


def read_rows(path: Path) -> list[Row]:
    """Rows of a JSON-lines file. Raises BadRows naming the line, OSError when unreadable."""
    rows = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        try:
            rows.append(msgspec.json.decode(line, type=Row))
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise BadRows(f"{path}:{number}: not a row: {error}") from error
    return rows


@dataclass(frozen=True)
class Change:
    """One measurement in two runs; None for a run without it."""

    key: Key
    before: float | None
    after: float | None
    verdict: Verdict

    @property
    def ratio(self) -> float | None:
        """after / before."""
        return self.after / self.before if self.before and self.after is not None else None


def compare(before: Iterable[Row], after: Iterable[Row], tolerance: float = 0.05) -> list[Change]:
    """Every measurement of either run, in the order seen; repeated ones count as their median.

    tolerance: a relative change up to this counts as the same.
    """
    old, new = _medians(before), _medians(after)
    keys = [*old, *(key for key in new if key not in old)]
    return [
        Change(key, old.get(key), new.get(key), _verdict(key, old, new, tolerance)) for key in keys
    ]


def _medians(rows: Iterable[Row]) -> dict[Key, float]:
    values: dict[Key, list[float]] = {}
    for row in rows:
        values.setdefault(row.key, []).append(row.value)
    return {key: statistics.median(found) for key, found in values.items()}


def differences(before: Sequence[Row], after: Sequence[Row]) -> list[str]:
    """How rows of the same measurement differ, within a run or between runs, besides in results."""
    told = [
        f"{side}: rows of {len(commits)} commits, {', '.join(commits)}: medians over all of them"
        for side, rows in (("before", before), ("after", after))
        if len(commits := sorted({row.commit for row in rows})) > 1
    ]
    old, new = _conditions(before), _conditions(after)
    counts: Counter[str] = Counter()
    for key in old.keys() & new.keys():
        for name in sorted({name for asked in (*old[key], *new[key]) for name in asked}):
            one, other = ({_spelt(asked, name) for asked in side[key]} for side in (old, new))
            if len(one | other) > 1:  # also if both sides mix the same values
                counts[f"{name}: {_listed(one)} before, {_listed(other)} after"] += 1
    return told + [f"{said} (measurements: {count})" for said, count in sorted(counts.items())]


def _conditions(rows: Iterable[Row]) -> dict[Key, list[dict[str, Any]]]:
    """The conditions that were asked for, of all rows of each measurement."""
    found: dict[Key, list[dict[str, Any]]] = {}
    for row in rows:
        asked = {name: value for name, value in row.shapes.items() if name not in _FOUND}
        found.setdefault(row.key, []).append({"device": row.device, "seed": row.seed, **asked})
    return found


def _spelt(asked: dict[str, Any], name: str) -> str:
    return str(asked.get(name)) or "''"


def _listed(values: Iterable[str]) -> str:
    return " and ".join(sorted(values))


def _verdict(key: Key, old: dict[Key, float], new: dict[Key, float], tolerance: float) -> Verdict:
    if key not in new:
        return "only before"
    if key not in old:
        return "only after"
    before, after = old[key], new[key]
    if abs(after - before) <= tolerance * abs(before):
        return "same"
    direction = UNITS[key.unit]
    if direction == "neither":
        return "differs"
    return "better" if (after > before) == (direction == "higher") else "worse"


def format_changes(changes: Sequence[Change]) -> str:
    """A table, the verdict last."""
    title = f"{'bench':10} {'case':34} {'metric':22} {'before':>12} {'after':>12} {'unit':9}"
    lines = [f"{title} {'ratio':>7}  verdict"]
    for change in changes:
        bench, case, metric, unit = change.key
        ratio = "" if change.ratio is None else f"{change.ratio:.3f}"
        lines.append(
            f"{bench:10} {case:34} {metric:22} {format_number(change.before):>12} "
            f"{format_number(change.after):>12} {unit:9} {ratio:>7}  {change.verdict}"
        )
    return "\n".join(lines)
