"""The threads that read grammars: all are there, or their process ends without them."""

import subprocess
import sys

from tests.transfer.children import ROOT
from transfer.grammar_threads import grammar_threads


def test_every_thread_is_there_at_once() -> None:
    with grammar_threads(3, "grammar") as threads:
        assert len(threads._threads) == 3


def test_a_process_that_is_refused_one_of_the_threads_says_so_and_ends() -> None:
    program = (
        "import threading\n"
        "from transfer.grammar_threads import grammar_threads\n"
        "start, started = threading.Thread.start, []\n"
        "def refuse_second(thread):\n"
        "    started.append(thread)\n"
        "    if len(started) == 2: raise RuntimeError('no more threads')\n"
        "    start(thread)\n"
        "threading.Thread.start = refuse_second\n"
        "grammar_threads(2, 'grammar')"
    )
    command = [sys.executable, "-c", program]
    ended = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=20, check=False
    )
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1] == "RuntimeError: no more threads"
