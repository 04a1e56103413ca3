"""Tensors of a checkpoint shown as codes, or as scales of these; see model/coded.py.

The second axis is that of inputs, in tensors of one expert and in those of all.
"""

from dataclasses import dataclass

import ml_dtypes
import numpy as np
from jaxtyping import Float32, UInt8

from model.checkpoint import Checkpoint
from model.coded import LARGEST
from model.errors import ModelError
from model.params import Holds, Leaf
from model.quantised import Quantised
from model.sources import Files, Index


@dataclass(frozen=True)
class _Codes:
    files: Checkpoint
    group: int

    def read(self, name: str, index: Index) -> np.ndarray:
        if isinstance(self.files, Quantised):
            return self.files.read_codes(name, index)
        values = self.files.read(name, index).astype(np.float32)
        return _encoded(values, _scales(values, self.group), self.group)


@dataclass(frozen=True)
class _Scales:
    """Of an index that counts groups along the second axis."""

    files: Checkpoint
    group: int

    def read(self, name: str, index: Index) -> np.ndarray:
        first, end = index[1].start * self.group, index[1].stop * self.group
        inputs = slice(first, min(end, self.files.shape(name)[1]))
        part = (index[0], inputs, *index[2:])
        if isinstance(self.files, Quantised):
            return self.files.read_scales(name, part, self.group)
        return _scales(self.files.read(name, part).astype(np.float32), self.group)


def shown(files: Checkpoint, leaf: Leaf) -> Files:
    """The tensors as this parameter holds them.

    Those of a quantised checkpoint keep their codes and scales, others are rounded to the nearest
    code, the largest weight of a group to the largest code.
    """
    match leaf.holds:
        case Holds.CODES:
            return _Codes(files, leaf.group)
        case Holds.SCALES:
            return _Scales(files, leaf.group)
        case Holds.VALUES:
            return files


def check_coded(files: Checkpoint, names: list[str]) -> None:
    """Raises ModelError for a tensor that is none of codes in a checkpoint where others are."""
    if not isinstance(files, Quantised):
        return
    for name in names:
        if not files.is_quantised(name):
            raise ModelError(
                f"{files.folder}: tensor {name} is not quantised, others are; accepted: all "
                "experts alike, or --quantization none"
            )


def _scales(
    values: Float32[np.ndarray, "a inputs *more"], group: int
) -> Float32[np.ndarray, "a groups *more"]:
    firsts = np.arange(0, values.shape[1], group)
    largest = np.maximum.reduceat(np.abs(values), firsts, axis=1)
    return np.where(largest > 0, largest / LARGEST, np.float32(1)).astype(np.float32)


def _encoded(
    values: Float32[np.ndarray, "a inputs *more"],
    scales: Float32[np.ndarray, "a groups *more"],
    group: int,
) -> UInt8[np.ndarray, "a inputs *more"]:
    each = np.repeat(scales, group, axis=1)[:, : values.shape[1]]
    return (values / each).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
