"""What both roles do alike; more of it is tested with each role and in tests/sim."""

import asyncio
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.sim.alone import Alone
from tests.sim.grammars import SimGrammars
from tests.transfer.samples import KV
from transfer import role, wire
from transfer.opened import PoolFacts
from transfer.role import RoleWorker
from transfer.worker import Aborted
from transfer.worker_config import WorkerConfig


@pytest.mark.parametrize(("num_pages", "limit"), [(100, 64), (3, 48)])
def test_a_request_is_limited_by_context_and_pool(num_pages: int, limit: int) -> None:
    facts = PoolFacts(page_size=16, context_length=64, logical_kv_heads=2, stored_kv_heads=2)
    assert facts.request_limit(num_pages) == limit


def test_a_worker_tells_all_of_its_pages_and_counts_heads_without_copies() -> None:
    worker: Any = SimpleNamespace(
        worker_id=lambda: "decode-0",
        role="decode",
        host="127.0.0.1",
        port=1,
        config=WorkerConfig(Path("model"), "127.0.0.1:8998"),
    )
    kv = replace(KV, planes=1, dtype="float16")
    model = SimpleNamespace(dtype=np.dtype("float32"))
    more = {"kv": kv, "logical_kv_heads": 1, "context_length": 64, "adapters": ("sql",)}
    opened: Any = SimpleNamespace(**more, digest="d1", model=model)
    info = RoleWorker.described(worker, opened, num_pages=3)
    assert msgspec.structs.asdict(info.kv_spec) == asdict(kv) | {"num_kv_heads": 1}
    assert (info.stored_kv_heads, info.max_request_tokens) == (4, 12)
    assert info.adapters == ("sql",)


@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_a_submit_that_comes_again_when_its_room_has_ended_opens_no_other(name: wire.Role) -> None:
    alone = Alone(name)
    for _ in range(2):
        alone.submit(1)
        alone.turn()
        alone.worker.handle(Aborted((1,)))
        alone.turn()
    assert len(alone.grants) == (name == "decode")
    assert [leg.room for leg in alone.legs()] == [1]


async def test_the_tokenizer_for_grammars_takes_its_memory_before_memory_is_planned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []

    async def check_fit(info: str) -> None:
        asked.append(info)

    monkeypatch.setattr(role, "Grammars", lambda path, cfg: (path, cfg))
    worker: Any = SimpleNamespace(
        _loop=asyncio.get_running_loop(),
        _registry=SimpleNamespace(check_fit=check_fit),
        _grammars=None,
        described=lambda opened: "described",
        config=WorkerConfig(Path("model"), "127.0.0.1:8998"),
    )
    opened: Any = SimpleNamespace(model=SimpleNamespace(cfg="cfg"))
    await asyncio.to_thread(RoleWorker.before_weights, worker, opened)
    assert asked == ["described"]
    assert worker._grammars == (Path("model"), "cfg")


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_worker_whose_thread_stays_at_a_grammar_makes_no_progress(
    role: wire.Role, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = Alone(role).worker
    monkeypatch.setattr(SimGrammars, "progress", lambda _: 7)
    for turns in (1, 2):
        worker.progress = turns
        assert [number() for number in worker.watched()] == [turns, 7]
