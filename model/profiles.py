"""Profiles of this process's devices and threads, written by JAX's profiler, one at a time."""

import asyncio
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Final

import jax

from model.errors import ProfileError
from model.threads import in_daemon_thread

log = logging.getLogger(__name__)

# Calls of Python functions are left out: tracing them slows down the host's part of every step.
_PYTHON_TRACER_LEVEL: Final = 0


class Profiler:
    """Begins and ends profiles. Used on one event loop, which it never holds up."""

    def __init__(self, folder: str, timeout_s: float) -> None:
        """folder: where profiles are written; "": nowhere, each is refused.

        timeout_s: after which a profile ends by itself, since its events fill the host's memory.
        """
        self._folder = Path(folder).absolute() if folder else None
        self._timeout_s = timeout_s
        self._tracer = _Tracer()
        self._latest: _Profile | None = None

    async def start(self, name: str) -> Path:
        """Begin a profile. Returns its folder, which is named after `name`. Raises ProfileError."""
        if self._folder is None:
            raise ProfileError("started without --profile-dir")
        if self._latest is not None and not self._latest.done.done():
            raise ProfileError(f"the profile in {self._latest.target} has not ended yet")
        folder = self._folder / re.sub(r"[^\w-]", "_", name)
        profile = self._latest = _Profile(self._tracer, folder, self._timeout_s)
        try:
            await asyncio.shield(profile.began)
        except ProfileError:
            self._latest = None
            raise
        return folder

    async def stop(self) -> Path:
        """End the latest profile, unless it has ended by itself, and wait until it is written.

        Returns its folder. Raises ProfileError.
        """
        profile = self._latest
        if profile is None:
            raise ProfileError("no profile has begun")
        profile.told_to_end.set()
        failure = await asyncio.shield(profile.done)
        if self._latest is profile:
            self._latest = None
        if failure:
            raise ProfileError(failure)
        return profile.target


class _Profile:
    """One profile, from its beginning until it is written."""

    def __init__(self, tracer: "_Tracer", target: Path, timeout_s: float) -> None:
        self._tracer = tracer
        self.target = target
        self.told_to_end = asyncio.Event()
        # Raises ProfileError if it cannot begin.
        self.began: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.done = asyncio.create_task(self._run(timeout_s))  # why it was not written, or ""

    async def _run(self, timeout_s: float) -> str:
        try:
            await _in_thread(lambda: self._tracer.start(self.target))
        except Exception as error:
            failure = f"no profile can begin in {self.target}: {error}"
            self.began.set_exception(ProfileError(failure))
            return failure
        self.began.set_result(None)
        try:
            await asyncio.wait_for(self.told_to_end.wait(), timeout_s)
        except TimeoutError:
            log.info("the profile ends after %g s", timeout_s)
        try:
            await _in_thread(self._tracer.stop)
        except Exception as error:
            failure = f"the profile in {self.target} could not be written: {error}"
            log.warning("%s", failure)
            return failure
        log.info("a profile was written to %s", self.target)
        return ""


class _Tracer:
    """JAX's profiler. It keeps a profile that cannot be written, and begins no other."""

    def __init__(self) -> None:
        self._kept: Path | None = None  # where the profile belongs that has begun, until written

    def start(self, target: Path) -> None:
        """Begin a profile, once the one before is written."""
        if self._kept is not None:
            try:
                self.stop()
            except Exception as error:
                message = f"the one in {self._kept} could not be written: {error}"
                raise ProfileError(message) from error
        target.mkdir(parents=True, exist_ok=True)
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = _PYTHON_TRACER_LEVEL
        jax.profiler.start_trace(target, profiler_options=options)
        self._kept = target

    def stop(self) -> None:
        """End the profile and write it."""
        jax.profiler.stop_trace()
        self._kept = None


def _in_thread(function: Callable[[], None]) -> asyncio.Future[None]:
    return asyncio.wrap_future(in_daemon_thread(function, "profile"))
