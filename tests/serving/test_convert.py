"""`kvferry convert` as a process: a conversion that was cut off does not pass for done."""

import signal
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
    told = commands.told_while_loading(tmp_path, "jax", "convert", number)
    assert told == (128 + number, "")
