"""Limits and addresses of a decode worker: one frozen value, validated once."""

from dataclasses import dataclass
from typing import Literal

from model.buckets import Drafting
from transfer.checks import at_least, at_most, check_port, reachable
from transfer.errors import ConfigError
from transfer.worker_config import ANY_PROMPT, WorkerConfig

MAX_SLOTS = 8192  # every power of two up to it is compiled


@dataclass(frozen=True)
class DecodeConfig(WorkerConfig):
    """Configuration of `kvferry decode`. Names are those of the flags."""

    max_running_requests: int = 0  # slots of all ranks; 0 = 16 a rank on CPU, 256 elsewhere
    headroom_pages: int = 1  # pages kept free for growth when a request is let in
    # Longest prompt that decode computes itself; 0 = none, ANY_PROMPT = whatever it can hold.
    local_prefill_tokens: int = 0
    speculative_algorithm: Literal["NONE", "NGRAM"] = "NONE"
    speculative_num_draft_tokens: int = 3  # for each slot of a step
    speculative_ngram_min_match_window_size: int = 2  # last tokens that must match, at least
    speculative_ngram_max_match_window_size: int = 4  # last tokens that are compared, at most
    data_host: str = ""  # where frames are received; "" = host
    data_port: int = 0
    transfer_staging_bytes: int = 0  # memory lent to each connection; 0 = enough

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, "max_running_requests", 0)
        at_most(self, "max_running_requests", MAX_SLOTS)
        if self.max_running_requests % self.dp_size:
            raise ConfigError(
                f"--dp-size {self.dp_size} must divide --max-running-requests "
                f"{self.max_running_requests}: all ranks have the same number of slots"
            )
        at_least(self, "headroom_pages", 0)
        at_least(self, "local_prefill_tokens", ANY_PROMPT)
        at_least(self, "transfer_staging_bytes", 0)
        self._check_drafting()
        reachable(self, "data_host")
        check_port(self, "data_port")

    def _check_drafting(self) -> None:
        """Raises ConfigError for sizes out of range, or a least window above the largest."""
        at_least(self, "speculative_num_draft_tokens", 1)
        at_most(self, "speculative_num_draft_tokens", 64)
        at_least(self, "speculative_ngram_min_match_window_size", 1)
        least = self.speculative_ngram_min_match_window_size
        at_least(self, "speculative_ngram_max_match_window_size", least)
        at_most(self, "speculative_ngram_max_match_window_size", 64)

    @property
    def reached_by(self) -> dict[str, str]:
        """As WorkerConfig's, and the host on which frames are received."""
        flag = "--data-host" if self.data_host else "--host"
        return super().reached_by | {flag: self.data_host or self.host}

    @property
    def num_drafts(self) -> int:
        """Tokens that a step drafts for each slot at most."""
        return self.drafting.num_tokens if self.drafting is not None else 0

    @property
    def drafting(self) -> Drafting | None:
        """How steps draft tokens; None: they do not."""
        if self.speculative_algorithm == "NONE":
            return None
        return Drafting(
            self.speculative_num_draft_tokens,
            self.speculative_ngram_min_match_window_size,
            self.speculative_ngram_max_match_window_size,
        )
