"""Tensors of a checkpoint shown as codes, or as the scales of codes; see model/coded.py.

The second axis is that of inputs, in tensors of one expert and in tensors of all.
"""

import logging
import math
from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np
from jaxtyping import Float32

from model.checkpoint import Checkpoint
from model.coded import LARGEST
from model.config_quantised import SCALE_INPUTS
from model.errors import ModelError
from model.params import Holds, Leaf
from model.quantised_pairs import Quantised
from model.sharding import EXPERT_WEIGHTS, Dims
from model.sources import Files, Index
from model.tensors import param_sources

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Codes:
    files: Checkpoint
    dtype: np.dtype

    def read(self, name: str, index: Index) -> np.ndarray:
        if isinstance(self.files, Quantised):
            return self.files.read_codes(name, index, self.dtype)
        return _Rounded.of(self.files, name, index, self.dtype).codes()


@dataclass(frozen=True)
class _Scales:
    """Shows scales; an index counts groups along the second axis."""

    files: Checkpoint
    group: int
    dtype: np.dtype  # of the codes

    def read(self, name: str, index: Index) -> np.ndarray:
        inputs = slice(index[1].start * self.group, index[1].stop * self.group)
        part = (index[0], inputs, *index[2:])
        if isinstance(self.files, Quantised):
            return self.files.read_scales(name, part, self.group)
        return _Rounded.of(self.files, name, part, self.dtype).scales()[:, :: self.group]


@dataclass(frozen=True)
class _Rounded:
    """A slice of a tensor that is not quantised, and the scales of the whole tensor there.

    Which inputs share a scale follows from the tensor alone: codes are the same on every mesh.
    """

    values: Float32[np.ndarray, "a inputs *more"]  # of whole groups
    share: int
    inner: slice  # the inputs of values that were asked for
    dtype: np.dtype  # of codes

    @staticmethod
    def of(files: Checkpoint, name: str, index: Index, dtype: np.dtype) -> "_Rounded":
        size = files.shape(name)[1]
        share, asked = math.gcd(size, SCALE_INPUTS), index[1]
        first, end = asked.start // share * share, -(-asked.stop // share) * share
        part = (index[0], slice(first, min(end, size)), *index[2:])
        values = files.read(name, part).astype(np.float32)
        return _Rounded(values, share, slice(asked.start - first, asked.stop - first), dtype)

    def scales(self) -> Float32[np.ndarray, "a inputs *more"]:
        """A scale for every input."""
        return np.repeat(self._each(), self.share, axis=1)[:, self.inner]

    def codes(self) -> np.ndarray:
        """The nearest code to each weight: [a, inputs, *more]."""
        # Weights so small that their scales are rounded coarsely may exceed the largest code.
        most = LARGEST[self.dtype]
        values = (self.values[:, self.inner] / self.scales()).clip(-most, most)
        if self.dtype == np.int8:
            return np.rint(values).astype(np.int8)
        return values.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)

    def _each(self) -> Float32[np.ndarray, "a groups *more"]:
        firsts = np.arange(0, self.values.shape[1], self.share)
        largest = np.maximum.reduceat(np.abs(self.values), firsts, axis=1)
        scales = largest / LARGEST[self.dtype]
        return np.where(scales > 0, scales, np.float32(1))


def shown(files: Checkpoint, leaf: Leaf, codes: np.dtype) -> Files:
    """The tensors as this parameter holds them. codes: their dtype, see model/coded.py.

    Tensors of a quantised checkpoint keep their codes and scales. Others are rounded to the nearest
    code; scales are such that the largest weight of a group becomes the largest code.
    """
    match leaf.holds:
        case Holds.CODES:
            return _Codes(files, codes)
        case Holds.SCALES:
            return _Scales(files, leaf.group, codes)
        case Holds.VALUES:
            return files


def codes_to_keep(files: Checkpoint, dims: Dims, asked: bool) -> tuple[str, ...]:
    """Which parameters are to be codes, of those where enough inputs share a scale.

    Of a quantised checkpoint, the parameters that it has quantised in every layer; of any other,
    all. asked: whether the operator asked for codes; then raises ModelError where the experts of a
    quantised checkpoint are not quantised.
    """
    if not isinstance(files, Quantised):
        return dims.codable
    layers, present = param_sources(replace(dims, coded=()))["layers"], set(files.names)
    found: list[str] = []
    for name, (_, group, _) in dims.coded_inputs.items():
        names = [tensor for run in layers if name in run for tensor, _ in run[name].expected()]
        others = [x for x in names if x in present and not files.is_quantised(x)]
        if others and asked and name in EXPERT_WEIGHTS:
            raise ModelError(
                f"{files.folder}: tensor {others[0]} is not quantised, though config.json says "
                f"that experts are; --quantization {dims.codes} needs all of them quantised"
            )
        if others:
            in_part = len(others) < len(names) or name in EXPERT_WEIGHTS
            level = logging.WARNING if in_part else logging.INFO
            log.log(level, "%s: expanded, since tensor %s is not quantised", name, others[0])
        elif name not in dims.codable:
            log.warning("%s: expanded, since only %d inputs could share a scale", name, group)
        else:
            found.append(name)
    return tuple(found)
