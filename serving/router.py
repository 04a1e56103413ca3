"""Picks the pair of workers for a request, from their reported loads and our own recent choices."""

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from serving.config import Policy
from transfer import wire

Key = tuple[str, int]  # worker id and epoch: one incarnation

# A worker reports its load every 0.5 s and the registry passes it on within 0.25 s, so a choice
# this old is part of what was reported, and counting it further would count it twice.
ACKNOWLEDGED_AFTER_S = 1.0


def key_of(member: wire.Member) -> Key:
    return member.info.worker_id, member.epoch


@dataclass(slots=True, eq=False)
class Pair:
    """The workers of one attempt, and what they are charged until their reports show it."""

    prefill: wire.Member
    decode: wire.Member
    num_tokens: int  # of the prompt and earlier attempts
    picked_s: float  # monotonic
    prefill_charged: bool = True
    decode_charged: bool = True
    prefill_key: Key = field(init=False)
    decode_key: Key = field(init=False)

    def __post_init__(self) -> None:
        self.prefill_key = key_of(self.prefill)
        self.decode_key = key_of(self.decode)


@dataclass(slots=True)
class _Charge:
    requests: int = 0
    tokens: int = 0
    last_pick: int = 0  # rank of the latest pick, to take turns among equals


class Router:
    """Picks by policy: least_load, round_robin, random, power_of_two; never a draining worker."""

    def __init__(self, policy: Policy, seed: int = 0) -> None:
        self._charges: dict[Key, _Charge] = {}
        self._unacknowledged: deque[Pair] = deque()
        self._picks = 0
        self._random = random.Random(seed)
        choosers: dict[str, Callable[[Sequence[wire.Member]], wire.Member]] = {
            "least_load": self._least_loaded,
            "round_robin": self._next_in_turn,
            "random": self._random.choice,
            "power_of_two": self._better_of_two,
        }
        self._choose = choosers[policy]

    def pick(
        self,
        prefills: Sequence[wire.Member],
        decodes: Sequence[wire.Member],
        num_tokens: int,
        now_s: float,
        avoid: frozenset[str] = frozenset(),
    ) -> Pair | None:
        """A pair, charged with the request; None when a role has no worker that takes work.

        avoid: ids of workers to take only when there is no other. now_s: monotonic.
        """
        self._acknowledge(now_s)
        chosen = []
        for members in (prefills, decodes):
            members = [member for member in members if not member.draining]
            members = [m for m in members if m.info.worker_id not in avoid] or members
            if not members:
                return None
            members.sort(key=key_of)
            chosen.append(members)
        prefill, decode = (self._choose(members) for members in chosen)
        pair = Pair(prefill, decode, num_tokens, now_s)
        self._picks += 1
        for member in (prefill, decode):
            charge = self._charge(member)
            charge.requests += 1
            charge.tokens += num_tokens
            charge.last_pick = self._picks
        self._unacknowledged.append(pair)
        return pair

    def prefilled(self, pair: Pair) -> None:
        """Prefill is done with the request."""
        if pair.prefill_charged:
            pair.prefill_charged = False
            self._discharge(pair.prefill, pair.num_tokens)

    def ended(self, pair: Pair) -> None:
        """Neither worker has the request any more."""
        self.prefilled(pair)
        if pair.decode_charged:
            pair.decode_charged = False
            self._discharge(pair.decode, pair.num_tokens)

    def forget(self, key: Key) -> None:
        """That incarnation of a worker is gone."""
        self._charges.pop(key, None)

    def charged_requests(self, key: Key) -> int:
        """Choices of ours that the worker's report does not show yet."""
        charge = self._charges.get(key)
        return 0 if charge is None else charge.requests

    def _acknowledge(self, now_s: float) -> None:
        while self._unacknowledged:
            pair = self._unacknowledged[0]
            charged = pair.prefill_charged or pair.decode_charged
            if charged and now_s - pair.picked_s < ACKNOWLEDGED_AFTER_S:
                return
            self._unacknowledged.popleft()
            self.ended(pair)

    def _charge(self, member: wire.Member) -> _Charge:
        key = key_of(member)
        charge = self._charges.get(key)
        if charge is None:
            charge = self._charges[key] = _Charge()
        return charge

    def _discharge(self, member: wire.Member, num_tokens: int) -> None:
        charge = self._charges.get(key_of(member))
        if charge is None:  # forgotten meanwhile
            return
        charge.requests -= 1
        charge.tokens -= num_tokens
        assert charge.requests >= 0, f"{member.info.worker_id} discharged more than charged"
        assert charge.tokens >= 0, f"{member.info.worker_id} discharged more than charged"

    def _burden(self, member: wire.Member) -> tuple[float, float, int]:
        """What sorts workers of one role: the least burdened first, equals in turn."""
        charge = self._charge(member)
        load = member.load
        requests = load.queued_requests + load.running_requests + charge.requests
        if member.info.role == "prefill":
            return load.queued_tokens + charge.tokens, requests, charge.last_pick
        slots = requests / max(load.slots_total, 1)
        pages = 0.0
        if load.pages_total:
            charged_pages = charge.tokens / member.info.kv_spec.page_size
            pages = (load.pages_total - load.pages_free + charged_pages) / load.pages_total
        return max(slots, pages), requests, charge.last_pick

    def _least_loaded(self, members: Sequence[wire.Member]) -> wire.Member:
        return min(members, key=self._burden)

    def _next_in_turn(self, members: Sequence[wire.Member]) -> wire.Member:
        return min(members, key=lambda member: self._charge(member).last_pick)

    def _better_of_two(self, members: Sequence[wire.Member]) -> wire.Member:
        if len(members) == 1:
            return members[0]
        return self._least_loaded(self._random.sample(members, 2))
