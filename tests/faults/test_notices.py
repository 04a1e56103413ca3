"""Notices of a fault are matched to it, however many faults follow."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from tests.faults import member, notices
from tests.faults.member import Line
from tests.faults.notices import SILENCE_NOTICED_S, Notices
from tests.faults.plan import Fault


@dataclass
class Member:
    name: str
    role: str
    life: int = 1
    up: bool = True

    @property
    def leader(self) -> "Member":
        return self

    def hurt(self, *_: float) -> list[Any]:
        return []


@dataclass
class System:
    members: dict[str, Member]
    open: dict[str, set[str]] = field(default_factory=dict)

    def named(self, role: str) -> list[Member]:
        return [member for member in self.members.values() if member.role == role]


def _notices(now_s: list[float], monkeypatch: pytest.MonkeyPatch) -> Notices:
    members = [
        Member("decode-0", "decode"),
        Member("prefill-0", "prefill"),
        Member("api-0", "api"),
    ]
    system: Any = System({member.name: member for member in members}, {"api-0": {"decode-0"}})
    traffic: Any = SimpleNamespace(flights={})
    monkeypatch.setattr(notices, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    return Notices(system, traffic)


def _fault(number: int, kind: Any, lasts_s: float, role: Any = "decode") -> Fault:
    return Fault(number, kind, role, "first_token", 0, 0.0, lasts_s, 0.0)


def test_a_hang_that_thirty_other_faults_follow_is_noticed_when_it_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = [100.0]
    heard = _notices(now_s, monkeypatch)
    hang = heard.struck(_fault(1, "hang", 5.8), "decode-0", "first_token")
    for number in range(2, 32):
        now_s[0] += 0.1
        heard.struck(_fault(number, "flip", 0.0), "decode-0", "mid_frame")
    heard.hear(Line("api-0", 1, 103.4, "worker decode-0 broke off: it said nothing for 3 s"))
    assert hang.noticed == {"api-0": pytest.approx(3.4)}
    assert heard.overdue(hang, 0.0) == []


def test_who_says_nothing_in_time_is_a_finding_and_late_words_are_no_excuse(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heard = _notices([100.0], monkeypatch)
    hang = heard.struck(_fault(1, "hang", 5.8), "decode-0", "first_token")
    heard.hear(Line("api-0", 1, 99.0, "worker decode-0 broke off: of another fault"))
    heard.hear(Line("api-0", 2, 101.0, "worker decode-0 broke off: told in another life"))
    heard.hear(Line("api-0", 1, 101.0, "worker decode-1 broke off: another worker"))
    assert [text.partition(": api-0 ")[2] for text in heard.overdue(hang, 0.0)] == [
        f"noticed never, expected within {SILENCE_NOTICED_S:g} s"
    ]
    heard.hear(Line("api-0", 1, 107.0, "worker decode-0 broke off: it said nothing for 3 s"))
    (found,) = heard.overdue(hang, 0.0)
    assert found.endswith(f"api-0 noticed after 7.00 s, expected within {SILENCE_NOTICED_S:g} s")


@pytest.mark.parametrize(
    ("room", "at_s", "num_found"),
    [(7, 101.0, 0), (7, 120.0, 1), (8, 101.0, 1)],
    ids=["its room", "its room, long after", "another room"],
)
def test_a_connection_whose_room_was_preempted_may_stall_unnoticed(
    room: int, at_s: float, num_found: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = _notices([100.0], monkeypatch)
    stall = heard.struck(_fault(1, "stall", 5.8, "link"), "decode-0", "mid_chunk", "prefill-0", 7)
    text = f"f1 is preempted in room {room}: older requests need its pages"
    heard.hear(Line("decode-0", 1, at_s, text))
    assert len(heard.overdue(stall, 0.0)) == num_found


def test_a_node_that_ends_long_after_a_fault_of_its_worker_has_no_excuse() -> None:
    """While it starts, what happened before excuses it: the others may still have been ending."""
    leader, other = _nodes()
    other.freeze()
    other.thaw()
    assert leader.odd_end() == []  # exit code 1, at once
    (trouble,) = other.troubles
    trouble.start_s -= 2 * member.ODD_ENDS_S
    trouble.end_s -= 2 * member.ODD_ENDS_S
    assert leader.odd_end() == ["decode-0 ended with 1, told to: nothing; at last: "]


def _nodes() -> tuple[member.Member, member.Member]:
    """Two nodes that were ready; the first has ended."""
    leader = member.Member("decode-0", "decode", (), lambda _: None, 0)
    other = member.Member("decode-0.1", "decode", (), lambda _: None, 0, leader=leader)
    leader.exit_code = lambda: 1  # type: ignore[method-assign]
    leader.ready = other.ready = True
    return leader, other
