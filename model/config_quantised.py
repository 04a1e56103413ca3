"""What a checkpoint says about how its tensors are stored, where that is not as their dtype."""

from typing import Any, Final

from model.fields import REQUIRED, Fields

MXFP4_GROUP: Final = 32  # values that share a scale
SCALE_INPUTS: Final = 128  # that share one at most, of weights that are rounded as they are read
_PACKED: Final = "pack-quantized"
_WORD: Final = 8  # values of four bits that a word has
# What changes the numbers and is not computed, each with the one value beside null that does not.
_WHOLE: Final[dict[str, Any]] = {
    "format": _PACKED,
    "kv_cache_scheme": None,
    "sparsity_config": {},
    "transform_config": {},
}
_OF_A_GROUP: Final[dict[str, Any]] = {
    "format": _PACKED,
    "input_activations": None,
    "output_activations": None,
}
_OF_WEIGHTS: Final[dict[str, Any]] = {
    "type": "int",
    "symmetric": True,
    "strategy": "group",
    "dynamic": False,
    "actorder": None,
    "block_structure": None,
}


def read_quantization(fields: Fields, architecture: str) -> dict[str, Any]:
    """Fields of ModelConfig. Tensors are computed with as the dtype of the weights says.

    Which tensors are stored so is seen by their names. Raises ModelError.
    """
    settings = fields.sub("quantization_config")
    if settings is None:
        return {}
    mxfp4 = ("mxfp4",) if architecture == "GptOssForCausalLM" else ()
    accepted = ("fp8", *mxfp4, "compressed-tensors")
    method = settings.raw("quant_method", REQUIRED)
    if method not in accepted:
        raise fields.fail("quantization_config", method, f"{', '.join(accepted)}, or null")
    if method == "mxfp4":
        return {"quantization": method, "quantized_block": (1, MXFP4_GROUP)}
    if method == "compressed-tensors":
        return _groups_of_integers(settings)
    block = settings.raw("weight_block_size", None)
    if not isinstance(block, list) or len(block) != 2 or not all(map(_is_size, block)):
        raise settings.fail("weight_block_size", block, "rows and columns of a block: two integers")
    return {"quantization": method, "quantized_block": (block[0], block[1])}


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _groups_of_integers(settings: Fields) -> dict[str, Any]:
    """Weights alone, of four bits, some values of a row to a scale.

    Source: vllm-project/compressed-tensors: src/compressed_tensors/quantization/quant_args.py.
    """
    settings.one_of("format", settings.raw("format", REQUIRED), (_PACKED,))
    settings.only(_WHOLE)
    groups = settings.sub("config_groups")
    if groups is None or len(groups.values) != 1:
        raise settings.fail("config_groups", groups and list(groups.values), "an object of one")
    group = groups.sub(next(iter(groups.values)))
    weights = group and group.sub("weights")
    if group is None or weights is None:
        raise settings.fail("config_groups", groups.values, "a group with weights")
    group.only(_OF_A_GROUP)
    weights.only(_OF_WEIGHTS)
    if (bits := weights.integer("num_bits")) != 4:
        raise weights.fail("num_bits", bits, "4")
    size = weights.integer("group_size")
    if size % _WORD:
        raise weights.fail("group_size", size, f"a multiple of {_WORD}")
    return {"quantization": "int4", "quantized_block": (1, size)}
