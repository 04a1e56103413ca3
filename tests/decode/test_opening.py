"""What decode refuses at its start."""

import socket
from pathlib import Path
from typing import Any

import pytest

from decode.config import DecodeConfig
from decode.opening import build_engine
from decode.worker import DecodeWorker
from model.errors import ModelError
from transfer.errors import ConfigError
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


def test_a_data_port_that_is_taken_is_told_before_weights_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("model.opening.load_params", _read)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = DecodeConfig(MODEL, "127.0.0.1:8998", context_length=64, data_port=port)
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}: .*; choose another --data-port"):
            DecodeWorker(config, Security("a token of the tests")).build()


def _read(*args: Any, **more: Any) -> None:
    raise AssertionError("read the weights")
