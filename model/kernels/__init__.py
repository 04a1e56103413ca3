"""Which backend computes each costly operation: chosen once, at start-up, and said in the log."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import model.kernels.attention.reference as attention_reference
import model.kernels.moe.reference as moe_reference

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class AttentionShape:
    """What one shard's attention has to serve. kv_heads and group are per shard."""

    platform: str
    dtype: str
    page_size: int
    kv_heads: int
    group: int
    head_dim: int


@dataclass(frozen=True)
class ExpertsShape:
    """What one shard's experts have to serve. experts and intermediate are per shard."""

    platform: str
    dtype: str
    hidden: int
    intermediate: int
    experts: int
    chosen: int


class Backend(NamedTuple):
    """build(shape) returns the kernel, or raises NotImplementedError saying what it cannot do."""

    name: str
    build: Callable[[Any], Callable[..., Any]]


# Best first; the reference serves every shape, so it comes last.
PREFILL_ATTENTION: Sequence[Backend] = (
    Backend("reference", lambda shape: attention_reference.prefill),
)
DECODE_ATTENTION: Sequence[Backend] = (
    Backend("reference", lambda shape: attention_reference.decode),
)
EXPERTS: Sequence[Backend] = (Backend("reference", lambda shape: moe_reference.experts),)


def choose(
    op: str, backends: Sequence[Backend], shape: AttentionShape | ExpertsShape
) -> Callable[..., Any]:
    """The first backend that can serve the shape.

    Raises NotImplementedError with every refusal when none can.
    """
    refusals: list[str] = []
    for backend in backends:
        try:
            kernel = backend.build(shape)
        except NotImplementedError as refusal:
            refusals.append(f"{backend.name}: {refusal}")
            continue
        log.info("%s: %s%s", op, backend.name, f" (refused: {refusals})" if refusals else "")
        return kernel
    raise NotImplementedError(f"no backend of {op} serves {shape}: {'; '.join(refusals)}")
