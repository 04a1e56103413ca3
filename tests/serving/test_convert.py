"""`kvferry convert` as a process: a conversion that was cut off does not pass for done."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.model.harness import GOLDENS
from tests.serving import commands


@pytest.mark.usefixtures("heard_hangups")
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
def test_a_conversion_that_is_told_to_end_leaves_nothing_and_does_not_end_well(
    number: signal.Signals, tmp_path: Path
) -> None:
    model, output = GOLDENS / "qwen3" / "model", tmp_path / "out"
    words = "convert", f"--model-path={model}", f"--output={output}"
    command = commands.start(tmp_path, *words, JAX_PLATFORMS="nowhere")  # it needs no device
    try:
        commands.wait_until(output.exists, 60.0)
        command.signal(number)
        assert command.process.wait(60.0) == 128 + number
        assert not output.exists()
    finally:
        command.kill()


@pytest.mark.usefixtures("heard_hangups")
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
def test_a_conversion_that_is_told_to_end_while_modules_load_does_not_end_well(
    number: signal.Signals, tmp_path: Path
) -> None:
    (tmp_path / "jax.py").write_text("import time\nprint('loading', flush=True)\ntime.sleep(60)\n")
    with subprocess.Popen(
        [sys.executable, "-c", "from serving.launch import main; main()", "convert"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "loading\n"
            process.send_signal(number)
            rest, _ = process.communicate(timeout=60.0)
        finally:
            process.kill()
    assert (process.returncode, rest) == (128 + number, "")
