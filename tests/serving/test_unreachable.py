"""Paths that cannot be looked at, or read to an end: refused in one line for the operator."""

import argparse
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from decode.config import DecodeConfig
from model.config import ModelConfig
from model.errors import ModelError
from serving.config import ServeConfig
from transfer import flags
from transfer.errors import ConfigError

# Root may enter every folder, but no system has such names: it fails alike, with an OSError.
UNREACHABLE = Path("/tmp") / ("x" * 300) / "file"


def _certificates() -> None:
    paths = {f"tls_{name}_file": UNREACHABLE for name in ("ca", "cert", "key")}
    flags.security_from(argparse.Namespace(cluster_token_file=None, **paths))


def _counts() -> None:
    placing = {"ep_size": 2, "enable_eplb": True, "expert_distribution_file": str(UNREACHABLE)}
    DecodeConfig(Path("m"), "127.0.0.1:1", tp_size=2, **placing)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("read", "start"),
    [
        (lambda: ModelConfig.from_dir(UNREACHABLE), "--model-path /tmp/x"),
        (_certificates, "TLS: /tmp/x"),
        (_counts, "--expert-distribution-file: /tmp/x"),
    ],
    ids=["model", "certificates", "counts"],
)
def test_a_path_that_cannot_be_reached_is_named_with_the_reason(
    read: Callable[[], object], start: str
) -> None:
    with pytest.raises((ModelError, ConfigError)) as caught:
        read()
    assert str(caught.value).startswith(start)
    assert str(caught.value).endswith(" cannot be reached: File name too long")


def _template(path: str) -> None:
    ServeConfig(Path("m"), "127.0.0.1:1", chat_template=path)


def _location(path: str) -> None:
    DecodeConfig(Path("m"), "127.0.0.1:1", tp_size=2, ep_size=2, init_expert_location=path)


@pytest.mark.parametrize(
    ("read", "flag"),
    [(_template, "--chat-template"), (_location, "--init-expert-location")],
)
def test_a_pipe_in_place_of_a_flags_file_is_refused_and_not_waited_for(
    read: Callable[[str], None], flag: str, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match=rf"{flag}: .*/pipe is a pipe, socket or device"):
        read(str(tmp_path / "pipe"))


def test_of_a_token_file_without_end_only_the_beginning_is_read() -> None:
    nothing = {f"tls_{name}_file": None for name in ("ca", "cert", "key")}
    args = argparse.Namespace(cluster_token_file=Path("/dev/zero"), **nothing)
    with pytest.raises(ConfigError, match="a cluster token of at most 4096 characters is needed"):
        flags.security_from(args)
