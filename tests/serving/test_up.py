"""The supervisor: children are started again, stopped in seconds, and never left behind."""

import asyncio
import re
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from serving import up
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

TELL_READY = "from transfer import flags; flags.notify_ready(port=1); "
WAIT = "import time; time.sleep(60)"


# --- children that only pretend --------------------------------------------------------------


@pytest.fixture
async def supervisor(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[up.Supervisor]:
    monkeypatch.setattr(up, "RESTART_DELAY_S", 0.0)
    monkeypatch.setattr(up, "STOP_TIMEOUT_S", 0.2)
    made = up.Supervisor("token")
    yield made
    if not made.stopping:
        await made.stop()


def child(code: str) -> up.ChildSpec:
    return up.ChildSpec("child", ("tests.serving.child", code))


async def test_a_ready_child_tells_its_facts(supervisor: up.Supervisor) -> None:
    running = await supervisor.start(child(TELL_READY + WAIT))
    assert await running.wait_ready() == {"port": 1}


async def test_a_child_that_ends_before_it_is_ready_passes_on_its_last_line(
    supervisor: up.Supervisor, capfd: pytest.CaptureFixture[str]
) -> None:
    running = await supervisor.start(child("print('first'); print('no luck'); raise SystemExit(2)"))
    with pytest.raises(up.ChildFailed) as caught:
        await running.wait_ready()
    assert str(caught.value) == "child ended with code 2 before it was ready: no luck"
    assert caught.value.code == 2
    assert capfd.readouterr().err == "[child] first\n[child] no luck\n"


async def test_a_line_of_any_length_does_not_stop_a_child(
    supervisor: up.Supervisor, capfd: pytest.CaptureFixture[str]
) -> None:
    running = await supervisor.start(child("print('x' * (1 << 20)); print('done')"))
    await asyncio.wait_for(running.process.wait(), 20)
    await running.output
    assert running.last_line == "done"
    assert capfd.readouterr().err.endswith("[child] done\n")


async def test_a_killed_child_is_started_again_the_same(supervisor: up.Supervisor) -> None:
    running = await supervisor.start(child(WAIT))
    watching = asyncio.create_task(supervisor.watch(running))
    running.process.kill()
    while running in supervisor._children or not supervisor._children:  # noqa: ASYNC110
        await asyncio.sleep(0)  # its own task has to run
    again = supervisor._children[0]
    assert again.spec == running.spec
    assert again.process.pid != running.process.pid
    watching.cancel()


async def test_a_child_that_ends_too_often_ends_the_supervisor(supervisor: up.Supervisor) -> None:
    running = await supervisor.start(child("raise SystemExit(3)"))
    with pytest.raises(up.ChildFailed) as caught:
        await supervisor.watch(running)
    assert str(caught.value).startswith(f"child ended with code 3, {up.MAX_RESTARTS + 1} time(s)")


async def test_a_child_that_cannot_start_again_ends_the_supervisor(
    supervisor: up.Supervisor,
) -> None:
    running = await supervisor.start(child("print('a bad file'); raise SystemExit(2)"))
    with pytest.raises(up.ChildFailed) as caught:
        await supervisor.watch(running)
    assert str(caught.value) == "child ended with code 2, 1 time(s) in a row: a bad file"
    assert caught.value.code == 2


async def test_a_child_that_does_not_listen_is_killed(supervisor: up.Supervisor) -> None:
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    running = await supervisor.start(child(deaf + TELL_READY + WAIT))
    await running.wait_ready()
    await supervisor.stop()
    assert running.process.returncode == -signal.SIGKILL


# --- real ones -------------------------------------------------------------------------------


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
