"""Limits and addresses of a decode worker: one frozen value, validated once."""

from dataclasses import dataclass

from transfer.errors import ConfigError
from transfer.worker_config import (
    ANY_PROMPT,
    WorkerConfig,
    at_least,
    at_most,
    check_port,
    reachable,
)


@dataclass(frozen=True)
class DecodeConfig(WorkerConfig):
    """Configuration of `kvferry decode`. Names are those of the flags."""

    max_running_requests: int = 0  # slots of all ranks; 0 = 16 on CPU, 256 elsewhere, for each
    headroom_pages: int = 1  # pages kept free for growth when a request is let in
    # Longest prompt that decode computes itself; 0 = none, ANY_PROMPT = whatever it can hold.
    local_prefill_tokens: int = 0
    data_host: str = ""  # where frames are taken; "" = host
    data_port: int = 0
    transfer_staging_bytes: int = 0  # memory shared with a prefill of this host; 0 = enough

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, "max_running_requests", 0)
        at_most(self, "max_running_requests", 8192)  # every power of two up to it is compiled
        if self.max_running_requests % self.dp_size:
            raise ConfigError(
                f"--dp-size {self.dp_size} must divide --max-running-requests "
                f"{self.max_running_requests}: every rank has as many slots"
            )
        at_least(self, "headroom_pages", 0)
        at_least(self, "local_prefill_tokens", ANY_PROMPT)
        at_least(self, "transfer_staging_bytes", 0)
        reachable(self, "data_host")
        check_port(self, "data_port")
