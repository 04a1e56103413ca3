"""What a checkpoint's config says about quantised tensors: how they are stored."""

from typing import Any, Final

from model.errors import ModelError
from model.fields import REQUIRED, Fields

MXFP4_GROUP: Final = 32  # values that share a scale
SCALE_INPUTS: Final = 128  # the most that share a scale, in weights that are rounded when read
FP8_BLOCKS: Final = "fp8-blocks"  # as fp8, under compressed-tensors' name for scales
FP8_ROWS: Final = "fp8-rows"  # a scale for each row, or one for all
AWQ: Final = "awq"
GPTQ: Final = "gptq"
GPTQ_V2: Final = "gptq_v2"
INT8: Final = "int8"  # a byte each
INT8_PACKED: Final = "int8-packed"  # four in a word
# By a checkpoint's quantization, the codes that represent its tensors' values exactly, the default
# first; see model/coded.py.
_CODES: Final[dict[str, tuple[str, ...]]] = {
    "": ("fp8", "int8"),  # not quantised: here values are rounded
    "fp8": ("fp8",),
    FP8_BLOCKS: ("fp8",),
    FP8_ROWS: ("fp8",),
    "mxfp4": ("fp8",),
    "int4": ("fp8", "int8"),
    # Differences of four bits, which neither kind rounds.
    AWQ: ("fp8", "int8"),
    GPTQ: ("fp8", "int8"),
    GPTQ_V2: ("fp8", "int8"),
    INT8: ("int8",),
    INT8_PACKED: ("int8",),
}
_PACKED: Final = "pack-quantized"
_BYTES: Final = "int-quantized"
_FLOATS: Final = "float-quantized"
_WORD: Final = 32  # bits
_EACH_COLUMN: Final = 8  # values of a word, of AWQ and GPTQ
# Orders of rounding columns that leave them stored in their own order; others come with an index.
_OWN_ORDER: Final = ("static", "weight")
# Settings that would change the numbers and are not implemented, each with the one value besides
# null that changes nothing.
_OF_AWQ: Final[dict[str, Any]] = {"bits": 4, "zero_point": True}
_OF_GPTQ: Final[dict[str, Any]] = {
    "bits": 4,
    "desc_act": False,
    "is_marlin_format": False,
    "pack_dtype": "int32",
    "dynamic": {},
}
_WHOLE: Final[dict[str, Any]] = {
    "kv_cache_scheme": None,
    "transform_config": {},
}
_OF_WEIGHTS: Final[dict[str, Any]] = {"symmetric": True, "dynamic": False}
# How rows may be said to be rounded in products: here they never are, so such a scheme only tells
# that the weights' rounding was chosen beside it.
_OF_ROWS: Final[dict[str, Any]] = {"num_bits": 8, "type": "float", "symmetric": True}


def read_quantization(fields: Fields, architecture: str) -> dict[str, Any]:
    """The fields of ModelConfig about quantisation. Products are in the dtype of the weights.

    Which tensors are quantised shows in the files, not here. Raises ModelError.
    """
    settings = fields.sub("quantization_config")
    if settings is None:
        return {}
    mxfp4 = ("mxfp4",) if architecture == "GptOssForCausalLM" else ()
    accepted = ("fp8", *mxfp4, "compressed-tensors", AWQ, GPTQ)
    method = settings.raw("quant_method", REQUIRED)
    if method not in accepted:
        raise fields.fail("quantization_config", method, f"{', '.join(accepted)}, or null")
    if method == "mxfp4":
        return {"quantization": method, "quantized_block": (1, MXFP4_GROUP)}
    if method == "compressed-tensors":
        return _compressed(settings)
    if method in (AWQ, GPTQ):
        return _columns(settings, method)
    if settings.raw("weight_block_size", None) is None:
        return {"quantization": FP8_ROWS, "quantized_block": (1, 0)}
    return {"quantization": method, "quantized_block": _block(settings, "weight_block_size")}


def _columns(settings: Fields, method: str) -> dict[str, Any]:
    """Integers of four bits with a zero point and a scale for each group of inputs.

    Source: huggingface/transformers: src/transformers/utils/quantization_config.py.
    """
    settings.only(_OF_AWQ if method == AWQ else _OF_GPTQ)
    if method == AWQ:
        settings.one_of("version", settings.raw("version", "gemm"), ("gemm", "GEMM"))
    else:
        stored = settings.raw("checkpoint_format", GPTQ)
        method = settings.one_of("checkpoint_format", stored, (GPTQ, GPTQ_V2))
    size = settings.integer("group_size", 128, low=-1)
    if size == 0 or (size > 0 and size % _EACH_COLUMN):
        raise settings.fail("group_size", size, f"a multiple of {_EACH_COLUMN}, or -1 for all")
    return {"quantization": method, "quantized_block": (1, max(size, 0))}


def codes_of(published: str, asked: str) -> str:
    """Which codes stand for weights: "fp8" or "int8", whether or not any are kept.

    published: ModelConfig.quantization. asked: a value of --quantization. Raises ModelError where
    the codes asked for cannot represent what is published.
    """
    exact = _CODES[published]
    if asked not in _CODES[""]:
        return exact[0]
    if asked not in exact:
        accepted = ", ".join(("auto", "none", *exact))
        raise ModelError(
            f"--quantization {asked}: config.json says that weights are {published}, which {asked} "
            f"cannot hold without rounding; accepted: {accepted}"
        )
    return asked


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _block(settings: Fields, name: str) -> tuple[int, int]:
    """The rows and columns that share a scale."""
    block = settings.raw(name, None)
    if not isinstance(block, list) or len(block) != 2 or not all(map(_is_size, block)):
        raise settings.fail(name, block, "rows and columns of a block: two integers")
    return block[0], block[1]


def _compressed(settings: Fields) -> dict[str, Any]:
    """What compressed-tensors says: one group, of integers or of fp8.

    Source: vllm-project/compressed-tensors: src/compressed_tensors/quantization/quant_args.py, and
    compressors/format.py for what such weights are stored as.
    """
    formats = _PACKED, _BYTES, _FLOATS
    stored = settings.one_of("format", settings.raw("format", REQUIRED), formats)
    settings.only(_WHOLE)
    sparsity = settings.sub("sparsity_config")
    if sparsity is not None and sparsity.values and sparsity.raw("format", None) != "dense":
        raise settings.fail("sparsity_config", sparsity.values, "null, {}, or of format 'dense'")
    groups = settings.sub("config_groups")
    if groups is None or len(groups.values) != 1:
        raise settings.fail("config_groups", groups and list(groups.values), "one group")
    group = groups.sub(next(iter(groups.values)))
    weights = group and group.sub("weights")
    if group is None or weights is None:
        raise settings.fail("config_groups", groups.values, "a group with weights")
    group.only({"format": stored, "output_activations": None})
    weights.only(_OF_WEIGHTS | {"type": "float" if stored == _FLOATS else "int"})
    if stored == _FLOATS:
        rows = group.sub("input_activations")
        if rows is not None:
            rows.only(_OF_ROWS)
        return _floats(weights)
    group.only({"input_activations": None})
    return _integers(weights, stored)


def _floats(weights: Fields) -> dict[str, Any]:
    """Weights of fp8 with a scale for all of them, for each row, or for each block."""
    weights.only({"num_bits": 8, "group_size": None, "actorder": None})
    strategies = ("tensor", "channel", "block")
    if weights.one_of("strategy", weights.raw("strategy", "tensor"), strategies) == "block":
        return {
            "quantization": FP8_BLOCKS,
            "quantized_block": _block(weights, "block_structure"),
        }
    weights.only({"block_structure": None})
    return {"quantization": FP8_ROWS, "quantized_block": (1, 0)}


def _integers(weights: Fields, stored: str) -> dict[str, Any]:
    """Integers of four bits with a scale per group of a row, of eight bits also per row."""
    weights.only({"block_structure": None})
    if (order := weights.raw("actorder", None)) not in (None, *_OWN_ORDER):
        raise weights.fail("actorder", order, f"null, {', '.join(_OWN_ORDER)}")
    bits, accepted = weights.integer("num_bits"), (4, 8) if stored == _PACKED else (8,)
    if bits not in accepted:
        raise weights.fail("num_bits", bits, " or ".join(map(str, accepted)))
    kind = "int4" if bits == 4 else INT8_PACKED if stored == _PACKED else INT8
    return {"quantization": kind, "quantized_block": (1, _sharing(weights, bits, stored))}


def _sharing(weights: Fields, bits: int, stored: str) -> int:
    """Columns of a row that share a scale; 0: all."""
    strategies = ("group", "channel") if bits == 8 else ("group",)
    if weights.one_of("strategy", weights.raw("strategy", "group"), strategies) == "channel":
        if (size := weights.raw("group_size", None)) not in (None, -1):
            raise weights.fail("group_size", size, "null or -1, since strategy is 'channel'")
        return 0
    size = weights.integer("group_size")
    each = _WORD // bits if stored == _PACKED else 1
    if size % each:
        raise weights.fail("group_size", size, f"a multiple of {each}")
    return int(size)
