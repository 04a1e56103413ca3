"""Which backend computes each costly operation: chosen once, at start-up, and logged."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import model.kernels.attention.reference as attention_reference
import model.kernels.moe.batched as moe_batched
import model.kernels.moe.grouped as moe_grouped
import model.kernels.moe.reference as moe_reference
from model.config_experts import RouterConfig
from model.heads import place_heads
from model.kernels import products, rows
from model.kernels.attention.paged_decode import paged_decode
from model.kernels.attention.paged_prefill import paged_prefill
from model.kernels.attention.unpacked import unpacked_decode
from model.kernels.moe.routing import best_experts, best_experts_by_kernel
from model.kernels.tiles import LEAST
from model.layers import add_and_norm
from model.products import product_parts
from model.sharding import Dims

log = logging.getLogger(__name__)

_GPUS = ("gpu", "cuda")  # jax's names for a GPU that is here, and for one that is compiled for


class Target(NamedTuple):
    """The platform that operations are built for, and whether a processor interprets its kernels.

    platform: jax's name. interpreted: kernels for it run operation by operation. shared_bytes:
    shared memory of a program on the GPU, of which an H200 has most; 0: as much as an H200.
    """

    platform: str
    interpreted: bool = False
    shared_bytes: int = 0


@dataclass(frozen=True)
class AttentionShape:
    """What one shard's attention has to serve. kv_heads and group are per shard.

    planes: see KVSpec. scale: of scores. sinks, windows: whether the kernel is given any.
    interpreted, shared_bytes: see Target.
    value_dim: see model.kernels.attention.reference.prefill.
    """

    platform: str
    dtype: str
    page_size: int
    kv_heads: int
    group: int
    head_dim: int
    planes: int = 2
    scale: float | None = None
    sinks: bool = False
    windows: bool = False
    interpreted: bool = False
    value_dim: int | None = None
    shared_bytes: int = 0


@dataclass(frozen=True)
class ExpertsShape:
    """What one shard's experts have to serve. experts and intermediate are per shard.

    limit, alpha: see model.layers.gated. bias: whether the kernel is given any. interpreted,
    shared_bytes: see Target. router: how experts are chosen.
    """

    platform: str
    dtype: str
    hidden: int
    intermediate: int
    experts: int
    chosen: int
    limit: float = 0.0
    alpha: float = 1.0
    bias: bool = False
    interpreted: bool = False
    router: RouterConfig = RouterConfig()  # noqa: RUF009 - frozen
    shared_bytes: int = 0


def attention_shape(dims: Dims, target: Target, dtype: str, page_size: int) -> AttentionShape:
    """The attention shape of one shard of a model."""
    cfg = dims.cfg
    return AttentionShape(
        target.platform,
        dtype,
        page_size,
        dims.kv_heads // dims.tp,
        dims.group,
        cfg.head_dim,
        cfg.kv_planes,
        cfg.softmax_scale,
        cfg.sinks,
        any(cfg.window_layers),
        target.interpreted,
        cfg.latent.kv_rank if cfg.latent else None,
        target.shared_bytes,
    )


def experts_shape(dims: Dims, target: Target, dtype: str) -> ExpertsShape:
    """The experts shape of one shard of a model."""
    cfg = dims.cfg
    return ExpertsShape(
        target.platform,
        dtype,
        cfg.hidden_size,
        dims.moe_intermediate // dims.expert_shards,
        dims.physical_experts // dims.ep,
        cfg.num_experts_per_tok,
        cfg.swiglu_limit,
        cfg.swiglu_alpha,
        cfg.experts_bias,
        target.interpreted,
        cfg.router,
        target.shared_bytes,
    )


class Backend(NamedTuple):
    """build(shape) returns the kernel, or raises NotImplementedError saying what it cannot do."""

    name: str
    build: Callable[[Any], Callable[..., Any]]


def _refuse_all_but_gpus(platform: str) -> None:
    if platform not in _GPUS:
        raise NotImplementedError(f"for GPUs, this is {platform}")


def _build_paged(kernel: Callable[..., Any], shape: AttentionShape) -> Callable[..., Any]:
    _refuse_all_but_gpus(shape.platform)
    if shape.head_dim % LEAST:
        raise NotImplementedError(f"for multiples of {LEAST}, heads have {shape.head_dim}")
    return partial(
        kernel,
        scale=shape.scale,
        value_dim=shape.value_dim,
        shared_bytes=shape.shared_bytes,
        interpret=shape.interpreted,
    )


def _build_attention(kernel: Callable[..., Any], shape: AttentionShape) -> Callable[..., Any]:
    how = {"scale": shape.scale, "value_dim": shape.value_dim}
    return partial(kernel, **how, accelerator=shape.platform != "cpu")


def _build_unpacked(shape: AttentionShape) -> Callable[..., Any]:
    if shape.platform != "cpu":
        raise NotImplementedError(f"for processors, this is {shape.platform}")
    if shape.planes == 1:
        # Keys that are values too have one head, so products read them as they lie. Elementwise,
        # XLA multiplies them again for each entry of the sum: 5 to 100 times the time.
        raise NotImplementedError("for keys and values apart, this has them in one")
    return partial(unpacked_decode, scale=shape.scale)


def _build_grouped(shape: ExpertsShape) -> Callable[..., Any]:
    _refuse_all_but_gpus(shape.platform)
    for name, size in (("hidden", shape.hidden), ("intermediate", shape.intermediate)):
        if size % LEAST:
            raise NotImplementedError(f"for multiples of {LEAST}, {name} size is {size}")
    return partial(
        moe_grouped.experts,
        limit=shape.limit,
        alpha=shape.alpha,
        shared_bytes=shape.shared_bytes,
        interpret=shape.interpreted,
    )


def _build_router(shape: ExpertsShape) -> Callable[..., Any]:
    _refuse_all_but_gpus(shape.platform)
    if shape.router.num_groups > 1:
        raise NotImplementedError(f"for one group of experts, there are {shape.router.num_groups}")
    return partial(
        best_experts_by_kernel, how=shape.router, chosen=shape.chosen, interpret=shape.interpreted
    )


def _build_heads(shape: AttentionShape) -> Callable[..., Any]:
    _refuse_all_but_gpus(shape.platform)
    if shape.planes == 1:
        raise NotImplementedError("for keys and values apart, this has them in one")
    if shape.head_dim & (shape.head_dim - 1) or shape.head_dim < 2 * LEAST:
        raise NotImplementedError(f"for powers of two from 32, heads have {shape.head_dim}")
    return partial(rows.place_heads, interpret=shape.interpreted)


def _build_norm(shape: AttentionShape) -> Callable[..., Any]:
    _refuse_all_but_gpus(shape.platform)
    return partial(rows.add_and_norm, interpret=shape.interpreted)


def _build_parts(shape: AttentionShape) -> Callable[..., Any]:
    _refuse_all_but_gpus(shape.platform)
    return partial(products.product_parts, interpret=shape.interpreted)


def _build_batched(shape: ExpertsShape) -> Callable[..., Any]:
    if shape.platform == "cpu":
        raise NotImplementedError("for accelerators: a processor reads chosen experts one by one")
    return partial(moe_batched.experts, limit=shape.limit, alpha=shape.alpha)


# Best first; the reference serves every shape, so it comes last.
PREFILL_ATTENTION: Sequence[Backend] = (
    Backend("paged", partial(_build_paged, paged_prefill)),
    Backend("reference", partial(_build_attention, attention_reference.prefill)),
)
DECODE_ATTENTION: Sequence[Backend] = (
    Backend("paged", partial(_build_paged, paged_decode)),
    Backend("unpacked", _build_unpacked),
    Backend("reference", partial(_build_attention, attention_reference.decode)),
)
EXPERTS: Sequence[Backend] = (
    Backend("grouped", _build_grouped),
    Backend("batched", _build_batched),
    Backend(
        "reference",
        lambda shape: partial(moe_reference.experts, limit=shape.limit, alpha=shape.alpha),
    ),
)
BEST_EXPERTS: Sequence[Backend] = (
    Backend("kernel", _build_router),
    Backend(
        "reference", lambda shape: partial(best_experts, how=shape.router, chosen=shape.chosen)
    ),
)
PLACE_HEADS: Sequence[Backend] = (
    Backend("fused", _build_heads),
    Backend("reference", lambda shape: place_heads),
)
PRODUCT_PARTS: Sequence[Backend] = (
    Backend("split", _build_parts),
    Backend("reference", lambda shape: product_parts),
)
ADD_AND_NORM: Sequence[Backend] = (
    Backend("fused", _build_norm),
    Backend("reference", lambda shape: add_and_norm),
)


def reads_whole_tables(decode_attention: Callable[..., Any]) -> bool:
    """Whether its cost follows the capacity of page tables rather than what rows see."""
    found = decode_attention.keywords if isinstance(decode_attention, partial) else {}
    return bool(found.get("accelerator"))


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
