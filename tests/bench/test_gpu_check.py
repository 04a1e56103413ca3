"""gpu_check: parts in processes of their own, within minutes, one failure not ending the others."""

import os
import subprocess
import sys

import pytest

from bench import gpu_check
from bench.cli import main
from bench.goldens import FOLDER, check_golden


def test_all_parts_together_take_less_than_eight_minutes():
    assert sum(gpu_check.LIMITS_S.values()) < 480


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


def test_a_part_that_takes_too_long_is_stopped_with_all_it_started():
    endless = [sys.executable, "-c", "import signal; signal.pause()"]
    nested = f"import subprocess; subprocess.run({endless})"
    command = [sys.executable, "-c", nested]
    assert gpu_check.run_limited(command, dict(os.environ), limit_s=0.3) is None


def test_a_part_that_ends_gives_its_status():
    assert gpu_check.run_limited([sys.executable, "-c", "exit(3)"], dict(os.environ), 30) == 3


def test_a_golden_checkpoint_gives_its_recorded_numbers():
    outcome = check_golden(FOLDER / "qwen3")
    assert outcome.error < 2e-4
    assert outcome.same == outcome.prompts == 4


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
