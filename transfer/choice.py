"""Opens either end of the transfer backend that a worker's flags choose."""

from typing import Any

from model import processors
from model.config import KVSpec
from transfer.backend import OnSenderEvent
from transfer.buffers import PinMemory
from transfer.nixl import NixlReceiver, NixlSender
from transfer.receiver import Receiver
from transfer.rpc import Security
from transfer.shm import ShmReceiver, ShmSender
from transfer.slots import FRAME_BYTES
from transfer.staging import slot_shape
from transfer.tcp import IDLE_BUFFER_BYTES, TcpReceiver, TcpSender
from transfer.worker_config import WorkerConfig

_MOST_CONNECTIONS = 2  # by default: a third adds no noticeable throughput


def default_connections() -> int:
    """Data connections of a pair of workers: one for each two processors available, at most 2.

    When a pair is on one host, the two ends of a connection keep two processors busy; a second
    connection would only take turns with the first, with cold caches.
    """
    return max(1, min(_MOST_CONNECTIONS, processors.available() // 2))


def open_sender(
    config: WorkerConfig,
    security: Security,
    connections: int,
    max_frame_bytes: int,
    sender_id: str,
    on_event: OnSenderEvent,
) -> TcpSender:
    """Prefill's end. connections: the most to each decode worker.

    Raises ConfigError when TLS files or the backend cannot be used.
    """
    common: dict[str, Any] = {
        "security": security,
        "connections": connections,
        "sender_id": sender_id,
        "on_event": on_event,
        "max_frame_bytes": max_frame_bytes,
        "stall_timeout_s": config.stall_timeout_s,
    }
    backend = config.disaggregation_transfer_backend
    if backend == "tcp":
        return TcpSender(**common)
    if backend == "nixl":
        return NixlSender(**common)
    return ShmSender(**common, is_demand=backend == "shm")


def open_receiver(
    config: WorkerConfig,
    security: Security,
    staging_bytes: int,
    pin: PinMemory | None = None,
    **more: Any,
) -> Receiver:
    """Decode's end, not started.

    pin: called for memory that receives pages; NIXL pins its own. more: host, port, kv and
    on_event of TcpReceiver.

    Raises ConfigError when TLS files, the backend or staging_bytes cannot be used.
    """
    common: dict[str, Any] = {
        "security": security,
        "tp_size": config.tp_size,
        "stall_timeout_s": config.stall_timeout_s,
        **more,
    }
    backend = config.disaggregation_transfer_backend
    if backend == "tcp":
        return TcpReceiver(**common, pin=pin)
    if backend == "nixl":
        return NixlReceiver(**common, staging_bytes=staging_bytes)
    common |= {"staging_bytes": staging_bytes, "is_demand": backend == "shm"}
    return ShmReceiver(**common, pin=pin)


def arriving_bytes(config: WorkerConfig, kv: KVSpec, staging_bytes: int) -> int:
    """Host memory that pages from one prefill process take until they are in decode's pool.

    Each further one, of the same worker or another, takes as much again in shared memory. The
    buffers of TCP are kept for all together.
    """
    if config.disaggregation_transfer_backend == "tcp":
        return IDLE_BUFFER_BYTES
    sizes = kv.page_bytes // config.tp_size, config.tp_size, FRAME_BYTES, staging_bytes
    return default_connections() * slot_shape(*sizes).num_bytes


def check_staging(config: WorkerConfig, kv: KVSpec, staging_bytes: int) -> None:
    """Raises ConfigError for the staging_bytes that open_receiver would refuse: a receiver is
    opened only when everything has been loaded and compiled, which can take many minutes."""
    if config.disaggregation_transfer_backend != "tcp":
        slot_shape(kv.page_bytes // config.tp_size, config.tp_size, FRAME_BYTES, staging_bytes)
