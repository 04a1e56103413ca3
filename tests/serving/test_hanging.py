"""A registry or an API process that stands still ends, so that it can be started again."""

import contextlib
import signal
import subprocess
import time
from pathlib import Path

from tests.ports import free_port
from tests.serving.commands import MODEL, Command, start

_TIMEOUT_S = 3.0  # longer than a busy host keeps a process waiting
_TRIES = 20
_WATCHED = f"--watchdog-timeout={_TIMEOUT_S}"


def _hang(process: Command) -> None:
    """Let it stand still until it ends. Its loop may be quicker than its watchdog afterwards."""
    for _ in range(_TRIES):
        process.signal(signal.SIGSTOP)
        time.sleep(1.2 * _TIMEOUT_S)  # its timer is not ours to move
        process.signal(signal.SIGCONT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.process.wait(1.0)
            break
    assert process.ends() == 1
    assert "Timeout (0:00:03)!" in process.text


def test_processes_without_an_engine_end_too_when_they_stand_still(
    commands: list[Command], tmp_path: Path
) -> None:
    port = free_port()
    registry = start(tmp_path, "registry", f"--disaggregation-bootstrap-port={port}", _WATCHED)
    commands.append(registry)
    registry.says(r"registry is ready on \S+")
    address = f"--registry-address=127.0.0.1:{port}"
    front = start(tmp_path, "serve", f"--model-path={MODEL}", address, "--port=0", _WATCHED)
    commands.append(front)
    front.says("HTTP server listens on")
    _hang(front)
    _hang(registry)
