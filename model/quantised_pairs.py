"""What all quantised checkpoints share: pairs of data and scales, shown as one tensor each."""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar, Final

import ml_dtypes
import numpy as np

from model.checkpoint import Checkpoint
from model.errors import ModelError

_LARGEST: Final = float(ml_dtypes.finfo(ml_dtypes.bfloat16).max)


class Quantised(Checkpoint, ABC):
    """Shows one tensor for each pair of data and scales; all others pass through.

    Shapes and dtypes of the pairs are checked here, values when they are read.
    """

    _NAME: ClassVar[str] = ""  # what stands in a shown name in place of the ends below
    _DATA: ClassVar[str]
    _SCALES: ClassVar[str]
    _STORED: ClassVar[str]
    _SHOWN: ClassVar[str]
    _BESIDE: ClassVar[tuple[str, ...]] = ()  # suffixes of further tensors, which are not shown

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        # Empty while pairs are being found: until then, names are those of the files.
        self._quantised: frozenset[str] = frozenset()
        names = self.names
        data = {name.removesuffix(self._DATA) for name in names if self._is_data(name)}
        scales = {name.removesuffix(self._SCALES) for name in names if self._is_scales(name)}
        for stem in sorted(data | scales):
            self._check_pair(stem)
        self._quantised = frozenset(stem + self._NAME for stem in data)

    def _part(self, name: str, end: str) -> str:
        """The tensor of a pair, by the name under which the whole is shown."""
        return name.removesuffix(self._NAME) + end

    def _check_pair(self, stem: str) -> None:
        """Raises ModelError unless both tensors are there and fit each other."""
        name, data, scales = stem + self._NAME, stem + self._DATA, stem + self._SCALES
        for one, other in ((data, scales), (scales, data)):
            if other not in self._where:
                raise ModelError(f"{self._at(one)}: no tensor {other} in {self.folder}")
        if self._DATA and name in self._where:
            raise ModelError(
                f"{self._at(name)}: is there beside {data} and {scales}; accepted: only one form"
            )
        if self.dtype(data) != self._STORED:
            got = self.dtype(data)
            raise ModelError(f"{self._at(data)}: dtype {got}; accepted: {self._STORED}")
        self._check_fit(data, scales)

    @abstractmethod
    def _is_data(self, name: str) -> bool:
        """Whether a tensor of the files needs scales."""

    def _is_scales(self, name: str) -> bool:
        """Whether a tensor of the files belongs to data."""
        return name.endswith(self._SCALES)

    @abstractmethod
    def _check_fit(self, data: str, scales: str) -> None:
        """Raises ModelError unless shapes and the dtype of the scales are as they should be."""

    @abstractmethod
    def _shown(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the tensor that data of a stored shape stand for."""

    @abstractmethod
    def _decode(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """A slice of a quantised tensor; every axis has a start, a stop and a step."""

    @abstractmethod
    def read_codes(self, name: str, index: tuple[slice, ...], dtype: np.dtype) -> np.ndarray:
        """A slice of a quantised tensor, without steps, as codes before they are scaled.

        dtype: of codes that represent all values of the tensor, see codes_of. Raises ModelError
        where it cannot be read, or has a NaN.
        """

    @abstractmethod
    def read_scales(self, name: str, index: tuple[slice, ...], group: int) -> np.ndarray:
        """f32: the scales of such a slice's codes, one for every `group` entries along axis 1.

        index: begins at a group along that axis, every axis has a start and a stop. group: divides
        the number of entries that share a scale.
        """

    def is_quantised(self, name: str) -> bool:
        """Whether a tensor has codes and scales."""
        return name in self._quantised

    def _check_scales(self, scales: str, dtypes: tuple[str, ...], shape: tuple[int, ...]) -> None:
        if self.dtype(scales) not in dtypes:
            got, accepted = self.dtype(scales), ", ".join(dtypes)
            raise ModelError(f"{self._at(scales)}: dtype {got}; accepted: {accepted}")
        if self.shape(scales) != shape:
            got_shape = list(self.shape(scales))
            raise ModelError(f"{self._at(scales)}: shape {got_shape}, expected {list(shape)}")

    def _check_largest(self, scales: str, values: np.ndarray, code: int) -> None:
        """Raises ModelError unless each of these scales times the largest code is finite.

        In bfloat16, which holds hardly less than float32.
        """
        largest, most = float(np.abs(values).max()), _LARGEST / code
        if largest > most:
            raise ModelError(
                f"{super()._at(scales)}: a scale of {largest:g}; accepted: up to {most:g}, whose "
                "products are finite in bfloat16"
            )

    @property
    def names(self) -> list[str]:
        """Every tensor, sorted; quantised ones as the whole, not as its parts."""
        ends = (self._DATA, self._SCALES, *self._BESIDE)
        parts = {self._part(name, end) for name in self._quantised for end in ends}
        return sorted((set(super().names) - parts) | self._quantised)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor. Raises ModelError if it is in no file."""
        if name in self._quantised:
            return self._shown(super().shape(self._part(name, self._DATA)))
        return super().shape(name)

    def dtype(self, name: str) -> str:
        """Name of a tensor's dtype as `read` gives it."""
        return self._SHOWN if name in self._quantised else super().dtype(name)

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """A non-empty slice of a tensor. Raises ModelError when it cannot be read."""
        if name not in self._quantised:
            return super().read(name, index)
        shape = self.shape(name)
        index = (*index, *(slice(None),) * (len(shape) - len(index)))
        bounds = tuple(slice(*s.indices(size)) for s, size in zip(index, shape, strict=True))
        for asked, got in zip(index, bounds, strict=True):
            assert 0 <= got.start < got.stop, (name, index)
            assert got.step > 0, (name, index)
            # numpy would cut off what is beyond the end, and return another shape than asked for.
            assert asked.start in (None, got.start), (name, index)
            assert asked.stop in (None, got.stop), (name, index)
        return self._decode(name, bounds)

    def _at(self, name: str) -> str:
        if name in self._quantised:
            file = self._where[self._part(name, self._DATA)]
            return f"{self.folder / file}: tensor {name}"
        return super()._at(name)


def columns_of(folder: Path, block: tuple[int, int], each: int) -> int:
    """The columns of one row that share a scale; 0: all. each: as many lie in one stored entry."""
    rows, columns = block
    if rows != 1 or columns % each:
        accepted = f"a multiple of {each} columns of one row"
        raise ModelError(f"{folder}: quantised in blocks of {list(block)}, accepted: {accepted}")
    return columns


def nibble_pairs(values: np.ndarray) -> np.ndarray:
    """For every byte, the values of its lower and its upper four bits, as one number; flat.

    values: [*tables, 16], by those four bits. There are 256 pairs of each table.
    """
    byte = np.arange(256)
    pairs = np.stack([values[..., byte & 15], values[..., byte >> 4]], axis=-1)
    return pairs.view(f"u{2 * values.dtype.itemsize}").reshape(-1)
