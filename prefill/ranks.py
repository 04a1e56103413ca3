"""The data-parallel ranks of a prefill worker, and the queue of prompts that have none yet.

Pure. Each rank has pages, a prefix cache and a scheduler of its own. Prompts that decode has
granted are bound oldest first, each once a rank has room in its next chunk: not before, so that the
choice weighs what the ranks have to do at that time.

The choice is among ranks that have pages for the prompt: bound to another, it would wait there
while a rank that has pages idles. Until there is such a rank, it waits unbound, and so does every
prompt behind it: ranks that take no new prompts run empty, so even the largest prompt gets its
turn. A prompt whose rank is dictated, or follows from the room, waits for that rank, and no younger
prompt is bound there first.

When no rank has room, but a prompt that needs several chunks leaves part of a rank's next chunk to
shorter ones, a prompt that fits whole into that part is bound there, past older ones that do not
fit. With one rank there is nothing to choose, and its scheduler has the only queue.
"""

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass

from model.pieces import Piece
from prefill.balancer import Balancer, Method, RankLoad
from prefill.scheduler import PrefillScheduler, Prompt, arrival_of
from transfer.pages import PagePool
from transfer.prefix_cache import PrefixCache


@dataclass(slots=True)
class Rank:
    """What one rank owns."""

    pool: PagePool
    cache: PrefixCache
    scheduler: PrefillScheduler

    def load(self) -> RankLoad:
        """Its work as the balancer weighs it."""
        requests, tokens = self.scheduler.pending()
        return RankLoad(requests, tokens, self.pool.num_to_have)


class Ranks:
    """Owner of all prompts: it holds the unbound ones itself, the others through their ranks."""

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
        """Decode has pages for the prompt: it may be computed."""
        if prompt.room not in self._unbound:
            self.ranks[prompt.rank].scheduler.grant(prompt.room)
        elif prompt not in self._ready:
            insort(self._ready, prompt, key=arrival_of)

    def keep_back(self, prompt: Prompt) -> None:
        """Compute nothing more of the prompt until it is granted again."""
        if prompt.room not in self._unbound:
            self.ranks[prompt.rank].scheduler.keep_back(prompt.room)
        elif prompt in self._ready:
            self._ready.remove(prompt)

    def release(self, prompt: Prompt) -> None:
        """The room is over, well or badly: its pages go back."""
        if self._unbound.pop(prompt.room, None) is None:
            self.ranks[prompt.rank].scheduler.release(prompt.room)
        elif prompt in self._ready:
            self._ready.remove(prompt)

    def plan(self) -> tuple[tuple[Piece[Prompt], ...], ...]:
        """The next chunk of each rank. Their tokens count as planned at once."""
        self._bind()
        return tuple(rank.scheduler.plan() for rank in self.ranks)

    def queued(self) -> tuple[int, int]:
        """Requests and tokens not yet planned, bound or not."""
        requests, tokens = len(self._unbound), sum(p.num_tokens for p in self._unbound.values())
        for rank in self.ranks:
            more = rank.scheduler.queued()
            requests, tokens = requests + more[0], tokens + more[1]
        return requests, tokens

    def queued_at(self, rank: int) -> tuple[int, int]:
        """As `queued`, of those bound to a rank and those that wait for this very one."""
        requests, tokens = self.ranks[rank].scheduler.queued()
        waiting = [p.num_tokens for p in self._unbound.values() if p.rank == rank]
        return requests + len(waiting), tokens + sum(waiting)

    def __len__(self) -> int:
        return len(self._unbound) + sum(len(rank.scheduler) for rank in self.ranks)

    def _bind(self) -> None:
        """Bind ready prompts to ranks while any rank has room."""
        if not self._ready:
            return
        room_at = {at for at, rank in enumerate(self.ranks) if rank.scheduler.has_room}
        # By rank without room: the tokens that its next chunk leaves to short prompts.
        beside = {
            at: rank.scheduler.room_beside
            for at, rank in enumerate(self.ranks)
            if at not in room_at and rank.scheduler.room_beside
        }
        awaited: set[int] = set()  # ranks that older prompts wait for: closed to younger ones
        at = 0
        while (room_at or beside) and at < len(self._ready):
            prompt = self._ready[at]
            if prompt.rank < 0:
                prompt.rank = self._balancer.rank_of(prompt.room)
            places = room_at or {at for at, room in beside.items() if prompt.num_tokens <= room}
            if not places or (prompt.rank >= 0 and prompt.rank not in places):
                if prompt.rank >= 0:
                    awaited.add(prompt.rank)
                at += 1
                continue
            found = [prompt.sharing.found(rank.cache) for rank in self.ranks]
            prefixes = [chain[:num_cached] for chain, num_cached in found]
            foreseen = [
                len(chain) * rank.cache.page_size
                for (chain, _), rank in zip(found, self.ranks, strict=True)
            ]
            if prompt.rank < 0:
                fitting = self._fitting(prompt, prefixes) - awaited
                if not fitting & places:
                    return
                among = fitting if room_at else fitting & places
                prompt.rank = self._picked(prompt, foreseen, among)
            del self._ready[at], self._unbound[prompt.room]
            prompt.num_foreseen = foreseen[prompt.rank]
            prompt.pages_foreseen = len(prefixes[prompt.rank])
            scheduler = self.ranks[prompt.rank].scheduler
            scheduler.add(prompt)
            scheduler.grant(prompt.room)
            beside.pop(prompt.rank, None)
            if not scheduler.has_room:
                room_at.discard(prompt.rank)
                if scheduler.room_beside:
                    beside[prompt.rank] = scheduler.room_beside

    def _fitting(self, prompt: Prompt, prefixes: Sequence[Sequence[bytes]]) -> set[int]:
        """Ranks that have pages for the prompt now. prefixes: what is cached of it, by rank."""
        return {
            at
            for at, (rank, prefix) in enumerate(zip(self.ranks, prefixes, strict=True))
            if rank.scheduler.can_start(prompt, prefix)
        }

    def _picked(self, prompt: Prompt, cached: Sequence[int], fitting: set[int]) -> int:
        """The balancer's choice; its method may prefer a rank that has no room just now."""
        loads = [rank.load() for rank in self.ranks]
        return self._balancer.pick(prompt.num_tokens, loads, cached, fitting)
