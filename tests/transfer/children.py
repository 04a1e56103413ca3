"""Ends of a transfer backend in separate processes, to be killed and frozen."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STALL_S = 0.3
FROZEN_S = 2.0  # when one end is frozen: long enough that a busy host does not look frozen too
NEVER_S = 60.0

_RECEIVER = """
import sys
from tests.transfer.samples import KV, SECURITY
from {module} import {kind}
receiver = {kind}(SECURITY, "127.0.0.1", 0, KV, 1,
                  lambda event: print(type(event).__name__, flush=True), {never_s}, **{more})
address = receiver.start()
receiver.expect(1, 1, {num_pages})
print(address, flush=True)
sys.stdin.read()
"""

_SENDER = """
import sys
import ml_dtypes
from tests.transfer.samples import SECURITY, a_grant, logical_pages, sharded
from transfer.layout import plan_heads
from {module} import {kind}
sender = {kind}(SECURITY, "child", lambda event: print(event.kind, flush=True), 16 << 20,
                {never_s}, **{more})
shards = sharded(logical_pages(4), 4, 1, ml_dtypes.bfloat16)
grant = a_grant(1, sys.argv[1], 4)
for start in (0, 2):
    part = [shard[:, :, start : start + 2] for shard in shards]
    sender.send_pages(grant, start, part, plan_heads(4, 1, 4, 1, 4))
    sys.stdin.readline()
"""


def receiving(what: str, num_pages: int = 4, **more: object) -> str:
    """A program: expects room 1, prints its address, then each event. what: module and class."""
    module, _, kind = what.rpartition(".")
    return _RECEIVER.format(
        module=module, kind=kind, num_pages=num_pages, never_s=NEVER_S, more=more
    )


def sending(what: str, **more: object) -> str:
    """A program: sends two of room 1's four pages, and after reading a line the others."""
    module, _, kind = what.rpartition(".")
    return _SENDER.format(module=module, kind=kind, never_s=NEVER_S, more=more)


@contextlib.contextmanager
def child(program: str, *args: str) -> Iterator["subprocess.Popen[str]"]:
    """Runs a program, and kills it when the block ends."""
    command = [sys.executable, "-c", program, *args]
    process = subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def said(process: "subprocess.Popen[str]") -> str:
    """The next line that the process prints."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


def tell(process: "subprocess.Popen[str]", line: str = "") -> None:
    """Send the process a line to read."""
    assert process.stdin is not None
    process.stdin.write(f"{line}\n")
    process.stdin.flush()
