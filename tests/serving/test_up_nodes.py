"""`up` and workers over several processes: one command for each."""

import dataclasses

import pytest

from decode.config import DecodeConfig
from prefill.config import PrefillConfig
from serving import up
from tests.serving.test_flags import ROLES, parse, up_args
from transfer.errors import ConfigError


def test_each_process_of_a_group_has_the_flags_of_all_and_a_rank() -> None:
    args = up_args("--decode-nnodes=2", "--tp-size=2", "--decode=2")
    (alone,) = up._group("prefill", PrefillConfig, 0, "a:1", args)
    groups = [[*up._group("decode", DecodeConfig, number, "a:1", args)] for number in range(2)]
    assert (alone.name, alone.group) == ("prefill-0", "")
    names = [[(spec.name, spec.group) for spec in group] for group in groups]
    wanted = [("decode-0", "decode-0.1"), ("decode-1", "decode-1.1")]
    assert names == [[(first, first), (second, first)] for first, second in wanted]
    meeting = set()
    for group in groups:
        first, second = (parse(DecodeConfig, [*spec.argv[1:]]) for spec in group)
        assert dataclasses.replace(first, node_rank=1) == second
        assert (first.nnodes, first.tp_size, first.node_rank) == (2, 2, 0)
        meeting.add(first.dist_init_addr)
    assert len(meeting) == 2


@pytest.mark.parametrize(
    ("argv", "groups"),
    [
        (["--expert-distribution-file=a.json"], "prefill-0, decode-0"),
        (["--decode-expert-distribution-file=a.json", "--decode=2"], "decode-0, decode-1"),
    ],
)
def test_what_experts_were_chosen_is_written_by_one_group_only(
    argv: list[str], groups: str
) -> None:
    moving = ["--tp-size=2", "--ep-size=2", "--enable-eplb"]
    with pytest.raises(ConfigError, match=f"a.json would be written by {groups}: name it for one"):
        up.main([*moving, *argv], "kvferry up", ROLES)
