"""When processes noticed a fault, and which requests moved, read off the processes' output."""

import math
import re
import time
from dataclasses import dataclass, field

from tests.faults.member import Line
from tests.faults.plan import Fault
from tests.faults.system import System
from tests.faults.traffic import Traffic

KILL_NOTICED_S = 1.0
# A stream is given up after 3 s of silence, checked every 0.5 s; its last message came up to 0.5 s
# before the fault. A data connection is lost after its stall timeout of 3 s, counted from its next
# sign of life.
SILENCE_NOTICED_S = 4.5
_LISTENED_S = 12.0  # for a strike: longer than any fault lasts, or takes to be noticed
_BROKE = re.compile(r"worker (\S+) (?:broke off|has drained)")
_MOVES = re.compile(r"(\S+) moves: ")
_PREEMPTED = re.compile(r" is preempted in room (\d+):")
_PAGES_LOST = re.compile(r"page connection closed with \d+ rooms")


@dataclass
class Strike:
    """A fault that was injected, and what was seen of it. Times are monotonic seconds."""

    fault: Fault
    target: str
    hit: str  # the phase that was hit; "missed" if the request was past it
    at_s: float
    life: int
    room: int = 0  # of the frame that a fault of a link hit
    seen_by: dict[str, int] = field(default_factory=dict)  # processes that should notice it -> life
    frames: dict[str, int] = field(default_factory=dict)  # request -> token frames before the fault
    noticed: dict[str, float] = field(default_factory=dict)  # who -> seconds after
    moved: dict[str, float] = field(default_factory=dict)  # request -> seconds after
    excused: str = ""  # why it need not be noticed: what ended the rooms of the link that it hit

    @property
    def bound_s(self) -> float:
        """Seconds within which it must be noticed; inf if it need not be."""
        fault = self.fault
        if fault.kind in ("kill", "int"):
            return KILL_NOTICED_S
        if fault.kind == "hang_kill":
            return fault.lasts_s + KILL_NOTICED_S
        if fault.kind == "cut":
            return KILL_NOTICED_S
        if fault.kind in ("hang", "stall", "part") and fault.lasts_s > SILENCE_NOTICED_S:
            return SILENCE_NOTICED_S
        return math.inf


class Notices:
    """Listens to what all processes say about the latest strikes."""

    def __init__(self, system: System, traffic: Traffic) -> None:
        self.strikes: list[Strike] = []
        self._preempted_s: dict[int, float] = {}  # by room
        self._system = system
        self._traffic = traffic

    def struck(
        self, fault: Fault, target: str, hit: str, sender: str = "", room: int = 0
    ) -> Strike:
        """Call at the moment of the fault. sender: prefill's end of a data connection."""
        system = self._system
        member = system.members[target]
        strike = Strike(fault, target, hit, time.monotonic(), member.life, room)
        strike.frames = {rid: f.told.frames for rid, f in self._traffic.flights.items()}
        if sender:
            strike.seen_by = {sender: system.members[sender].life}
        elif member.role in ("prefill", "decode"):
            strike.seen_by = {
                api.name: api.life
                for api in system.named("api")
                if api.up and member.leader.name in system.open[api.name]
            }
        self.strikes.append(strike)
        return strike

    def hear(self, line: Line) -> None:
        for strike in reversed(self.strikes):
            if line.at_s - strike.at_s > _LISTENED_S:
                break
            if strike.seen_by.get(line.member) != line.life or line.at_s < strike.at_s:
                continue
            found = _BROKE.search(line.text)
            of_pages = strike.fault.role == "link" and _PAGES_LOST.search(line.text)
            worker = self._system.members[strike.target].leader.name
            if not (of_pages or (found and found[1] == worker)):
                continue
            if not self._system.members[line.member].hurt(strike.at_s):
                strike.noticed.setdefault(line.member, line.at_s - strike.at_s)
        if found := _PREEMPTED.search(line.text):
            self._preempted_s[int(found[1])] = line.at_s
        if found := _MOVES.search(line.text):
            self._moved(found[1], line.at_s)

    def _moved(self, request_id: str, at_s: float) -> None:
        """Credit the move to the latest strike that can be its cause."""
        for strike in reversed(self.strikes):
            if strike.fault.role not in ("api", "registry") and strike.at_s <= at_s:
                if request_id in strike.frames:
                    strike.moved.setdefault(request_id, at_s - strike.at_s)
                return

    def overdue(self, strike: Strike, lag_s: float) -> list[str]:
        """Processes that should have noticed and did not. lag_s: how late this machine was."""
        wrong: list[str] = []
        if strike.fault.role == "link":
            strike.excused = self._what_ended_rooms(strike, lag_s)
        if strike.excused:
            return wrong
        for name, life in strike.seen_by.items():
            witness = self._system.members[name]
            if witness.hurt(strike.at_s) or witness.life != life:
                continue
            took_s = strike.noticed.get(name, math.inf)
            if took_s > strike.bound_s + lag_s:
                when = "never" if took_s == math.inf else f"after {took_s:.2f} s"
                wrong.append(
                    f"{strike.fault} of {strike.target}: {name} noticed {when}, "
                    f"expected within {strike.bound_s:g} s"
                )
        return wrong

    def _what_ended_rooms(self, strike: Strike, lag_s: float) -> str:
        """What may have ended all rooms of a connection, which then owes no signs of life.

        "" if nothing did.
        """
        until_s = strike.at_s + strike.bound_s + lag_s
        if self._preempted_s.get(strike.room, math.inf) < until_s:
            return "preemption"
        ends = self._system.members[strike.target].hurt(strike.at_s, until_s)
        if any(trouble.kind != "freeze" for trouble in ends):
            return "end of decode"
        if any(api.hurt(strike.at_s, until_s) for api in self._system.named("api")):
            return "fault of api"
        return ""
