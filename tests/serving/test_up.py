"""`kvferry up`: its children are started again, stopped in seconds, and never left behind."""

import re
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.serving.commands import (
    MODEL,
    SMALL_DECODE,
    SMALL_PREFILL,
    Command,
    copy_of,
    refused,
    start,
    truncate,
)

READY = r"kvferry is ready: http://127\.0\.0\.1:\d+ "
SMALL = tuple(dict.fromkeys((*SMALL_PREFILL, *SMALL_DECODE)))
STOP_S = 10.0


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[list[Command]]:
    """Commands that a test started; whatever it leaves is killed."""
    started: list[Command] = []
    yield started
    for command in started:
        command.kill()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port: int = sock.getsockname()[1]
    return port


def start_up(commands: list[Command], folder: Path, model: Path, port: int, *more: str) -> Command:
    command = start(folder, "up", f"--model-path={model}", f"--port={port}", *SMALL, *more)
    commands.append(command)
    return command


def test_a_killed_worker_is_started_again_until_it_cannot_be(
    commands: list[Command], tmp_path: Path
) -> None:
    model = copy_of(MODEL, tmp_path)
    command = start_up(commands, tmp_path, model, 0)
    command.says(READY)
    command.child("prefill").kill()
    command.says(r"\[prefill-0\] .* is ready", times=2)
    # Its place is empty now, and what comes next cannot take it.
    truncate(model)
    command.child("decode").kill()
    assert command.ends() == 2, command.text
    line = command.text.splitlines()[-1]
    assert line.startswith("kvferry up: decode-0 ended with code 2")
    assert f"{model}/model.safetensors: not a whole safetensors file" in line


def test_whatever_ends_up_ends_its_children_and_the_next_start_works(
    commands: list[Command], tmp_path: Path
) -> None:
    port = free_port()
    killed = start_up(commands, tmp_path, MODEL, port)
    killed.says(READY)
    killed.signal(signal.SIGKILL)
    assert killed.ends(STOP_S) == -signal.SIGKILL

    interrupted = start_up(commands, tmp_path, MODEL, port)
    interrupted.says(r"\[registry\] .* registry is ready")
    interrupted.signal(signal.SIGINT)
    assert interrupted.ends(STOP_S) == 0, interrupted.text

    stopped = start_up(commands, tmp_path, MODEL, port)
    stopped.says(READY)
    assert f"http://127.0.0.1:{port} " in stopped.text
    stopped.signal(signal.SIGTERM)
    assert stopped.ends(STOP_S) == 0, stopped.text
    for command in (interrupted, stopped):
        assert "Traceback" not in command.text, command.text


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, "/model.safetensors: not a whole safetensors file"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "/tokenizer.json: "),
    ],
)
def test_a_child_that_cannot_start_ends_all(
    damage: Callable[[Path], object], message: str, commands: list[Command], tmp_path: Path
) -> None:
    model = copy_of(MODEL, tmp_path, damage)
    command = start_up(commands, tmp_path, model, 0)
    line = refused(command)
    assert re.match(r"kvferry up: (prefill-0|decode-0|serve) ended with code 2 before it was", line)
    assert message in line
    # The child's own line is there as well, under its name.
    own = r"^\[(prefill-0|decode-0|serve)\] kvferry .*"
    assert re.search(own + message, command.text, re.MULTILINE)


def test_workers_that_do_not_fit_together_are_told_so(
    commands: list[Command], tmp_path: Path
) -> None:
    command = start_up(commands, tmp_path, MODEL, 0, "--decode-page-size=32")
    line = refused(command)
    assert re.search(r"kv page_size differs: prefill-\S+ has 16, decode-\S+ has 32", line)
