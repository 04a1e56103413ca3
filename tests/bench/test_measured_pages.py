"""The pages with figures have commits that have rows, and tables that are what the rows give."""

import json
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MEASURED = ("docs/numbers.md", "docs/benchmarks.md", "docs/streaming.md")
COMMIT = re.compile(r"(?<![\w./#-])(?=[a-f]*\d)(?=\d*[a-f])[0-9a-f]{7,12}(?![\w.])")


def page(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


@cache
def measured() -> frozenset[str]:
    """The commits of all rows that are kept, and of campaigns of faults."""
    folder = ROOT / "bench" / "results"
    tables = [path.read_text(encoding="utf-8") for path in folder.glob("*.jsonl")]
    lines = [line for table in tables for line in table.splitlines()]
    lines += [path.read_text(encoding="utf-8") for path in folder.glob("*.json")]
    return frozenset(json.loads(line)["commit"] for line in lines)


@pytest.mark.parametrize("name", ["README.md", *MEASURED])
def test_every_commit_that_a_page_names_has_rows(name: str) -> None:
    named = set(COMMIT.findall(page(name)))
    assert named
    assert [one for one in named if not any(each.startswith(one) for each in measured())] == []


def test_the_readme_has_the_figures_of_the_page_of_numbers() -> None:
    numbers = page("docs/numbers.md").splitlines()
    section = page("README.md").partition("## Numbers")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    assert len(lines) > 10
    assert [line for line in lines if line not in numbers] == []


def test_the_simulation_of_routing_gives_what_the_tables_have() -> None:
    rows = [json.loads(line) for line in page("bench/results/routing.jsonl").splitlines()]
    means = {
        row["case"]: (row["value"] / 1000, row.get("ratio"))
        for row in rows
        if row["commit"].startswith("5701043") and row["metric"] == "ttft mean"
    }
    wrong, checked = [], 0
    for lengths in ("skewed", "constant", "shared"):
        table = page("docs/benchmarks.md").partition(f"\n| {lengths} |")[2].partition("\n\n")[0]
        loads = re.findall(r" ([\d.]+) \(", table.splitlines()[0])
        for line in table.splitlines()[2:]:
            way, *cells = (cell.strip() for cell in line.replace("`", "").split("|")[1:-1])
            for load, cell in zip(loads, cells, strict=True):
                mean, ratio = means[f"{lengths} {load} {way}"]
                change = "" if ratio is None else f", {(ratio - 1) * 100:+.0f}%".replace("-", "−")
                told = re.sub(r" / [\d.]+", "", cell)
                checked += 1
                if told != f"{mean:.2f}{change}".replace("−0%", "+0%"):
                    wrong.append((lengths, load, way, cell, mean, ratio))
    assert checked > 100
    assert wrong == []
