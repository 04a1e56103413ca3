"""Fixtures: commands, streams that write for themselves or in columns, a tokenizer's files."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from serving import plain_streams
from serving.body_writer import BodyWriter, Borrower
from tests.serving.commands import Command
from tests.serving.tokenizer_folders import GOLDENS


@pytest.fixture
def commands() -> Iterator[list[Command]]:
    """Commands that a test started; whatever it leaves is killed."""
    started: list[Command] = []
    yield started
    for command in started:
        command.kill()


@pytest.fixture(params=[False, True], ids=["own", "lent"])
def lent(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The slots that streams lent to: none, or one per stream each time that it settles."""
    slots: list[int] = []
    lend = BodyWriter.lend

    def noted(self: BodyWriter, borrower: Borrower, slot: int) -> None:
        slots.append(slot)
        lend(self, borrower, slot)

    monkeypatch.setattr(BodyWriter, "lend", noted)
    monkeypatch.setattr(plain_streams, "LEAST_STREAMS", 1 if request.param else 1 << 30)
    return slots


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the tokenizer that a test may break."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(GOLDENS / name, tmp_path / name)
    (tmp_path / "tokenizer_config.json").chmod(0o644)
    return tmp_path
