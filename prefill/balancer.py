"""Which data-parallel rank of prefill takes the next prompt.

Pure: loads in, a rank out. The choice is made when the prompt is about to be computed, so it weighs
what the ranks have to do at that moment. Only `follow_bootstrap_room` does not depend on the
moment: the rank follows from the room number alone, and no load is looked at.
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
    """Work that is bound to a rank but not yet computed, and pages that it could give a prompt."""

    queued_requests: int
    queued_tokens: int  # to compute; for prompts not begun, without what the rank's cache has
    pages_free: int  # cached pages that nobody holds count as free


class Balancer:
    """Picks ranks by one method; among equals, the one picked longest ago."""

    def __init__(self, method: Method, dp_size: int) -> None:
        """Raises ConfigError for an unknown method or for fewer than one rank."""
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

    def rank_of(self, room: int) -> int:
        """The rank that follows from the room's number; -1: it is to be picked."""
        return room % self.dp_size if self.method == "follow_bootstrap_room" else -1

    def pick(
        self,
        num_tokens: int,
        loads: Sequence[RankLoad],
        cached_tokens: Sequence[int],
        among: Collection[int],
    ) -> int:
        """Choose the rank for a prompt of num_tokens >= 1, and count it as picked.

        among: ranks to choose from, not empty.

        loads, cached_tokens: one per rank; cached_tokens is what the rank's cache has of this
        prompt. A caller that binds several prompts in one turn adds each to its rank's load before
        the next pick, less what the cache has: if cached tokens counted as work, a rank would seem
        busy while its chunks are half empty.
        """
        assert len(loads) == len(cached_tokens) == self.dp_size, (len(loads), len(cached_tokens))
        cost = self._costs[self.method]

        def order(rank: int) -> tuple[tuple[int, ...], bool, int]:
            load = loads[rank]
            # A rank without a free page still has pages on their way to decode: it loses a tie.
            full = load.pages_free <= 0 and self.method != "round_robin"
            return cost(load, num_tokens - cached_tokens[rank]), full, self._last_picks[rank]

        picked = min(sorted(among), key=order)
        self._picks += 1
        self._last_picks[picked] = self._picks
        return picked


def _cost_with_prefix(load: RankLoad, uncached_tokens: int) -> tuple[int, ...]:
    """Tokens to compute before this prompt is done: a cached prefix is worth its own length."""
    return (load.queued_tokens + uncached_tokens, load.queued_requests)
