"""How a worker of either role opens its model, and what its bookkeeping needs to know of it."""

import dataclasses
from dataclasses import dataclass

from model.executables import ExecutableCache
from model.opening import BeforeWeights, OpenedModel, open_model
from transfer.worker_config import WorkerConfig


def open_configured(
    config: WorkerConfig, chunk_size: int, before_weights: BeforeWeights
) -> OpenedModel:
    """Load the model that the flags name. Raises ModelError as early as it can."""
    opened = open_model(
        config.model_path,
        dtype=config.dtype,
        kv_cache_dtype=config.kv_cache_dtype,
        tp_size=config.tp_size,
        ep_size=config.ep_size,
        page_size=config.page_size,
        context_length=config.context_length,
        chunk_size=chunk_size,
        fraction=config.mem_fraction_static,
        max_total_tokens=config.max_total_tokens,
        dp_size=config.dp_size,
        placing=config.placing,
        quantization=config.quantization,
        load_format=config.load_format,
        lora_paths=config.lora_paths,
        before_weights=before_weights,
    )
    return dataclasses.replace(opened, kept=ExecutableCache.beside_compiled())


@dataclass(frozen=True)
class PoolFacts:
    """What a worker's bookkeeping needs to know of the model."""

    page_size: int
    context_length: int
    logical_kv_heads: int
    stored_kv_heads: int
    window: int = 0  # positions seen by windowed layers with pages of their own; 0: none have any
    adapters: tuple[str, ...] = ()  # their names

    @staticmethod
    def of(opened: OpenedModel) -> "PoolFacts":
        return PoolFacts(
            opened.kv.page_size,
            opened.context_length,
            opened.logical_kv_heads,
            opened.kv.num_kv_heads,
            opened.model.cfg.sliding_window if opened.kv.groups > 1 else 0,
            opened.adapters,
        )

    @property
    def groups(self) -> int:
        """See model.config.KVSpec."""
        return 2 if self.window else 1

    def request_limit(self, num_pages: int) -> int:
        """Most tokens of one request, prompt and output."""
        return min(self.context_length, num_pages * self.page_size)
