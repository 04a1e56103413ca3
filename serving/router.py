"""Picks workers and ranks for a request, from their reported loads and our own recent choices."""

import math
import random
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from serving.breaker import Breakers
from serving.config import Policy, RolePolicy
from serving.prefix_index import PrefixIndex, ToldUse, Untold, Use
from serving.prompt import Prompt
from transfer import wire

Key = tuple[str, int]  # worker id and epoch: one incarnation
Cache = tuple[Key, int]  # a worker and the rank that has the cache; -1: any, or its only one
# Prefill: queued tokens, requests. Decode: share of slots or pages in use, the larger; requests.
Burden = tuple[float, float]
_FULLER = 0.25  # a place with this much more in use than the emptiest is not picked for its cache
MAX_CONSIDERED = 8  # places of a role whose burdens are kept with a pair

# A worker reports its load every 0.5 s and the registry passes it on within 0.25 s, so the reports
# include a pair that was picked this long ago, and charging it any longer would count it twice.
ACKNOWLEDGED_AFTER_S = 1.0
_MANY = 1024  # unacknowledged pairs; at each multiple of so many, those that ended are removed


def key_of(member: wire.Member) -> Key:
    return member.info.worker_id, member.epoch


def computes_all(info: wire.WorkerInfo) -> bool:
    """Whether it is a decode worker that needs no prefill: it computes every prompt it can hold."""
    return info.role == "decode" and info.local_prefill_tokens >= info.max_request_tokens


class Ranks(NamedTuple):
    """The data-parallel ranks that a client dictates, from 0; -1: any."""

    prefill: int = -1
    decode: int = -1


ANY_RANKS = Ranks()


class Place(NamedTuple):
    """Where a leg may go. rank -1: the worker chooses its rank, or has only one."""

    member: wire.Member
    rank: int
    load: wire.Load

    @property
    def name(self) -> str:
        worker_id = self.member.info.worker_id
        return worker_id if self.rank < 0 else f"{worker_id}/{self.rank}"

    @property
    def num_ranks(self) -> int:
        """Ranks that share its queue: a prompt whose rank is chosen late waits for one's share."""
        return self.member.info.dp_size if self.rank < 0 else 1


def _places_of(members: Sequence[wire.Member], rank: int) -> list[Place]:
    """The places of these workers.

    Every rank of a decode worker is a place. A prefill worker is one place, unless a rank is
    dictated: it chooses the rank itself, late, by loads that only it knows. A worker with only one
    rank is the same place whether that rank is dictated or not.
    """
    places = []
    for member in members:
        if member.info.dp_size == 1 or (member.info.role == "prefill" and rank < 0):
            places.append(Place(member, -1, member.load))
        else:
            ranks = range(member.info.dp_size) if rank < 0 else (rank,)
            places += [Place(member, at, _load_of(member, at)) for at in ranks]
    return places


def _load_of(member: wire.Member, rank: int) -> wire.Load:
    """The load of a rank; that of the worker if it has reported none for the rank."""
    return member.ranks[rank] if rank < len(member.ranks) else member.load


def _cache_of(place: Place) -> Cache:
    """The place's cache, as `Pair.cache` names it."""
    member = place.member
    return key_of(member), place.rank if member.info.role == "decode" else -1


def _most_pages(place: Place) -> int:
    """The most pages of prefixes that the place's cache can have; 0: not known."""
    load = place.load if _cache_of(place)[1] >= 0 else place.member.load
    return load.pages_total and load.pages_total + place.member.info.host_pages


@dataclass(slots=True, eq=False)
class Pair:
    """The workers of one attempt, and what they are charged until their reports show it."""

    prefill: wire.Member
    decode: wire.Member
    num_tokens: int  # of the prompt and earlier attempts
    picked_s: float  # monotonic
    num_uncached: int = 0  # of these tokens, those that are expected to be computed
    use: Use | None = None  # of `cache`, until it is settled
    prefill_rank: int = -1  # dictated; -1: prefill chooses, or has only one
    decode_rank: int = -1  # -1: there is only one
    prefill_charged: bool = True
    decode_charged: bool = True
    prefill_key: Key = field(init=False)
    decode_key: Key = field(init=False)
    # The burdens of each role's places when the pair was picked, charges included.
    considered: dict[wire.Role, dict[str, Burden]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.prefill_key = key_of(self.prefill)
        self.decode_key = key_of(self.decode)

    @property
    def is_charged(self) -> bool:
        return self.prefill_charged or self.decode_charged

    @property
    def is_local(self) -> bool:
        """Whether decode computes the prompt itself: then there is one worker and one leg."""
        return self.prefill_key == self.decode_key

    @property
    def cache(self) -> Cache:
        """The cache that may have pages of the prompt.

        Prefill chooses its rank late, so all its ranks count as one cache.
        """
        return (self.decode_key, self.decode_rank) if self.is_local else (self.prefill_key, -1)

    def needs(self, key: Key, prefill_done: bool) -> bool:
        """Whether the attempt still needs this worker."""
        return key == self.decode_key or (key == self.prefill_key and not prefill_done)

    @property
    def keys(self) -> tuple[Key, ...]:
        """The keys of its workers, each once; decode first."""
        return (self.decode_key,) if self.is_local else (self.decode_key, self.prefill_key)


@dataclass(slots=True)
class _Charge:
    requests: int = 0
    to_compute: int = 0  # tokens of prompts
    to_hold: int = 0  # tokens, in pages of decode
    last_pick: int = 0  # number of the latest pick, to take turns among equals


class Router:
    """Picks a worker of each role by its policy, for decode also the rank; never a draining worker.

    cache_aware takes the worker with the fewest tokens to compute until this prompt is done: those
    queued, and those of the prompt that its cache is not thought to have. If no cache has any of
    the prompt, that is the least load. For decode it takes the place that is thought to have most
    of the prompt, among those that are not much fuller than the emptiest.
    """

    def __init__(
        self,
        policy: Policy,
        seed: int = 0,
        prefill_policy: RolePolicy = "same",
        decode_policy: RolePolicy = "same",
        breaker_failures: int = 5,
    ) -> None:
        self.breakers = Breakers[Key](breaker_failures)
        self._charges: dict[Key, dict[int, _Charge]] = {}  # by rank; -1 as in Place
        self._unacknowledged: deque[Pair] = deque()
        self._reported_s = math.inf  # when the registry last passed loads on
        self._picks = 0
        self._random = random.Random(seed)
        choosers: dict[str, Callable[[Sequence[Place]], Place]] = {
            "least_load": self._least_loaded,
            "round_robin": self._next_in_turn,
            "random": self._random.choice,
            "power_of_two": self._better_of_two,
            "cache_aware": self._least_loaded,  # where no cache matters
        }
        for_prefill = policy if prefill_policy == "same" else prefill_policy
        for_decode = policy if decode_policy == "same" else decode_policy
        self.policies: dict[wire.Role, str] = {"prefill": for_prefill, "decode": for_decode}
        self._choose_prefill, self._choose_decode = choosers[for_prefill], choosers[for_decode]
        # None unless a role's policy is cache_aware.
        self._index: PrefixIndex[Cache] | None = None
        if "cache_aware" in self.policies.values():
            self._index = PrefixIndex()
        self.untold: Untold | None = None  # None where no other process wants to know

    def pick(
        self,
        prefills: Sequence[wire.Member],
        decodes: Sequence[wire.Member],
        num_tokens: int,
        now_s: float,
        avoid: frozenset[str] = frozenset(),
        prompt: Prompt | None = None,
        salt: str = "",
        stalled: Collection[Key] = (),
        ranks: Ranks = ANY_RANKS,
        may_be_local: bool = False,
    ) -> Pair | None:
        """A pair, charged with the request; None when no workers take it.

        may_be_local: a decode worker that computes prompts of this length itself (its
        local_prefill_tokens) becomes both workers of the pair. Without a prefill worker only such a
        decode worker is picked.

        stalled: workers that make no progress, picked only if there is no other. avoid: ids of
        workers that, of the rest, are picked only if there is no other. now_s: monotonic. prompt,
        salt: what caches are searched for; the prompt may have fewer tokens than num_tokens.
        ranks: only workers that have these ranks are picked.
        """
        self._acknowledge(now_s)
        prompt = prompt or Prompt(())

        def is_local(member: wire.Member) -> bool:
            return may_be_local and num_tokens <= member.info.local_prefill_tokens

        to_prefill = self._places(prefills, ranks.prefill, avoid, stalled, now_s)
        if not to_prefill:
            decodes = [member for member in decodes if is_local(member)]
        to_decode = self._places(decodes, ranks.decode, avoid, stalled, now_s)
        if not to_decode:
            return None
        if not to_prefill and self.policies["decode"] == "cache_aware":
            found = self._pick_by_cache(self._evenly(to_decode), num_tokens, prompt, salt)
            return self._local_pair(*found, to_decode, num_tokens, now_s)
        decode = self._pick_decode(to_decode, prompt, salt)
        if is_local(decode.member):
            return self._local_pair(decode, None, num_tokens, to_decode, num_tokens, now_s)
        prefill, use, num_uncached = self._pick_prefill(to_prefill, num_tokens, prompt, salt)
        pair = Pair(prefill.member, decode.member, num_tokens, now_s, num_uncached, use)
        pair.prefill_rank, pair.decode_rank = prefill.rank, decode.rank
        pair.considered = {
            "prefill": self._burdens(prefill, to_prefill),
            "decode": self._burdens(decode, to_decode),
        }
        self._picked(pair, ((prefill, num_uncached, 0), (decode, 0, num_tokens)), now_s)
        return pair

    def _evenly(self, places: Sequence[Place]) -> Sequence[Place]:
        """The places that have room and are not much fuller than the emptiest, or else all.

        What a place has cached says nothing about how long its streams wait for each other, or how
        long a request there waits for a slot.
        """
        shares = [self._burden(place)[0] for place in places]
        most = min(min(shares) + _FULLER, 1.0)
        able = [place for place, share in zip(places, shares, strict=True) if share < most]
        return able or places

    def _local_pair(
        self,
        decode: Place,
        use: Use | None,
        num_uncached: int,
        to_decode: Sequence[Place],
        num_tokens: int,
        now_s: float,
    ) -> Pair:
        pair = Pair(decode.member, decode.member, num_tokens, now_s, num_uncached, use)
        pair.decode_rank = decode.rank
        pair.considered = {"decode": self._burdens(decode, to_decode)}
        self._picked(pair, ((decode, num_uncached, num_tokens),), now_s)
        return pair

    def _picked(self, pair: Pair, charged: Sequence[tuple[Place, int, int]], now_s: float) -> None:
        """Charge the places of a new pair. charged: (place, tokens to compute, tokens to hold)."""
        self._picks += 1
        for place, to_compute, to_hold in charged:
            charge = self._charge(place)
            charge.requests += 1
            charge.to_compute += to_compute
            charge.to_hold += to_hold
            charge.last_pick = self._picks
            self.breakers.picked(key_of(place.member), pair, now_s)
        self._unacknowledged.append(pair)
        if len(self._unacknowledged) > _MANY and not len(self._unacknowledged) % _MANY:
            # While no load is reported, pairs that ended pile up behind one that is still charged.
            self._unacknowledged = deque(each for each in self._unacknowledged if each.is_charged)

    def _places(
        self,
        members: Sequence[wire.Member],
        rank: int,
        avoid: frozenset[str],
        stalled: Collection[Key],
        now_s: float,
    ) -> list[Place]:
        """The places at workers that may be picked, in order of the workers' keys.

        Workers that are to be passed over are among them only if there are no others.
        """
        able = (m for m in members if not m.draining and rank < m.info.dp_size)
        members = sorted(able, key=key_of)
        members = [
            member
            for member in members
            if not (key_of(member) in stalled or self.breakers.is_out(key_of(member), now_s))
        ] or members
        members = [member for member in members if member.info.worker_id not in avoid] or members
        return _places_of(members, rank)

    def _pick_prefill(
        self, places: Sequence[Place], num_tokens: int, prompt: Prompt, salt: str
    ) -> tuple[Place, Use | None, int]:
        """The worker, the expected use of its cache, and the tokens it will have to compute."""
        if self.policies["prefill"] == "cache_aware":
            return self._pick_by_cache(places, num_tokens, prompt, salt)
        return self._choose_prefill(places), None, num_tokens

    def _pick_by_cache(
        self, places: Sequence[Place], num_tokens: int, prompt: Prompt, salt: str
    ) -> tuple[Place, Use | None, int]:
        """As `_pick_prefill`, by caches, among places of either role that compute the prompt."""
        index = self._index
        assert index is not None, "cache_aware has an index"
        page_size = places[0].member.info.kv_spec.page_size  # the registry admits only one size
        chain = prompt.chain(page_size, salt)
        # The last token is always computed: its logits are the answer.
        num_reusable = max(num_tokens - 1, 0) // page_size
        best: tuple[tuple[float, float, int], Place, int] | None = None
        for place in places:
            found = index.match(_cache_of(place), chain[:num_reusable])
            num_uncached = num_tokens - page_size * found
            _, requests, last_pick = self._burden(place)
            cost = self._to_compute(place) + num_uncached, requests, last_pick
            if best is None or cost < best[0]:
                best = cost, place, num_uncached
        assert best is not None, "somebody takes work"
        _, place, num_uncached = best
        use = index.use(_cache_of(place), chain, num_reusable, _most_pages(place))
        self._tell_others(place, chain)
        return place, use, num_uncached

    def _pick_decode(self, places: Sequence[Place], prompt: Prompt, salt: str) -> Place:
        """Where the answer is computed, of a prompt that prefill computes or that is short."""
        index, shares = self._index, any(p.member.info.shares_pages for p in places)
        if index is None or self.policies["decode"] != "cache_aware" or not shares:
            return self._choose_decode(places)
        chain = prompt.chain(places[0].member.info.kv_spec.page_size, salt)
        place = min(
            self._evenly(places),
            key=lambda place: (-index.match(_cache_of(place), chain), *self._burden(place)),
        )
        if place.member.info.shares_pages:
            # How much of it the place has, nobody tells: the pages are sent or not.
            self._note(_cache_of(place), chain, _most_pages(place))
            self._tell_others(place, chain)
        return place

    def _note(self, cache: Cache, chain: Sequence[int], most_pages: int) -> None:
        """The cache will have these pages, as far as we shall ever know."""
        index = self._index
        if index is not None:
            index.settle(cache, index.use(cache, chain, 0, most_pages), None)

    def _tell_others(self, place: Place, chain: Sequence[int]) -> None:
        if self.untold is not None:
            key, rank = _cache_of(place)
            self.untold.add(*key, rank, chain, _most_pages(place))

    def told(self, use: ToldUse) -> None:
        """What another process of this server sends to a worker that is here."""
        self._note(((use.worker_id, use.epoch), use.rank), use.chain, use.most_pages)

    def prefilled(self, pair: Pair) -> None:
        """The prompt is computed, so the pair is no longer charged for it."""
        if not pair.prefill_charged:
            return
        pair.prefill_charged = False
        if pair.is_local:
            self._discharge(pair.decode_key, pair.decode_rank, 0, to_compute=pair.num_uncached)
        else:
            self._discharge(pair.prefill_key, pair.prefill_rank, 1, to_compute=pair.num_uncached)

    def found_cached(self, pair: Pair, cached_tokens: int | None) -> None:
        """The worker found so many of the prompt's tokens in its cache; None: not known."""
        if self._index is None or pair.use is None:
            return
        use, pair.use = pair.use, None
        page_size = pair.prefill.info.kv_spec.page_size
        num_cached = None if cached_tokens is None else cached_tokens // page_size
        self._index.settle(pair.cache, use, num_cached)

    def ended(self, pair: Pair) -> None:
        """Neither worker has the request any more."""
        self.found_cached(pair, None)
        self._discharge_both(pair)
        for key in pair.keys:
            self.breakers.left(key, pair)

    def _discharge_both(self, pair: Pair) -> None:
        self.prefilled(pair)
        if pair.decode_charged:
            pair.decode_charged = False
            self._discharge(pair.decode_key, pair.decode_rank, 1, to_hold=pair.num_tokens)

    def forget(self, key: Key) -> None:
        """That incarnation of a worker is gone."""
        self.flushed(key)
        self._charges.pop(key, None)

    def flushed(self, key: Key) -> None:
        """That worker's caches are empty."""
        if self._index is not None:
            self._index.forget(lambda cache: cache[0] == key)

    def keep(self, keys: Collection[Key]) -> None:
        """Forget all others, of which siblings may have told more since: they are gone."""
        self.breakers.keep(keys)
        if self._index is not None:
            self._index.forget(lambda cache: cache[0] not in keys)

    def reported(self, now_s: float) -> None:
        """The registry has just passed loads on."""
        self._reported_s = now_s

    def charged_requests(self, key: Key) -> int:
        """Requests of ours that the worker's reports do not include yet."""
        return sum(charge.requests for charge in self._charges.get(key, {}).values())

    def _acknowledge(self, now_s: float) -> None:
        # While the registry passes no loads on, no report includes what was picked since. Those
        # pairs stay charged: else every request would go to the worker that had the least to do
        # when the last report came.
        now_s = min(now_s, self._reported_s)
        while self._unacknowledged:
            pair = self._unacknowledged[0]
            if pair.is_charged and now_s - pair.picked_s < ACKNOWLEDGED_AFTER_S:
                return
            self._unacknowledged.popleft()
            self._discharge_both(pair)

    def _charge(self, place: Place) -> _Charge:
        by_rank = self._charges.setdefault(key_of(place.member), {})
        charge = by_rank.get(place.rank)
        if charge is None:
            charge = by_rank[place.rank] = _Charge()
        return charge

    def _discharge(
        self, key: Key, rank: int, requests: int, to_compute: int = 0, to_hold: int = 0
    ) -> None:
        charge = self._charges.get(key, {}).get(rank)
        if charge is None:  # forgotten meanwhile
            return
        charge.requests -= requests
        charge.to_compute -= to_compute
        charge.to_hold -= to_hold
        least = min(charge.requests, charge.to_compute, charge.to_hold)
        assert least >= 0, f"{key} rank {rank} discharged more than charged"

    def _to_compute(self, place: Place) -> float:
        """Tokens of prompts that are queued at the place, per rank if prefill chooses the rank."""
        return (place.load.queued_tokens + self._charge(place).to_compute) / place.num_ranks

    def _burden(self, place: Place) -> tuple[float, float, int]:
        """Sort key for places of one role: the least burdened first, equals in turn."""
        member, _, load = place
        charge = self._charge(place)
        requests = load.queued_requests + load.running_requests + charge.requests
        if member.info.role == "prefill":
            return self._to_compute(place), requests / place.num_ranks, charge.last_pick
        slots = requests / max(load.slots_total, 1)
        pages = 0.0
        if load.pages_total:
            charged_pages = charge.to_hold / member.info.kv_spec.page_size
            pages = (load.pages_total - load.pages_free + charged_pages) / load.pages_total
        return max(slots, pages), requests, charge.last_pick

    def _burdens(self, picked: Place, places: Sequence[Place]) -> dict[str, Burden]:
        """The burdens of the picked place and of some others, by name."""
        others = [place for place in places if place is not picked]
        shown = [picked, *others[: MAX_CONSIDERED - 1]]
        return {place.name: self._burden(place)[:2] for place in shown}

    def _least_loaded(self, places: Sequence[Place]) -> Place:
        return min(places, key=self._burden)

    def _next_in_turn(self, places: Sequence[Place]) -> Place:
        return min(places, key=lambda place: self._charge(place).last_pick)

    def _better_of_two(self, places: Sequence[Place]) -> Place:
        if len(places) == 1:
            return places[0]
        return self._least_loaded(self._random.sample(places, 2))
