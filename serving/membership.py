"""Tracks the workers: follows the registry's view and keeps one link to each incarnation in it."""

import asyncio
import logging
from collections.abc import Callable

from serving.config import ServeConfig
from serving.router import Key, computes_all, key_of
from serving.timers import Timer
from serving.worker_link import Context, WorkerLink
from transfer import wire
from transfer.bootstrap import RegistryClient

logger = logging.getLogger(__name__)

_TICK_S = 0.5
# A restarted registry knows no workers until their next heartbeats, so workers whose streams are
# alive keep their place for as long as a lease would have lasted. Any stream of views after the
# first may come from a restarted registry: revisions cannot tell, as they may start at 0 again.
_RESTART_GRACE_S = 3.0


class Membership:
    """Follows the registry; owns the links.

    A worker takes new work while its stream is open and it is in the view (or in the grace period
    after a registry's restart). Leaving the view does not end what runs there: only a broken
    stream does, or a newer incarnation under the same id. So the death of a registry ends no
    request.
    """

    def __init__(
        self,
        config: ServeConfig,
        context: Context,
        on_change: Callable[[], None],
    ) -> None:
        self.members: tuple[wire.Member, ...] = ()
        self.model_digest = ""  # of the workers' model; "" before any worker was seen
        self.adapters: tuple[str, ...] | None = None  # of that model, by name
        self._config = config
        self._context = context
        self._on_change = on_change
        self._links: dict[Key, WorkerLink] = {}
        self._listed: frozenset[Key] = frozenset()
        self._has_view = False
        self._is_anew = False  # the next view is the first of its stream
        self._grace_until_s = 0.0
        self._context_length = 0
        self._ticked_s = 0.0
        self._ticker: Timer | None = None
        self._watching: asyncio.Task[None] | None = None
        self._closing: set[asyncio.Task[None]] = set()

    def start(self) -> asyncio.Task[None]:
        """Begin to watch the registry, in a task that ends only as `RegistryClient.watch` does."""
        self._watching = asyncio.create_task(self._watch())
        self._ticked_s = self._context.clock.monotonic_s()
        self._ticker = self._context.timers.call_later(_TICK_S, self._tick)
        return self._watching

    async def stop(self) -> None:
        if self._ticker is not None:
            self._ticker.cancel()
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        links = list(self._links.values())
        self._links.clear()
        await asyncio.gather(*(link.close() for link in links), *self._closing)

    # --- which workers take work ---

    def takers(self, role: wire.Role) -> list[wire.Member]:
        """Workers of the role that take new work, or would if they were not draining."""
        in_grace = self._context.clock.monotonic_s() < self._grace_until_s
        return [
            link.member
            for key, link in self._links.items()
            if link.open and link.member.info.role == role and (key in self._listed or in_grace)
        ]

    def _able(self, role: wire.Role) -> list[wire.Member]:
        return [member for member in self.takers(role) if not member.draining]

    def missing_roles(self) -> list[wire.Role]:
        """Roles of which no worker takes work, although one must before any prompt is served.

        Prefill does not count where a decode worker computes all prompts, or would if it were able.
        """
        decodes = self._able("decode")
        is_alone = any(computes_all(member.info) for member in decodes or self.members)
        there: dict[wire.Role, bool] = {
            "prefill": is_alone or bool(self._able("prefill")),
            "decode": bool(decodes),
        }
        return [role for role, is_there in there.items() if not is_there]

    def met_all(self) -> bool:
        """Whether the registry has answered and the link to every worker it lists is open."""
        open_keys = {key for key, link in self._links.items() if link.open}
        return self._has_view and self._listed <= open_keys

    def stalled(self) -> list[Key]:
        """Workers that still report to be alive while their loops make no progress."""
        timeout_s = self._config.progress_timeout_s
        return [link.key for link in self._links.values() if link.stalled_s > timeout_s]

    def roles_without_progress(self) -> list[wire.Role]:
        """Roles with workers that take work, all of which are stalled.

        Prefill does not count while every decode worker computes all prompts.
        """
        stalled = self.stalled()
        prefills, decodes = self._able("prefill"), self._able("decode")
        if decodes and all(computes_all(member.info) for member in decodes):
            prefills = []
        able: dict[wire.Role, list[wire.Member]] = {"prefill": prefills, "decode": decodes}
        return [
            role
            for role, members in able.items()
            if members and all(key_of(member) in stalled for member in members)
        ]

    def keys(self) -> frozenset[Key]:
        """The keys of all incarnations that have a link."""
        return frozenset(self._links)

    def link(self, key: Key) -> WorkerLink | None:
        return self._links.get(key)

    def open_links(self) -> list[WorkerLink]:
        """The links with an open stream, in order of role and id."""
        links = [link for link in self._links.values() if link.open]
        return sorted(links, key=lambda link: (link.member.info.role, link.worker_id))

    def context_length(self) -> int:
        """The least that the workers and the config allow; the last known if there is no worker."""
        asked = self._config.context_length
        if self._context_length and asked:
            return min(asked, self._context_length)
        return self._context_length or asked

    def dp_size(self, role: wire.Role) -> int | None:
        """The most data-parallel ranks of any worker of the role; None if there is no worker.

        0 if none of that role is needed: every worker is a decode worker that computes all prompts.
        """
        sizes = [member.info.dp_size for member in self.members if member.info.role == role]
        if sizes:
            return max(sizes)
        is_alone = bool(self.members) and all(computes_all(m.info) for m in self.members)
        return 0 if is_alone else None

    # --- changes ---

    def on_view(self, view: wire.ClusterView) -> None:
        """Take the registry's list of all live workers."""
        if self._is_anew and self._has_view:
            self._grace_until_s = self._context.clock.monotonic_s() + _RESTART_GRACE_S
        self._has_view, self._is_anew = True, False
        self.members = view.members
        self._listed = frozenset(key_of(member) for member in view.members)
        for member in view.members:
            link = self._links.get(key_of(member))
            if link is not None:
                link.update(member)
            else:
                self._open(member)
        newest = {member.info.worker_id: member.epoch for member in view.members}
        for key, link in list(self._links.items()):
            worker_id, epoch = key
            if newest.get(worker_id, epoch) > epoch:
                self._supersede(link)
            elif key not in self._listed and not link.open:
                self._close(link)
        if view.members:
            infos = [member.info for member in view.members]
            self._context_length = min(
                min(info.context_length, info.max_request_tokens) for info in infos
            )
            self.model_digest = infos[0].model_digest
            own = self._config.model_name
            self.adapters = tuple(name for name in infos[0].adapters if name != own)
        self._on_change()

    def broken(self, link: WorkerLink) -> None:
        """The link's stream ended; it is reopened for as long as the registry lists the worker."""
        if link.key not in self._listed:
            self._close(link)

    async def _watch(self) -> None:
        context = self._context
        client = RegistryClient(self._config.registry_address, context.security, context.clock)
        try:
            await client.watch(self.on_view, self._begin_anew)
        finally:
            await client.close()

    def _begin_anew(self) -> None:
        self._is_anew = True

    def _open(self, member: wire.Member) -> None:
        link = WorkerLink(member, self._context)
        self._links[link.key] = link
        link.start()

    def _supersede(self, link: WorkerLink) -> None:
        """Close the link of an older incarnation: whatever it still says is stale."""
        was_open = link.open
        self._close(link)
        if was_open:
            self._context.owner.on_broken(link, f"{link.worker_id} was restarted")

    def _close(self, link: WorkerLink) -> None:
        if self._links.pop(link.key, None) is None:
            return
        link.retire()
        task = asyncio.create_task(link.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _tick(self) -> None:
        """Check for silent workers, unless it was this process that slept."""
        now_s = self._context.clock.monotonic_s()
        if now_s - self._ticked_s < 2 * _TICK_S:
            for link in self._links.values():
                link.check_silence(now_s)
        self._ticked_s = now_s
        self._ticker = self._context.timers.call_later(_TICK_S, self._tick)
