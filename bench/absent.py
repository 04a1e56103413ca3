"""A network on a device that need not be here: nothing of it is in memory."""

from typing import Any, Final

import jax

from bench.fitting import model_of
from bench.shapes import Shape
from model.eplb import ExpertPolicy
from model.opening import OpenedModel
from model.params import LORA_MATRICES
from model.placement import PlacedExperts
from model.sharding import LoraShape

CONTEXT: Final = 4096
POOL_PAGES: Final = 4096
_ADAPTERS: Final = ("one", "two", "three")


def absent_model(shape: Shape, device: Any, lora_rank: int = 0) -> OpenedModel:
    """The shape's network as a worker has it, for programs that are compiled and not run.

    lora_rank: of three adapters, which change all that adapters can; 0: there are none.
    """
    adapters = _ADAPTERS if lora_rank else ()
    lora = LoraShape(len(adapters), lora_rank, tuple(LORA_MATRICES)) if adapters else None
    model = model_of(shape, device, lora)
    params = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=leaf.sharding(model.mesh)
        ),
        model.param_leaves() | model.lora_leaves(),
    )
    experts = PlacedExperts(model, ExpertPolicy())
    kv_heads = shape.cfg.num_kv_heads
    return OpenedModel(model, params, model.kv_spec(), kv_heads, CONTEXT, "", experts, adapters)
