"""What prefill does with a prompt of which decode has the first pages: it sends the rest."""

from dataclasses import dataclass, replace
from typing import Any

import pytest

from prefill.worker import Granted
from tests.prefill.test_worker import prefill
from tests.sim.alone import PAGE
from transfer import wire


@dataclass
class Device:
    """Counts the chunks that the host has dispatched, and those that it has waited for."""

    dispatched: int = 0
    awaited: int = 0


@dataclass
class Logits:
    """The logits of one chunk. number: of its dispatch, from 1."""

    device: Device
    number: int

    def block_until_ready(self) -> "Logits":
        self.device.awaited = max(self.device.awaited, self.number)
        return self


def test_the_host_is_a_chunk_ahead_at_most_though_no_chunk_has_pages_to_send(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alone, worker = prefill(num_pages=16)
    device, run_chunk = Device(), worker._engine.run_chunk

    def counted(plans: Any) -> Any:
        device.dispatched += 1
        return replace(run_chunk(plans), logits=Logits(device, device.dispatched))

    monkeypatch.setattr(worker._engine, "run_chunk", counted)
    alone.submit(1, num_tokens=8 * PAGE)  # four chunks
    last = wire.pack_i32([0])
    grant = wire.Grant(1, worker.epoch, ("sim://nobody",), last, 1, 2, first_page=7)
    worker.handle(Granted((grant,)))
    ahead = []
    while alone.turn():
        ahead.append(device.dispatched - device.awaited)
    assert alone.tokens() == [(1, 0)]
    assert device.dispatched == 4
    assert max(ahead) == 1
    assert device.awaited == 4
