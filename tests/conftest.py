"""One environment for every test: eight virtual CPU devices, strict dtypes, checked shapes."""

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests import compiling

ROOT = Path(__file__).resolve().parents[1]


def _prepare_environment() -> None:
    """Set what jax reads once, at its import; processes started by tests inherit it."""
    compiling.prepare()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ["JAX_NUMPY_DTYPE_PROMOTION"] = "strict"
    # A program compiled by one test process is read from disk by the next.
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".cache" / "jax"))
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"


def _hear_interrupts() -> None:
    """Let processes that tests start receive SIGINT, which is ignored in the jobs that a shell
    without job control runs in the background, and in whatever such a job starts."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


_prepare_environment()
_hear_interrupts()

# Imported only now, since it imports jax.
from tests import annotations  # noqa: E402

annotations.check_arrays_of("model")
# On a busy host a test may stand still for any length of time, so examples have no deadline.
settings.register_profile("patient", settings(), deadline=None)
settings.load_profile("patient")
# Traced programs leave millions of live objects; collecting over all of them again and again took
# 2% of the time of the tests of model/.
gc.set_threshold(10_000, 20, 100)


@pytest.fixture(scope="module", autouse=True)
def _only_own_garbage() -> None:
    """Freeze what exists before a module's tests, so that their collections do not look at it.

    Programs traced earlier are millions of objects: each collection took half a second, and a test
    that collects to find leaks blocked its event loop until workers seemed to be silent.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture
def heard_hangups() -> Iterator[None]:
    """Let processes that the test starts receive SIGHUP, even if the tests run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture
def own_signals() -> Iterator[None]:
    """Restore the signal handlers: a process that leaves ignores signals, but this one goes on."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
