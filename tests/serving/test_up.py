"""`kvferry up`: its children are started again, stopped in seconds, and never left behind."""

import os
import re
import signal
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cluster import up, wait_until
from tests.ports import free_port
from tests.served import FEW_SLOTS
from tests.serving.commands import (
    MODEL,
    SMALL_DECODE,
    SMALL_PREFILL,
    Command,
    copy_of,
    refused,
    start,
    told_while_loading,
    truncate,
)

READY = r"kvferry is ready: http://127\.0\.0\.1:\d+ "
SMALL = tuple(dict.fromkeys((*SMALL_PREFILL, *SMALL_DECODE)))
STOP_S = 10.0


def ask(n: int, max_new_tokens: int) -> dict[str, Any]:
    sampling = {"n": n, "max_new_tokens": max_new_tokens, "temperature": 0, "ignore_eos": True}
    return {"input_ids": [5, 6, 7], "sampling_params": sampling, "stream": True}


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
    # With the weights cut off, decode cannot be started again.
    truncate(model)
    command.child("decode").kill()
    assert command.ends() == 2, command.text
    line = command.text.splitlines()[-1]
    assert line.startswith("kvferry up: decode-0 ended with code 2")
    assert f"{model}/model.safetensors: not a whole safetensors file" in line


def test_a_registry_that_dies_while_workers_load_is_started_again(
    commands: list[Command], tmp_path: Path
) -> None:
    command = start_up(commands, tmp_path, MODEL, 0)
    command.says(r"\[prefill-0\] .* config: ")
    command.child("serving.launch").kill()
    command.says(r"\[registry\] .* registry is ready", times=2)
    command.says(READY)
    command.signal(signal.SIGTERM)
    assert command.ends(STOP_S) == 0, command.text


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


@pytest.mark.usefixtures("heard_hangups")
def test_up_whose_terminal_closes_stops_in_order(commands: list[Command], tmp_path: Path) -> None:
    command = start_up(commands, tmp_path, MODEL, free_port())
    command.says(READY)
    for _ in range(2):  # one from the kernel, one from the shell
        command.signal(signal.SIGHUP)
    assert command.ends(STOP_S) == 0, command.text
    assert "kvferry up: draining\n" in command.text


def test_ctrl_c_while_modules_load_ends_a_command_without_a_word(tmp_path: Path) -> None:
    assert told_while_loading(tmp_path, "grpc", "up", signal.SIGINT) == (130, "")


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


def test_up_serves_on_a_unix_socket_with_two_processes(
    commands: list[Command], tmp_path: Path
) -> None:
    path = tmp_path / "api.sock"
    flags = (f"--model-path={MODEL}", f"--uds={path}", "--api-workers=2", *SMALL)
    command = start(tmp_path, "up", *flags)
    commands.append(command)
    command.says(rf"kvferry is ready: unix:{path} ")
    assert f"curl -N --unix-socket {path} http://localhost/v1/chat/completions" in command.text
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), timeout=60) as http:
        body = {"prompt": "A", "max_tokens": 4, "ignore_eos": True}
        reply = http.post("http://localhost/v1/completions", json=body)
    assert reply.json()["usage"]["completion_tokens"] == 4
    # Both API processes go with their parent, and all of it comes back.
    command.child("serving").kill()
    command.says(r"\[serve\] .* 2 HTTP processes listen on unix:", times=2)
    command.signal(signal.SIGTERM)
    assert command.ends(STOP_S) == 0, command.text
    assert not path.exists()
    assert "Traceback" not in command.text, command.text


def test_a_killed_api_process_leaves_nothing_at_the_workers() -> None:
    with up("--api-workers=2", *FEW_SLOTS) as cluster, ExitStack() as stack:
        doors: dict[int, httpx.Client] = {}
        while len(doors) < 2:
            http = stack.enter_context(httpx.Client(base_url=cluster.url, timeout=60))
            info = http.get("/get_server_info").json()
            doors[info["process"]] = http
            pids = {state["process"]: state["pid"] for state in info["processes"]}
        # The kept one first, as there are only four slots.
        kept, lost = (
            stack.enter_context(doors[i].stream("POST", "/generate", json=body)).iter_lines()
            for i, body in ((1, ask(1, 400)), (0, ask(100, 400)))
        )
        next(kept)
        next(lost)
        os.kill(pids[0], signal.SIGKILL)
        with pytest.raises(httpx.TransportError):
            list(lost)
        assert '"completion_tokens":400' in [line for line in kept if line][-2]
        assert [worker["pages_held"] for worker in cluster.settled()] == [0, 0]
        # The lost ones were given up: otherwise decode would have made all of their tokens.
        assert cluster.worker("decode")["counters"]["tokens"] < 100 * 399
        wait_until(lambda: len(cluster.http.get("/get_server_info").json()["processes"]) == 2)


def test_workers_that_do_not_fit_together_are_told_so(
    commands: list[Command], tmp_path: Path
) -> None:
    command = start_up(commands, tmp_path, MODEL, 0, "--decode-quantization=int8")
    line = refused(command)
    digests = r"prefill-\S+ has (\w+), decode-\S+ has \1-int8-layers"
    assert re.search(f"model digest differs: {digests}", line)
