"""A decode worker's limits are checked before anything starts."""

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


@pytest.mark.parametrize(
    ("told", "says"),
    [
        (
            {"speculative_num_draft_tokens": 0},
            "--speculative-num-draft-tokens must be at least 1, got 0",
        ),
        (
            {"speculative_num_draft_tokens": 65},
            "--speculative-num-draft-tokens must be at most 64, got 65",
        ),
        (
            {"speculative_ngram_min_match_window_size": 0},
            "--speculative-ngram-min-match-window-size must be at least 1, got 0",
        ),
        (
            {"speculative_ngram_min_match_window_size": 9},
            "--speculative-ngram-max-match-window-size must be at least 9, got 4",
        ),
    ],
)
def test_drafts_that_cannot_be_made_are_refused(told: dict[str, int], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        DecodeConfig(Path("model"), "127.0.0.1:8998", **told)  # type: ignore[arg-type]
