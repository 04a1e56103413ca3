"""An API process whose token the registry refuses ends, whichever of the two was started first."""

from pathlib import Path

import pytest

from tests.ports import free_port
from tests.serving.commands import MODEL, Command, refused, start

OTHER = "another-token-of-the-tests"
REGISTRY_READY = r"registry is ready on \S+"


def _registry(commands: list[Command], folder: Path, port: int) -> None:
    registry = start(folder, "registry", f"--disaggregation-bootstrap-port={port}")
    commands.append(registry)
    registry.says(REGISTRY_READY)


def _serve(commands: list[Command], folder: Path, port: int, *more: str) -> Command:
    argv = "serve", f"--model-path={MODEL}", f"--registry-address=127.0.0.1:{port}", "--port=0"
    front = start(folder, *argv, *more, KVFERRY_CLUSTER_TOKEN=OTHER)
    commands.append(front)
    return front


@pytest.mark.parametrize("processes", [1, 2])
def test_a_server_with_a_wrong_token_ends_at_its_start(
    processes: int, commands: list[Command], tmp_path: Path
) -> None:
    port = free_port()
    _registry(commands, tmp_path, port)
    line = refused(_serve(commands, tmp_path, port, f"--api-workers={processes}"))
    assert "wrong or missing cluster token" in line


def test_a_server_that_waits_for_the_registry_ends_once_that_refuses_its_token(
    commands: list[Command], tmp_path: Path
) -> None:
    port = free_port()
    front = _serve(commands, tmp_path, port)
    front.says("HTTP server listens on")
    _registry(commands, tmp_path, port)
    assert "wrong or missing cluster token" in refused(front)
