"""`kvferry up --help` says the defaults, and what a role in front of a flag means."""

import pytest

from serving import up
from tests.serving.test_flags import ROLES


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
