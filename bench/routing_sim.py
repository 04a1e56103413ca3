"""Simulates prefill in virtual time, with the real ranks, schedulers, balancer and router."""

import heapq
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from bench.routing_cost import (
    BUCKETS,
    CONTEXT,
    OUTPUT_TOKENS,
    PAGE_SIZE,
    RANKS,
    Arrival,
    ChunkCost,
    pairs_of,
)
from model.pieces import Piece
from prefill.balancer import Method
from prefill.ranks import Rank, Ranks
from prefill.scheduler import PrefillScheduler, Prompt
from serving.config import Policy
from serving.prompt import Prompt as AskedPrompt
from serving.router import Pair, Router
from transfer import wire
from transfer.pages import PagePool
from transfer.prefix_cache import PrefixCache
from transfer.worker import HEARTBEAT_S

Layout = Literal["group", "groups"]  # one group of four ranks; four groups of one
LAYOUTS: tuple[Layout, ...] = get_args(Layout)

POOL_PAGES = 4096  # of a rank
PASSED_ON_S = 0.25  # at most, until a heartbeat reaches the router through the registry
DECODE_STEP_S = 0.02


def _rank(cached: bool) -> Rank:
    pool = PagePool(POOL_PAGES)
    cache = PrefixCache(pool, PAGE_SIZE, cached)
    scheduler = PrefillScheduler(pool, cache, BUCKETS.tokens[-1], BUCKETS.seqs, BUCKETS.pages)
    return Rank(pool, cache, scheduler)


class Group:
    """Ranks that compute in lock step; decode is assumed to grant at once."""

    def __init__(self, ranks: Sequence[Rank], method: Method | None) -> None:
        """method: how the worker binds prompts to ranks; None: each prompt comes with its rank."""
        self.ranks = ranks
        self.busy = False
        self._queue = None if method is None else Ranks(ranks, method)

    def add(self, prompt: Prompt, rank: Rank | None) -> None:
        if self._queue is not None:
            self._queue.add(prompt)
            self._queue.grant(prompt)
            return
        assert rank is not None
        rank.scheduler.add(prompt)
        rank.scheduler.grant(prompt.room)

    def plan(self) -> Sequence[tuple[Piece[Prompt], ...]]:
        """The next chunk of each rank."""
        if self._queue is not None:
            return self._queue.plan()
        return [rank.scheduler.plan() for rank in self.ranks]


@dataclass(frozen=True)
class Way:
    """How a prompt gets its rank: by a method of the worker's balancer, or by the router's policy.

    random_rooms: rooms are random, as if every client made its own; otherwise they count up.
    """

    layout: Layout
    method: Method | None = None
    policy: Policy | None = None
    random_rooms: bool = False


@dataclass
class Simulation:
    """One run; `ttft_s` has each prompt's, in order of arrival."""

    way: Way
    arrivals: Sequence[Arrival]
    cost: ChunkCost
    seed: int
    now_s: float = 0.0
    ttft_s: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        cached = any(arrival.prefix_tokens for arrival in self.arrivals)
        self._ranks = [_rank(cached) for _ in range(RANKS)]
        together = self.way.layout == "group"
        split = [self._ranks] if together else [[rank] for rank in self._ranks]
        self._groups = [Group(ranks, self.way.method) for ranks in split]
        self._home = {id(rank): group for group in self._groups for rank in group.ranks}
        self._router = None if self.way.policy is None else Router(self.way.policy, self.seed)
        self._seen = [wire.Load(pages_total=POOL_PAGES, pages_free=POOL_PAGES)] * RANKS
        self._pairs: dict[int, Pair] = {}
        self._prompts: dict[int, int] = {}  # room -> number of its arrival
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._left = len(self.arrivals)
        self._random = random.Random(self.seed)

    def run(self) -> list[float]:
        """TTFT of each prompt: arrival to the end of the chunk with its last token, seconds."""
        self.ttft_s = [0.0] * len(self.arrivals)
        for number, arrival in enumerate(self.arrivals):
            self._at(arrival.at_s, lambda number=number: self._arrive(number))  # type: ignore[misc]
        if self._router is not None:
            for rank in range(RANKS):
                self._at(HEARTBEAT_S * rank / RANKS, lambda rank=rank: self._beat(rank))  # type: ignore[misc]
        while self._left:
            self.now_s, _, act = heapq.heappop(self._events)
            act()
        return self.ttft_s

    def _at(self, at_s: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (at_s, next(self._order), act))

    def _arrive(self, number: int) -> None:
        room = self._random.getrandbits(62) if self.way.random_rooms else number + 1
        self._prompts[room] = number
        prompt = Prompt(room, self.arrivals[number].token_ids, self.now_s)
        group, rank = self._groups[0], None
        if self._router is not None:
            rank = self._ranks[self._route(prompt, self._router)]
            group = self._home[id(rank)]
        group.add(prompt, rank)
        self._begin_chunk(group)

    def _route(self, prompt: Prompt, router: Router) -> int:
        prefills = [_member("prefill", at, load) for at, load in enumerate(self._seen)]
        decode = _member("decode", 0, wire.Load(slots_total=4096, slots_free=4096))
        ids = prompt.token_ids.tolist() if router.policies["prefill"] == "cache_aware" else ()
        asked = AskedPrompt(ids)
        pair = router.pick(prefills, [decode], prompt.num_tokens, self.now_s, prompt=asked)
        assert pair is not None
        self._pairs[prompt.room] = pair
        return int(pair.prefill.info.worker_id)

    def _beat(self, at: int) -> None:
        """That rank sends a heartbeat, which reaches the router a little later."""
        rank = self._ranks[at]
        requests, tokens = rank.scheduler.queued()
        load = wire.Load(
            requests, tokens, len(rank.scheduler) - requests, POOL_PAGES, rank.pool.num_free
        )

        def seen() -> None:
            self._seen[at] = load

        self._at(self.now_s + PASSED_ON_S * self._random.random(), seen)
        self._at(self.now_s + HEARTBEAT_S, lambda: self._beat(at))

    def _begin_chunk(self, group: Group) -> None:
        if group.busy:
            return
        chunks = group.plan()
        if not any(chunks):
            return
        group.busy = True
        took_s = self.cost.of([_size(pieces) for pieces in chunks])
        self._at(self.now_s + took_s, lambda: self._end_chunk(group, chunks))

    def _end_chunk(self, group: Group, chunks: Sequence[tuple[Piece[Prompt], ...]]) -> None:
        """First tokens leave. Decode already has all pages but the last, so prefill is done."""
        group.busy = False
        for rank, pieces in zip(group.ranks, chunks, strict=True):
            for piece in pieces:
                if piece.is_last:
                    rank.scheduler.release(piece.prompt.room)
                    self._prefilled(piece.prompt)
        self._begin_chunk(group)

    def _prefilled(self, prompt: Prompt) -> None:
        number = self._prompts.pop(prompt.room)
        self.ttft_s[number] = self.now_s - self.arrivals[number].at_s
        self._left -= 1
        router, pair = self._router, self._pairs.pop(prompt.room, None)
        if router is not None and pair is not None:
            router.found_cached(pair, prompt.num_cached)
            router.prefilled(pair)
            decoded_s = self.now_s + OUTPUT_TOKENS * DECODE_STEP_S
            self._at(decoded_s, lambda: router.ended(pair))


def _size(pieces: tuple[Piece[Prompt], ...]) -> tuple[int, int]:
    """Tokens and pairs of one rank's chunk."""
    tokens = sum(piece.num_tokens for piece in pieces)
    return tokens, sum(pairs_of(piece.start, piece.num_tokens) for piece in pieces)


def _member(role: wire.Role, at: int, load: wire.Load) -> wire.Member:
    """A rank as the router sees it; its id is its number."""
    kv_spec = wire.KVSpecMessage(48, 4, 128, PAGE_SIZE, "bfloat16")
    address = f"{role}:{at + 1}"
    info = wire.WorkerInfo(
        worker_id=str(at) if role == "prefill" else address,
        role=role,
        address=address,
        data_address="",
        model_name="simulated",
        model_digest="simulated",
        kv_spec=kv_spec,
        tp_size=1,
        dp_size=1,
        context_length=CONTEXT,
        max_request_tokens=CONTEXT,
        stored_kv_heads=4,
    )
    return wire.Member(info, 1, load)
