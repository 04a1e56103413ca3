"""Both roles in this process, with pages copied by hand: the reference for served requests."""

import queue
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from decode.admission import Admission
from decode.engine import DecodeEngine, SlotStart
from decode.rings import Rings
from decode.scheduler import DecodeScheduler
from model.buckets import Drafting, decode_buckets, prefill_buckets
from model.chunks import FirstSample
from model.opening import OpenedModel
from model.pieces import Piece
from prefill.engine import PrefillEngine
from prefill.scheduler import PrefillScheduler, Prompt
from prefill.shipping import Shipping
from tests.model.harness import open_plainly
from transfer import wire
from transfer.grammars import Constraint, Grammars, Outcome
from transfer.opened import PoolFacts
from transfer.pages import PagePool
from transfer.prefix_cache import PrefixCache

PAGE_SIZE = 16
CONTEXT = 512
CHUNK = 64
POOL_TOKENS = 2 * CONTEXT


class OneProcess:
    """One request at a time through both engines, with no transfer, cache or preemption."""

    def __init__(
        self, path: Path, has_rings: bool = False, drafting: Drafting | None = None
    ) -> None:
        """has_rings: decode keeps only what windows need, as a worker does; else all pages.

        drafting: for every step; None: no drafts.
        """
        self._opened = _opened(path)
        self._facts = PoolFacts.of(self._opened)
        self._grammars = Grammars(path, self._opened.model.cfg)
        # One chunk program only: compiling is what takes time here.
        self._buckets = replace(prefill_buckets(CHUNK, 1, CONTEXT, PAGE_SIZE), tokens=(CHUNK,))
        self._prefill = PrefillEngine(self._opened, self._buckets, 0.0, POOL_TOKENS, 1)
        window = self._facts.window if has_rings else 0
        self._drafting = drafting
        buckets = decode_buckets(1, CONTEXT, PAGE_SIZE, drafting, window)
        self._decode = DecodeEngine(_opened(path), buckets, 0.0, POOL_TOKENS)
        self.rings = Rings(self._facts, self._decode.num_pages, buckets.ring_pages)

    def run(self, token_ids: Sequence[int], params: wire.SamplingParams) -> list[int]:
        """Returns the generated ids."""
        ids = np.array(token_ids, np.int32)
        constraint = self._constraint(ids, params) if params.grammar else None
        pool, ring_pages = PagePool(self.rings.pool_pages), self.rings.ring_pages
        admission = Admission([pool], 1, PAGE_SIZE, 0, ring_pages=ring_pages)
        drafts = self._drafting.num_tokens if self._drafting is not None else 0
        scheduler = DecodeScheduler(admission, drafts)
        admission.add(0, len(ids), 0.0)
        (seat,) = admission.admit()
        mask = constraint.first_mask if constraint is not None else None
        tokens = [self._first(ids, params, self.rings.to_fill(seat), mask)]
        if tokens[0] in params.stop_token_ids or params.max_new_tokens == 1:
            return tokens
        known = np.append(ids, tokens).astype(np.int32)
        start = SlotStart(seat.slot, known, len(ids), seat.pages, params, seat.ring)
        self._decode.start_slots([start])
        scheduler.start(seat, "api", params, len(ids))
        while (plan := scheduler.plan(drafts > 0)) is not None:
            if constraint is not None:
                assert constraint.take(tokens[-1])
                self._decode.set_masks(plan.slots, self._grammars.masks([constraint]))
            flight = self._decode.step(*plan.arrays, drafts > 0)
            result = scheduler.finish(plan, flight.token_ids()[0])
            tokens += result.token_ids.tolist()
            if result.finish[-1]:
                break
        return tokens

    def _constraint(self, ids: np.ndarray, params: wire.SamplingParams) -> Constraint:
        nobody = wire.WorkerRef("", 0, "")
        data = wire.pack_i32(ids)
        submit = wire.Submit(0, "", "", data, len(ids), params, 0.0, 0.0, nobody, nobody)
        outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self._grammars.begin(submit, lambda: True, outcomes.put)
        outcome = outcomes.get(timeout=60)
        assert isinstance(outcome, Constraint), outcome
        return outcome

    def _first(
        self,
        ids: np.ndarray,
        params: wire.SamplingParams,
        to_fill: Sequence[int],
        mask: np.ndarray | None,
    ) -> int:
        pool = PagePool(self._prefill.num_pages)
        scheduler = PrefillScheduler(
            pool, PrefixCache(pool, PAGE_SIZE, False), CHUNK, 1, self._buckets.pages
        )
        prompt = Prompt(0, ids, 0.0)
        scheduler.add(prompt)
        scheduler.grant(0)
        while pieces := scheduler.plan():
            self._prefill.run_chunk([pieces])
        out = self._prefill.sample_first([FirstSample(0, params, ids, len(ids), mask)])
        sizes = PAGE_SIZE, self._prefill.num_pages, self._prefill.max_run_pages
        shipping = Shipping(*sizes, self._facts.groups)
        first = shipping.first_windowed(len(ids), len(to_fill))
        assert first is not None
        for run in shipping.runs_of(Piece(prompt, 0, len(ids)), range(len(prompt.pages)), first):
            ((shard,),) = self._prefill.gather_runs([run.page_ids])
            staged = np.asarray(shard)[:, :, : len(run.page_ids)]
            filled = to_fill[run.first_page : run.first_page + len(run.page_ids)]
            self._decode.place_run(0, filled, [staged])
        return int(np.asarray(out.ids)[0])


def _opened(path: Path) -> OpenedModel:
    return open_plainly(path, PAGE_SIZE, CONTEXT)
