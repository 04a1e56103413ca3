"""gpu_check: parts in processes of their own, within minutes, one failure not ending the others."""

import os
import subprocess
import sys
from typing import Any

import psutil
import pytest

from bench import gpu_check
from bench.cli import main
from bench.goldens import BFLOAT16_MEDIANS, FOLDER, check_golden
from tests.cluster import has_ended, wait_until


def test_parts_that_take_all_they_may_end_within_eight_minutes(monkeypatch, capsys):
    now_s = 0.0
    seen: list[str] = []

    def run(command: list[str], environment: dict[str, str], limit_s: float) -> int | None:
        nonlocal now_s
        seen.append(command[command.index("--only") + 1])
        now_s += limit_s
        return None

    monkeypatch.setattr(gpu_check, "run_limited", run)
    assert gpu_check.main([], clock=lambda: now_s) == 1
    assert now_s + gpu_check.STOP_TIMEOUT_S <= 480
    begun = len(seen)
    assert seen == list(gpu_check.LIMITS_S)[:begun]
    assert seen[:6] == ["ceilings", "goldens", "backends", "steps", "kernels", "pages"]
    assert capsys.readouterr().err.count("no time is left") == len(gpu_check.LIMITS_S) - begun > 0


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
    assert gpu_check.shape_of(part, asked, on_cpu=True).name == expected


def test_on_an_accelerator_parts_named_after_a_shape_have_it():
    names = [gpu_check.shape_of(part, None, on_cpu=False).name for part in gpu_check.LIMITS_S]
    last = ["qwen3-30b-a3b-fp8", "deepseek-v2-lite", "gpt-oss-20b"]
    assert names[-3:] == list(gpu_check.LIMITS_S)[-3:] == last
    assert set(names[:-3]) == {"qwen3-30b-a3b"}


def test_a_part_that_fails_does_not_end_the_others(monkeypatch, capsys):
    seen: list[str] = []

    def run(command: list[str], environment: dict[str, str], limit_s: float) -> int | None:
        part = command[command.index("--only") + 1]
        seen.append(part)
        return {"goldens": None, "steps": 1}.get(part, 0)

    monkeypatch.setattr(gpu_check, "run_limited", run)
    assert gpu_check.main([]) == 1
    assert seen == list(gpu_check.LIMITS_S)
    assert "failed: goldens, steps" in capsys.readouterr().err


def test_a_part_that_takes_too_long_is_stopped_with_all_it_started(monkeypatch, tmp_path):
    """Even what has a session of its own, and does not heed SIGTERM."""
    monkeypatch.setattr(gpu_check, "STOP_TIMEOUT_S", 0.5)
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    deaf += f"open({str(tmp_path / 'deaf')!r}, 'w').close(); signal.pause()"
    endless = [sys.executable, "-c", deaf]
    nested = f"import subprocess; subprocess.run({endless}, start_new_session=True)"
    started: list[psutil.Process] = []

    class Clockless(psutil.Popen):
        """Time is up as soon as the child is there."""

        def wait(self, timeout: float | None = None) -> Any:
            if not started:
                wait_until((tmp_path / "deaf").exists)
                started.extend(self.children())
                raise psutil.TimeoutExpired(0.0)
            return super().wait(timeout)

    monkeypatch.setattr(psutil, "Popen", Clockless)
    assert gpu_check.run_limited([sys.executable, "-c", nested], dict(os.environ), 60.0) is None
    (child,) = started
    wait_until(lambda: has_ended(child))


def test_a_part_that_ends_gives_its_status():
    assert gpu_check.run_limited([sys.executable, "-c", "exit(3)"], dict(os.environ), 30) == 3


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
    assert "usage: kvferry bench" in capsys.readouterr().err


def test_the_load_client_starts_without_jax():
    code = "import sys, bench.cli, bench.serve; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
