"""gpu_check: parts in separate processes, within minutes; one failure does not end the others."""

import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import psutil
import pytest

from bench import ceilings, gpu_check
from bench.cli import main
from bench.goldens import BFLOAT16_MEDIANS, FOLDER, check_golden
from bench.gpu_check import Command
from bench.gpu_parts import PARTS, shape_of
from bench.kernels import KernelBench
from bench.report import Report
from bench.surroundings import Surroundings
from bench.timing import Allowance
from tests.bench.test_kernels import TINY_GPT_OSS
from tests.cluster import has_ended, wait_until


class Runs:
    """Stands in for processes, noting which ran side by side. Each takes its limit unless told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **codes: int | None) -> None:
        self.now_s = 0.0
        self.seen: list[list[str]] = []
        self.limits_s: list[float] = []
        self.commands: dict[str, Command] = {}
        self.taken_s = dict.fromkeys(gpu_check.LIMITS_S, 1000.0)
        self._codes = codes
        monkeypatch.setattr(gpu_check, "run_limited", self._run)

    def _run(self, commands: Mapping[str, Command], limit_s: float) -> dict[str, int | None]:
        self.seen.append([*commands])
        self.limits_s.append(limit_s)
        self.commands.update(commands)
        self.now_s += min(limit_s, max(self.taken_s[part] for part in commands))
        return {part: self._codes.get(part, 0) for part in commands}

    def main(self, *argv: str) -> int:
        return gpu_check.main(argv, clock=lambda: self.now_s)


CHECKED = ["goldens", "goldens-bfloat16", "backends"]
OTHERS = ["qwen3-30b-a3b-fp8", "deepseek-v2-lite", "gpt-oss-20b"]


def test_parts_that_take_all_they_may_end_within_eight_minutes(monkeypatch, capsys):
    runs = Runs(monkeypatch, **dict.fromkeys(gpu_check.LIMITS_S))
    assert runs.main() == 1
    assert runs.now_s + gpu_check.STOP_TIMEOUT_S <= 480
    begun = [part for stage in runs.seen for part in stage]
    assert begun == list(gpu_check.LIMITS_S)[: len(begun)]
    assert runs.seen[:5] == [["ceilings"], CHECKED, ["steps"], ["kernels"], ["pages"]]
    left_out = len(gpu_check.LIMITS_S) - len(begun)
    assert capsys.readouterr().out.count("was not begun: no time is left") == left_out > 0


def test_parts_that_only_check_numbers_run_beside_each_other_and_share_the_memory(monkeypatch):
    for name in gpu_check.SHARE:
        monkeypatch.delenv(name, raising=False)
    runs = Runs(monkeypatch)
    assert runs.main() == 0
    assert runs.seen[1] == CHECKED
    assert all(len(stage) == 1 for stage in [*runs.seen[:1], *runs.seen[2:]])
    shares = [
        float(runs.commands[part].environment["XLA_CLIENT_MEM_FRACTION"])
        for part in (*CHECKED, "steps")
    ]
    assert sum(shares[:3]) < shares[3] == gpu_check.ALONE


@pytest.mark.parametrize("name", gpu_check.SHARE)
def test_a_share_of_memory_that_is_told_is_left_to_parts_that_run_alone(monkeypatch, name):
    """JAX refuses two variables for it, and then finds no GPU at all."""
    for other in gpu_check.SHARE:
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(name, "0.5")
    runs = Runs(monkeypatch)
    runs.taken_s = dict.fromkeys(gpu_check.LIMITS_S, 1.0)
    assert runs.main() == 0
    for part in (*CHECKED, "steps", "serving"):
        environment = runs.commands[part].environment
        (told,) = (environment[each] for each in gpu_check.SHARE if each in environment)
        assert (told == "0.5") == (part not in CHECKED)


def test_a_part_that_is_not_begun_is_a_failure_only_where_it_was_named(monkeypatch, capsys):
    runs = Runs(monkeypatch)
    named = [part for stage in (["--only", part] for part in gpu_check.LIMITS_S) for part in stage]
    assert runs.main() == 0
    out, err = capsys.readouterr()
    assert "gpt-oss-20b was not begun" in out
    assert not err
    assert runs.main(*named) == 1
    assert "failed: " in capsys.readouterr().err


def test_other_shapes_share_the_time_that_is_left(monkeypatch):
    runs = Runs(monkeypatch)
    runs.taken_s.update(dict.fromkeys(gpu_check.LIMITS_S, 10.0) | {"steps": 100.0, "kernels": 60.0})
    runs.taken_s |= {"serving": 60.0, "deepseek-v2-lite": 1000.0, OTHERS[-1]: 1000.0}
    assert runs.main() == 0
    assert runs.seen[-3:] == [[part] for part in OTHERS]
    left_s = gpu_check.TOTAL_S - 260
    assert runs.limits_s[-3:] == pytest.approx([left_s / 3, 90, 90])
    command = runs.commands[OTHERS[0]].argv
    told_s = float(command[command.index("--limit-s") + 1])
    assert told_s == pytest.approx(left_s / 3 - gpu_check.ENDING_S)


@pytest.mark.parametrize(("left_s", "expected"), [(300, 90), (200, 200 / 3), (150, 60), (59, 0)])
def test_a_part_is_begun_when_much_of_its_limit_is_left(left_s, expected):
    assert gpu_check.limit_of(["gpt-oss-20b"], left_s, 3) == pytest.approx(expected)


def test_the_most_telling_rows_are_printed_last(monkeypatch, capsys, tmp_path):
    path = tmp_path / "rows.jsonl"
    report = Report("gpu_check", Surroundings("c", "d", {}), 0, path, io.StringIO())
    report.add("old decode step x1", "time", 1.0, "ms", 0.5, shapes={})

    def run(commands: Mapping[str, Command], limit_s: float) -> dict[str, int | None]:
        report.add("big decode step x1", "time", 4.0, "ms", 1.0, shapes={})
        return dict.fromkeys(commands, 0)

    monkeypatch.setattr(gpu_check, "run_limited", run)
    assert gpu_check.main(["--only", "steps", "--json", str(path)]) == 0
    told, _, table = capsys.readouterr().out.partition("share of floor\n")
    assert "1 of 1 parts ended well" in told
    assert table.split() == ["big", "decode", "step", "x1", "4.000", "ms", "0.2500"]


def test_a_file_that_rows_cannot_be_read_from_is_refused_before_anything_runs(
    monkeypatch, capsys, tmp_path
):
    runs = Runs(monkeypatch)
    (tmp_path / "notes.txt").write_text("no row", encoding="utf-8")
    with pytest.raises(SystemExit):
        runs.main("--json", str(tmp_path / "notes.txt"))
    assert "notes.txt:1: not a row" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        runs.main("--json", str(tmp_path / "nowhere" / "rows.jsonl"))
    assert "No such file or directory" in capsys.readouterr().err
    assert not runs.seen


@pytest.mark.parametrize(
    ("part", "asked", "expected"),
    [
        ("steps", None, "demo"),
        ("steps", "middle", "middle"),
        ("deepseek-v2-lite", None, "demo-latent"),
        ("gpt-oss-20b", "middle", "demo-gpt-oss"),
    ],
)
def test_on_a_cpu_small_shapes_stand_in_for_large_ones(part, asked, expected):
    assert shape_of(part, asked, on_cpu=True).name == expected


def test_on_an_accelerator_parts_named_after_a_shape_have_it():
    names = [shape_of(part, None, on_cpu=False).name for part in gpu_check.LIMITS_S]
    assert names[-3:] == list(gpu_check.LIMITS_S)[-3:] == OTHERS
    assert set(names[:-3]) == {"qwen3-30b-a3b"}


def test_a_part_that_fails_does_not_end_the_others(monkeypatch, capsys):
    runs = Runs(monkeypatch, goldens=None, steps=1)
    runs.taken_s = dict.fromkeys(gpu_check.LIMITS_S, 1.0)
    assert runs.main() == 1
    assert [part for stage in runs.seen for part in stage] == list(gpu_check.LIMITS_S)
    assert "failed: goldens, steps" in capsys.readouterr().err


def test_a_part_that_takes_too_long_is_stopped_with_all_it_started(monkeypatch, tmp_path):
    """Even a child in a session of its own that ignores SIGTERM."""
    monkeypatch.setattr(gpu_check, "STOP_TIMEOUT_S", 0.5)
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    deaf += f"open({str(tmp_path / 'deaf')!r}, 'w').close(); signal.pause()"
    endless = [sys.executable, "-c", deaf]
    nested = f"import subprocess; subprocess.run({endless}, start_new_session=True)"
    started: list[psutil.Process] = []

    class Clockless(psutil.Popen):
        """The child exists by the time the limit is up, however soon that is."""

        def wait(self, timeout: float | None = None) -> Any:
            if not started:
                wait_until((tmp_path / "deaf").exists)
                started.extend(self.children())
            return super().wait(timeout)

    monkeypatch.setattr(psutil, "Popen", Clockless)
    assert gpu_check.run_limited({"it": command(nested)}, 1.0) == {"it": None}
    (child,) = started
    wait_until(lambda: has_ended(child))


def test_parts_end_with_a_check_that_is_told_to_end(tmp_path):
    part = f"""
import pathlib, signal
from bench import gpu_check, gpu_parts

def measure(*_):
    pathlib.Path({str(tmp_path / "begun")!r}).touch()
    signal.pause()

gpu_parts.PARTS["pages"] = measure
gpu_check.main()
"""
    words = ["--inside", "--only", "pages", "--scratch", str(tmp_path / "rows.jsonl")]
    outer = f"""
import os, sys
from bench.gpu_check import Command, run_limited
command = Command([sys.executable, "-c", {part!r}, *{words}], dict(os.environ))
run_limited({{"pages": command}}, 60.0)
"""
    with subprocess.Popen([sys.executable, "-c", outer]) as check:
        wait_until((tmp_path / "begun").exists)
        (child,) = psutil.Process(check.pid).children()
        check.terminate()
    try:
        wait_until(lambda: has_ended(child))
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()


def command(code: str) -> Command:
    return Command([sys.executable, "-c", code], dict(os.environ))


def test_parts_beside_each_other_give_a_status_each(capsys):
    commands = {"one": command("exit(3)"), "other": command("")}
    assert gpu_check.run_limited(commands, 60) == {"one": 3, "other": 0}
    assert "--- one: " in capsys.readouterr().out


def test_what_no_time_is_left_for_is_left_out_by_name():
    now_s, out = 0.0, io.StringIO()

    def task(taken_s: float) -> Callable[[], float]:
        def run() -> float:
            nonlocal now_s
            now_s += taken_s
            return taken_s

        return run

    allowance = Allowance(10.0, lambda: now_s)
    tasks = {"a": task(3.0), "b": task(4.0), "c": task(1.0), "d": task(1.0)}
    assert allowance.spend(tasks, out, lambda: 3.0) == [3.0, 4.0]
    assert out.getvalue() == "left out, for want of time: c, d\n"
    assert allowance.spend({"e": task(3.0), "f": task(1.0)}, out) == [3.0]


def test_another_shape_stops_by_itself_with_what_tells_most_measured(monkeypatch, capsys):
    """Time is up after two steps; that is not a failure."""
    monkeypatch.setitem(ceilings.COPY_BYTES, "cpu", 1 << 16)
    monkeypatch.setitem(ceilings.MATMUL_SIZE, "cpu", 64)
    now_s = 0.0

    def measure(bench: KernelBench, call: Callable[[], object]) -> float:
        nonlocal now_s
        now_s += 1.0
        return 1e-3

    monkeypatch.setattr(KernelBench, "_measure", measure)
    report = Report("gpu_check", Surroundings("c", "d", {}))
    shape = replace(TINY_GPT_OSS, slots=(1, 2, 4), chunks=(4, 8))
    assert PARTS["gpt-oss-20b"](report, shape, 0.01, Allowance(1.5, lambda: now_s))
    timed = [row.case for row in report.rows if row.metric == "time"]
    assert timed == ["tiny decode step x1", "tiny decode step x2"]
    out = capsys.readouterr().out
    assert "left out, for want of time: decode step x4, prefill chunk 8\n" in out
    assert "left out, for want of time: attention and experts, backends\n" in out


@pytest.mark.parametrize("name", ["qwen3", "deepseek_v3"])
def test_a_golden_checkpoint_gives_its_recorded_numbers(name):
    outcome = check_golden(FOLDER / name)
    assert outcome.error < 2e-4
    assert outcome.same == outcome.prompts == 4


def test_in_bfloat16_one_is_as_near_as_other_correct_runs_and_no_nearer():
    assert (
        1e-3 < check_golden(FOLDER / "llama", "bfloat16").median < 1.5 * BFLOAT16_MEDIANS["llama"]
    )


@pytest.mark.parametrize(
    "argv", [["kernels", "--shape", "none"], ["serve", "--rate", "fast"], ["nothing"], []]
)
def test_arguments_that_mean_nothing_are_refused(argv, capsys):
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("kvferry bench")
    assert line.endswith(" --help)")


def test_the_load_client_starts_without_jax():
    code = "import sys, bench.cli, bench.serve; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
