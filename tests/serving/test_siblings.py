"""What one process of a server tells of another that does not answer."""

import asyncio
import re
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import msgspec
import pytest

from serving import siblings
from serving.front import Front
from serving.metrics import Metrics
from serving.prefix_index import Untold
from serving.siblings import Siblings
from tests.fakes import SECURITY, until
from tests.serving.test_metrics import parsed
from transfer import complaint, wire
from transfer.errors import Unavailable
from transfer.rpc import RpcClient


class Away(RpcClient):
    """A client of a process that is not there; it need not be waited for."""

    async def call[M: msgspec.Struct](
        self, name: str, request: msgspec.Struct, reply: type[M], timeout_s: float
    ) -> M:
        raise Unavailable(f"{name} at {self.address}: refused")


class Alone:
    """A process whose only sibling is away, and what it has counted."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(complaint, "_QUIET_S", 0.0)
        self._metrics = Metrics()
        front = SimpleNamespace(dispatcher=SimpleNamespace(metrics=self._metrics))
        self.siblings = Siblings(cast(Front, front))
        self.siblings._clients = [Away(f"unix:{folder}/1", SECURITY)]

    @property
    def num_silent(self) -> float:
        return parsed(self._metrics.own_text())["kvferry_sibling_silent_total",]


async def test_a_sibling_that_is_away_is_logged_once_whatever_it_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    alone = Alone(tmp_path, monkeypatch)
    try:
        for name in ("State", "Metrics", "State", "Flushed"):
            assert await alone.siblings._ask_all(name, wire.Empty(), wire.Empty) == []
        assert alone.num_silent == 4
    finally:
        await alone.siblings.stop()
    (line,) = (record.getMessage() for record in caplog.records)
    assert line == f"another API process of this server is left out: unix:{tmp_path}/1: refused"


async def test_an_error_begins_with_the_question_which_is_left_out_of_that_line(
    tmp_path: Path,
) -> None:
    client = RpcClient(f"unix:{tmp_path}/1", SECURITY)
    try:
        with pytest.raises(Unavailable, match=f"^State at {re.escape(client.address)}: "):
            await client.call("State", wire.Empty(), wire.Empty, 60.0)
    finally:
        await client.close()


async def test_hints_that_a_sibling_misses_are_no_questions_that_it_did_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(siblings, "_TELL_EACH_S", 0.001)
    alone, untold = Alone(tmp_path, monkeypatch), Untold()
    untold.add("a", 1, -1, [1], 0)
    telling = asyncio.create_task(alone.siblings._tell_uses(untold))
    try:
        await until(lambda: bool(caplog.records))
        assert "is left out" in caplog.text
        assert alone.num_silent == 0
    finally:
        telling.cancel()
        await asyncio.wait({telling})
        await alone.siblings.stop()
