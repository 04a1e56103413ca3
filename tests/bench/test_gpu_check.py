"""gpu_check: parts in processes of their own, within minutes, one failure not ending the others."""

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

    def run(command, timeout, check, env):
        part = command[command.index("--only") + 1]
        seen.append(part)
        if part == "goldens":
            raise subprocess.TimeoutExpired(command, timeout)
        return subprocess.CompletedProcess(command, 1 if part == "steps" else 0)

    monkeypatch.setattr(subprocess, "run", run)
    assert gpu_check.main([]) == 1
    assert seen == list(gpu_check.LIMITS_S)
    assert "failed: goldens, steps" in capsys.readouterr().err


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
