"""Limits and addresses of a prefill worker: one frozen value, validated once."""

from dataclasses import dataclass

from model.buckets import MAX_SEQS_PER_CHUNK
from prefill.balancer import Method
from transfer.backend import MAX_PAYLOAD_BYTES
from transfer.checks import at_least, at_most
from transfer.worker_config import WorkerConfig


@dataclass(frozen=True)
class PrefillConfig(WorkerConfig):
    """Configuration of `kvferry prefill`. Names are those of the flags."""

    max_seqs_per_chunk: int = 8  # prompts packed into one chunk
    # To each decode worker, opened as rooms want them; 0: by processors.
    transfer_connections: int = 0
    max_frame_bytes: int = 16 << 20
    # Bytes of pages that may wait to be sent to a decode worker before its prompts wait, too.
    transfer_queue_bytes: int = 2 << 30
    # How prompts are shared out to the data-parallel ranks.
    load_balance_method: Method = "shortest_queue"

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, "max_seqs_per_chunk", 1)
        at_least(self, "transfer_connections", 0)
        at_least(self, "transfer_queue_bytes", 0)
        at_least(self, "max_frame_bytes", 1)
        at_most(self, "transfer_connections", 64)  # each has a thread at either end
        at_most(self, "max_frame_bytes", MAX_PAYLOAD_BYTES)
        at_most(self, "max_seqs_per_chunk", MAX_SEQS_PER_CHUNK)
