"""Rows keep the context a number needs, and comparing two runs says which direction is better."""

import io
import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from bench.cli import main
from bench.report import BadRows, Report, Row, compare, differences, format_changes, read_rows
from bench.surroundings import Surroundings, describe, processor
from model.processors import VARIABLES

HERE = Surroundings("abc123", "2 x processor", {"jax": "0.11.2"})


def row(metric: str = "time", value: float = 1.0, unit: str = "ms") -> Row:
    return Row("bench", "case", metric, value, unit, "abc", "cpu", {}, {}, 0)


def test_a_row_survives_the_file(tmp_path):
    report = Report("kernels", HERE, 7, tmp_path / "rows.jsonl", io.StringIO())
    written = report.add("step x1", "time", 2.0, "ms", baseline=1.0, shapes={"slots": 1})
    (read,) = read_rows(tmp_path / "rows.jsonl")
    assert read == written
    assert read.ratio == 2.0
    assert (read.commit, read.device, read.seed, read.shapes) == (
        "abc123",
        "2 x processor",
        7,
        {"slots": 1},
    )


def test_rows_are_on_disk_before_the_next_is_measured(tmp_path):
    path = tmp_path / "rows.jsonl"
    report = Report("kernels", HERE, 0, path, io.StringIO())
    for count in (1, 2):
        report.add("a", "time", 1.0, "ms", shapes={})
        assert len(path.read_text().splitlines()) == count


def test_a_file_that_cannot_be_written_is_known_before_anything_is_measured(tmp_path):
    with pytest.raises(OSError, match="nowhere"):
        Report("kernels", HERE, 0, tmp_path / "nowhere" / "rows.jsonl", io.StringIO())


def test_a_row_that_cannot_be_stored_is_printed_and_the_other_way_round(tmp_path):
    out = io.StringIO()
    report = Report("kernels", HERE, 0, Path("/dev/full"), out)
    with pytest.raises(OSError, match="No space left"):
        report.add("a", "time", 1.0, "ms", shapes={})
    assert "1.000 ms" in out.getvalue()
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as gone:
        report = Report("kernels", HERE, 0, tmp_path / "rows.jsonl", gone)
        with pytest.raises(BrokenPipeError):
            report.add("a", "time", 1.0, "ms", shapes={})
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, gone.fileno())
        os.close(nowhere)
    assert len(read_rows(tmp_path / "rows.jsonl")) == 1


_QUICK = ["routing", "--only=constant", "--num-requests=20", "--seeds=1"]


def test_a_file_that_cannot_be_opened_is_a_wrong_argument_and_a_full_disk_is_not(tmp_path, capsys):
    assert main([*_QUICK, f"--json={tmp_path}/nowhere/rows.jsonl"]) == 2
    said = capsys.readouterr()
    assert (said.out, len(said.err.splitlines())) == ("", 1)
    assert main([*_QUICK, "--json=/dev/full"]) == 1
    said = capsys.readouterr()
    assert len(said.out.splitlines()) == 2
    assert said.err == "kvferry bench routing: [Errno 28] No space left on device\n"


def test_a_benchmark_whose_reader_leaves_has_failed_in_a_line():
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write) as gone:
        command = [sys.executable, "-m", "bench", *_QUICK]
        done = subprocess.run(command, stdout=gone, stderr=subprocess.PIPE, check=False)
    expected = b"kvferry bench routing: [Errno 32] Broken pipe\n"
    assert (done.returncode, done.stderr) == (1, expected)


def test_what_two_runs_were_not_alike_in_is_said():
    before = [replace(row(), shapes={"slots": 1, "load_average_1m": 0.1})] * 2
    after = [replace(row(), device="gpu", commit="b", seed=7, shapes={"slots": 2})]
    assert differences(before, before) == []
    assert differences(before, [*after, replace(after[0], commit="c")]) == [
        "after: rows of 2 commits, b, c: medians over all of them",
        "device: cpu before, gpu after (measurements: 1)",
        "seed: 0 before, 7 after (measurements: 1)",
        "slots: 1 before, 2 after (measurements: 1)",
    ]


def test_every_row_of_a_median_has_its_say_in_what_was_not_alike():
    one, other = (replace(row(), shapes={"rate": rate}) for rate in (4.0, 8.0))
    assert differences([other, one], [one]) == [
        "rate: 4.0 and 8.0 before, 4.0 after (measurements: 1)"
    ]
    assert differences([one, other], [other, one]) == [
        "rate: 4.0 and 8.0 before, 4.0 and 8.0 after (measurements: 1)"
    ]
    assert differences([one, row()], [row()]) == [
        "rate: 4.0 and None before, None after (measurements: 1)"
    ]


def test_absent_fields_are_left_out_of_the_line():
    assert "baseline" not in json.loads(row().to_json())


@pytest.mark.parametrize("bad", [{"unit": "furlongs"}, {"value": math.nan}])
def test_a_row_that_means_nothing_is_refused(bad):
    with pytest.raises(ValueError, match=r"furlongs|nan"):
        row(**bad)


def test_a_line_is_json_whatever_was_asked():
    with pytest.raises(ValueError, match="not JSON compliant"):
        replace(row(), shapes={"rate": math.inf}).to_json()


@pytest.mark.parametrize(
    "line",
    [
        *(b"{", b"[]", b'{"bench": "x"}', b"3", b"\xff", b"[" * 100_000),
        *(
            row().to_json().replace(one, other).encode()
            for one, other in (
                (': "bench"', ": null"),
                (': "case"', ': ["case"]'),
                ("1.0", "1" + "0" * 400),
                ("1.0", "true"),
                ('"seed": 0', '"seed": "0"'),
            )
        ),
    ],
)
def test_a_broken_line_is_named(tmp_path, line):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(row().to_json().encode() + b"\n" + line + b"\n")
    with pytest.raises(BadRows, match=r"rows\.jsonl:2"):
        read_rows(path)


@pytest.mark.parametrize(
    ("unit", "before", "after", "verdict"),
    [
        ("ms", 1.0, 2.0, "worse"),
        ("ms", 2.0, 1.0, "better"),
        ("tok/s", 1.0, 2.0, "better"),
        ("tok/s", 2.0, 1.0, "worse"),
        ("ms", 1.0, 1.04, "same"),
        ("MB", 1.0, 2.0, "differs"),
        ("failed", 0.0, 1.0, "worse"),
    ],
)
def test_the_unit_decides_what_is_better(unit, before, after, verdict):
    (change,) = compare([row(value=before, unit=unit)], [row(value=after, unit=unit)])
    assert change.verdict == verdict


def test_repeated_measurements_count_as_their_median_and_missing_ones_are_said():
    before = [row(value=v) for v in (1.0, 2.0, 9.0)] + [row("gone")]
    changes = compare(before, [row(value=2.0), row("new")])
    assert [change.verdict for change in changes] == ["same", "only before", "only after"]
    assert "only after" in format_changes(changes)


def test_compare_fails_on_worse_only_when_asked(tmp_path, capsys):
    before, after = tmp_path / "a", tmp_path / "b"
    before.write_text(row(value=1.0).to_json() + "\n")
    after.write_text(row(value=2.0).to_json() + "\n")
    assert main(["compare", str(before), str(after)]) == 0
    assert main(["compare", str(before), str(after), "--fail-on-worse"]) == 1
    assert "worse" in capsys.readouterr().out
    after.write_text(row("other").to_json() + "\n")
    assert main(["compare", str(before), str(after), "--fail-on-worse"]) == 1
    assert main(["compare", str(before), str(before), "--fail-on-worse"]) == 0
    with pytest.raises(SystemExit):
        main(["compare", str(before), str(before), "--tolerance", "nan"])
    after.write_text(row().to_json().replace('"shapes": {}', '"shapes": null') + "\n")
    capsys.readouterr()
    assert main(["compare", str(before), str(after)]) == 2
    assert "not a row" in capsys.readouterr().err
    assert main(["compare", str(before), str(tmp_path / "none")]) == 2


def test_a_reader_that_leaves_does_not_change_the_verdict(tmp_path):
    (tmp_path / "a").write_text(row(value=1.0).to_json() + "\n")
    (tmp_path / "b").write_text(replace(row(value=2.0), seed=7).to_json() + "\n")
    read, write = os.pipe()
    os.close(read)  # as `head -0` does
    command = [sys.executable, "-m", "bench", "compare", tmp_path / "a", tmp_path / "b"]
    with os.fdopen(write) as gone, (tmp_path / "said").open("w+") as said:
        for flag, code in (("--tolerance=0.1", 0), ("--fail-on-worse", 1)):
            for stderr in (said, gone):
                done = subprocess.run([*command, flag], stdout=gone, stderr=stderr, check=False)
                assert done.returncode == code
        said.seek(0)
        assert said.read() == 2 * "not alike: seed: 0 before, 7 after (measurements: 1)\n"


@pytest.mark.parametrize("names", [("full", "empty"), ("empty", "full"), ("empty", "empty")])
def test_with_no_rows_there_is_nothing_to_compare(names, tmp_path, capsys):
    (tmp_path / "full").write_text(row().to_json() + "\n")
    (tmp_path / "empty").write_text("")  # from a run that died
    assert main(["compare", *(str(tmp_path / name) for name in names), "--fail-on-worse"]) == 2
    assert capsys.readouterr().err == f"kvferry bench compare: {tmp_path / 'empty'} has no rows\n"


def test_surroundings_without_jax_name_processor_and_versions():
    found = describe(with_jax=False)
    assert found.device
    assert found.commit
    assert {"python", "jax", "numpy"} <= found.versions.keys()


def test_a_device_that_has_not_a_thread_for_each_processor_says_how_many(monkeypatch):
    monkeypatch.setenv(VARIABLES[0], "11")
    monkeypatch.setattr(psutil, "cpu_count", lambda: 16)
    assert describe(with_jax=True).device == f"11 of {processor()}"
    monkeypatch.setattr(psutil, "cpu_count", lambda: 11)
    assert describe(with_jax=True).device == processor()
