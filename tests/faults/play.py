"""One campaign, from its flags to its figures."""

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.faults.campaign import Campaign
from tests.faults.member import Line
from tests.faults.network import Loopback, Namespaces, why_no_namespaces, why_no_netem
from tests.faults.notices import Strike
from tests.faults.plan import Means
from tests.faults.system import SIZES, System
from tests.faults.traffic import NUM_ASKS


@dataclass
class Played:
    """What was seen in a campaign that kept every promise."""

    strikes: list[Strike]
    ends: Counter[str]
    seconds: float
    settled_s: list[float]

    def summary(self) -> dict[str, Any]:
        """A few figures, by name."""
        return {
            "faults": len(self.strikes),
            "seconds": round(self.seconds, 1),
            "requests": dict(self.ends),
            "kinds": dict(Counter(f"{s.fault.kind} {_what(s)}" for s in self.strikes)),
            "phases hit": dict(Counter(s.hit for s in self.strikes)),
            "requests moved": sum(len(s.moved) for s in self.strikes),
            "moved before / after first token": _moved(self.strikes),
            "need not be noticed": dict(Counter(s.excused for s in self.strikes if s.excused)),
            **_noticed(self.strikes),
        }

    def as_dict(self) -> dict[str, Any]:
        rows = [
            {
                **asdict(s.fault),
                "target": s.target,
                "hit": s.hit,
                "noticed_s": s.noticed,
                "moved_s": s.moved,
            }
            for s in self.strikes
        ]
        return {"summary": self.summary(), "settled_s": self.settled_s, "rows": rows}


async def play(
    folder: Path,
    *,
    faults: int,
    seed: int,
    backend: str = "tcp",
    network: str = "loopback",
    clients: int = 6,
    settle_every: int = 25,
    long_share: float = 0.3,
    model: Path | None = None,
    sizes: Mapping[str, tuple[str, ...]] = SIZES,
    nodes: Mapping[str, int] | None = None,
    few_steps: bool = False,
    num_asks: int = NUM_ASKS,
    tell: Callable[[Strike], None] = lambda strike: None,
) -> Played:
    """Start a system, inject faults, stop it. Raises Broken; RuntimeError without namespaces.

    model, sizes, nodes, few_steps: see System. num_asks: different requests.
    """
    is_apart = network == "namespaces"
    if is_apart and (why := why_no_namespaces()):
        raise RuntimeError(f"this machine has no network namespaces: {why}")
    listeners: list[Callable[[Line], None]] = []
    system = System(
        folder,
        backend=backend,
        model=model,
        sizes=sizes,
        nodes=nodes,
        few_steps=few_steps,
        network=Namespaces() if is_apart else Loopback(),
        on_line=lambda line: [hear(line) for hear in listeners].clear(),
    )
    means = Means(
        frames=bool(system.proxies),
        namespaces=is_apart,
        netem=is_apart and not why_no_netem(),
        long_share=long_share,
    )
    begun_s = time.monotonic()
    try:
        await system.start()
        campaign = Campaign(system, seed, means, clients, settle_every, num_asks)
        listeners.append(campaign.hear)
        await campaign.run(faults, tell)
    finally:
        await system.close()
    return Played(
        campaign.notices.strikes,
        campaign.traffic.ends,
        time.monotonic() - begun_s,
        campaign.settled_s,
    )


def _what(strike: Strike) -> str:
    """The kind of process hurt: not the role aimed at, if a stand-in had to be hit."""
    return "link" if strike.fault.role == "link" else strike.target.rpartition("-")[0] or "registry"


def _moved(strikes: Sequence[Strike]) -> str:
    frames = [s.frames[rid] for s in strikes for rid in s.moved]
    return f"{sum(1 for n in frames if not n)} / {sum(1 for n in frames if n)}"


def _noticed(strikes: Sequence[Strike]) -> dict[str, str]:
    """By kind, seconds from fault to notice: count, median, 90 %, maximum."""
    by_kind: dict[str, list[float]] = {}
    for strike in strikes:
        if strike.bound_s < math.inf and strike.hit != "missed" and not strike.excused:
            of_kind = by_kind.setdefault(f"{strike.fault.kind} {_what(strike)}", [])
            # Count from the kill, if the process was frozen before it.
            begun_s = strike.fault.lasts_s if strike.fault.kind == "hang_kill" else 0.0
            of_kind += [took_s - begun_s for took_s in strike.noticed.values()]
    return {f"noticed: {kind}": _spread(took) for kind, took in sorted(by_kind.items()) if took}


def _spread(values: list[float]) -> str:
    ordered = sorted(values)
    middle, most = ordered[len(ordered) // 2], ordered[-1]
    ninth = ordered[min(int(0.9 * len(ordered)), len(ordered) - 1)]
    return f"{len(ordered)} times, {middle:.3f} / {ninth:.3f} / {most:.3f} s (50 %, 90 %, most)"
