"""`kvferry up` says defaults, what a role in front of a flag means, and whose flag it refuses."""

from pathlib import Path

import pytest

from serving import up
from tests.serving.test_flags import ROLES
from transfer.errors import ConfigError


@pytest.mark.parametrize(
    "said",
    [
        "defaults are read from it; default: the demo model --host STR",
        "data-parallel rank (virtual ones on CPU) (default: 1) --ep-size INT",
        "prompts packed into one chunk (default: 8) --transfer-connections INT",
        "prefill only: --prefill-X sets X for prefill alone, whatever --X says to both roles",
        "decode only: --decode-X sets X for decode alone, whatever --X says to both roles",
    ],
)
def test_help_of_up_says_defaults_and_what_a_role_in_front_means(said: str) -> None:
    assert said in " ".join(up._parser("kvferry up", ROLES).format_help().split())


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_what_one_role_refuses_is_told_with_its_name(role: str, tmp_path: Path) -> None:
    given = [f"--model-path={tmp_path}", f"--{role}-dp-size=0"]
    with pytest.raises(ConfigError, match=f"^{role}: --dp-size must be at least 1, got 0$"):
        up.main(given, "kvferry up", ROLES)
