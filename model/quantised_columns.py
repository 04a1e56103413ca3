"""Checkpoints of four-bit integers that lie [in, out], with a zero point and a scale for a group.

As AWQ and GPTQ have them: a weight is an integer less its group's zero point, times its scale.
"""

from abc import abstractmethod
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import ClassVar, Final

import ml_dtypes
import numpy as np
from jaxtyping import Float32, Int8, Int32

from model.errors import ModelError
from model.quantised_pairs import Quantised, columns_of, nibble_pairs

_EACH: Final = 8  # values of a word
_AT_ONCE: Final = 128  # inputs, where all of them are one group
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
        self._group = columns_of(folder, block, _EACH)
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
        scales, first = self._scales_of(name, whole[0], *self._groups_of(columns))
        out = np.empty((rows.stop - rows.start, columns.stop - columns.start), np.float32)
        for part, group, differences in self._differences(name, whole):
            out[:, part] = (differences * scales[group - first]).T
        return np.ascontiguousarray(out[:: rows.step, :: columns.step])

    def read_codes(self, name: str, index: tuple[slice, ...], dtype: np.dtype) -> np.ndarray:
        kind = ml_dtypes.float8_e4m3fn if dtype == np.uint8 else dtype
        table = np.arange(-_LARGEST, _LARGEST + 1).astype(kind).view(dtype)
        rows, columns = index
        out = np.empty((rows.stop - rows.start, columns.stop - columns.start), dtype)
        for part, _, differences in self._differences(name, index):
            out[:, part] = table.take(differences + np.int8(_LARGEST), mode="clip").T
        return out

    def read_scales(self, name: str, index: tuple[slice, ...], group: int) -> np.ndarray:
        rows, columns = index
        groups = self._nth_group(np.arange(columns.start, columns.stop, group))
        scales, first = self._scales_of(name, rows, int(groups[0]), int(groups[-1]))
        return np.ascontiguousarray(scales[groups - first].T)

    def _differences(
        self, name: str, index: tuple[slice, ...]
    ) -> Iterator[tuple[slice, int, Int8[np.ndarray, "in out"]]]:
        """The integers of a slice [out, in] less their zero points, for a group at a time.

        Each with where its inputs are in the slice, and which group of the weight it is.
        """
        rows, columns = index
        self._check_order(name)
        outputs, (first, last) = _whole_words(rows), self._groups_of(columns)
        words = slice(first, last + 1), slice(outputs.start // _EACH, outputs.stop // _EACH)
        zeros = self._zeros(self.read(self._part(name, self._ZEROS), words))
        own = slice(rows.start - outputs.start, rows.stop - outputs.start)
        step, end = self._group or _AT_ONCE, self.shape(name)[1]
        for at in range(columns.start // step * step, columns.stop, step):
            group = int(self._nth_group(at))
            integers = self._integers(name, slice(at, min(at + step, end)), outputs)
            begin, stop = max(columns.start, at), min(columns.stop, at + step)
            differences = integers[begin - at : stop - at] - zeros[group - first]
            yield slice(begin - columns.start, stop - columns.start), group, differences[:, own]

    def _check_order(self, name: str) -> None:
        """Raises ModelError unless the inputs of a group follow each other."""

    def _groups_of(self, columns: slice) -> tuple[int, int]:
        """The first and the last group of these inputs."""
        return int(self._nth_group(columns.start)), int(self._nth_group(columns.stop - 1))

    def _nth_group[N: (int, np.ndarray)](self, column: N) -> N:
        return column // self._group if self._group else 0 * column

    def _scales_of(
        self, name: str, rows: slice, first: int, last: int
    ) -> tuple[Float32[np.ndarray, "groups out"], int]:
        """The scales of these groups, and the first of them."""
        part = slice(first, last + 1), slice(rows.start, rows.stop)
        scales = self.read(self._part(name, self._SCALES), part).astype(np.float32)
        self._check_largest(self._part(name, self._SCALES), scales, _LARGEST)
        return scales, first


class Awq(_Columns):
    """A word holds eight outputs of one input: the even ones first, the lowest bits first.

    Source: casper-hansen/AutoAWQ: awq/utils/packing_utils.py.
    """

    def _shown(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        return stored[1] * _EACH, stored[0]

    def _integers(self, name: str, inputs: slice, outputs: slice) -> Int8[np.ndarray, "in out"]:
        words = slice(outputs.start // _EACH, outputs.stop // _EACH)
        return self._zeros(self.read(self._part(name, self._DATA), (inputs, words)))

    def _zeros(self, words: Int32[np.ndarray, "groups words"]) -> Int8[np.ndarray, "groups out"]:
        halves = _nibbles(words).reshape(len(words), -1, 2, _EACH // 2)
        return halves.swapaxes(-1, -2).reshape(len(words), -1)


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
        part = slice(inputs.start // _EACH, inputs.stop // _EACH), outputs
        words = self.read(self._part(name, self._DATA), part)
        return _nibbles(words).transpose(0, 2, 1).reshape(-1, words.shape[1])

    def _check_order(self, name: str) -> None:
        # Only when a tensor is read: for every expert it would touch a page of the files.
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
    return _pairs().take(pairs, mode="clip").view(np.int8).reshape(*words.shape, _EACH)


@cache
def _pairs() -> np.ndarray:
    """For every byte, both of its values as one number."""
    return nibble_pairs(np.arange(16, dtype=np.int8))
