"""Which data-parallel rank of prefill takes the next prompt.

Pure: loads in, a rank out. The choice is made when the prompt is about to be computed, so what it
weighs is what the ranks have to do now. `follow_bootstrap_room` alone needs no such moment: anyone
who knows the room knows the rank, and no load is looked at.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from transfer.errors import ConfigError

Method = Literal[
    "round_robin", "shortest_queue", "total_tokens", "follow_bootstrap_room", "prefix_aware"
]
METHODS: tuple[Method, ...] = get_args(Method)


@dataclass(frozen=True, slots=True)
class RankLoad:
    """Work bound to a rank and not yet computed, and its pages that a prompt could take."""

    queued_requests: int
    queued_tokens: int  # to compute: without those of prompts not begun that its cache has
    pages_free: int  # cached pages that nobody holds count as free


class Balancer:
    """Picks ranks by one method; equals take turns, the one picked longest ago first."""

    def __init__(self, method: Method, dp_size: int) -> None:
        """Raises ConfigError for a method that does not exist or fewer ranks than one."""
        if method not in METHODS:
            raise ConfigError(f"balancing takes {', '.join(METHODS)}, got {method!r}")
        if dp_size < 1:
            raise ConfigError(f"prompts are balanced over 1 rank at least, got {dp_size}")
        self.method: Method = method
        self.dp_size = dp_size
        self._picks = 0
        self._last_picks = [0] * dp_size  # number of the latest pick of each rank; 0: none yet
        self._costs: dict[Method, Callable[[RankLoad, int], tuple[int, ...]]] = {
            "round_robin": lambda load, uncached: (),
            "shortest_queue": lambda load, uncached: (load.queued_requests, load.queued_tokens),
            "total_tokens": lambda load, uncached: (load.queued_tokens, load.queued_requests),
            "prefix_aware": _cost_with_prefix,
        }

    def pick(
        self,
        room: int,
        num_tokens: int,
        loads: Sequence[RankLoad],
        cached_tokens: Sequence[int],
        among: Collection[int] | None = None,
    ) -> int:
        """The rank for a prompt of num_tokens >= 1; it counts as picked.

        among: ranks to choose from, not empty, None for all; one that follows from the room is
        taken whatever they are.

        loads, cached_tokens: one a rank, the latter what its cache has of this prompt. Whoever
        binds several prompts in one turn adds each to its rank's load before the next pick,
        less what the cache has: a rank whose cached tokens counted as work would pass for busy
        with chunks half empty.
        """
        assert len(loads) == len(cached_tokens) == self.dp_size, (len(loads), len(cached_tokens))
        if self.method == "follow_bootstrap_room":
            return room % self.dp_size
        cost = self._costs[self.method]

        def order(rank: int) -> tuple[tuple[int, ...], bool, int]:
            load = loads[rank]
            # Its last pages are still on their way to decode: no choice while others are equal.
            full = load.pages_free <= 0 and self.method != "round_robin"
            return cost(load, num_tokens - cached_tokens[rank]), full, self._last_picks[rank]

        picked = min(range(self.dp_size) if among is None else sorted(among), key=order)
        self._picks += 1
        self._last_picks[picked] = self._picks
        return picked


def _cost_with_prefix(load: RankLoad, uncached_tokens: int) -> tuple[int, ...]:
    """Tokens to compute before this prompt is done: a cached prefix is worth its own length."""
    return (load.queued_tokens + uncached_tokens, load.queued_requests)
