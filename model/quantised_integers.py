"""Checkpoints of four-bit or eight-bit integers, with a scale for each group of a row's values.

As compressed-tensors has them: weights alone, which are [out, in], symmetric about zero.
"""

from abc import abstractmethod
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import ClassVar, Final

import ml_dtypes
import numpy as np
from jaxtyping import UInt8

from model.errors import ModelError
from model.quantised_pairs import Quantised, columns_of, nibble_pairs

_WORD: Final = 4  # bytes
_TILE: Final = 64
_SHAPE: Final = "_shape"


class _Integers(Quantised):
    """Shown as float32 [out, in]: an integer times its scale, rounded only to float32."""

    _SCALES = "_scale"
    _SHOWN = "F32"
    _EACH: ClassVar[int]  # values in one stored entry
    _LARGEST: ClassVar[int] = 128  # value, whatever its sign
    # Tensors that come with kinds of weights that are not implemented here.
    _FOREIGN: ClassVar[Mapping[str, str]] = {
        "_zero_point": "symmetric weights, which have none",
        "_g_idx": "groups of columns in their order, which need none",
    }

    def __init__(self, folder: Path, block: tuple[int, int]) -> None:
        """block: 1, and the columns of a row that share a scale; with eight bits, 0 means all."""
        self._group = columns_of(folder, block, self._EACH)
        super().__init__(folder)

    @abstractmethod
    def _stored(self, name: str, rows: slice, entries: slice) -> UInt8[np.ndarray, "rows bytes"]:
        """Some stored entries of a tensor, each a word or a byte, in the order of columns."""

    @abstractmethod
    def _codes(self, stored: UInt8[np.ndarray, "rows bytes"], dtype: np.dtype) -> np.ndarray:
        """The values of stored entries, as codes."""

    def _values(self, stored: UInt8[np.ndarray, "rows bytes"]) -> np.ndarray:
        """The values of stored entries, as float32."""
        return self._codes(stored, np.dtype(np.int8)).astype(np.float32)

    def _check_fit(self, data: str, scales: str) -> None:
        name, shape = scales.removesuffix(self._SCALES), self.shape(data)
        for end, accepted in self._FOREIGN.items():
            if name + end in self._where:
                raise ModelError(f"{self._at(name + end)}: is there; accepted: {accepted}")
        columns = shape[1] * self._EACH if len(shape) == 2 else 0
        if not columns or (self._group and columns % self._group):
            each = f" / {self._EACH}" * (self._EACH > 1)
            groups = f" with whole groups of {self._group} values" * (self._group > 0)
            raise ModelError(
                f"{self._at(data)}: shape {list(shape)}, expected [out, in{each}]{groups}"
            )
        per_row = columns // self._group if self._group else 1
        self._check_scales(scales, ("BF16", "F16", "F32"), (shape[0], per_row))

    def _shown(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        return stored[0], stored[1] * self._EACH

    def _decode(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        rows, columns = index
        first, stored = self._around(name, index)
        scales = self._scales_of(name, rows, columns.start, columns.stop - 1)
        within = slice(columns.start - first, columns.stop - first, columns.step)
        num_columns = len(range(columns.start, columns.stop, columns.step))
        out = np.empty((len(stored), num_columns), np.float32)
        for at in range(0, len(stored), _TILE):
            tile = slice(at, at + _TILE)
            values = self._values(stored[tile])
            values = values.reshape(*scales[tile].shape, -1)
            values *= scales[tile, :, None]
            out[tile] = values.reshape(len(values), -1)[:, within]
        return out

    def read_codes(self, name: str, index: tuple[slice, ...], dtype: np.dtype) -> np.ndarray:
        first, stored = self._around(name, index)
        return self._codes(stored, dtype)[:, index[1].start - first : index[1].stop - first]

    def read_scales(self, name: str, index: tuple[slice, ...], group: int) -> np.ndarray:
        firsts = np.arange(index[1].start, index[1].stop, group)
        scales = self._scales_of(name, index[0], int(firsts[0]), int(firsts[-1]))
        return scales[:, self._nth_group(firsts) - self._nth_group(int(firsts[0]))]

    def _nth_group[N: (int, np.ndarray)](self, column: N) -> N:
        return column // self._group if self._group else 0 * column

    def _scales_of(self, name: str, rows: slice, first: int, last: int) -> np.ndarray:
        """The scales of the groups from that of column `first` to that of column `last`."""
        groups = slice(self._nth_group(first), self._nth_group(last) + 1)
        part = slice(rows.start, rows.stop), groups
        scales = self.read(name + self._SCALES, part)[:: rows.step].astype(np.float32)
        self._check_largest(name + self._SCALES, scales, self._LARGEST)
        return scales

    def _around(
        self, name: str, index: tuple[slice, ...]
    ) -> tuple[int, UInt8[np.ndarray, "rows bytes"]]:
        """The first column of the whole groups that an index touches, and their stored entries.

        The excess of the first group and the last is little, and the caller cuts it off. Where rows
        have one scale each, every stored entry counts as a group.
        """
        (rows, columns), group = index, self._group or self._EACH
        first, last = columns.start // group * group, -(-columns.stop // group) * group
        entries = slice(first // self._EACH, last // self._EACH)
        return first, self._stored(name, rows, entries)


class _Packed(_Integers):
    """i32[out, in / values of a word], beside a tensor with the shape of the whole.

    A word holds values one after the other, the lowest bits first, each with half of its range
    added, so that none is below zero.
    Source: vllm-project/compressed-tensors: src/compressed_tensors/compressors/pack_quantized.
    """

    _DATA = "_packed"
    _STORED = "I32"
    _BESIDE = (_SHAPE,)

    def _is_data(self, name: str) -> bool:
        return name.endswith(self._DATA)

    def _check_fit(self, data: str, scales: str) -> None:
        super()._check_fit(data, scales)
        said = data.removesuffix(self._DATA) + _SHAPE
        if said not in self._where:
            raise ModelError(f"{self._at(data)}: no tensor {said} in {self.folder}")
        if self.shape(said) != (2,) or self.dtype(said) not in ("I32", "I64"):
            got = f"{self.dtype(said)} {list(self.shape(said))}"
            raise ModelError(f"{self._at(said)}: {got}; accepted: I32 or I64 [2]")

    def _stored(self, name: str, rows: slice, entries: slice) -> UInt8[np.ndarray, "rows bytes"]:
        self._check_said(name)
        words = self.read(name + self._DATA, (slice(rows.start, rows.stop), entries))[:: rows.step]
        return np.ascontiguousarray(words, "<i4").view(np.uint8)

    def _check_said(self, name: str) -> None:
        """Raises ModelError unless the stored shape is the tensor's.

        Called only when a tensor is read: for every expert it would touch a page of the files.
        """
        said = name + _SHAPE
        shape, expected = self.read(said, (slice(0, 2),)).tolist(), list(self.shape(name))
        if shape != expected:
            raise ModelError(f"{super()._at(said)}: says {shape}, expected {expected}")


class Int4(_Packed):
    """Values from -8 to 7, eight in a word, some of a row to a scale."""

    _EACH = 2 * _WORD
    _LARGEST = 8

    def _codes(self, stored: UInt8[np.ndarray, "rows bytes"], dtype: np.dtype) -> np.ndarray:
        return _pairs_of(dtype).take(stored, mode="clip").view(dtype).reshape(len(stored), -1)

    def _values(self, stored: UInt8[np.ndarray, "rows bytes"]) -> np.ndarray:
        pairs = _pairs_of(np.dtype(np.float32)).take(stored, mode="clip")
        return pairs.view(np.float32).reshape(len(stored), -1)


class Int8Packed(_Packed):
    """Values from -128 to 127, four in a word."""

    _EACH = _WORD

    def _codes(self, stored: UInt8[np.ndarray, "rows bytes"], dtype: np.dtype) -> np.ndarray:
        assert dtype == np.int8, dtype
        # Adding 128 to a byte, or subtracting it, flips the highest bit.
        return (stored ^ np.uint8(128)).view(np.int8)


class Int8(_Integers):
    """Values from -128 to 127 as they are: i8[out, in].

    Source: vllm-project/compressed-tensors: src/compressed_tensors/compressors/naive_quantized.
    """

    _DATA = ""
    _STORED = "I8"
    _EACH = 1

    def _is_data(self, name: str) -> bool:
        return self.dtype(name) == self._STORED

    def _stored(self, name: str, rows: slice, entries: slice) -> UInt8[np.ndarray, "rows bytes"]:
        return self.read_bytes(name, (rows, entries))

    def _codes(self, stored: UInt8[np.ndarray, "rows bytes"], dtype: np.dtype) -> np.ndarray:
        assert dtype == np.int8, dtype
        return stored.view(np.int8)


@cache
def _pairs_of(dtype: np.dtype) -> np.ndarray:
    """For every byte, both four-bit values as one number; uint8 means e4m3 codes, also exact."""
    kind = ml_dtypes.float8_e4m3fn if dtype == np.uint8 else dtype
    return nibble_pairs(np.arange(-8, 8).astype(kind))
