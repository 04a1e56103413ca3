"""Tuning the tiles of experts' products: the candidates, the choice, and the resulting table."""

import io
import math
from dataclasses import replace

import numpy as np
import pytest

from bench import tune
from bench.floors import Ceilings
from bench.kernels import KernelBench
from bench.report import Report
from bench.shapes import SHAPES, Shape
from bench.surroundings import Surroundings
from model import kernels
from model.kernels import Target
from model.kernels.moe import tuned
from model.kernels.tiles import Tiles

BF16 = replace(SHAPES["demo-moe"], dtype="bfloat16")
FP8 = replace(SHAPES["demo-moe-fp8"], dtype="bfloat16")
LINES = (
    tuned.Tuned("numbers", 64, 32, 8.0, Tiles(16, 32, 64), Tiles(16, 32, 32), "a"),
    tuned.Tuned("numbers", 64, 32, math.inf, Tiles(64, 32, 32), Tiles(64, 64, 32), "b"),
    tuned.Tuned("fp8", 64, 32, 8.0, Tiles(32, 32, 32), Tiles(32, 64, 64), "c"),
    tuned.Tuned("fp8", 64, 32, math.inf, Tiles(64, 32, 32), Tiles(64, 64, 32), "d"),
)


def _tuning(shape: Shape) -> tune.Tuning:
    report = Report("tune", Surroundings("c", "a GPU", {}), out=io.StringIO())
    bench = KernelBench(report, tune.shallow(shape), Ceilings(1.0, 1.0), 0.001)
    target = Target("gpu", interpreted=True)
    wanted = kernels.experts_shape(bench.model.dims, target, "bfloat16")
    chosen = kernels.choose("experts", kernels.EXPERTS, wanted)
    bench.model = replace(bench.model, kernels=bench.model.kernels._replace(experts=chosen))
    return tune.Tuning(bench)


def _timed_by(
    tuning: tune.Tuning, monkeypatch: pytest.MonkeyPatch, wanted: dict[str, Tiles]
) -> list[int]:
    """The more numbers of a tile differ from the wanted ones, the longer it takes."""
    seen: list[int] = []

    def off(cut, want):
        names = ("rows", "outputs", "inputs", "warps", "stages")
        return sum(abs(math.log2(getattr(cut, name) / getattr(want, name))) for name in names)

    def time(work, cuts):
        seen.append(len(cuts))
        return [tune.Timed(1e-4 * (1 + off(cut, wanted[work.name])), cut) for cut in cuts]

    monkeypatch.setattr(tuning, "_time", time)
    return seen


def test_round_by_round_the_fastest_tiles_are_found_and_written(monkeypatch, tmp_path):
    tuning = _tuning(BF16)
    _, hidden, width = tuning.sizes
    lines = [line._replace(hidden=hidden, width=width) for line in LINES]
    wanted = {"first": Tiles(32, 64, 64, 8, 2), "second": Tiles(32, 128, 32, 4, 4)}
    rounds = _timed_by(tuning, monkeypatch, wanted)
    found = tuning.tune(24.0, lines)
    (line,) = [line for line in found if line.rows == 24]
    assert (line.first, line.second) == (wanted["first"], wanted["second"])
    assert len(rounds) > 6
    assert "16 rows each: 200.0 us, before" in line.source
    assert line.source.endswith("; a GPU")
    tuned.write(found, tmp_path / "table.json")
    assert {*tuned.read(tmp_path / "table.json")} == {*lines, line}
    (row,) = tuning.bench.report.rows
    assert row.unit == "us"
    assert row.baseline is not None
    assert row.baseline > row.value == pytest.approx(200)


def test_experts_that_nobody_measured_begin_with_the_tiles_of_those_measured_first(monkeypatch):
    tuning = _tuning(BF16)
    assert tuning.sizes[1:] != tuned.MEASURED_FIRST
    _timed_by(tuning, monkeypatch, {"first": Tiles(16, 64, 64), "second": Tiles(16, 64, 64)})
    lines = list(tuned.read())
    for rows in (1.0, 24.0):
        lines = tuning.tune(rows, lines)
    own = [line.rows for line in lines if line.sizes == tuning.sizes]
    assert own == [1.0, 24.0]
    for even in (0.5, 12.0, 600.0):
        assert tuned.tiles_for(lines, tuning.sizes, even)


def test_codes_keep_rows_and_inputs_of_numbers(monkeypatch):
    tuning = _tuning(FP8)
    kind, hidden, width = tuning.sizes
    assert kind == "fp8"
    lines = [line._replace(hidden=hidden, width=width) for line in LINES]
    wanted = Tiles(64, 64, 128, 8, 2)
    _timed_by(tuning, monkeypatch, {"first": wanted, "second": wanted})
    line = next(line for line in tuning.tune(8.0, lines) if line.weights == kind and line.rows == 8)
    assert (line.first.rows, line.first.inputs) == (16, min(64, hidden & -hidden))
    assert (line.second.rows, line.second.inputs) == (16, 32)
    assert line.first.warps == 8


@pytest.mark.parametrize("which", [0, 1])
def test_tiles_that_do_not_compile_or_give_other_numbers_are_left_out(which, monkeypatch):
    tuning = _tuning(BF16)
    work = tuning._works(4)[which]
    base = Tiles(16, 32, 32)
    others = [replace(base, warps=warps) for warps in (8, 2, 1)]

    def spoiled(*args, cut):
        if cut.warps == 2:
            raise ValueError("no")
        spoil = (2, np.nan)[which] if cut.warps == 1 else 1
        return work.function(*args, cut=cut) * np.array(spoil, "bfloat16")

    timed = tuning._time(work._replace(function=spoiled), [base, *others])
    assert [one.cut for one in timed] == [base, others[0]]
    assert all(one.seconds > 0 for one in timed)
    out = tuning.bench.report.out
    assert isinstance(out, io.StringIO)
    assert [text.rpartition(": ")[2] for text in out.getvalue().splitlines()] == [
        "no",
        "gives other numbers",
    ]
    with pytest.raises(RuntimeError, match=r"product with Tiles.*warps=2.*: no"):
        tuning._time(work._replace(function=spoiled), [others[1]])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--out {}/nowhere/table.json", "--out {}/nowhere/table.json: cannot be written"),
        ("--json {}/nowhere/rows.jsonl", "a file that cannot be used: [Errno 2]"),
        ("--out {}/notes.txt", "a file that cannot be used: "),
        ("--budget-s nan", "argument --budget-s: must be finite, got nan"),
    ],
)
def test_what_cannot_be_used_is_refused_before_anything_is_measured(
    argv, message, capsys, tmp_path
):
    (tmp_path / "notes.txt").write_text("no table", encoding="utf-8")
    with pytest.raises(SystemExit) as ended:
        tune.main(["--shape", "demo-moe", *argv.format(tmp_path).split()])
    assert ended.value.code == 2
    assert message.format(tmp_path) in capsys.readouterr().err


def test_where_experts_are_not_multiplied_in_tiles_nothing_is_tuned(capsys, tmp_path):
    assert tune.main(["--shape", "demo-moe", "--out", str(tmp_path / "table.json")]) == 2
    assert "tune: experts are multiplied in tiles on GPUs alone" in capsys.readouterr().err
    assert not (tmp_path / "table.json").exists()
