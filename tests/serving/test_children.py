"""The supervisor of child processes: ready or failed, started again, stopped whatever they do."""

import asyncio
import contextlib
import errno
import io
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from serving import children
from tests.recording import until
from tests.transfer.children import ROOT

TELL_READY = "from transfer import flags; flags.notify_ready(port=1); "
WAIT = "import time; time.sleep(60)"


@pytest.fixture
async def supervisor(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[children.Supervisor]:
    monkeypatch.setattr(children, "RESTART_DELAY_S", 0.0)
    made = children.Supervisor("token", stop_timeout_s=0.2)
    yield made
    if not made.stopping:
        await made.stop()


def child(code: str) -> children.ChildSpec:
    found_in = ("PYTHONPATH", str(ROOT))  # the tests are no part of what is installed
    return children.ChildSpec("child", ("tests.serving.child", code), (found_in,))


class _Stuck:
    """A process that SIGKILL does not end."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    def __getattr__(self, name: str) -> Any:
        return getattr(self._process, name)

    def kill(self) -> None:
        """Do nothing."""


async def test_a_ready_child_tells_its_facts(supervisor: children.Supervisor) -> None:
    running = await supervisor.start(child(TELL_READY + WAIT))
    assert await running.wait_ready() == {"port": 1}


async def test_a_child_that_ends_before_it_is_ready_passes_on_its_last_line(
    supervisor: children.Supervisor, capfd: pytest.CaptureFixture[str]
) -> None:
    running = await supervisor.start(child("print('first'); print('no luck'); raise SystemExit(2)"))
    with pytest.raises(children.ChildFailed) as caught:
        await running.wait_ready()
    assert str(caught.value) == "child ended with code 2 before it was ready: no luck"
    assert caught.value.code == 2
    assert capfd.readouterr().err == "[child] first\n[child] no luck\n"
    running = await supervisor.start(
        child(f"import signal; signal.raise_signal({signal.SIGBUS:d})")
    )
    with pytest.raises(children.ChildFailed, match=r"code -7 \(a file in its memory became short"):
        await running.wait_ready()


async def test_a_child_that_may_have_no_thread_says_which_limits_these_are(
    supervisor: children.Supervisor,
) -> None:
    none = 'raise RuntimeError("can\'t start new thread")'
    code = (
        f"def refuse(thread): {none}\nthreading.Thread.start = refuse\nflags.run_main('x', print)"
    )
    running = await supervisor.start(child(f"import threading\nfrom transfer import flags\n{code}"))
    with pytest.raises(children.ChildFailed, match=r"ready: kvferry x: .* of `ulimit -u`, "):
        await running.wait_ready()


async def test_who_is_not_ready_in_time_is_named(
    supervisor: children.Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(children, "READY_TIMEOUT_S", 0.05)
    ready = await supervisor.start(child(TELL_READY + WAIT))
    await ready.wait_ready()
    late = await supervisor.start(replace(child(WAIT), name="decode-1"))
    with pytest.raises(children.ChildFailed, match=r"^decode-1 not ready after 0\.05 s$"):
        await children.all_ready([ready, late])


async def test_a_line_of_any_length_does_not_stop_a_child(
    supervisor: children.Supervisor, capfd: pytest.CaptureFixture[str]
) -> None:
    running = await supervisor.start(child("print('x' * (1 << 20)); print('done')"))
    await asyncio.wait_for(running.process.wait(), 20)
    await running.output
    assert running.last_trouble == "done"
    assert capfd.readouterr().err.endswith("[child] done\n")


async def test_a_child_goes_on_though_nobody_reads_what_it_says(
    supervisor: children.Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stderr", Gone())
    running = await supervisor.start(child("for k in range(100_000): print('x' * 50)"))
    assert await asyncio.wait_for(running.process.wait(), 20) == 0
    await running.output


async def test_what_lies_where_it_was_started_hides_nothing_of_ours_from_a_child(
    supervisor: children.Supervisor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "transfer.py").write_text("raise SystemExit('not ours')")
    monkeypatch.chdir(tmp_path)
    running = await supervisor.start(child(TELL_READY + WAIT))
    assert await running.wait_ready() == {"port": 1}


async def test_a_killed_child_is_started_again_the_same(supervisor: children.Supervisor) -> None:
    running = await supervisor.start(child(WAIT))
    watching = asyncio.create_task(supervisor.watch(running))
    running.process.kill()
    while running in supervisor._children or not supervisor._children:  # noqa: ASYNC110
        await asyncio.sleep(0)  # its own task has to run
    again = supervisor._children[0]
    assert again.spec == running.spec
    assert again.process.pid != running.process.pid
    watching.cancel()


async def test_a_child_that_ends_too_often_ends_the_supervisor(
    supervisor: children.Supervisor,
) -> None:
    running = await supervisor.start(child("raise SystemExit(3)"))
    with pytest.raises(children.ChildFailed) as caught:
        await supervisor.watch(running)
    assert str(caught.value).startswith(
        f"child ended with code 3, {children.MAX_RESTARTS + 1} time(s)"
    )


@pytest.mark.parametrize(
    ("said", "quoted"),
    [
        (
            "01:02:03 W memory is short|[api-1] 01:02:04 I 2 workers|",
            ": 01:02:03 W memory is short",
        ),
        ("01:02:03 [decode] I config: a=1|", "; it said of nothing wrong"),
        ("", "; it said of nothing wrong"),
        ("01:02:03 E failed|Traceback:|ValueError: no luck", ": ValueError: no luck"),
        ("[api-0] 01:02:03 [serve] E it failed", ": [api-0] 01:02:03 [serve] E it failed"),
        ("F0000 00:00:00.1 1 a.cc:1] no peer|I0000 00:00:00.2 1 b.cc:2] done|[Gloo] Rank 0 is", ""),
    ],
)
async def test_of_a_child_that_ends_too_often_its_last_error_is_quoted_not_its_last_word(
    supervisor: children.Supervisor, monkeypatch: pytest.MonkeyPatch, said: str, quoted: str
) -> None:
    monkeypatch.setattr(children, "MAX_RESTARTS", 0)
    saying = "".join(f"print({line!r}); " for line in said.split("|") if line)
    running = await supervisor.start(child(f"{TELL_READY}{saying}raise SystemExit(9)"))
    with pytest.raises(children.ChildFailed) as caught:
        await supervisor.watch(running)
    want = quoted or ": F0000 00:00:00.1 1 a.cc:1] no peer"
    assert str(caught.value) == f"child ended with code 9, 1 time(s) in a row{want}"


async def test_pauses_before_a_child_starts_again_double_as_what_it_lacks_may_take_a_while_to_come(
    supervisor: children.Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    sleep, pauses = asyncio.sleep, []

    async def noted(delay_s: float) -> None:
        pauses.append(delay_s)
        await sleep(0)

    monkeypatch.setattr(children, "RESTART_DELAY_S", 1.0)
    monkeypatch.setattr(children.asyncio, "sleep", noted)
    running = await supervisor.start(child("raise SystemExit(1)"))
    with pytest.raises(children.ChildFailed):
        await asyncio.wait_for(supervisor.watch(running), 60)
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0]


async def test_a_child_that_takes_long_to_start_and_never_does_ends_the_supervisor(
    supervisor: children.Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(children, "FORGIVEN_AFTER_S", 0.0)  # starting takes longer
    running = await supervisor.start(child("raise SystemExit(3)"))
    with pytest.raises(children.ChildFailed, match=r"^child ended with code 3, 6 time\(s\)"):
        await asyncio.wait_for(supervisor.watch(running), 60)


async def test_a_child_started_again_that_is_never_ready_is_killed_and_counted(
    supervisor: children.Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(children, "READY_TIMEOUT_S", 0.05)
    monkeypatch.setattr(children, "MAX_RESTARTS", 1)
    running = await supervisor.start(child(WAIT))
    running.process.kill()
    with pytest.raises(children.ChildFailed, match=r"was not ready after 0.05 s .*, 2 time"):
        await asyncio.wait_for(supervisor.watch(running), 20)


async def test_the_ends_of_a_child_that_served_long_are_not_in_a_row(
    supervisor: children.Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(children, "FORGIVEN_AFTER_S", 0.0)
    monkeypatch.setattr(children, "MAX_RESTARTS", 1)
    running = await supervisor.start(child(TELL_READY + WAIT))
    watching = asyncio.create_task(supervisor.watch(running))
    for _ in range(3):
        await running.wait_ready()
        running.process.kill()
        while running in supervisor._children or not supervisor._children:
            assert not watching.done(), watching.exception()
            await asyncio.sleep(0)  # its own task has to run
        running = supervisor._children[0]
    watching.cancel()


async def test_a_child_that_cannot_start_again_ends_the_supervisor(
    supervisor: children.Supervisor,
) -> None:
    running = await supervisor.start(child("print('a bad file'); raise SystemExit(2)"))
    with pytest.raises(children.ChildFailed) as caught:
        await supervisor.watch(running)
    assert str(caught.value) == "child ended with code 2, 1 time(s) in a row: a bad file"
    assert caught.value.code == 2


def no_room(monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """Have the system refuse to start a process so many times."""
    make = asyncio.create_subprocess_exec
    left = [OSError(errno.EAGAIN, "no more processes")] * times

    async def refuse(*args: Any, **kwargs: Any) -> asyncio.subprocess.Process:
        if left:
            raise left.pop()
        return await make(*args, **kwargs)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", refuse)


def num_open() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def test_a_restart_for_which_there_is_no_room_is_tried_again(
    supervisor: children.Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = await supervisor.start(child(WAIT))
    before = num_open()
    no_room(monkeypatch, 4)
    watching = asyncio.create_task(supervisor.watch(running))
    running.process.kill()
    while running in supervisor._children or not supervisor._children:
        assert not watching.done(), watching.exception()
        await asyncio.sleep(0)  # its own task has to run
    assert supervisor._children[0].spec == running.spec
    # The killed child's files may still be open; those of each failed try are closed.
    assert num_open() <= before + 3
    watching.cancel()


async def test_a_first_start_for_which_there_is_no_room_ends_the_supervisor_with_a_line(
    supervisor: children.Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_room(monkeypatch, 1)
    with pytest.raises(children.ChildFailed) as caught:
        await supervisor.start(child(WAIT))
    assert str(caught.value) == f"child cannot be started: [Errno {errno.EAGAIN}] no more processes"
    assert caught.value.code == 1


async def test_a_restart_for_which_there_is_never_room_ends_the_supervisor(
    supervisor: children.Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = await supervisor.start(child("raise SystemExit(3)"))
    no_room(monkeypatch, 1 << 10)
    with pytest.raises(children.ChildFailed, match=r"cannot be started again, 6 .*no more process"):
        await supervisor.watch(running)


async def test_children_are_stopped_whatever_ends_their_parent(
    supervisor: children.Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(children, "on_signals", lambda _: contextlib.nullcontext())
    started: list[children.Child] = []

    async def body(supervisor: children.Supervisor) -> None:
        started.append(await supervisor.start(child(WAIT)))
        raise OSError(errno.ENOMEM, "no memory")

    with pytest.raises(OSError, match="no memory"):
        await children._until_told("up", supervisor, body)
    assert supervisor.stopping
    assert started[0].process.returncode == -signal.SIGTERM


async def test_a_child_that_does_not_listen_is_killed(supervisor: children.Supervisor) -> None:
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    running = await supervisor.start(child(deaf + TELL_READY + WAIT))
    await running.wait_ready()
    await supervisor.stop()
    assert running.process.returncode == -signal.SIGKILL


async def test_a_child_that_does_not_even_end_when_killed_keeps_nobody_from_ending(
    supervisor: children.Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that waits for a disk or a driver."""
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    stuck, other = [await supervisor.start(child(deaf + TELL_READY + WAIT)) for _ in range(2)]
    await children.all_ready([stuck, other])
    with monkeypatch.context() as patch:
        patch.setattr(stuck, "process", _Stuck(stuck.process))
        async with asyncio.timeout(20):
            await supervisor.stop()
    assert other.process.returncode == -signal.SIGKILL
    stuck.process.kill()
    await stuck.process.wait()


async def test_those_in_front_are_stopped_first_then_workers_then_what_these_need(
    supervisor: children.Supervisor, capfd: pytest.CaptureFixture[str]
) -> None:
    """Otherwise each would warn that the next is lost."""
    supervisor._stop_timeout_s = 20.0
    # Leaving takes each a while, so one that is told too early speaks before the last has left.
    leave = "print('told', flush=True), time.sleep(0.2), print('left', flush=True), exit(0)"
    code = (
        f"import signal, time; leave = lambda *_: ({leave}); signal.signal(signal.SIGTERM, leave); "
    )
    code += "signal.signal(signal.SIGINT, leave); " + TELL_READY + WAIT
    needed = await supervisor.start(replace(child(code), name="registry"))
    front = await supervisor.start(replace(child(code), name="serve", is_front=True))
    worker = await supervisor.start(replace(child(code), name="decode", is_worker=True))
    await asyncio.gather(*(each.wait_ready() for each in (needed, front, worker)))
    await supervisor.stop()
    await asyncio.gather(*(each.output for each in (needed, front, worker)))
    order = [
        f"[{name}] {what}" for name in ("serve", "decode", "registry") for what in ("told", "left")
    ]
    assert capfd.readouterr().err.splitlines() == order


async def test_one_in_front_that_hangs_does_not_keep_the_others_from_leaving_well(
    supervisor: children.Supervisor,
) -> None:
    supervisor._stop_timeout_s = 4.0
    deaf = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); "
    front = await supervisor.start(front_of(deaf + TELL_READY + WAIT))
    tell = "import signal; signal.signal(signal.SIGINT, lambda *_: exit(0)); "
    worker = await supervisor.start(replace(child(tell + TELL_READY + WAIT), is_worker=True))
    await asyncio.gather(front.wait_ready(), worker.wait_ready())
    await supervisor.stop()
    assert (front.process.returncode, worker.process.returncode) == (-signal.SIGKILL, 0)


async def test_a_child_that_drains_and_left_well_is_not_started_again(
    supervisor: children.Supervisor,
) -> None:
    leaver = replace(child("pass"), is_worker=True)
    await asyncio.wait_for(supervisor.watch(await supervisor.start(leaver)), 20)
    assert supervisor._children == []


async def test_a_child_that_drains_is_stopped_at_once_whether_ready_or_not(
    supervisor: children.Supervisor,
) -> None:
    supervisor._stop_timeout_s = 20.0
    tell = "import signal; signal.signal(signal.SIGINT, lambda *_: exit(7)); "
    ready = await supervisor.start(replace(child(tell + TELL_READY + WAIT), is_worker=True))
    await ready.wait_ready()
    starting = await supervisor.start(replace(child(WAIT), is_worker=True))
    await supervisor.stop()
    assert ready.process.returncode == 7
    assert starting.process.returncode == -signal.SIGTERM


async def test_a_child_without_which_another_is_of_no_use_does_not_outlive_it(
    supervisor: children.Supervisor,
) -> None:
    code = TELL_READY + "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + WAIT
    both = [await supervisor.start(replace(child(code), group="one")) for _ in range(2)]
    alone = await supervisor.start(child(code))
    await asyncio.gather(*(each.wait_ready() for each in [*both, alone]))
    watching = [asyncio.create_task(supervisor.watch(each)) for each in [*both, alone]]
    both[1].process.kill()
    await asyncio.wait_for(both[0].process.wait(), 20)
    assert alone.process.returncode is None
    started: list[children.Child] = []
    while len(started) < 2:
        assert not any(task.done() for task in watching)
        await asyncio.sleep(0.01)
        started = [each for each in supervisor._children if each.spec.group and each not in both]
    assert alone in supervisor._children
    for task in watching:
        task.cancel()


async def test_a_child_that_leaves_as_told_takes_those_of_its_group_along(
    supervisor: children.Supervisor,
) -> None:
    drains = replace(child(TELL_READY + WAIT), is_worker=True)
    leaves = replace(child(TELL_READY + "raise SystemExit(0)"), is_worker=True, group="one")
    other = await supervisor.start(replace(drains, group="one"))
    alone = await supervisor.start(drains)
    await asyncio.gather(other.wait_ready(), alone.wait_ready())
    await asyncio.wait_for(supervisor.watch(await supervisor.start(leaves)), 20)
    assert await asyncio.wait_for(other.process.wait(), 20) == -signal.SIGTERM
    assert alone.process.returncode is None


async def test_a_child_that_dies_when_another_of_its_group_left_as_told_is_not_started_again(
    supervisor: children.Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(children, "RESTART_DELAY_S", 0.2)
    dies = await supervisor.start(
        replace(child("raise SystemExit(1)"), is_worker=True, group="one")
    )
    leaves = await supervisor.start(replace(child("pass"), is_worker=True, group="one"))
    for each in (dies, leaves):
        await asyncio.wait_for(each.process.wait(), 20)
    await asyncio.wait_for(asyncio.gather(*map(supervisor.watch, (dies, leaves))), 20)
    assert not supervisor._children


def front_of(code: str) -> children.ChildSpec:
    return replace(child(code), is_front=True)


DRAINS = (
    "import signal, sys; signal.signal(signal.SIGUSR1, lambda *_: (print('drains'), exit(0))); "
)


async def test_a_parent_that_drains_starts_nobody_in_front_again_and_the_others_are_kept(
    supervisor: children.Supervisor,
) -> None:
    supervisor._stop_timeout_s = 20.0
    front = await supervisor.start(front_of(DRAINS + TELL_READY + WAIT))
    loading = await supervisor.start(front_of(WAIT))
    behind = await supervisor.start(child(TELL_READY + WAIT))
    await asyncio.gather(front.wait_ready(), behind.wait_ready())
    watching = [asyncio.create_task(supervisor.watch(each)) for each in (front, loading, behind)]
    await supervisor.drain()
    assert front.process.returncode == 0
    assert loading.process.returncode == -signal.SIGTERM
    await asyncio.wait_for(asyncio.gather(*watching[:2]), 20)
    behind.process.kill()
    await until(lambda: supervisor._children not in ([behind], []))
    (again,) = supervisor._children
    assert again.spec == behind.spec
    watching[2].cancel()


async def test_one_in_front_that_died_just_before_its_parent_drains_stays_away(
    supervisor: children.Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(children, "RESTART_DELAY_S", 0.2)
    dead = await supervisor.start(front_of("raise SystemExit(1)"))
    watching = asyncio.create_task(supervisor.watch(dead))
    await until(lambda: not supervisor._children)
    await supervisor.drain()
    await asyncio.wait_for(watching, 20)
    assert supervisor._children == []


async def test_what_drains_for_too_long_is_killed_and_not_waited_for_again(
    supervisor: children.Supervisor,
) -> None:
    deaf = "import signal; signal.signal(signal.SIGUSR1, signal.SIG_IGN); "
    front = await supervisor.start(front_of(deaf + TELL_READY + WAIT))
    await front.wait_ready()
    await asyncio.wait_for(supervisor.drain(), 20)
    assert await asyncio.wait_for(front.process.wait(), 20) == -signal.SIGKILL


async def test_what_fails_beside_the_children_is_raised_as_it_is(
    supervisor: children.Supervisor,
) -> None:
    """Not in a group, of which a process could only print a traceback."""
    running = await supervisor.start(child(TELL_READY + WAIT))
    await running.wait_ready()

    async def beside() -> None:
        raise RuntimeError("can't start new thread")

    with pytest.raises(RuntimeError, match=r"^can't start new thread$"):
        await supervisor.watch_all([running], beside())
