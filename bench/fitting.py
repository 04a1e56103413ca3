"""Fits a shape to a device: its network, its pages, and the batches whose pages fit."""

import math
from dataclasses import replace
from typing import Any, Final

import jax
import numpy as np

from bench.shapes import Shape
from model.buckets import pages_for
from model.errors import ModelError
from model.programs import mib
from model.sharding import LoraShape, make_mesh
from model.transformer import Model

TRAVEL_PAGES: Final = 32


def table_pages(shape: Shape, slots: int, model: Model) -> int:
    """Pages of each page table of a step: those for short contexts, or more if needed."""
    short = model.short_context(slots) // shape.page_size
    return max(short, context_pages(shape))


def context_pages(shape: Shape) -> int:
    """Pages of a slot with the shape's context and one more token."""
    return pages_for(shape.context + 1, shape.page_size)


def pool_pages(shape: Shape) -> int:
    """Pages that are enough for every batch, chunk and transfer of the shape."""
    return max(
        max(shape.slots) * context_pages(shape),
        max(shape.chunks) // shape.page_size,
        2 * TRAVEL_PAGES,
    )


def model_of(shape: Shape, device: Any = None, lora: LoraShape | None = None) -> Model:
    """The network of the shape on this device; None: on the first. lora: room for adapters."""
    mesh = make_mesh(1, 1, [device or jax.devices()[0]])
    sizes, codes = (shape.dtype, shape.page_size), shape.codes or "fp8"
    held: dict[str, Any] = {"coded": shape.coded, "codes": codes, "narrow": shape.narrow}
    return Model.create(shape.cfg, mesh, *sizes, **held, lora=lora)


def fitting(shape: Shape, memory_bytes: int) -> Shape:
    """The shape without the batches whose pages do not fit. Raises ModelError if none is left.

    A sixteenth of the memory is left for scratch.
    """
    model = model_of(shape)
    weights = sum(
        math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize
        for leaf in jax.tree.leaves(model.param_leaves())
    )
    page_bytes = model.kv_spec().all_layers_bytes
    left = memory_bytes - memory_bytes // 16 - weights
    batches = [
        slots
        for slots in shape.slots
        if pool_pages(replace(shape, slots=(slots,))) * page_bytes <= left
    ]
    if not batches:
        raise ModelError(
            f"{shape.name} does not fit: weights of {mib(weights)} and pages of a batch of "
            f"{min(shape.slots)} in {mib(memory_bytes)}, less a sixteenth for scratch; choose a "
            "smaller --shape"
        )
    return replace(shape, slots=tuple(batches))
