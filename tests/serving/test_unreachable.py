"""Paths that this process may not even look at: refused in one line, for the operator to mend."""

import argparse
from collections.abc import Callable
from pathlib import Path

import pytest

from decode.config import DecodeConfig
from model.config import ModelConfig
from model.errors import ModelError
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
