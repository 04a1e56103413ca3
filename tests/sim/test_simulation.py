"""The whole system under many seeds: what must happen in them, and faults they must detect."""

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random
from typing import Any

import msgspec
import numpy as np
import pytest

import decode.worker
import prefill.worker
from decode import rings
from decode.admission import Admission, Seat
from decode.constrained import ConstrainedSlots
from decode.held import StepFlight
from decode.scheduler import DecodeScheduler
from decode.worker import DecodeWorker
from model import buckets
from model.pieces import NO_ADAPTER
from model.sampling import NOT_A_TOKEN
from prefill.ranks import Ranks
from prefill.scheduler import PrefillScheduler
from prefill.shipping import Shipping
from prefill.worker import PrefillWorker
from serving.dispatch import Dispatcher
from serving.generation import Generation
from serving.limits import Limiter
from serving.placement import Placement
from serving.plain_streams import PlainStreams
from serving.router import Router
from tests.sim.plan import draw_plan
from tests.sim.simulation import Simulation, SimulationFailed, play
from transfer import replies, wire
from transfer.host_pages import HostMemory
from transfer.inbound import Inbound
from transfer.keeping import Keeping
from transfer.prefix_cache import PrefixCache, Sharing
from transfer.role import GrammarReady, RoleWorker
from transfer.worker import Aborted, ApiGone

SEEDS = range(500, 600)  # chosen so that the rarest of what is listed below happens too
FAULT_SEEDS = (245, 256, 262, 242, 270, 284, 244, 243, 333)  # one of these shows each fault

HAPPENS = [
    "ended_finished",
    "ended_aborted",
    "ended_deadline",
    "ended_bad_request",
    "ended_internal",
    "ended_api_died",
    "second_attempts_finished",
    # the normal course, and what makes it fast
    "cached_tokens",
    "prefill_host_pages_saved",
    "prefill_host_pages_restored",
    "decode_pages_shared",
    "decode_host_pages_saved",
    "decode_host_pages_restored",
    "prompt_logprobs",
    "tokens_early",
    "step_read_1_behind",
    "steps_with_drafts",
    "drafts_accepted",
    "rings_round",
    "chunk_read_1_behind",
    "decode_receiving_done",  # its first token ended the room
    "decode_decoding_done",
    # load
    "preempted",
    "refused_queue_full",
    # several ranks behind one address
    "dictated",
    # prompts that decode computes itself
    "local_prefills",
    "local_chunks_left",
    "local_prefixes_shared",
    "local_logprobs",
    "prefill_rank_2_holds",
    "decode_rank_2_holds",
    # grammars
    "prefill_grammars",
    "decode_grammars",
    "grammars_resumed",
    "grammars_not_wanted",
    # failures in every state
    "prefill_queued_failed",
    "prefill_granted_failed",
    "prefill_computing_failed",
    "prefill_sending_failed",
    "decode_queued_failed",
    "decode_reserved_failed",
    "decode_receiving_failed",
    "decode_ready_failed",
    "decode_decoding_failed",
    "aborts_decode_decoding",
    "aborts_waiting",
    # deaths in every phase
    "prefill_died_queued",
    "prefill_died_granted",
    "prefill_died_computing",
    "prefill_died_sending",
    "decode_died_queued",
    "decode_died_reserved",
    "decode_died_receiving",
    "decode_died_decoding",
    "api_deaths",
    # workers told to leave
    "prefill_drained",
    "decode_drained",
    "prefill_drains_queued",
    "prefill_drains_granted",
    "prefill_drains_computing",
    "prefill_drains_sending",
    "decode_drains_queued",
    "decode_drains_reserved",
    "decode_drains_decoding",
    "refused_draining",
    "failed_draining",
    # connections
    "control_breaks",
    "data_links_broken",
    "failed_peer_lost",
    "failed_gone",
    "grant_replies_lost",
    "prefill_grants_expired",
    "prefill_decodes_behind",
    "prefill_gives_pages_up",
    "submits_doubled",
    "submit_replies_lost",
    "abort_replies_lost",
    "freezes",
    "registry_deaths",
    "decode_pages_late",
    "replies_NACK",
    # hosts
    "clocks_set",
    # streams
    "told_by_columns",
    "runs_of_several",
    "clients_slow",
    # operators
    "flushes_amid_rooms",
]


@pytest.fixture(scope="module", autouse=True)
def quiet() -> Iterator[None]:
    """No warning for each refused frame: these tests are about them."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture(scope="module")
def played() -> Counter[str]:
    """What happened over all seeds; a failing seed is named in the error."""
    total: Counter[str] = Counter()
    for seed in SEEDS:
        total += play(seed)
    return total


def test_every_request_ends_once_with_the_right_tokens_and_everything_comes_back(
    played: Counter[str],
) -> None:
    """The simulation checks the rest; this checks that it had something to check."""
    assert played["ended_finished"] > 5 * len(SEEDS)
    assert played["rooms"] > played["ended_finished"]


@pytest.mark.parametrize("name", HAPPENS)
def test_over_the_seeds_it_happens_that(played: Counter[str], name: str) -> None:
    assert played[name] > 0


def test_a_seed_plays_the_same_twice() -> None:
    assert play(11) == play(11)


def test_workers_that_leave_in_peace_cost_nobody_an_attempt() -> None:
    total: Counter[str] = Counter()
    for seed in SEEDS:
        plan = draw_plan(Random(seed))
        if plan.worker_death == 0.0:
            total += Simulation(seed, replace(plan, drain=0.02)).run()
    assert total["prefill_drained"] > 10
    assert total["decode_drained"] > 10
    assert total["failed_draining"] > 10
    assert not total["failed_peer_lost"]
    assert not total["refused_peer_lost"]
    assert not total["retried_peer_lost"]


# --- faults ------------------------------------------------------------------------------------

Wrap = Callable[[Any], Callable[..., Any]]


def _rows_of_former_owners(finish: Any) -> Callable[..., Any]:
    return lambda self, plan, ids: finish(self, replace(plan, rooms=self._room[plan.slots]), ids)


def _no_page_entered(pages_at: Any) -> Callable[..., Any]:
    return lambda self, slot, place: (-1, pages_at(self, slot, place)[1])


def _ring_without_its_last_page(pages_at: Any) -> Callable[..., Any]:
    return lambda self, slot, place: (pages_at(self, slot, place)[0], -1)


def _rings_a_page_short(touched_pages: Any) -> Callable[..., Any]:
    return lambda *sizes: max(touched_pages(*sizes) - 1, 1)


def _window_that_ends_a_page_late(first_seen: Any) -> Callable[..., Any]:
    return lambda tokens, window, page_size: first_seen(tokens, window, page_size) + 1


def _windows_from_the_pages_of_others(runs_of: Any) -> Callable[..., Any]:
    return lambda self, *piece: runs_of(replace(self, num_pages=0), *piece)


def _drafts_for_which_there_is_no_page(plan: Any) -> Callable[..., Any]:
    def planned(self: DecodeScheduler, tries: bool) -> Any:
        made = plan(self, False)
        return made and replace(made, width=1 + tries)

    return planned


def _pages_shared_before_they_come(sit: Any) -> Callable[..., Any]:
    def sat(self: Admission, seat: Seat, rank: int) -> None:
        sit(self, seat, rank)
        self.filled(seat, seat.num_tokens)

    return sat


def _pages_saved_a_turn_late(dispatch: Any) -> Callable[..., Any]:
    late: dict[PrefixCache, list[tuple[bytes, int]]] = {}

    def dispatched(self: Keeping) -> None:
        for cache in self._caches:
            cache.evicted, late[cache] = late.get(cache, []), cache.evicted
        dispatch(self)

    return dispatched


def _pages_never_restored(dispatch: Any) -> Callable[..., Any]:
    def dispatched(self: Keeping) -> None:
        for cache in self._caches:
            cache.restored.clear()
        dispatch(self)

    return dispatched


def _pages_of_the_host_turned_round(fetch: Any) -> Callable[..., Any]:
    return lambda self, pages: fetch(self, pages[::-1])


def _one_salt_for_all_adapters(_: Any) -> Callable[..., Any]:
    return lambda adapter, cache_salt: cache_salt


def _no_adapter(_: Any) -> Callable[..., Any]:
    return lambda self, submit: NO_ADAPTER


def _one_salt_for_all(chain: Any) -> Callable[..., Any]:
    return lambda self, tokens, salt: chain(self, tokens, "")


def _no_limit_to_reuse(_: Any) -> Callable[..., Any]:
    def cached(self: Sharing, cache: PrefixCache) -> list[bytes]:
        whole = self.first(cache, len(self.token_ids))
        return whole[: cache.cached_pages(whole)]

    return cached


def _deaf_to(kind: type) -> Wrap:
    return lambda handle: (
        lambda self, event: None if isinstance(event, kind) else handle(self, event)
    )


def _ranks_as_it_likes(add: Any) -> Callable[..., Any]:
    return lambda self, prompt: add(self, replace(prompt, rank=-1))


def _kept_back_for_good(keep_back: Any) -> Callable[..., Any]:
    def kept_back(self: PrefillScheduler, room: int) -> None:
        keep_back(self, room)
        self._prompts[room].granted = True

    return kept_back


def _pages_a_place_further(place: Any) -> Callable[..., Any]:
    return lambda self, room, start, shards: place(self, room, max(start - 1, 0), shards)


def _frames_of_the_forgotten(_: Any) -> Callable[..., Any]:
    return lambda self, room: None


def _deadlines_by_the_wall_clock(open_room: Any) -> Callable[..., Any]:
    def opened(self: Any, submit: wire.Submit, received_s: float) -> None:
        left_s = submit.left_s - self.clock.wrong_s
        open_room(self, msgspec.structs.replace(submit, left_s=left_s), received_s)

    return opened


def _failed_for_what_is_drawn_behind_an_end(complete_step: Any) -> Callable[..., Any]:
    def completed(self: DecodeWorker, done: StepFlight) -> None:
        token_ids, _ = done.step.token_ids()
        for row in np.flatnonzero((token_ids == NOT_A_TOKEN).any(axis=1)).tolist():
            self.fail_undrawn(int(done.plan.rooms[row]), NOT_A_TOKEN)
        complete_step(self, done)

    return completed


def _the_other_leg_goes_on(leave: Any) -> Callable[..., Any]:
    return lambda self, generation, over_at, tell_workers=True: leave(
        self, generation, over_at, False
    )


def _takes_tokens_as_they_come(accept: Any) -> Callable[..., Any]:
    return lambda self, first_idx, *run: accept(self, len(self.token_ids), *run)


def _pages_on_their_way_when_it_ended(finish: Any) -> Callable[..., Any]:
    def finished(self: Dispatcher, generation: Generation) -> None:
        generation.attempt_start -= 1  # as if decode had told its end
        finish(self, generation)

    return finished


def _only_what_the_last_step_says(merge: Any) -> Callable[..., Any]:
    return lambda steps: msgspec.structs.replace(merge(steps), events=steps[-1].events)


def _nothing(_: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: None


def _masks_without_the_last_step(_: Any) -> Callable[..., Any]:
    return lambda self: 0


@pytest.mark.parametrize(
    ("owner", "method", "wrap"),
    [
        (DecodeScheduler, "finish", _rows_of_former_owners),
        (DecodeScheduler, "_pages_at", _no_page_entered),
        (DecodeScheduler, "_pages_at", _ring_without_its_last_page),
        (rings, "first_seen", _window_that_ends_a_page_late),
        (buckets, "touched_pages", _rings_a_page_short),
        (Shipping, "runs_of", _windows_from_the_pages_of_others),
        (Admission, "_sit", _pages_shared_before_they_come),
        (DecodeScheduler, "plan", _drafts_for_which_there_is_no_page),
        (Ranks, "add", _ranks_as_it_likes),
        (PrefillScheduler, "keep_back", _kept_back_for_good),
        (Keeping, "dispatch", _pages_saved_a_turn_late),
        (Keeping, "dispatch", _pages_never_restored),
        (HostMemory, "fetch", _pages_of_the_host_turned_round),
        (PrefixCache, "chain", _one_salt_for_all),
        (prefill.worker, "sharing_salt", _one_salt_for_all_adapters),
        (decode.worker, "sharing_salt", _one_salt_for_all_adapters),
        (PrefillWorker, "adapter_of", _no_adapter),
        (DecodeWorker, "adapter_of", _no_adapter),
        (Sharing, "cached", _no_limit_to_reuse),
        (PrefillWorker, "handle", _deaf_to(ApiGone)),
        (DecodeWorker, "handle", _deaf_to(ApiGone)),
        (PrefillWorker, "handle", _deaf_to(Aborted)),
        (DecodeWorker, "_place", _pages_a_place_further),
        (Inbound, "forget", _frames_of_the_forgotten),
        (RoleWorker, "open_room", _deadlines_by_the_wall_clock),
        (DecodeWorker, "_complete_step", _failed_for_what_is_drawn_behind_an_end),
        (ConstrainedSlots, "__len__", _masks_without_the_last_step),
        (PrefillWorker, "handle", _deaf_to(GrammarReady)),
        (DecodeWorker, "handle", _deaf_to(GrammarReady)),
        (Placement, "_leave", _the_other_leg_goes_on),
        (Placement, "worker_lost", _nothing),
        (Placement, "place_waiting", _nothing),
        (Router, "ended", _nothing),
        (Generation, "accept", _takes_tokens_as_they_come),
        (PlainStreams, "_fold", _nothing),
        (PlainStreams, "hindered", _nothing),
        (Dispatcher, "finish", _pages_on_their_way_when_it_ended),
        (Dispatcher, "on_refused", _nothing),
        (Limiter, "_admit_waiting", _nothing),
        (replies, "merge", _only_what_the_last_step_says),
    ],
)
def test_a_fault_is_noticed(
    monkeypatch: pytest.MonkeyPatch, owner: Any, method: str, wrap: Wrap
) -> None:
    monkeypatch.setattr(owner, method, wrap(getattr(owner, method)))
    with pytest.raises(SimulationFailed, match=r"seed \d+, tick \d+: .*--seed \d+"):
        sum(map(play, FAULT_SEEDS), Counter())
