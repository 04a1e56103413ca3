"""Runs a process that compiles grammars, each in a forked child that may die of it.

llguidance does not bound the time and memory that a grammar takes, and a thread cannot be stopped:
`{"multipleOf": 999999}` takes seconds and 500 MB, and 99999999 does not end. Limits on a process
can stop it. A child forked from a process that has read the tokenizer starts in 10 ms, while a new
process takes a second if the vocabulary is large; so it is forked children that die.
"""

import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import weakref
from pathlib import Path
from typing import BinaryIO, Final, NoReturn

import llguidance
import psutil

from model.config import ModelConfig
from model.tokenizer_files import eos_ids, read_tokenizer
from transfer.errors import Code, RequestError
from transfer.grammar_limits import LIMITS, fault_of

MEMORY_BYTES: Final = 128 << 20  # that a grammar may add
OVER_TIME: Final = int(signal.SIGPROF)
_FROM_OUTSIDE: Final = (signal.SIGKILL, signal.SIGTERM)  # our own limits use neither
_WAIT_S: Final = 20.0  # for an answer on a busy host, the start of the process included
_MAX_FAULT: Final = 1000  # characters
_READY: Final = "ready"
_NO_TEXT: Final = "no text that this model can write is of this form"

# A child's verdict: why the grammar cannot be followed, "" if it can; or the number of the signal
# that ended the child, 0 if it was no signal.
Word = str | int


class TrialProcess:
    """The process, started for its first grammar and again if it is lost.

    Only one thread at a time may ask it.
    """

    def __init__(self, model_path: Path, cpu_s: float) -> None:
        """cpu_s: processor time for one grammar and its first mask."""
        module = "serving.trial_process"
        self._command = [sys.executable, "-P", "-m", module, str(model_path), str(cpu_s)]
        self._talk: _Talk | None = None
        self._closed = False

    def word(self, grammar: str) -> Word:
        """Try a grammar; returns the verdict.

        Raises RequestError: BAD_REQUEST if this model's tokenizer cannot follow grammars, INTERNAL
        if the process does not start, or if it or its child was lost or killed from outside twice
        in a row, SHUTTING_DOWN after `close`.
        """
        for _ in range(2):
            if self._talk is None:
                self._talk = self._started()
            word = self._talk.ask(grammar)
            if word is None:
                self._stop()
            elif word not in _FROM_OUTSIDE:
                return word
        raise RequestError(Code.INTERNAL, "the process that tries grammars was killed twice")

    def close(self) -> None:
        """End the process and do not start it again. Called from any thread."""
        self._closed = True
        if self._talk is not None:
            self._talk.end()  # a thread that waits for an answer gets none

    def _started(self) -> "_Talk":
        if self._closed:
            raise _shutting_down()
        try:
            talk = _Talk(self._command)
        except OSError as error:
            reason = f"the process that tries grammars did not start: {error.strerror}"
            raise RequestError(Code.INTERNAL, reason) from error
        first = talk.hear()
        if first == _READY and not self._closed:
            return talk
        talk.end()
        if self._closed:
            raise _shutting_down()
        if first is None:  # the process died, or the host is too busy
            raise RequestError(Code.INTERNAL, "the process that tries grammars did not start")
        raise RequestError(Code.BAD_REQUEST, str(first))

    def _stop(self) -> None:
        if self._talk is not None:
            self._talk.end()
        self._talk = None


class _Talk:
    """One such process and the socket to it: a line each way for each grammar."""

    def __init__(self, command: list[str]) -> None:
        """Raises OSError if the host has no process, memory or descriptor left for it."""
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(_WAIT_S)
        self._lines = self._socket.makefile("rb")
        with theirs, contextlib.ExitStack() as unless_started:
            unless_started.callback(self._socket.close)
            unless_started.callback(self._lines.close)
            process = subprocess.Popen(
                command,
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # no Ctrl-C from the terminal; killpg ends its children too
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # it forks: one thread only
            )
            unless_started.pop_all()
        self.end = weakref.finalize(self, _end, process, self._socket, self._lines)

    def ask(self, grammar: str) -> Word | None:
        """The verdict on a grammar; None if the process died or does not answer."""
        try:
            self._socket.sendall(grammar.encode() + b"\n")
        except OSError:
            return None
        return self.hear()

    def hear(self) -> Word | None:
        """The next line that the process sends; None if none comes."""
        line = b""
        with contextlib.suppress(OSError, ValueError):  # ValueError: `end` has closed the file
            line = self._lines.readline()
        word: Word | None = json.loads(line) if line.endswith(b"\n") else None
        return word


def _shutting_down() -> RequestError:
    return RequestError(Code.SHUTTING_DOWN, "the server is shutting down")


def _end(process: subprocess.Popen[bytes], ours: socket.socket, lines: BinaryIO) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # not waited for yet, so the pid is still its own
    process.wait()
    lines.close()  # a thread that is reading gets the end of file, and lets go
    ours.close()


# --- the process ----------------------------------------------------------------------------------


def main(model_path: Path, cpu_s: float) -> None:
    """Read a grammar a line, answer each with a verdict, until the input ends."""
    try:
        config, files = ModelConfig.from_dir(model_path), read_tokenizer(model_path)
        ends = [*eos_ids(config, files.eos_id)]
        tokenizer = llguidance.LLTokenizer(files.backend.to_str(), config.vocab_size, ends)
    except ValueError as error:
        _say(f"this model's tokenizer cannot follow a grammar: {error}")
        return
    _fault(tokenizer, '{"grammars": [{"json_schema": {}}]}')  # what only the first grammar sets up
    most = psutil.Process().memory_info().vms + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _say(_READY)
    for line in sys.stdin:
        _say(_tried(tokenizer, line, cpu_s))


def _tried(tokenizer: llguidance.LLTokenizer, grammar: str, cpu_s: float) -> Word:
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        _be_child(tokenizer, grammar, cpu_s, writing)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return said.decode() if code == 0 else max(0, -code)


def _be_child(
    tokenizer: llguidance.LLTokenizer, grammar: str, cpu_s: float, writing: int
) -> NoReturn:
    try:
        for number in (0, 1):
            os.close(number)  # else the asking side would not notice that the parent was killed
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        os.write(writing, _fault(tokenizer, grammar)[:_MAX_FAULT].encode())
        os._exit(0)
    finally:
        os._exit(1)


def _fault(tokenizer: llguidance.LLTokenizer, grammar: str) -> str:
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
    if not matcher.is_error():
        matcher.compute_bitmask()
    return fault_of(matcher, _NO_TEXT)


def _say(word: Word) -> None:
    sys.stdout.write(json.dumps(word) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
