"""A crowd of streams whose steps a test tells by hand, with columns or without."""

import asyncio
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from serving.config import ServeConfig
from serving.generation import Generation
from serving.metrics import Metrics
from serving.placement import Placement
from serving.protocol import ChoiceAsk
from serving.router import Key, Pair
from serving.steps import Steps
from serving.worker_link import WorkerLink
from tests.serving.live import EOS, FIRST_BYTE, LETTER_A, MODEL_PATH, SECOND_BYTE
from tests.serving.streaming import Streaming, asked
from transfer import wire
from transfer.clock import ManualClock

PREFILL: Key = ("p", 1)
DECODE: Key = ("d", 1)
OTHER: Key = ("d", 2)
FIRST_ROOM = 1 << 40
TOKENS = [LETTER_A, LETTER_A + 1, FIRST_BYTE, SECOND_BYTE, EOS, 1 << 20]


@dataclass
class Link:
    key: Key
    aborted: list[int] = field(default_factory=list)

    @property
    def worker_id(self) -> str:
        return self.key[0]

    def abort(self, room: int) -> None:
        self.aborted.append(room)


class Cluster:
    """Where generations are, and who ends them: what Steps needs of a placement and an owner."""

    def __init__(self) -> None:
        self.rooms: dict[int, Generation] = {}
        self.failed: list[Generation] = []

    def __len__(self) -> int:
        return len(self.rooms)

    def at(self, room: int, key: Key) -> Generation | None:
        generation = self.rooms.get(room)
        return generation if generation is not None and generation.involves(key) else None

    def progressed(self, generation: Generation) -> None:
        assert generation.computed

    def finish(self, generation: Generation) -> None:
        self.leave(generation)
        generation.sink.on_end(generation.finish_reason)

    def stream_failed(self, generation: Generation, error: Exception) -> None:
        raise error

    def leave(self, generation: Generation) -> None:
        del self.rooms[generation.room]
        generation.leave_attempt()


def _ask() -> ChoiceAsk:
    """A choice whose stop token shows nothing, so that there is only text to show."""
    sampling = wire.SamplingParams(max_new_tokens=99, stop_token_ids=(EOS,))
    return dataclasses.replace(asked(stop_ids=frozenset({EOS})), sampling=sampling)


class Crowd:
    """Streams that are told by Steps, with or without columns."""

    def __init__(
        self,
        num_streams: int,
        interval: int,
        own: Sequence[int | None],
        group_size: int = 0,
        **request: Any,
    ) -> None:
        """own: the interval that each stream asked for. request: what else all asked for."""
        self.cluster = Cluster()
        self.clock = ManualClock()
        self.metrics = Metrics()
        config = ServeConfig(
            MODEL_PATH, "registry:1", stream_interval=interval, batch_notify_size=group_size
        )
        placement = cast(Placement, self.cluster)
        self.steps = Steps(config, placement, self.metrics, self.clock, self.cluster)
        self.links = {key: Link(key) for key in (PREFILL, DECODE, OTHER)}
        self.streams = [
            Streaming([_ask()], interval=self.steps.interval if one is None else one, **request)
            for one in own[:num_streams]
        ]
        self.generations: list[Generation] = []
        for place, stream in enumerate(self.streams):
            generation = stream.answer.sinks[0].generation
            assert generation is not None
            self.generations.append(generation)
            self.attempt(generation, FIRST_ROOM + place)

    def attempt(self, generation: Generation, room: int) -> None:
        pair = cast(Any, _Pair())
        generation.begin_attempt(room, cast(Pair, pair))
        self.cluster.rooms[room] = generation

    async def tell(self, key: Key, rows: Sequence[tuple[int, int, int, int]]) -> None:
        """rows: (room, token index, id, finish). All that is written leaves, and streams settle."""
        await self.tell_only(key, rows)
        await turns(2)

    async def tell_only(self, key: Key, rows: Sequence[tuple[int, int, int, int]]) -> None:
        """The same, but streams do not settle yet."""
        rooms, idx, ids, finish = zip(*rows, strict=True)
        batch = wire.StepBatch(
            key[0],
            key[1],
            1,
            self.clock.monotonic_s(),
            rooms=wire.pack_i64(rooms),
            token_ids=wire.pack_i32(ids),
            token_idx=wire.pack_i32(idx),
            finish=wire.pack_u8(finish),
        )
        await self.steps.take(cast(WorkerLink, self.links[key]), batch)
        self.flush()

    def flush(self) -> None:
        for stream in self.streams:
            stream.bench.outbox.send()

    @property
    def num_lent(self) -> int:
        return sum(generation.lent_to is not None for generation in self.generations)

    def bodies(self) -> list[list[bytes]]:
        return [stream.bench.wire.bodies for stream in self.streams]


async def turns(count: int) -> None:
    """Give the event loop this many turns."""
    for _ in range(count):
        await asyncio.sleep(0)


class _Pair:
    decode_key = DECODE
    prefill_key = PREFILL


async def begun(num_streams: int = 3, interval: int = 1, **asks: Any) -> Crowd:
    """A crowd in which all have their first four tokens, and have lent if they may."""
    own = asks.pop("own", [None] * num_streams)
    crowd = Crowd(num_streams, interval, own, **asks)
    for idx in range(4):
        rows = [(g.room, idx, LETTER_A + idx, 0) for g in crowd.generations]
        await crowd.tell(DECODE if idx else PREFILL, rows)
    return crowd
