"""Grammars that take too much are refused by a process that they may kill."""

import errno
import gc
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from serving.demo import demo_model_path
from serving.grammar_trial import LANES, TOO_MUCH, GrammarTrial
from tests.cluster import has_ended
from tests.recording import until
from tests.serving.trials import lark, processes, schema
from transfer.errors import Code, RequestError


@pytest.fixture(scope="module")
def trial() -> Iterator[GrammarTrial]:
    trial = GrammarTrial(demo_model_path())
    yield trial
    trial.close()
    assert not processes()


@pytest.mark.parametrize(
    "grammar",
    [
        schema({"type": "integer", "multipleOf": 99999999}),
        schema({"allOf": [{"type": "integer", "multipleOf": n} for n in range(1, 60)]}),
        lark('start: %json {"type": "integer", "multipleOf": 99999999}'),
        lark("start: a0\n" + "".join(f'a{n}: "b" a{n + 1}\n' for n in range(4000)) + 'a4000: "b"'),
        lark(f"start: /{'a?' * 20_000}{'a' * 20_000}/"),
    ],
)
async def test_what_takes_too_much_is_refused_and_the_next_one_is_not(
    trial: GrammarTrial, grammar: str
) -> None:
    assert await trial.fault(grammar) == TOO_MUCH
    assert await trial.fault(schema({"enum": [len(grammar)]})) == ""
    assert len(processes()) <= len(LANES)


@pytest.mark.parametrize(
    "grammar",
    [
        schema({}),
        schema({"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(200)}}),
        lark("start: /[a-z]{1,9}( [a-z]{1,9}){400}/"),
    ],
)
async def test_what_is_usual_passes(trial: GrammarTrial, grammar: str) -> None:
    assert await trial.fault(grammar) == ""


async def test_a_fault_is_told_in_a_line(trial: GrammarTrial) -> None:
    fault = await trial.fault(lark("start: /(a/"))
    assert "unclosed group" in fault
    assert "\n" not in fault


async def test_a_process_that_was_killed_is_replaced(trial: GrammarTrial) -> None:
    assert await trial.fault(schema({"const": 1})) == ""
    before = processes()
    for process in before:
        os.kill(process.pid, signal.SIGKILL)
    await until(lambda: all(map(has_ended, before)))
    assert await trial.fault(schema({"const": 2})) == ""
    assert not set(before) & set(processes())


async def test_a_model_without_a_tokenizer_refuses_all(tmp_path: Path) -> None:
    shutil.copy(demo_model_path() / "config.json", tmp_path)
    trial = GrammarTrial(tmp_path)
    for _ in range(2):
        with pytest.raises(RequestError, match="tokenizer") as refused:
            await trial.fault(schema({}))
        assert refused.value.code is Code.BAD_REQUEST
    trial.close()


async def test_a_trial_that_is_dropped_leaves_no_process() -> None:
    before = processes()
    trial = GrammarTrial(demo_model_path())
    assert await trial.fault(schema({})) == ""
    assert len(processes()) == len(before) + 1
    del trial

    def is_gone() -> bool:
        gc.collect()  # the thread that asked the process may hold it for a moment longer
        return processes() == before

    await until(is_gone)


def open_files() -> set[str]:
    """What this process has open, by inode: others of its threads may close some meanwhile."""
    folder = Path("/proc/self/fd")
    found = set[str]()
    for file in folder.iterdir():
        with suppress(FileNotFoundError):  # as that of this listing
            found.add(str(file.readlink()))
    return found


async def test_a_host_that_starts_no_process_is_an_internal_error_and_leaves_nothing_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    trial = GrammarTrial(demo_model_path())
    with monkeypatch.context() as host:
        host.setattr(subprocess, "Popen", refused)
        before = open_files()
        with pytest.raises(RequestError, match="did not start") as failed:
            await trial.fault(schema({}))
        assert failed.value.code is Code.INTERNAL
        assert not open_files() - before
    assert await trial.fault(schema({})) == ""
    trial.close()
