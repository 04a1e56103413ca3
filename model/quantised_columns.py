"""Checkpoints of four-bit integers that lie [in, out], with a zero point and a scale for a group.

As AWQ and GPTQ have them: a weight is an integer less its group's zero point, times its scale.
"""

from abc import abstractmethod
from pathlib import Path
from typing import ClassVar, Final

import ml_dtypes
import numpy as np
from jaxtyping import Float32, Int8, Int32

from model.errors import ModelError
from model.quantised_pairs import Quantised

_EACH: Final = 8  # values of a word
_LARGEST: Final = 16  # difference to a zero point, whatever its sign
_SCALE_DTYPES: Final = ("F16", "BF16", "F32")


class _Columns(Quantised):
    """Shown as float32 [out, in], under the name that a weight has which is not quantised."""

    _NAME = "weight"
    _DATA = "qweight"
    _SCALES = "scales"
    _STORED = "I32"
    _SHOWN = "F32"
    _ZEROS: ClassVar[str] = "qzeros"
    _BESIDE: ClassVar[tuple[str, ...]] = (_ZEROS,)

    def __init__(self, folder: Path, block: tuple[int, int]) -> None:
        """block: 1, and the inputs that share a scale; 0 means all."""
        rows, self._group = block
        if rows != 1 or self._group % _EACH:
            accepted = f"a multiple of {_EACH} columns of one row"
            raise ModelError(
                f"{folder}: quantised in blocks of {list(block)}, accepted: {accepted}"
            )
        super().__init__(folder)

    @abstractmethod
    def _integers(self, name: str, inputs: slice, outputs: slice) -> Int8[np.ndarray, "in out"]:
        """Some of the integers, 0 to 15. Both slices hold whole words."""

    @abstractmethod
    def _zeros(self, words: Int32[np.ndarray, "groups words"]) -> Int8[np.ndarray, "groups out"]:
        """Zero points of consecutive outputs."""

    def _is_data(self, name: str) -> bool:
        return name.endswith(f".{self._DATA}")

    def _is_scales(self, name: str) -> bool:
        return name.endswith(f".{self._SCALES}")

    def _check_fit(self, data: str, scales: str) -> None:
        stem, shape = data.removesuffix(self._DATA), self.shape(data)
        columns, rows = self._shown(shape)[::-1] if len(shape) == 2 else (0, 0)
        if not columns or not rows or rows % _EACH or columns % (self._group or _EACH):
            raise ModelError(
                f"{self._at(data)}: shape {list(shape)}, expected words of [in, out], with whole "
                f"groups of {self._group or _EACH} inputs and of {_EACH} outputs"
            )
        num_groups = columns // self._group if self._group else 1
        self._check_scales(scales, _SCALE_DTYPES, (num_groups, rows))
        zeros = stem + self._ZEROS
        if zeros not in self._where:
            raise ModelError(f"{self._at(data)}: no tensor {zeros} in {self.folder}")
        self._check_scales(zeros, ("I32",), (num_groups, rows // _EACH))

    def _decode(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        rows, columns = index
        whole = slice(rows.start, rows.stop), slice(columns.start, columns.stop)
        groups = self._nth_group(np.arange(columns.start, columns.stop))
        scales = self._scales_of(name, whole[0], int(groups[0]), int(groups[-1]))
        values = self._differences(name, whole).astype(np.float32)
        values *= scales[groups - groups[0]]
        return np.ascontiguousarray(values.T[:: rows.step, :: columns.step])

    def read_codes(self, name: str, index: tuple[slice, ...], dtype: np.dtype) -> np.ndarray:
        kind = ml_dtypes.float8_e4m3fn if dtype == np.uint8 else dtype
        table = np.arange(-_LARGEST, _LARGEST + 1).astype(kind).view(dtype)
        return table[self._differences(name, index).T + np.int8(_LARGEST)]

    def read_scales(self, name: str, index: tuple[slice, ...], group: int) -> np.ndarray:
        rows, columns = index
        groups = self._nth_group(np.arange(columns.start, columns.stop, group))
        scales = self._scales_of(name, rows, int(groups[0]), int(groups[-1]))
        return np.ascontiguousarray(scales[groups - groups[0]].T)

    def _differences(self, name: str, index: tuple[slice, ...]) -> Int8[np.ndarray, "in out"]:
        """The integers of a slice [out, in] less their zero points."""
        rows, columns = index
        outputs, inputs = _whole_words(rows), _whole_words(columns)
        found = self._integers(name, inputs, outputs)
        groups = self._nth_group(np.arange(inputs.start, inputs.stop))
        words = slice(outputs.start // _EACH, outputs.stop // _EACH)
        part = slice(int(groups[0]), int(groups[-1]) + 1), words
        zeros = self._zeros(self.read(self._part(name, self._ZEROS), part).astype(np.int32))
        found = found - zeros[groups - groups[0]]
        first, top = columns.start - inputs.start, rows.start - outputs.start
        return found[
            first : first + columns.stop - columns.start, top : top + rows.stop - rows.start
        ]

    def _nth_group(self, columns: np.ndarray) -> np.ndarray:
        return columns // self._group if self._group else 0 * columns

    def _scales_of(
        self, name: str, rows: slice, first: int, last: int
    ) -> Float32[np.ndarray, "groups out"]:
        part = slice(first, last + 1), slice(rows.start, rows.stop)
        scales = self.read(self._part(name, self._SCALES), part).astype(np.float32)
        self._check_largest(self._part(name, self._SCALES), scales, _LARGEST)
        return scales


class Awq(_Columns):
    """A word holds eight outputs of one input: the even ones first, the lowest bits first.

    Source: casper-hansen/AutoAWQ: awq/utils/packing_utils.py.
    """

    _PLACES: Final = np.array([0, 4, 1, 5, 2, 6, 3, 7])  # where in a word the nth output is

    def _shown(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        return stored[1] * _EACH, stored[0]

    def _integers(self, name: str, inputs: slice, outputs: slice) -> Int8[np.ndarray, "in out"]:
        words = slice(outputs.start // _EACH, outputs.stop // _EACH)
        return self._zeros(self.read(self._part(name, self._DATA), (inputs, words)))

    def _zeros(self, words: Int32[np.ndarray, "groups words"]) -> Int8[np.ndarray, "groups out"]:
        return _nibbles(words)[..., self._PLACES].reshape(len(words), -1)


class Gptq(_Columns):
    """A word holds eight inputs of one output, the lowest bits first; of zero points, outputs.

    Zero points are stored less one. `g_idx` names the group of each input.
    Source: AutoGPTQ/AutoGPTQ: auto_gptq/nn_modules/qlinear/qlinear_cuda_old.py.
    """

    _INDEX: ClassVar[str] = "g_idx"
    _BESIDE = (_Columns._ZEROS, _INDEX)
    _LESS: ClassVar[int] = 1

    def _shown(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        return stored[1], stored[0] * _EACH

    def _integers(self, name: str, inputs: slice, outputs: slice) -> Int8[np.ndarray, "in out"]:
        self._check_order(name)
        part = slice(inputs.start // _EACH, inputs.stop // _EACH), outputs
        words = self.read(self._part(name, self._DATA), part)
        return _nibbles(words).transpose(0, 2, 1).reshape(-1, words.shape[1])

    def _check_order(self, name: str) -> None:
        """Raises ModelError unless the inputs of a group follow each other.

        Called only when a tensor is read: for every expert it would touch a page of the files.
        """
        said, columns = self._part(name, self._INDEX), self.shape(name)[1]
        if said not in self._where:
            return
        if (
            self.shape(said) != (columns,)
            or (self.read(said, (slice(0, columns),)) != self._nth_group(np.arange(columns))).any()
        ):
            accepted = "groups of inputs that follow each other (desc_act false)"
            raise ModelError(f"{super()._at(said)}: names others; accepted: {accepted}")

    def _zeros(self, words: Int32[np.ndarray, "groups words"]) -> Int8[np.ndarray, "groups out"]:
        return _nibbles(words).reshape(len(words), -1) + np.int8(self._LESS)


class GptqV2(Gptq):
    """The same with zero points as they are.

    Source: ModelCloud/GPTQModel: gptqmodel/utils/model.py, convert_gptq_v1_to_v2_format.
    """

    _LESS = 0


def _whole_words(part: slice) -> slice:
    """The entries of all words that hold some of these."""
    return slice(part.start // _EACH * _EACH, -(-part.stop // _EACH) * _EACH)


def _nibbles(words: Int32[np.ndarray, "rows columns"]) -> Int8[np.ndarray, "rows columns 8"]:
    """Four bits each, the lowest first."""
    pairs = np.ascontiguousarray(words, "<i4").view(np.uint8)
    both = np.stack([pairs & np.uint8(15), pairs >> np.uint8(4)], axis=-1)
    return both.reshape(*words.shape, _EACH).view(np.int8)
