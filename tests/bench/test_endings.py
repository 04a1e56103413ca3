"""However a benchmark ends, so does everything it started; Ctrl-C prints one line."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from subprocess import PIPE

import psutil
import pytest

from bench.endings import deaf_children, paths
from tests.cluster import has_ended, wait_until


def test_a_server_dies_with_the_benchmark_that_started_it():
    outer = """
import os, subprocess, sys, time
from bench.endings import lifeline
from transfer.flags import LIFELINE_ENV
with lifeline() as fd:
    command = [sys.executable, "-m", "serving.launch", "registry", "--port", "0"]
    known = {LIFELINE_ENV: str(fd), "KVFERRY_CLUSTER_TOKEN": "of-the-tests"}
    child = subprocess.Popen(command, pass_fds=(fd,), env=os.environ | known)
    print(child.pid, flush=True)
    child.wait()
"""
    with subprocess.Popen([sys.executable, "-c", outer], stdout=PIPE) as bench:
        assert bench.stdout is not None
        server = psutil.Process(int(bench.stdout.readline()))
        bench.kill()
    wait_until(lambda: has_ended(server))


@pytest.mark.parametrize(
    ("code", "started"),
    [
        ("from bench.routing_floor import measure; measure(1, 60, 0)", "routing_floor"),
        (
            "import asyncio, bench.routing_registry as b; asyncio.run(b._measure(1, 60, 0))",
            "registry",
        ),
    ],
)
def test_what_routes_pass_through_dies_with_the_benchmark_that_started_it(code: str, started: str):
    with subprocess.Popen([sys.executable, "-c", code]) as bench:
        found: list[psutil.Process] = []

        def is_there() -> bool:
            children = psutil.Process(bench.pid).children()
            found[:] = [one for one in children if started in " ".join(one.cmdline())]
            return bool(found)

        wait_until(is_there)
        bench.kill()
    wait_until(lambda: all(map(has_ended, found)))


@pytest.mark.parametrize("of_ctrl_c", ["default_int_handler", "SIG_IGN"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_who_is_told_to_end_clears_up_as_after_ctrl_c(
    number: signal.Signals, of_ctrl_c: str, tmp_path: Path
):
    code = f"""
import signal, tempfile, time
from bench.endings import exit_with
signal.signal(signal.SIGINT, signal.{of_ctrl_c})
def main():
    with tempfile.TemporaryDirectory():
        print(flush=True)
        time.sleep(60)
exit_with("it", main)
"""
    command, environment = [sys.executable, "-c", code], os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stdout=PIPE, stderr=PIPE, env=environment) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert list(tmp_path.iterdir())
        process.send_signal(number)
        _, said = process.communicate(timeout=30)
    assert (process.returncode, said) == (130, b"it: interrupted\n")
    assert not list(tmp_path.iterdir())


def test_ctrl_c_while_a_process_is_started_comes_once_it_is_known():
    """Whichever thread receives it, so masking the signal in one thread would not be enough."""
    known: list[bool] = []

    def start() -> None:
        with deaf_children():
            thread = threading.Thread(target=interrupt)
            thread.start()
            thread.join()
            known.append(True)

    def interrupt() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # as in an older thread
        signal.raise_signal(signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        start()
    assert known
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_is_a_line_and_ends_what_was_started():
    command = [sys.executable, "-m", "bench", "transfer", "--only", "small", "--budget-s", "100"]
    with subprocess.Popen(command, stdout=PIPE, stderr=PIPE, start_new_session=True) as bench:
        children: list[psutil.Process] = []

        def started() -> bool:
            children[:] = psutil.Process(bench.pid).children()
            with contextlib.suppress(psutil.NoSuchProcess):  # git, which names the commit
                return any("bench.host_limits" in child.cmdline() for child in children)
            return False

        wait_until(started)
        os.killpg(bench.pid, signal.SIGINT)  # as a terminal does: to the whole process group
        _, said = bench.communicate(timeout=30)
    assert (bench.returncode, said) == (130, b"kvferry bench: interrupted\n")
    wait_until(lambda: all(map(has_ended, children)))


def test_ctrl_c_while_modules_load_is_a_line_too():
    code = """
import os, runpy, signal, sys
from importlib.abc import MetaPathFinder

class Interrupting(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "bench.cli":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
sys.argv[1:] = ["compare", "a", "b"]
runpy.run_module("bench", run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (130, b"kvferry bench: interrupted\n")


def test_who_started_deaf_children_hears_ctrl_c_afterwards():
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with deaf_children():
        assert signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


@pytest.mark.parametrize("words", [["-P", "-m", "serving.launch", "bench"], ["-m", "bench"]])
def test_its_processes_find_our_modules_where_it_does(words: list[str], tmp_path: Path):
    """`kvferry bench` runs in any folder, also in one with a model.py; `-m bench`, in a clone."""
    root, is_kvferry = Path(__file__).parents[2], words[0] == "-P"
    (tmp_path / "model.py").write_text("raise SystemExit('not ours')")
    asked = ["transfer", "--only=small", "--backend=tcp", "--budget-s=0.001"]
    done = subprocess.run(
        [sys.executable, *words, *asked],
        cwd=tmp_path if is_kvferry else root,
        env=os.environ | ({"PYTHONPATH": str(root)} if is_kvferry else {}),
        capture_output=True,
        check=False,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "tcp p50" in done.stdout


def test_a_server_has_the_modules_of_the_clone_that_a_benchmark_runs_in(monkeypatch, tmp_path):
    """Even where another clone is installed: rows name this one's commit."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (clone, told) = paths()["PYTHONPATH"].split(os.pathsep)
    assert Path(clone, "serving", "launch.py").is_file()
    assert told == str(tmp_path)


def test_a_server_of_an_installed_benchmark_needs_no_paths():
    code = "from bench.endings import paths; raise SystemExit(bool(paths()))"
    root = str(Path(__file__).resolve().parents[2])
    known = os.environ | {"PYTHONPATH": root}  # in place of an installation
    subprocess.run([sys.executable, "-P", "-c", code], env=known, check=True)
