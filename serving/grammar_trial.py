"""Grammars are tried by a process that may die of one, before any worker is given it.

Nothing in llguidance bounds the time and the memory in which a grammar is compiled, and a thread
cannot be stopped: `{"multipleOf": 999999}` takes 11 s and 500 MB, and 99999999 goes on. So each new
grammar is compiled here first, by a process with a limit on either; what passes costs a worker no
more.
"""

import asyncio
import contextlib
import json
import resource
import select
import signal
import subprocess
import sys
import weakref
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import llguidance
import psutil

from model.config import ModelConfig
from model.tokenizer_files import eos_ids, read_tokenizer
from transfer.grammar_limits import LIMITS

CPU_S: Final = 2.0  # to compile, and for the first mask
MEMORY_BYTES: Final = 128 << 20  # that a grammar may add
_WAIT_S: Final = 20.0  # for a word of it on a host that is busy, its start included
_MAX_KNOWN: Final = 256
_READY: Final = "ready"
TOO_MUCH: Final = "it takes too much time or memory to compile"


class GrammarTrial:
    """The process and its verdicts; it is started by the first grammar."""

    def __init__(self, model_path: Path) -> None:
        self._model_path = model_path
        self._known: OrderedDict[str, str] = OrderedDict()
        self._process: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize[..., GrammarTrial] | None = None
        self._thread = ThreadPoolExecutor(1, "grammar trial")

    async def fault(self, grammar: str) -> str:
        """Why it cannot be followed, in a line; "" it can."""
        known = self._known.get(grammar)
        if known is None:
            loop = asyncio.get_running_loop()
            known = await loop.run_in_executor(self._thread, self._judged, grammar)
        return known

    def close(self) -> None:
        """The process is gone, and nothing is tried any more."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._stop()

    def _judged(self, grammar: str) -> str:
        known = self._known.get(grammar)  # the one before may have asked for the same
        if known is not None:
            return known
        is_fresh = self._process is None
        word = self._try(grammar)
        if word is None and not is_fresh:
            word = self._try(grammar)  # what came before may have left too little memory
        if word is not None and self._process is None:
            return word  # it did not start, which is no fault of the grammar
        known = self._known[grammar] = TOO_MUCH if word is None else word
        while len(self._known) > _MAX_KNOWN:
            self._known.popitem(last=False)
        return known

    def _stop(self) -> None:
        self._process = None
        if self._end is not None:
            self._end()

    def _try(self, grammar: str) -> str | None:
        """Its verdict; None when it died of it."""
        if self._process is None:
            self._process = self._start()
            first = self._word(self._process)
            if first != _READY:
                self._stop()
                return first or "this model's tokenizer cannot be read"
        process = self._process
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has no word, then
            process.stdin.write(grammar.encode() + b"\n")
            process.stdin.flush()
        word = self._word(process)
        if word is None:
            self._stop()
        return word

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-P", "-m", "serving.grammar_trial", str(self._model_path)]
        # Of no terminal's group: Ctrl-C is for who started it.
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._end = weakref.finalize(self, _end, process)
        return process

    def _word(self, process: subprocess.Popen[bytes]) -> str | None:
        """The next line that it says; None when it died, or says nothing."""
        assert process.stdout is not None
        poll = select.poll()  # not select, which knows 1,024 descriptors
        poll.register(process.stdout, select.POLLIN)
        line = process.stdout.readline() if poll.poll(_WAIT_S * 1000) else b""
        return str(json.loads(line)) if line else None


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(BrokenPipeError):  # what it did not read
            assert pipe is not None
            pipe.close()


def main(model_path: Path) -> None:
    """A verdict for each line, until there are no more."""
    try:
        config, files = ModelConfig.from_dir(model_path), read_tokenizer(model_path)
        ends = [*eos_ids(config, files.eos_id)]
        tokenizer = llguidance.LLTokenizer(files.backend.to_str(), config.vocab_size, ends)
    except ValueError as error:
        _say(f"this model's tokenizer cannot follow a grammar: {error}")
        return
    _verdict(tokenizer, '{"grammars": [{"json_schema": {}}]}')  # what the first one begins
    most = psutil.Process().memory_info().vms + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    _say(_READY)
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, CPU_S)
        word = _verdict(tokenizer, line)
        signal.setitimer(signal.ITIMER_PROF, 0)
        _say(word)


def _verdict(tokenizer: llguidance.LLTokenizer, grammar: str) -> str:
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
    if not matcher.is_error():
        matcher.compute_bitmask()
    return " ".join(matcher.get_error().split())


def _say(word: str) -> None:
    sys.stdout.write(json.dumps(word) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
