"""A model of an API process: places requests, puts their tokens in order, and moves requests."""

from dataclasses import dataclass, field
from functools import partial

import msgspec
import numpy as np

from decode.config import ANY_PROMPT, DecodeConfig
from serving.step_rows import unpack_runs
from tests.sim.engines import prompt_logprob
from tests.sim.grammars import WRONG
from tests.sim.network import expected_tokens
from tests.sim.transport import Channel, Net
from tests.sim.workers import SimDecode, SimPrefill, close_stream, open_stream, run_now
from transfer import wire
from transfer.clock import Clock
from transfer.errors import Code
from transfer.stops import finish_of

STRAYS_TOLERATED = 3


@dataclass(eq=False)
class Request:
    """What a client asked for, and what it was told."""

    number: int
    prompt_ids: list[int]
    sampling: wire.SamplingParams
    salt: str
    adapter: str
    patience_s: float
    is_dictated: bool  # the request names the ranks of both workers
    arrival_s: float = 0.0  # by the clock of its API process
    tokens: list[int] = field(default_factory=list)
    early: dict[int, int] = field(default_factory=dict)
    room: int = 0
    pair: tuple["Line", ...] = ()  # prefill, decode
    attempt_start: int = 0
    prefilled: bool = False
    not_before: int = 0  # tick
    attempts: int = 0
    end: str = ""

    def __post_init__(self) -> None:
        self.expected = expected_tokens(self.prompt_ids, self.sampling, self.adapter)
        last = len(self.expected) - 1
        # Its logits are no numbers behind these tokens.
        self.breaks = not self.expected or not finish_of(self.expected[-1], last, self.sampling)

    @property
    def deadline_s(self) -> float:
        return self.arrival_s + self.patience_s

    def finish(self, how: str) -> None:
        assert not self.end, f"request {self.number} ended {self.end}, and again {how}"
        self.end = how

    def check(self, token_idx: int, token_id: int, finish: int) -> None:
        """Check that a token some worker drew is the one an undisturbed worker draws."""
        what = f"request {self.number}, token {token_idx}"
        assert token_idx < len(self.expected), f"{what} comes after the end"
        assert token_id == self.expected[token_idx], f"{what} is {token_id}"
        assert finish == finish_of(token_id, token_idx, self.sampling), what


class Line:
    """One reply stream from one incarnation of a worker to one API process, and the calls back."""

    def __init__(
        self, api: "Api", worker: SimPrefill | SimDecode, api_id: str, lost_reply: float
    ) -> None:
        self.api = api
        self.worker = worker
        self.api_id = api_id
        self.open = False
        self.draining = False
        self.drained = False  # the worker holds nothing of ours any more
        self.duplicate = 0.0
        self._lost_reply = lost_reply
        self._net = api.net
        self._to_worker = Channel(api.net)
        self._to_api = Channel(api.net)
        self._to_worker.send(self._subscribed)

    @property
    def ref(self) -> wire.WorkerRef:
        return wire.WorkerRef(self.worker.worker_id(), self.worker.epoch, self.worker.host)

    def submit(self, submit: wire.Submit) -> None:
        self._to_worker.send(lambda: self._submitted(submit))

    def abort(self, room: int) -> None:
        batch = wire.AbortBatch((room,))
        self._to_worker.send(lambda: run_now(self.worker._abort(batch)))

    def steps(self, batch: wire.StepBatch) -> None:
        """Publish the worker's batch."""
        data = wire.encode(batch)
        self._to_api.send(lambda: self.api.on_batch(self, wire.decode(data, wire.StepBatch)))

    def farewell(self) -> None:
        """The worker ends its stream in order: all that it has sent arrives before the end."""
        worker = self.worker
        event = wire.RoomEvent(0, "drained")
        self.steps(wire.StepBatch(worker.worker_id(), worker.epoch, 0, 0.0, events=(event,)))
        self._to_api.send(self.break_)

    def break_(self) -> None:
        """Nothing more arrives; both ends notice, each after a while."""
        if not self._to_worker.open:
            return
        self._to_worker.close()
        self._to_api.close()
        self._net.after(self._net.delay(), lambda: close_stream(self.worker, self.api_id))
        self._net.after(self._net.delay(), lambda: self.api.on_broken(self))

    def _subscribed(self) -> None:
        open_stream(self.worker, self.api_id)
        self._to_api.send(lambda: self.api.on_open(self))

    def _submitted(self, submit: wire.Submit) -> None:
        batch = wire.SubmitBatch((submit,))
        if self._net.rng.random() < self.duplicate:
            self._net.stats["submits_doubled"] += 1
            run_now(self.worker._submit(batch))
        reply = run_now(self.worker._submit(batch))
        refused = list(reply.refused)
        if self._net.rng.random() < self._lost_reply:
            self._net.stats["submit_replies_lost"] += 1
            refused = [wire.Refusal(submit.room, Code.PEER_LOST.value, "no answer")]
        for refusal in refused:
            # Replies and steps come by different calls, so they overtake each other.
            self._net.after(self._net.delay(), partial(self.api.on_refused, self, refusal))


class Api:
    """One API process."""

    def __init__(self, name: str, net: Net, clock: Clock, owners: dict[int, Request]) -> None:
        self.name = name
        self.net = net
        self.alive = True
        self.lines: list[Line] = []
        self.live: list[Request] = []
        self._clock = clock
        self._owners = owners  # the request of every room there ever was, of all API processes
        self._rooms: dict[int, Request] = {}
        # Rooms that ended with their first token, while prefill may still fail to tell decode.
        self._ended_by_first: dict[int, tuple[Line, ...]] = {}
        self._strays: dict[tuple[str, int], int] = {}

    def take(self, request: Request) -> None:
        request.arrival_s = self._clock.monotonic_s()
        self.live.append(request)

    def tick(self, abort: float) -> None:
        """Handle deadlines, clients that leave, and placement of waiting requests."""
        for request in list(self.live):
            if request.deadline_s < self._clock.monotonic_s():
                self._close(request, "deadline")
            elif self.net.rng.random() < abort:
                self.net.stats[f"aborts_{self._where(request)}"] += 1
                self._close(request, "aborted")
            elif not request.room and request.not_before <= self.net.tick:
                self._place(request)

    def die(self) -> None:
        self.alive = False
        for line in self.lines:
            line.break_()
        for request in self.live:
            request.finish("api_died")

    # --- what workers say -----------------------------------------------------------------------

    def on_open(self, line: Line) -> None:
        if self.alive:
            line.open = True

    def on_broken(self, line: Line) -> None:
        if not self.alive:
            return
        line.open = False
        self.lines.remove(line)
        for request in list(self._rooms.values()):
            # Decode has all of prefill's pages if it sent a token, or if prefill left in order
            # after the first token.
            enough = request.attempt_start + (0 if line.drained else 1)
            if request.pair[1] is line or (
                request.pair[0] is line and len(request.tokens) <= enough
            ):
                self._leave(request, line)
        for room, (prefill, decode) in list(self._ended_by_first.items()):
            if prefill is line and decode.open:
                decode.abort(room)

    def on_refused(self, line: Line, refusal: wire.Refusal) -> None:
        request = self._rooms.get(refusal.room)
        if not self.alive or request is None or line not in request.pair:
            return
        code = Code(refusal.code)
        assert code.retryable, refusal
        self.net.stats[f"refused_{code.value}"] += 1
        if code is Code.DRAINING:
            line.draining = True
        else:
            request.not_before = self.net.tick + self.net.rng.randrange(20)
        self._leave(request, None)

    def on_batch(self, line: Line, batch: wire.StepBatch) -> None:
        if not self.alive:
            return
        assert (batch.worker_id, batch.epoch) == (line.worker.worker_id(), line.worker.epoch)
        for event in batch.events:
            if event.kind == "prefilled":
                self._prefilled(line, event)
        runs = unpack_runs(batch)
        every = np.arange(len(runs))
        columns = (column.tolist() for column in (runs.rooms, runs.first_idx, runs.finish))
        rows = zip(*columns, runs.ids_of(every), runs.detail_of(every), strict=True)
        for room, first, finish, ids, detail in rows:
            for place, token_id in enumerate(ids):
                is_last = place == len(ids) - 1
                self._row(line, room, first + place, token_id, finish if is_last else wire.RUNNING)
            if detail is not None and self._owners[room].sampling.num_top_logprobs >= 0:
                assert detail.logprobs == [-token_id / 8 for token_id in ids]
                for token_id, top in zip(ids, detail.top, strict=True):
                    assert top is None or top[0][0] == token_id
        for event in batch.events:
            if event.kind != "prefilled":
                self._interrupted(line, event)

    def _prefilled(self, line: Line, event: wire.RoomEvent) -> None:
        request = self._rooms.get(event.room)
        if request is None or line not in request.pair or request.prefilled:
            return
        request.prefilled = True
        self.net.stats["cached_tokens"] += event.cached_tokens
        start = request.sampling.prompt_logprobs_start
        told = event.prompt_logprobs
        assert (told is not None) == (start >= 0)
        if told is not None:
            spots = range(max(start, 1), len(request.prompt_ids))
            assert told.start == spots.start
            assert wire.unpack_i32(told.token_ids).tolist() == request.prompt_ids[spots.start :]
            assert wire.unpack_f32(told.logprobs).tolist() == [prompt_logprob(p) for p in spots]
            self.net.stats["prompt_logprobs"] += 1

    def _row(self, line: Line, room: int, token_idx: int, token_id: int, finish: int) -> None:
        self._owners[room].check(token_idx, token_id, finish)
        request = self._rooms.get(room)
        if request is None or line not in request.pair:
            self._stray(line, room)
            return
        if token_idx > len(request.tokens):
            self.net.stats["tokens_early"] += 1
            request.early[token_idx] = token_id
            return
        self.net.stats["tokens_doubled"] += token_idx < len(request.tokens)
        if token_idx == len(request.tokens):
            request.tokens.append(token_id)
            while len(request.tokens) in request.early:
                request.tokens.append(request.early.pop(len(request.tokens)))
        if len(request.tokens) == len(request.expected) and not request.breaks:
            if len(request.tokens) == request.attempt_start + 1:
                self._ended_by_first[room] = request.pair
            self._close(request, "finished", tell_workers=False)

    def _interrupted(self, line: Line, event: wire.RoomEvent) -> None:
        if event.kind == "drained" or event.code == Code.DRAINING.value:
            line.draining = True
            line.drained = line.drained or event.kind == "drained"
        request = self._rooms.get(event.room)
        if request is None or line not in request.pair:
            pair = self._ended_by_first.pop(event.room, None)
            if pair is not None and line is pair[0] and pair[1].open:
                pair[1].abort(event.room)
            return
        if event.kind == "preempted":
            self.net.stats["preempted"] += 1
        elif event.code == Code.GONE.value:
            self.net.stats["failed_gone"] += 1
            return  # the other worker always says why, and this model relies on it
        elif event.code == Code.DEADLINE.value:
            assert request.deadline_s < self._clock.monotonic_s()
            self._close(request, "deadline")
            return
        elif event.code == Code.INTERNAL.value:
            assert request.breaks, event
            self._close(request, "internal")
            return
        elif event.code == Code.BAD_REQUEST.value:
            assert request.sampling.grammar == WRONG
            self._close(request, "bad_request")
            return
        else:
            assert Code(event.code).retryable, event
            self.net.stats[f"failed_{event.code}"] += 1
        self._leave(request, line)

    def _stray(self, line: Line, room: int) -> None:
        key = (line.api_id, room)
        self._strays[key] = self._strays.get(key, 0) + 1
        if self._strays[key] > STRAYS_TOLERATED:
            line.abort(room)

    # --- places ---------------------------------------------------------------------------------

    def _place(self, request: Request) -> None:
        pair = []
        for role in ("prefill", "decode"):
            takers = [
                line
                for line in self.lines
                if line.open and not line.draining and line.worker.role == role
            ]
            if not takers:
                return
            pair.append(self.net.rng.choice(takers))
        if self._may_be_local(request, pair[1]):
            pair[0] = pair[1]
        self.net.stats["rooms"] += 1
        request.room = self.net.stats["rooms"]
        request.pair = tuple(pair)
        request.attempt_start = len(request.tokens)
        request.attempts += 1
        request.early.clear()
        self._rooms[request.room] = request
        self._owners[request.room] = request
        for line in dict.fromkeys(pair):
            line.submit(self._message(request, line.api_id))

    def _may_be_local(self, request: Request, decode: Line) -> bool:
        config = decode.worker.config
        assert isinstance(config, DecodeConfig)
        limit, num_tokens = config.local_prefill_tokens, len(request.prompt_ids)
        fits = limit == ANY_PROMPT or num_tokens + len(request.tokens) <= limit
        return fits and not request.is_dictated

    def _message(self, request: Request, api_id: str) -> wire.Submit:
        sampling = request.sampling
        if request.prefilled:
            sampling = msgspec.structs.replace(sampling, prompt_logprobs_start=-1)
        prefill, decode = request.pair
        ranks, now_s = [-1, -1], self._clock.monotonic_s()
        if request.is_dictated:
            self.net.stats["dictated"] += 1
            ranks = [request.room % line.worker.config.dp_size for line in request.pair]
        return wire.Submit(
            room=request.room,
            request_id=str(request.number),
            api_id=api_id,
            token_ids=wire.pack_i32(request.prompt_ids + request.tokens),
            num_prompt_tokens=len(request.prompt_ids),
            sampling=sampling,
            age_s=now_s - request.arrival_s,
            left_s=request.deadline_s - now_s,
            prefill=prefill.ref,
            decode=decode.ref,
            cache_salt=request.salt,
            adapter=request.adapter,
            disagg_prefill_dp_rank=ranks[0],
            routed_dp_rank=ranks[1],
        )

    def _leave(self, request: Request, over_at: Line | None, tell_workers: bool = True) -> None:
        del self._rooms[request.room]
        if tell_workers:
            for line in dict.fromkeys(request.pair):
                if line is not over_at and line.open:
                    line.abort(request.room)
        request.room, request.pair = 0, ()
        request.early.clear()

    def _close(self, request: Request, how: str, tell_workers: bool = True) -> None:
        if request.room:
            self._leave(request, None, tell_workers)
        self.live.remove(request)
        request.finish(how)

    def _where(self, request: Request) -> str:
        if not request.room:
            return "waiting"
        for line in reversed(request.pair):
            held = line.worker._held.get(request.room)
            if held is not None:
                return f"{line.worker.role}_{held.room.state.value}"
        return "under_way"
