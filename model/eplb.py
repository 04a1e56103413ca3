"""Where experts are placed: loads in, placement out. Pure; the caller moves the weights.

The physical experts of a layer are ordered by part, part 0 first; all parts have equally many. A
logical expert may have copies, each in a different part, which share its rows.

Source: deepseek-ai/EPLB: README.md, the policy for all parts at once: copies for the most loaded
experts, then the heaviest first, each to the least loaded part. Ours keeps copies of one expert in
different parts, since two in one part would be read twice for nothing, and moves as few experts as
it can.
"""

import heapq
from dataclasses import dataclass
from typing import Final

import numpy as np

TRIVIAL: Final = "trivial"  # physical expert p is logical expert p modulo their number


@dataclass(frozen=True)
class ExpertPolicy:
    """Where experts are at the start, and when they are placed anew. Names are those of flags."""

    ep_num_redundant_experts: int = 0
    init_expert_location: str = TRIVIAL
    enable_eplb: bool = False
    expert_distribution_file: str = ""
    eplb_rebalance_num_iterations: int = 1000
    eplb_rebalance_layers_per_chunk: int = 1
    eplb_min_rebalancing_utilization_threshold: float = 1.0

    @property
    def places_experts(self) -> bool:
        """Whether the programs need a placement at all."""
        moved = self.init_expert_location != TRIVIAL
        return self.enable_eplb or moved or self.ep_num_redundant_experts > 0


AS_TRAINED: Final = ExpertPolicy()


def trivial(num_experts: int, num_physical: int) -> np.ndarray:
    """The placement as loaded: i32[physical], logical experts."""
    return np.arange(num_physical, dtype=np.int32) % np.int32(num_experts)


def balancedness(loads: np.ndarray, placed: np.ndarray, num_parts: int) -> float:
    """Mean load of the parts over that of the fullest, 1 at best; 1 where there is no load.

    loads: [experts], rows that chose each. placed: i32[physical], logical experts. Copies of an
    expert have equal shares.
    """
    shares = loads / np.maximum(np.bincount(placed, minlength=len(loads)), 1)
    parts = shares[placed].reshape(num_parts, -1).sum(axis=1)
    fullest = float(parts.max())
    return float(parts.mean()) / fullest if fullest > 0 else 1.0


def balanced(loads: np.ndarray, placed: np.ndarray, num_parts: int) -> np.ndarray:
    """A placement for these loads that moves few experts of the present one.

    loads: [experts], rows that chose each. placed: i32[physical], the present one. Returns
    i32[physical]: every expert at least once, and no two copies in one part while there is room
    elsewhere.
    """
    copies = _copies(loads, len(placed), num_parts)
    parts = _packed(loads / copies, copies, num_parts, len(placed) // num_parts)
    return _least_moves(parts, placed.reshape(num_parts, -1))


def sources(old: np.ndarray, new: np.ndarray, num_parts: int) -> np.ndarray:
    """The physical expert whose weights each takes, of its own part if possible: i32[physical].

    old, new: i32[physical], logical experts before and after.
    """
    size = len(old) // num_parts
    homes: dict[int, list[int]] = {}
    for place, expert in enumerate(old.tolist()):
        homes.setdefault(expert, []).append(place)
    found = np.arange(len(new), dtype=np.int32)
    for place, expert in enumerate(new.tolist()):
        if expert != old[place]:
            near = (home for home in homes[expert] if home // size == place // size)
            found[place] = next(near, homes[expert][0])
    return found


def copies_of(placed: np.ndarray, num_experts: int, most: int) -> tuple[np.ndarray, np.ndarray]:
    """(i32[layers, experts, most] places of each expert's copies, i32[layers, experts] how many).

    placed: i32[layers, physical], logical experts. Entries past an expert's copies repeat them.
    """
    num_layers = len(placed)
    places = np.zeros((num_layers, num_experts, most), np.int32)
    counts = np.zeros((num_layers, num_experts), np.int32)
    for layer, row in enumerate(placed):
        order = np.argsort(row, kind="stable").astype(np.int32)
        counts[layer] = np.bincount(row, minlength=num_experts)
        first = np.cumsum(counts[layer]) - counts[layer]
        nth = np.arange(most) % counts[layer][:, None]
        places[layer] = order[first[:, None] + nth]
    return places, np.minimum(counts, np.int32(most))


def _copies(loads: np.ndarray, num_physical: int, num_parts: int) -> np.ndarray:
    """How many copies each expert gets: each further one goes where the shares are largest."""
    copies = np.ones(len(loads), np.int64)
    heap = [(-float(load), expert) for expert, load in enumerate(loads)]
    heapq.heapify(heap)
    for _ in range(num_physical - len(loads)):
        _, expert = heapq.heappop(heap)
        copies[expert] += 1
        if copies[expert] < num_parts:
            heapq.heappush(heap, (-float(loads[expert]) / int(copies[expert]), expert))
    return copies


def _packed(shares: np.ndarray, copies: np.ndarray, num_parts: int, size: int) -> list[list[int]]:
    """Experts of each part: the heaviest first, all its copies to the parts with the least load."""
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    totals = [0.0] * num_parts
    for expert in np.argsort(-shares, kind="stable").tolist():
        share = float(shares[expert])
        open_parts = [part for part in range(num_parts) if len(parts[part]) < size]
        chosen = heapq.nsmallest(int(copies[expert]), open_parts, key=lambda p: (totals[p], p))
        for part in chosen:
            parts[part].append(expert)
            totals[part] += share
        for _ in range(int(copies[expert]) - len(chosen)):
            _make_room(parts, totals, shares, expert, size)
    return parts


def _make_room(
    parts: list[list[int]], totals: list[float], shares: np.ndarray, expert: int, size: int
) -> None:
    """Place one more copy where only parts that have the expert are open: another expert moves.

    An expert that the open part lacks moves there from a full part, which takes the copy. There
    always is one: the full part has `size` experts without this one, the open part fewer than
    `size` with it.
    """
    to = min(
        (part for part in range(len(parts)) if len(parts[part]) < size), key=lambda p: totals[p]
    )
    full = [part for part in range(len(parts)) if expert not in parts[part]]
    fro = min(full, key=lambda p: totals[p])
    lighter = [other for other in parts[fro] if other not in parts[to]]
    other = min(lighter, key=lambda e: abs(float(shares[e]) - float(shares[expert])))
    parts[fro].remove(other)
    parts[to].append(other)
    parts[fro].append(expert)
    totals[to] += float(shares[other])
    totals[fro] += float(shares[expert]) - float(shares[other])


def _least_moves(parts: list[list[int]], old: np.ndarray) -> np.ndarray:
    """Give each set of experts to the part that has most of them; experts stay in their places."""
    taken = [set(row.tolist()) for row in old]
    pairs = [
        (-len(taken[part].intersection(experts)), part, idx)
        for part in range(len(parts))
        for idx, experts in enumerate(parts)
    ]
    chosen: dict[int, int] = {}
    for _, part, idx in sorted(pairs):
        if part not in chosen and idx not in chosen.values():
            chosen[part] = idx
    placed = np.full(old.shape, -1, np.int32)
    for part, idx in chosen.items():
        left = list(parts[idx])
        for place, expert in enumerate(old[part].tolist()):
            if expert in left:
                placed[part, place] = expert
                left.remove(expert)
        placed[part, placed[part] < 0] = left
    return placed.ravel()
