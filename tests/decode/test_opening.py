"""What decode refuses at its start."""

import socket
from pathlib import Path
from typing import Any

import pytest

from decode.__main__ import main
from decode.config import ANY_PROMPT, DecodeConfig
from decode.opening import build_engine
from decode.worker import DecodeWorker
from model.errors import ModelError
from model.promises import Promises
from transfer.errors import ConfigError
from transfer.flags import TOKEN_ENV
from transfer.rpc import Security

MODEL = Path(__file__).resolve().parents[1] / "goldens" / "qwen3" / "model"


@pytest.mark.parametrize(
    ("flags", "error", "message"),
    [
        (
            {"speculative_algorithm": "NGRAM", "page_size": 2},
            ModelError,
            "--speculative-num-draft-tokens 3 must be below --page-size 2",
        ),
        (
            {"transfer_staging_bytes": 4096},
            ConfigError,
            "--transfer-staging-bytes must be at least .*, got 4096",
        ),
        (  # also where no chunk is computed: the flag is checked like those of drafts
            {"chunked_prefill_size": 40},
            ModelError,
            "--page-size 16 does not divide --chunked-prefill-size 40",
        ),
    ],
)
def test_flags_that_do_not_fit_are_told_before_weights_are_read(
    flags: dict[str, Any],
    error: type[Exception],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("model.opening.load_params", _read)
    with pytest.raises(error, match=message):
        build_engine(DecodeConfig(MODEL, "127.0.0.1:8998", context_length=64, **flags))


def test_slots_that_can_never_be_used_are_told(caplog: pytest.LogCaptureFixture) -> None:
    flags: dict[str, Any] = {"max_running_requests": 2048, "transfer_staging_bytes": 4096}
    for most in (2048, 1024):
        assert caplog.messages == []
        with pytest.raises(ConfigError, match="staging"):  # so nothing is loaded
            build_engine(DecodeConfig(MODEL, "127.0.0.1:8998", max_queued_requests=most, **flags))
    assert caplog.messages[0] == "of 2048 slots 1024 can be used: raise --max-queued-requests"


@pytest.mark.parametrize(
    ("flags", "num_mib"),
    [
        ({}, 128),
        ({"transfer_staging_bytes": 32 << 20}, 32),
        ({"disaggregation_transfer_backend": "tcp"}, 256),
        ({"local_prefill_tokens": ANY_PROMPT}, 0),  # colocated: no pages come
    ],
)
def test_memory_for_pages_that_come_is_promised(
    flags: dict[str, Any], num_mib: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    promises = Promises(tmp_path)
    monkeypatch.setattr("decode.opening.PROMISES", promises)
    monkeypatch.setattr("transfer.choice.default_connections", lambda: 1)
    monkeypatch.setattr("model.opening.load_params", _stop)
    with pytest.raises(_Stopped):
        build_engine(DecodeConfig(MODEL, "127.0.0.1:8998", context_length=64, **flags))
    assert promises.lent_bytes == num_mib << 20


def test_a_data_port_that_is_taken_is_told_before_weights_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("model.opening.load_params", _read)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = DecodeConfig(MODEL, "127.0.0.1:8998", context_length=64, data_port=port)
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}: .*; choose another --data-port"):
            DecodeWorker(config, Security("a token of the tests")).build()


def test_a_node_that_does_not_lead_needs_no_data_port(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    monkeypatch.setenv(TOKEN_ENV, "a token of the tests")
    monkeypatch.setattr("decode.__main__.rest_while_starting", lambda: None)
    monkeypatch.setattr("transfer.process.run", lambda *of: started.append(of))
    with socket.create_server(("127.0.0.1", 0)) as taken:  # by node 0, on the same host
        port = taken.getsockname()[1]
        flags = ["--registry-address=127.0.0.1:8998", "--tp-size=2", "--nnodes=2", "--node-rank=1"]
        more = ["--dist-init-addr=127.0.0.1:5000", f"--data-port={port}"]
        main([f"--model-path={MODEL}", *flags, *more])
    assert len(started) == 1


def _read(*args: Any, **more: Any) -> None:
    raise AssertionError("read the weights")


class _Stopped(Exception):
    pass


def _stop(*_: Any, **__: Any) -> None:
    raise _Stopped
