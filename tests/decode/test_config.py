"""Limits of a decode worker are checked before anything starts."""

from pathlib import Path

import pytest

from decode.config import DecodeConfig
from transfer.errors import ConfigError


@pytest.mark.parametrize("flag", ["host", "data_host"])
@pytest.mark.parametrize("address", ["0.0.0.0", "::"])
def test_an_address_that_no_peer_can_reach_is_refused(flag: str, address: str) -> None:
    told = {flag: address}
    with pytest.raises(ConfigError, match=f"--{flag.replace('_', '-')} .*{address}"):
        DecodeConfig(Path("model"), "127.0.0.1:8998", **told)  # type: ignore[arg-type]
