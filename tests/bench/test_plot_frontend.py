"""The plot of stream intervals: which rows become points, that bytes repeat, and refusals."""

import argparse
import re
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from bench import cli
from bench.plot_frontend import Point, draw, points_of
from bench.report import Row, read_rows


def row(interval: int, metric: str, value: float, drive: str, **more) -> Row:
    design = more.pop("design", "all" if interval == 1 else f"all, interval {interval}")
    shapes = {
        "design": design,
        "num_streams": 64,
        "interval": interval,
        "drive": drive,
        "step_s": 0.05 if drive == "paced" else 0.0,
    }
    shapes |= more
    case = f"x{shapes['num_streams']} {drive} {design}"
    return Row("frontend", case, metric, value, "ms", "c", "d", {}, shapes, 0)


def rows_of_two_intervals() -> list[Row]:
    return [
        row(1, "output", 50e3, "saturated"),
        row(1, "lag p50", 4.0, "paced"),
        row(8, "output", 200e3, "saturated"),
        row(8, "lag p50", 100.0, "paced"),
        row(1, "output", 90e3, "backlog"),
        row(0, "output", 300e3, "backlog", design="auto"),
        row(0, "lag p50", 5.0, "paced", design="auto"),
    ]


def write(path: Path, rows: list[Row]) -> Path:
    path.write_text("".join(one.to_json() + "\n" for one in rows))
    return path


def plot(*words: str) -> int:
    parser = argparse.ArgumentParser()
    cli.add_subcommands(parser)
    return cli.run(parser.parse_args(["plot", "frontend", *words]))


def test_a_point_is_the_output_of_one_drive_at_the_lag_when_paced():
    rows = rows_of_two_intervals()
    assert points_of(rows, "saturated") == [Point(64, 1, 4.0, 50e3), Point(64, 8, 100.0, 200e3)]
    assert points_of(rows, "backlog") == [Point(64, 0, 5.0, 300e3), Point(64, 1, 4.0, 90e3)]


def test_other_designs_and_metrics_and_shorter_steps_make_no_point():
    rows = [
        row(1, "output", 50e3, "saturated"),
        row(1, "output", 70e3, "saturated"),
        row(1, "output of floor", 1.0, "saturated"),
        row(1, "output", 1.0, "saturated", design="naive"),
        row(1, "lag p50", 4.0, "paced"),
        row(1, "lag p50", 900.0, "paced", step_s=0.012),
        row(2, "lag p50", 8.0, "paced"),
        row(4, "output", 9.0, "saturated"),
    ]
    assert points_of(rows, "saturated") == [Point(64, 1, 4.0, 60e3)]


def test_the_same_rows_make_the_same_bytes_and_an_svg_that_says_what_it_shows(tmp_path):
    results = write(tmp_path / "rows.jsonl", rows_of_two_intervals())
    pictures = [tmp_path / "a.svg", tmp_path / "b.svg"]
    for picture in pictures:
        assert plot(str(results), "--out", str(picture)) == 0
    data = pictures[0].read_bytes()
    assert data == pictures[1].read_bytes()
    root = ET.fromstring(data)
    texts = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"64 streams", "8", "auto", "thousand tokens a second"} <= set(texts)
    assert b"dc:date" not in data
    assert b"#000000" not in data  # legible on dark pages


def test_the_picture_of_the_docs_is_of_the_rows_that_they_name(tmp_path):
    root = Path(__file__).resolve().parents[2]
    rows = [
        row
        for row in read_rows(root / "bench" / "results" / "frontend-2-cores.jsonl")
        if row.commit == "41285d5d4f60" and row.shapes["baseline"] == "all"
    ]
    draw(rows, tmp_path / "a.svg")
    drawn, shown = (
        re.sub(rb"Matplotlib v[\d.]+", b"", path.read_bytes())
        for path in (tmp_path / "a.svg", root / "docs" / "streaming.svg")
    )
    assert drawn == shown


def test_what_cannot_be_drawn_is_refused_in_a_line(tmp_path, capsys):
    results = write(tmp_path / "rows.jsonl", rows_of_two_intervals()[:1])
    assert plot(str(results), "--out", str(tmp_path / "a.svg")) == 2
    assert "kvferry bench plot: no rows to draw" in capsys.readouterr().err
    results = write(tmp_path / "rows.jsonl", rows_of_two_intervals())
    assert plot(str(results), "--out", str(tmp_path / "a.png")) == 2
    assert "--out must end in .svg, got" in capsys.readouterr().err
    of_another_version = rows_of_two_intervals()
    del of_another_version[0].shapes["num_streams"]
    results = write(tmp_path / "rows.jsonl", of_another_version)
    assert plot(str(results), "--out", str(tmp_path / "a.svg")) == 2
    assert "front end has no 'num_streams' in its shapes" in capsys.readouterr().err
    assert plot(str(tmp_path / "none.jsonl"), "--out", str(tmp_path / "a.svg")) == 2
    assert "none.jsonl" in capsys.readouterr().err


def test_a_plot_says_what_it_lacks(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ValueError, match="a plot needs matplotlib"):
        draw(rows_of_two_intervals(), tmp_path / "a.svg")
