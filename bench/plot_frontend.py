"""Plots what events of more tokens buy: throughput against lag, from rows of `bench frontend`.

The same rows make the same bytes: no date, no random ids. Lines and letters have middle tones on a
transparent background, to be read on light and dark pages. matplotlib comes with the development
dependencies.
"""

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.report import Row

_INK = "#7d8590"
_COLOURS = ("#3b82f6", "#d9730d", "#2f9e63", "#a371f7")
_TITLES = {
    "saturated": "a step when the client has the last",
    "backlog": "all steps at once",
}
_SETTINGS: Any = {
    "svg.hashsalt": "kvferry",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 10,
}


@dataclass(frozen=True)
class Point:
    """One design at one number of streams. interval: tokens per event; 0: the server decides."""

    num_streams: int
    interval: int
    lag_ms: float
    tokens_per_s: float


def points_of(rows: Sequence[Row], drive: str) -> list[Point]:
    """The product's points, by streams and interval; repeated rows count as their median.

    lag_ms: p50 of the paced cell with the longest steps. tokens_per_s: of the cell with that drive.
    """
    lags: dict[tuple[int, int], dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    outputs: dict[tuple[int, int], list[float]] = defaultdict(list)
    for row in rows:
        shapes = row.shapes
        if row.bench != "frontend" or not str(shapes.get("design")).startswith(("all", "auto")):
            continue
        key = (shapes["num_streams"], shapes["interval"])
        if (row.metric, shapes["drive"]) == ("lag p50", "paced"):
            lags[key][shapes["step_s"]].append(row.value)
        elif (row.metric, shapes["drive"]) == ("output", drive):
            outputs[key].append(row.value)
    return [
        Point(*key, statistics.median(lags[key][max(lags[key])]), statistics.median(outputs[key]))
        for key in sorted(lags.keys() & outputs.keys())
    ]


def draw(rows: Sequence[Row], out: Path) -> None:
    """Write the picture as SVG.

    Raises ValueError when matplotlib is absent or there is nothing to draw, OSError for the file.
    """
    try:
        panels = {drive: points for drive in _TITLES if (points := points_of(rows, drive))}
    except KeyError as error:
        raise ValueError(f"a row of the front end has no {error} in its shapes") from error
    if not panels:
        raise ValueError(
            "no rows to draw: there must be an output of design `all` in saturated or backlog "
            "cells, and its lag p50 in paced ones"
        )
    if out.suffix != ".svg":
        raise ValueError(f"--out must end in .svg, got {out}")
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ValueError(
            f"a plot needs {error.name}; ./kvferry test --version brings it"
        ) from error
    with mpl.rc_context(_SETTINGS):
        figure = Figure(figsize=(4.6 * len(panels), 4.2), layout="constrained")
        axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        for axis, (drive, points) in zip(axes, panels.items(), strict=True):
            _panel(axis, _TITLES[drive], points)
        axes[0].set_ylabel("thousand tokens a second", color=_INK)
        axes[0].set_ylim(bottom=0)  # once all is drawn: the panels share it
        _legend(figure, axes[0])
        figure.savefig(out, format="svg", metadata={"Date": None}, transparent=True)


def _panel(axis: Any, title: str, points: Sequence[Point]) -> None:
    """For each number of streams, a line through its intervals, and a star for the server's own."""
    streams = sorted({point.num_streams for point in points})
    for number, num_streams in enumerate(streams):
        colour = _COLOURS[number % len(_COLOURS)]
        own = [point for point in points if point.num_streams == num_streams]
        fixed = [point for point in own if point.interval]
        axis.plot(*_places(fixed), "o-", color=colour, markersize=4, label=f"{num_streams} streams")
        for point, x, y in zip(fixed, *_places(fixed), strict=True):
            axis.annotate(
                str(point.interval),
                (x, y),
                textcoords="offset points",
                xytext=(5, -11),
                color=colour,
            )
        auto = [point for point in own if not point.interval]
        if auto:
            axis.scatter(*_places(auto), marker="*", s=150, color=colour, zorder=3)
            axis.annotate(
                "auto",
                (auto[0].lag_ms, auto[0].tokens_per_s / 1e3),
                textcoords="offset points",
                xytext=(7, 5),
                color=colour,
            )
    _style(axis, title)


def _places(points: Sequence[Point]) -> tuple[list[float], list[float]]:
    return [point.lag_ms for point in points], [point.tokens_per_s / 1e3 for point in points]


def _style(axis: Any, title: str) -> None:
    axis.set_facecolor("none")
    axis.set_xscale("log", subs=())
    axis.xaxis.get_major_locator().set_params(subs=(1, 2, 5))
    axis.xaxis.set_major_formatter("{x:g}")
    axis.margins(x=0.1)
    axis.set_title(title, color=_INK, fontsize=10)
    axis.set_xlabel("lag p50 when paced, ms", color=_INK)
    axis.tick_params(which="both", colors=_INK)
    axis.grid(color=_INK, alpha=0.25, linewidth=0.6)
    for spine in axis.spines.values():
        spine.set_color(_INK)


def _legend(figure: Any, axis: Any) -> None:
    handles, labels = axis.get_legend_handles_labels()
    legend = figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=len(labels),
        frameon=False,
        labelcolor=_INK,
        title="tokens an event: --stream-interval 1, 2, ... or auto",
    )
    legend.get_title().set_color(_INK)
