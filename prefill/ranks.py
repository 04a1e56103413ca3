"""The data-parallel ranks of a prefill worker, and the queue of prompts that have none yet.

Pure. A rank has pages, a prefix cache and a scheduler of its own. A prompt that decode has granted
is bound to a rank when one has room in its next chunk, oldest first: not before, so that the choice
weighs what the ranks have to do then. It is made among ranks that have pages for it: bound to
another, it would wait there while one that has some idles. Until there is one, it waits unbound,
and everybody behind it too: ranks that take nobody new run empty, so the largest prompt has its
turn. A rank that is dictated, or follows from the room, is waited for; nobody who came later goes
there first. When no rank has room, but the next chunk of one leaves a part to prompts shorter than
one that needs several, a prompt that fits into that part whole goes there past those that do not.
With one rank there is nothing to choose, and its scheduler has the only queue.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from prefill.balancer import Balancer, Method, RankLoad
from prefill.scheduler import Piece, PrefillScheduler, Prompt
from transfer.pages import PagePool
from transfer.prefix_cache import PrefixCache


@dataclass(slots=True)
class Rank:
    """What one rank owns."""

    pool: PagePool
    cache: PrefixCache
    scheduler: PrefillScheduler
    num_evictable: int = 0  # cached pages that nobody held, as of the last `refresh`

    def refresh(self) -> None:
        """Count what the cache could give; this walks it."""
        self.num_evictable = self.cache.num_evictable()

    def load(self) -> RankLoad:
        """Its work as the balancer weighs it."""
        requests, tokens = self.scheduler.pending()
        return RankLoad(requests, tokens, self.pool.num_free + self.num_evictable)


class Ranks:
    """Owner of all prompts: of the unbound ones itself, of the others through their ranks."""

    def __init__(self, ranks: Sequence[Rank], method: Method) -> None:
        """Raises ConfigError for an unknown method."""
        self.ranks = ranks
        self._balancer = Balancer(method, len(ranks))
        self._unbound: dict[int, Prompt] = {}
        self._ready: list[Prompt] = []  # unbound and granted, oldest first

    def add(self, prompt: Prompt) -> None:
        """Queue a prompt. It waits for `grant`."""
        if len(self.ranks) == 1:
            prompt.rank = 0
            self.ranks[0].scheduler.add(prompt)
        else:
            assert prompt.room not in self._unbound, f"room {prompt.room} twice"
            self._unbound[prompt.room] = prompt

    def grant(self, prompt: Prompt) -> None:
        """Decode has pages for it: it may be computed."""
        if prompt.room not in self._unbound:
            self.ranks[prompt.rank].scheduler.grant(prompt.room)
        elif prompt not in self._ready:
            at = len(self._ready)
            while at and self._ready[at - 1].arrival_s > prompt.arrival_s:
                at -= 1
            self._ready.insert(at, prompt)

    def keep_back(self, prompt: Prompt) -> None:
        """What is left of it is not computed before it is granted again."""
        if prompt.room not in self._unbound:
            self.ranks[prompt.rank].scheduler.keep_back(prompt.room)
        elif prompt in self._ready:
            self._ready.remove(prompt)

    def release(self, prompt: Prompt) -> None:
        """The room is over, well or badly: what it has goes back."""
        if self._unbound.pop(prompt.room, None) is None:
            self.ranks[prompt.rank].scheduler.release(prompt.room)
        elif prompt in self._ready:
            self._ready.remove(prompt)

    def plan(self) -> tuple[tuple[Piece, ...], ...]:
        """The next chunk of each rank. Its tokens count as planned at once."""
        self._bind()
        return tuple(rank.scheduler.plan() for rank in self.ranks)

    def queued(self) -> tuple[int, int]:
        """Requests and tokens not yet planned, bound or not."""
        requests, tokens = len(self._unbound), sum(p.num_tokens for p in self._unbound.values())
        for rank in self.ranks:
            more = rank.scheduler.queued()
            requests, tokens = requests + more[0], tokens + more[1]
        return requests, tokens

    def __len__(self) -> int:
        return len(self._unbound) + sum(len(rank.scheduler) for rank in self.ranks)

    def _bind(self) -> None:
        """Give prompts to ranks while any has room."""
        if not self._ready:
            return
        room_at = {at for at, rank in enumerate(self.ranks) if rank.scheduler.has_room}
        # Tokens that a short prompt may have where there is no room for another.
        beside = {
            at: rank.scheduler.room_beside
            for at, rank in enumerate(self.ranks)
            if at not in room_at and rank.scheduler.room_beside
        }
        awaited: set[int] = set()  # by prompts that nobody younger may overtake
        at = 0
        while (room_at or beside) and at < len(self._ready):
            prompt = self._ready[at]
            if prompt.rank < 0 and self._balancer.method == "follow_bootstrap_room":
                prompt.rank = prompt.room % len(self.ranks)
            places = room_at or {at for at, room in beside.items() if prompt.num_tokens <= room}
            if not places or (prompt.rank >= 0 and prompt.rank not in places):
                if prompt.rank >= 0:
                    awaited.add(prompt.rank)
                at += 1
                continue
            prefixes = [prompt.sharing.cached(rank.cache) for rank in self.ranks]
            cached = [
                len(prefix) * rank.cache.page_size
                for prefix, rank in zip(prefixes, self.ranks, strict=True)
            ]
            if prompt.rank < 0:
                fitting = self._fitting(prompt, prefixes) - awaited
                if not fitting & places:
                    return
                among = fitting if room_at else fitting & places
                prompt.rank = self._picked(prompt, cached, among)
            del self._ready[at], self._unbound[prompt.room]
            prompt.num_foreseen = cached[prompt.rank]
            scheduler = self.ranks[prompt.rank].scheduler
            scheduler.add(prompt)
            scheduler.grant(prompt.room)
            beside.pop(prompt.rank, None)
            if not scheduler.has_room:
                room_at.discard(prompt.rank)
                if scheduler.room_beside:
                    beside[prompt.rank] = scheduler.room_beside

    def _fitting(self, prompt: Prompt, prefixes: Sequence[Sequence[bytes]]) -> set[int]:
        """Ranks that have pages for it now. prefixes: what is cached of it, by rank."""
        return {
            at
            for at, (rank, prefix) in enumerate(zip(self.ranks, prefixes, strict=True))
            if rank.scheduler.can_start(prompt, prefix)
        }

    def _picked(self, prompt: Prompt, cached: Sequence[int], fitting: set[int]) -> int:
        """By the balancer, whose method may prefer a rank that has no room just now."""
        loads = [rank.load() for rank in self.ranks]
        return self._balancer.pick(prompt.room, prompt.num_tokens, loads, cached, fitting)
