"""The part of NIXL that pages need: an agent, memory registered with it, one write at a time.

Each optional package is for one CUDA version. Pages move between host memories, so any of the
packages will do. This module uses their bindings to the library, not the class on top of them:
that class starts a thread that polls without a pause and takes a whole processor for every agent.
Given a delay, the same thread sleeps until there is something to do.
"""

import importlib
import importlib.util
import logging
import os
import secrets
from types import ModuleType
from typing import Any

from transfer.errors import ConfigError, PeerLost

log = logging.getLogger(__name__)

PACKAGES = ("nixl_cu12", "nixl_cu13", "nixl_rocm")
_ENGINE = "UCX"
_WAKE_AT_LEAST_US = 100_000


def find() -> str:
    """The package that is installed. Raises ConfigError when none is."""
    for package in PACKAGES:
        if importlib.util.find_spec(package) is not None:
            return package
    raise ConfigError(
        "--disaggregation-transfer-backend nixl needs a NIXL package, and none of "
        f"{', '.join(PACKAGES)} is installed: pip install --no-deps --require-hashes "
        "-r requirements-nixl.lock (or pip install '.[nixl]' in a clone, which brings torch too), "
        "or choose auto, tcp or shm"
    )


def bindings() -> ModuleType:
    """NIXL's bindings. Raises ConfigError when no package is installed or it cannot be loaded."""
    package = find()
    try:
        return importlib.import_module(f"{package}._bindings")
    except (ImportError, OSError) as error:
        raise ConfigError(
            f"--disaggregation-transfer-backend nixl: {package} cannot be loaded: {error}; "
            "install it anew, or choose auto, tcp or shm"
        ) from error


class Agent:
    """One NIXL agent (any thread; calls take turns)."""

    def __init__(self, name: str, is_target: bool) -> None:
        """is_target: others write here, which with some transports needs a helper thread.

        Raises ConfigError when NIXL is not installed, or has no usable transport.
        """
        self._lib = bindings()
        config = self._lib.nixlAgentConfig()
        config.useProgThread = is_target
        config.pthrDelay = _WAKE_AT_LEAST_US
        config.useListenThread = False
        config.syncMode = self._lib.NIXL_THREAD_SYNC_STRICT
        # Unique, since a restarted worker is another agent.
        self.name = f"{name}-{os.getpid()}-{secrets.token_hex(8)}"
        # NIXL has an exception class for each status, and throws all else as RuntimeError.
        kinds = [kind for kind in vars(self._lib).values() if isinstance(kind, type)]
        thrown = [kind for kind in kinds if issubclass(kind, Exception)]
        self.failures: tuple[type[Exception], ...] = (RuntimeError, *thrown)
        try:
            self._agent = self._lib.nixlAgent(self.name, config)
            self._agent.createBackend(_ENGINE, {})
        except self.failures as error:
            raise ConfigError(
                f"--disaggregation-transfer-backend nixl: no {_ENGINE} in it: {error!r}"
            ) from error

    def register(self, address: int, num_bytes: int) -> Any:
        """Register memory, which must stay mapped; returns its handle. Raises OSError."""
        memory = self._lib.nixlRegDList(self._lib.DRAM_SEG, [(address, num_bytes, 0, "")])
        try:
            self._agent.registerMem(memory, [])
        except self.failures as error:
            raise OSError(f"NIXL does not register {num_bytes} bytes: {error!r}") from error
        return memory

    def release(self, memory: Any) -> None:
        """Unregister memory: where hardware enforces it, peers cannot write there any more."""
        try:
            self._agent.deregisterMem(memory, [])
        except self.failures as error:
            log.warning("NIXL does not let go of memory: %r", error)

    def describe(self, memory: Any) -> bytes:
        """What a peer needs to write to this memory. Raises OSError when there is none."""
        try:
            told: bytes = self._agent.getLocalPartialMD(memory, True, [])
        except self.failures as error:
            raise OSError(f"NIXL does not describe its memory: {error!r}") from error
        return told

    def meet(self, description: bytes) -> str:
        """Load a peer's description; returns the peer's name. Raises PeerLost if it is invalid."""
        try:
            told: bytes = self._agent.loadRemoteMD(description)
        except self.failures as error:
            raise PeerLost(f"NIXL cannot reach the receiver's memory: {error!r}") from error
        return told.decode()

    def part(self, peer: str) -> None:
        """Forget a peer."""
        try:
            self._agent.invalidateRemoteMD(peer)
        except self.failures as error:
            log.debug("NIXL did not know %s any more: %r", peer, error)

    def write(self, peer: str, source: int, target: int, num_bytes: int) -> "Write":
        """Begin to write registered memory at address source to a peer's address target.

        Raises PeerLost when the write cannot begin: then nothing is under way.
        """
        lib = self._lib
        try:
            handle = self._agent.createXferReq(
                lib.NIXL_WRITE,
                lib.nixlXferDList(lib.DRAM_SEG, [(source, num_bytes, 0)]),
                lib.nixlXferDList(lib.DRAM_SEG, [(target, num_bytes, 0)]),
                peer,
            )
        except self.failures as error:
            raise PeerLost(f"NIXL cannot write: {error!r}") from error
        try:
            return Write(self, handle, self._agent.postXferReq(handle))
        except self.failures as error:
            self.forget(handle)
            raise PeerLost(f"NIXL cannot write: {error!r}") from error

    def status(self, handle: int) -> Any:
        """Drive NIXL's progress; returns a write's status. Raises one of `failures`."""
        return self._agent.getXferStatus(handle)

    def forget(self, handle: int) -> None:
        """Release a write that is over."""
        try:
            self._agent.releaseXferReq(handle)
        except self.failures as error:
            log.debug("NIXL keeps a write that is over: %r", error)

    def is_under_way(self, status: Any) -> bool:
        """Whether a write with this status may go on: only success is known to be the end."""
        return bool(status != self._lib.NIXL_SUCCESS)


class Write:
    """One write, until it is over.

    A write under way cannot be cancelled: releasing it in NIXL does not make it safe to free the
    memory that it reads, so that memory has to stay.
    """

    def __init__(self, agent: Agent, handle: int, status: Any) -> None:
        self._agent = agent
        self._handle = handle
        self.is_over = False
        self._judge(status)

    def done(self) -> bool:
        """Whether every byte has reached the receiver. Raises PeerLost when the write failed."""
        if not self.is_over:
            try:
                self._judge(self._agent.status(self._handle))
            except self._agent.failures as error:
                self._end()
                raise PeerLost(f"NIXL lost a write: {error!r}") from error
        return self.is_over

    def _judge(self, status: Any) -> None:
        if not self._agent.is_under_way(status):
            self._end()

    def _end(self) -> None:
        self.is_over = True
        self._agent.forget(self._handle)
