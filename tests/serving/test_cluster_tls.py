"""A system started by hand whose processes speak TLS with each other."""

import json
from pathlib import Path

import httpx
import pytest

from tests.certificate import made_security
from tests.cluster import wait_until
from tests.ports import free_port
from tests.serving.commands import (
    SMALL_DECODE,
    SMALL_PREFILL,
    TOKEN,
    Command,
    refused,
    start,
)
from transfer.flags import tls_argv_of

GOLDEN = Path(__file__).resolve().parents[1] / "goldens" / "llama"
PROMPT = next(
    p for p in json.loads((GOLDEN / "golden.json").read_text())["prompts"] if p["name"] == "p7"
)


@pytest.mark.parametrize(("backend", "way"), [("auto", "shm"), ("tcp", "tcp")])
def test_pages_arrive_by_the_way_that_was_chosen(backend: str, way: str, tmp_path: Path) -> None:
    tls = tls_argv_of(made_security(TOKEN, tmp_path))
    registry, port = free_port(), free_port()
    worker = [f"--model-path={GOLDEN / 'model'}", f"--registry-address=127.0.0.1:{registry}", *tls]
    page_way = f"--disaggregation-transfer-backend={backend}"
    started: list[Command] = []
    try:
        commands = (
            ["registry", f"--disaggregation-bootstrap-port={registry}", *tls],
            ["prefill", "--port=0", page_way, *worker, *SMALL_PREFILL],
            ["decode", "--port=0", page_way, *worker, *SMALL_DECODE],
            ["serve", f"--port={port}", *worker],
        )
        started.extend(start(tmp_path, *words) for words in commands)
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
            wait_until(lambda: is_ready(http, started), 120.0)
            sampling = {"temperature": 0, "max_new_tokens": 8}
            body = {"input_ids": PROMPT["ids"], "sampling_params": sampling}
            answer = http.post("/generate", json=body)
            assert answer.status_code == 200, answer.text
            assert answer.json()["output_ids"] == PROMPT["greedy_ids"][:8]
            workers = http.get("/get_server_info").json()["workers"]
        (decode,) = (worker for worker in workers if worker["role"] == "decode")
        assert decode["counters"][f"connections_{way}"] == 1
    finally:
        for command in started:
            command.kill()


@pytest.mark.parametrize(
    ("role", "host", "flag"),
    [
        ("prefill", "--host=127.0.0.2", "--host 127.0.0.2"),
        ("decode", "--data-host=127.0.0.2", "--data-host 127.0.0.2"),
    ],
)
def test_a_worker_whose_certificate_names_another_host_does_not_start(
    role: str, host: str, flag: str, tmp_path: Path
) -> None:
    tls = tls_argv_of(made_security(TOKEN, tmp_path))
    model = f"--model-path={GOLDEN / 'model'}"
    command = start(tmp_path, role, model, "--registry-address=127.0.0.1:1", host, *tls)
    expected = f"{flag} is how peers reach us, and peers would not take {tmp_path / 'cert.pem'}: "
    assert expected + "IP address mismatch" in refused(command)
    assert "loading weights" not in command.text


def test_a_registry_whose_certificate_no_peer_would_take_by_any_name_does_not_start(
    tmp_path: Path,
) -> None:
    made = made_security(TOKEN, tmp_path, "-addext", "extendedKeyUsage=clientAuth")
    port = f"--disaggregation-bootstrap-port={free_port()}"
    command = start(tmp_path, "registry", port, *tls_argv_of(made))
    try:
        expected = (
            f"kvferry registry: peers would not take {made.cert_file}: unsuitable certificate"
        )
        assert expected in refused(command)
    finally:
        command.kill()


def is_ready(http: httpx.Client, started: list[Command]) -> bool:
    for command in started:
        assert command.process.poll() is None, command.text
    try:
        return http.get("/health").status_code == 200
    except httpx.TransportError:
        return False
