"""A process that stands still ends by itself and says where it stood; one that is well goes on."""

import asyncio
import os
import re
import subprocess
import sys
from itertools import count
from pathlib import Path

import pytest

from prefill.config import PrefillConfig
from tests.transfer.children import ROOT
from transfer import watchdog
from transfer.clock import ManualClock
from transfer.errors import ConfigError

_TIMEOUT_S = 0.5
_PATIENCE_S = 60.0

_WORKER = """
import asyncio, re, threading
from tests.transfer.test_worker import PlainWorker

class Hanging(PlainWorker):
    watchdog_timeout_s = {timeout_s}

    def turn(self):
        if self.progress > 20:
            print("hangs", flush=True)
            {hang}
        return False

worker = Hanging()
worker.host, worker.port = "127.0.0.1", 0
asyncio.run(worker.run("127.0.0.1:1", print))
"""
_HANGS = {
    "waits": ("threading.Event().wait()", "0:00:00.500000"),
    # A match that takes for ever keeps Python's lock: neither the loop nor a handler runs.
    "keeps the lock": ('re.match("(a+)+b", "a" * 64)', "0:00:00.750000"),
}


@pytest.mark.parametrize("how", _HANGS)
def test_a_worker_whose_engine_hangs_ends_and_shows_its_stacks(how: str) -> None:
    hang, after = _HANGS[how]
    ended = _run(_WORKER.format(timeout_s=_TIMEOUT_S, hang=hang))
    assert ended.returncode == 1
    assert ended.stdout == "hangs\n"
    assert f"Timeout ({after})!" in ended.stderr
    assert re.search(r'File "<string>", line \d+ in turn$', ended.stderr, re.MULTILINE)


_GRAMMARS = """
import asyncio, json
from itertools import count
from model.config import ModelConfig
from serving.demo import demo_model_path
from tests.transfer.test_grammars import begin, submit
from transfer.grammars import Grammars
from transfer.watchdog import watch

def of(schema):
    return submit(json.dumps({{"grammars": [{{"json_schema": schema}}]}}))

async def main():
    path = demo_model_path()
    grammars = Grammars(path, ModelConfig.from_dir(path))
    await asyncio.to_thread(begin, grammars, of({{"const": 1}}))
    task = asyncio.create_task(watch({timeout_s}, count().__next__, grammars.progress))
    await asyncio.sleep({timeout_s})
    await asyncio.to_thread(begin, grammars, of({{"const": 2}}))
    await asyncio.sleep({timeout_s})
    print("well until now", flush=True)
    await asyncio.to_thread(begin, grammars, of({{"multipleOf": 99999999}}))

asyncio.run(main())
"""


def test_a_thread_that_does_not_come_back_from_a_grammar_ends_its_process() -> None:
    ended = _run(_GRAMMARS.format(timeout_s=_TIMEOUT_S))
    assert (ended.returncode, ended.stdout) == (1, "well until now\n"), ended.stderr
    assert re.search(r"line \d+ in _matcher$", ended.stderr, re.MULTILINE)


def test_a_loop_that_stands_still_ends_its_process() -> None:
    program = (
        "import asyncio, itertools, time\n"
        "from transfer.watchdog import watch\n"
        "async def main():\n"
        f"    task = asyncio.create_task(watch({_TIMEOUT_S}, itertools.count().__next__))\n"
        f"    await asyncio.sleep({3 * _TIMEOUT_S})\n"
        "    print('well until now', flush=True)\n"
        f"    time.sleep({_PATIENCE_S})\n"
        "asyncio.run(main())"
    )
    ended = _run(program)
    assert (ended.returncode, ended.stdout) == (1, "well until now\n")
    assert "line 7 in main" in ended.stderr


_FULL = """
import asyncio, itertools, os, threading, time
from transfer.watchdog import watch

async def main():
    for _ in range(20):  # stacks that are longer than what still fits
        threading.Thread(target=time.sleep, args=({patience_s},), daemon=True).start()
    os.set_blocking(2, False)
    for size in (4096, 1):
        try:
            while True:
                os.write(2, b"x" * size)
        except BlockingIOError:
            pass
    os.set_blocking(2, True)
    task = asyncio.create_task(watch({timeout_s}, itertools.count().__next__))
    await asyncio.sleep({timeout_s})
    time.sleep({patience_s})  # the loop hangs; only the watchdog ends it before that

asyncio.run(main())
"""


def test_a_process_that_stands_still_ends_though_nobody_reads_its_stacks() -> None:
    reader, writer = os.pipe()
    program = _FULL.format(timeout_s=_TIMEOUT_S, patience_s=_PATIENCE_S)
    try:
        command = [sys.executable, "-c", program]
        ended = subprocess.run(
            command, cwd=ROOT, stderr=writer, timeout=_PATIENCE_S / 2, check=False
        )
    finally:
        os.close(reader)
        os.close(writer)
    assert ended.returncode == 1


async def test_progress_and_the_end_of_watching_put_the_end_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_off: list[object] = []
    monkeypatch.setattr(watchdog, "_end_process", lambda *_: None)
    timer = watchdog.faulthandler
    monkeypatch.setattr(timer, "dump_traceback_later", lambda s, **_: set_off.append(s))
    monkeypatch.setattr(timer, "cancel_dump_traceback_later", lambda: set_off.append("off"))
    states = iter((1, 1, 2, 2, 2))
    task = asyncio.create_task(watchdog.watch(0.01, lambda: next(states, 2)))
    await asyncio.sleep(0.05)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert set_off == [pytest.approx(0.015)] * 2 + ["off"], "one for each state that was new"


async def test_every_part_has_to_make_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    set_off: list[float] = []
    monkeypatch.setattr(watchdog, "_end_process", lambda *_: None)
    timer = watchdog.faulthandler
    monkeypatch.setattr(timer, "dump_traceback_later", lambda s, **_: set_off.append(s))
    monkeypatch.setattr(timer, "cancel_dump_traceback_later", lambda: None)
    slow, is_over = [3, 3, 2, 1, 1, 1], asyncio.Event()

    def progress() -> int:
        if len(slow) == 1:
            is_over.set()
            return slow[0]
        return slow.pop()

    task = asyncio.create_task(watchdog.watch(0.01, count().__next__, progress))
    await is_over.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert len(set_off) == 3, "one for each state that was new to both"


async def test_a_timer_that_cannot_be_set_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    left = [RuntimeError("unable to start watchdog thread")] * 2
    is_set = asyncio.Event()

    def set_or_raise(_: float, **__: object) -> None:
        if left:
            raise left.pop()
        is_set.set()

    monkeypatch.setattr(watchdog, "_end_process", lambda *_: None)
    monkeypatch.setattr(watchdog.faulthandler, "dump_traceback_later", set_or_raise)
    task = asyncio.create_task(watchdog.watch(0.01, lambda: 1))
    trying = asyncio.create_task(is_set.wait())
    await asyncio.wait({task, trying}, return_when=asyncio.FIRST_COMPLETED, timeout=_PATIENCE_S)
    assert is_set.is_set(), task
    task.cancel()


async def test_a_process_that_is_well_goes_on_while_its_timer_cannot_be_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, looks, is_over = ManualClock(), count(), asyncio.Event()
    ended: list[object] = []

    def progress() -> int:
        clock.advance(0.004)
        look = next(looks)
        if look == 50:
            is_over.set()
        return look

    def set_or_raise(_: float, **__: object) -> None:
        if clock.monotonic_s() > begun_s + 0.005:  # all but the first
            raise RuntimeError("unable to start watchdog thread")

    begun_s = clock.monotonic_s()
    monkeypatch.setattr(watchdog, "SYSTEM_CLOCK", clock)
    monkeypatch.setattr(watchdog, "_end_process", lambda *_: ended.append("ended"))
    monkeypatch.setattr(watchdog.faulthandler, "dump_traceback_later", set_or_raise)
    task = asyncio.create_task(watchdog.watch(0.01, progress))
    await asyncio.wait_for(is_over.wait(), _PATIENCE_S)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert ended == []


async def test_without_a_timeout_nothing_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(watchdog.faulthandler, "dump_traceback_later")
    await asyncio.wait_for(watchdog.watch(0.0, count().__next__), _PATIENCE_S)


@pytest.mark.parametrize(
    ("timeout_s", "says"),
    [(-1.0, "must be at least 0, got -1.0"), (1e7, "must be at most 1000000")],
)
def test_a_timeout_that_no_timer_takes_is_refused(timeout_s: float, says: str) -> None:
    with pytest.raises(ConfigError, match=f"--watchdog-timeout {says}"):
        PrefillConfig(Path("model"), "127.0.0.1:1", watchdog_timeout_s=timeout_s)


def _run(program: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", program]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=_PATIENCE_S, check=False
    )
