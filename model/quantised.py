"""Checkpoints of quantised tensors, read as if they were not, or as e4m3 codes and scales."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import ClassVar, Final

import ml_dtypes
import numpy as np
from jaxtyping import Float32, UInt8, UInt16, UInt32, UInt64

from model.checkpoint import Checkpoint
from model.config_quantised import MXFP4_GROUP as _GROUP
from model.errors import ModelError

_GROUP_BYTES: Final = 16
# 6 · 2^(252 - 127) is the largest finite product in bfloat16, and 255 means NaN.
_SCALE_MAX: Final = 252
_WORD: Final = 8  # values of four bits in an i32
_MAGNITUDES: Final = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_FOUR_BITS: Final = np.concatenate([_MAGNITUDES, -_MAGNITUDES])  # by what they say, e2m1
_TILE: Final = 64


def open_checkpoint(
    folder: Path, quantization: str, block: tuple[int, int] = (128, 128)
) -> Checkpoint:
    """The tensors of a folder, those that are quantised under the name and shape they stand for.

    quantization: "" for none, "mxfp4" as GPT-OSS is published, "fp8" as DeepSeek-V3 is, "int4" as
    Kimi-K2-Thinking is. block: rows and columns of a weight that share a scale; mxfp4 has its own,
    and of int4 it is a multiple of 8 columns of one row.
    Raises ModelError as Checkpoint does, and for a tensor without its scales or scales without
    their tensor, a dtype or a shape that does not fit.
    """
    if min(block) < 1:
        raise ModelError(f"{folder}: quantised in blocks of {list(block)}, accepted: 1 and more")
    if quantization == "":
        return Checkpoint(folder)
    if quantization == "mxfp4":
        return _Mxfp4(folder)
    if quantization == "fp8":
        return _Fp8(folder, block)
    if quantization == "int4":
        return _Int4(folder, block)
    accepted = "'', 'mxfp4', 'fp8', 'int4'"
    raise ModelError(f"{folder}: quantization {quantization!r}, accepted: {accepted}")


class Quantised(Checkpoint, ABC):
    """Shows one tensor for each pair of data and scales; all others pass through.

    Shapes and dtypes of the pairs are checked here, values when they are read.
    """

    _DATA: ClassVar[str]
    _SCALES: ClassVar[str]
    _STORED: ClassVar[str]
    _SHOWN: ClassVar[str]
    _BESIDE: ClassVar[tuple[str, ...]] = ()  # ends of names of what is there too, and not shown

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        # Empty while the pairs are looked for: until then, every name is one of the files'.
        self._quantised: frozenset[str] = frozenset()
        names = self.names
        data = {name.removesuffix(self._DATA) for name in names if self._is_data(name)}
        scales = {name.removesuffix(self._SCALES) for name in names if name.endswith(self._SCALES)}
        for name in sorted(data | scales):
            self._check_pair(name)
        self._quantised = frozenset(data)

    def _check_pair(self, name: str) -> None:
        """Raises ModelError unless both tensors are there and fit each other."""
        data, scales = name + self._DATA, name + self._SCALES
        for one, other in ((data, scales), (scales, data)):
            if other not in self._where:
                raise ModelError(f"{self._at(one)}: no tensor {other} in {self.folder}")
        if self._DATA and name in self._where:
            raise ModelError(
                f"{self._at(name)}: is there as {data} and {scales} too; accepted: one"
            )
        if self.dtype(data) != self._STORED:
            got = self.dtype(data)
            raise ModelError(f"{self._at(data)}: dtype {got}; accepted: {self._STORED}")
        self._check_fit(data, scales)

    @abstractmethod
    def _is_data(self, name: str) -> bool:
        """Whether a tensor of the files needs scales."""

    @abstractmethod
    def _check_fit(self, data: str, scales: str) -> None:
        """Raises ModelError unless shapes and the dtype of the scales are as they should be."""

    @abstractmethod
    def _shown(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the tensor that data of a shape stand for."""

    @abstractmethod
    def _decode(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """A slice of a quantised tensor; every axis has a start, a stop and a step."""

    @abstractmethod
    def read_codes(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """A slice of a quantised tensor, without steps, as e4m3 codes before they are scaled.

        Raises ModelError where it cannot be read, or has one that is no number.
        """

    @abstractmethod
    def read_scales(self, name: str, index: tuple[slice, ...], group: int) -> np.ndarray:
        """f32: what such a slice's codes are scaled by, of every `group` entries along axis 1 one.

        index: begins at a group along that axis, every axis has a start and a stop. group: divides
        the entries that share a scale.
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

    @property
    def names(self) -> list[str]:
        """Every tensor, sorted; of quantised ones not the parts but the whole."""
        ends = (self._DATA, self._SCALES, *self._BESIDE)
        parts = {name + end for name in self._quantised for end in ends}
        return sorted((set(super().names) - parts) | self._quantised)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor. Raises ModelError if it is in no file."""
        if name in self._quantised:
            return self._shown(super().shape(name + self._DATA))
        return super().shape(name)

    def dtype(self, name: str) -> str:
        """Name of a tensor's dtype as `read` gives it."""
        return self._SHOWN if name in self._quantised else super().dtype(name)

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """A slice, not an empty one, of a tensor. Raises ModelError when it cannot be read."""
        if name not in self._quantised:
            return super().read(name, index)
        shape = self.shape(name)
        index = (*index, *(slice(None),) * (len(shape) - len(index)))
        bounds = tuple(slice(*s.indices(size)) for s, size in zip(index, shape, strict=True))
        for asked, got in zip(index, bounds, strict=True):
            assert 0 <= got.start < got.stop, (name, index)
            assert got.step > 0, (name, index)
            # numpy would cut what is beyond the end, and give another shape than asked for.
            assert asked.start in (None, got.start), (name, index)
            assert asked.stop in (None, got.stop), (name, index)
        return self._decode(name, bounds)

    def _at(self, name: str) -> str:
        if name in self._quantised:
            return f"{self.folder / self._where[name + self._DATA]}: tensor {name}"
        return super()._at(name)


class _Mxfp4(Quantised):
    """u8[experts, rows, cols / 32, 16] and a scale per 32 values; shown as [experts, cols, rows].

    A byte holds two values, the lower four bits first, each a sign, two bits of exponent and one
    of mantissa; a scale s stands for 2^(s - 127). All products are exact in bfloat16.
    Source: OCP Microscaling Formats (MX) Specification 1.0; for the order of axes and halves,
    huggingface/transformers: src/transformers/integrations/mxfp4.py.
    """

    _DATA = "_blocks"
    _SCALES = "_scales"
    _STORED = "U8"
    _SHOWN = "BF16"

    def _is_data(self, name: str) -> bool:
        return name.endswith(self._DATA)

    def _check_fit(self, data: str, scales: str) -> None:
        shape = self.shape(data)
        if len(shape) != 4 or shape[3] != _GROUP_BYTES:
            raise ModelError(
                f"{self._at(data)}: shape {list(shape)}, expected [experts, rows, cols / {_GROUP}, "
                f"{_GROUP_BYTES}]"
            )
        self._check_scales(scales, ("U8",), shape[:3])

    def _shown(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        experts, rows, groups, _ = stored
        return experts, groups * _GROUP, rows

    def _decode(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        experts, columns, rows = index
        first = columns.start // _GROUP
        part = experts, rows, slice(first, -(-columns.stop // _GROUP))
        blocks = self.read_bytes(name + self._DATA, part)
        scales = self.read_bytes(name + self._SCALES, part)
        within = slice(columns.start - first * _GROUP, columns.stop - first * _GROUP, columns.step)
        self._check_largest(name, scales)
        num_experts, num_rows = blocks.shape[:2]
        num_columns = len(range(columns.start, columns.stop, columns.step))
        out = np.empty((num_experts, num_columns, num_rows), np.uint16)
        for expert in range(num_experts):
            # Some rows at a time stay in the cache while they are turned.
            for at in range(0, num_rows, _TILE):
                tile = slice(at, at + _TILE)
                values = _unpacked(blocks[expert, tile], scales[expert, tile])
                out[expert, :, tile] = values[:, within].T
        return out.view(ml_dtypes.bfloat16)

    def read_codes(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        experts, columns, rows = index
        first = columns.start // _GROUP
        part = experts, rows, slice(first, -(-columns.stop // _GROUP))
        blocks = self.read_bytes(name + self._DATA, part)
        within = slice(columns.start - first * _GROUP, columns.stop - first * _GROUP)
        num_experts, num_rows = blocks.shape[:2]
        out = np.empty((num_experts, columns.stop - columns.start, num_rows), np.uint8)
        for expert in range(num_experts):
            for at in range(0, num_rows, _TILE):
                tile = slice(at, at + _TILE)
                codes = _mxfp4_codes().take(blocks[expert, tile], mode="clip")
                out[expert, :, tile] = codes.view(np.uint8).reshape(len(codes), -1)[:, within].T
        return out

    def read_scales(self, name: str, index: tuple[slice, ...], group: int) -> np.ndarray:
        experts, columns, rows = index
        groups = np.arange(columns.start, columns.stop, group) // _GROUP
        part = experts, rows, slice(int(groups[0]), int(groups[-1]) + 1)
        scales = self.read_bytes(name + self._SCALES, part)
        self._check_largest(name, scales)
        exponents = scales[:, :, groups - groups[0]].transpose(0, 2, 1).astype(np.int32) - 127
        return np.ldexp(np.float32(1), exponents)

    def _check_largest(self, name: str, scales: UInt8[np.ndarray, "..."]) -> None:
        largest = int(scales.max())
        if largest > _SCALE_MAX:
            raise ModelError(
                f"{super()._at(name + self._SCALES)}: a scale of {largest}; accepted: 0 to "
                f"{_SCALE_MAX}, whose products are finite in bfloat16"
            )


class _Fp8(Quantised):
    """F8_E4M3 [out, in] times the scale of its block; shown as float32.

    Source: deepseek-ai/DeepSeek-V3: README_WEIGHTS.md, and inference/kernel.py for the product.
    """

    _DATA = ""
    _SCALES = "_scale_inv"
    _STORED = "F8_E4M3"
    _SHOWN = "F32"

    def __init__(self, folder: Path, block: tuple[int, int]) -> None:
        self._block = block
        super().__init__(folder)

    def _is_data(self, name: str) -> bool:
        return self.dtype(name) == self._STORED

    def _check_fit(self, data: str, scales: str) -> None:
        shape = self.shape(data)
        if len(shape) != 2:
            raise ModelError(f"{self._at(data)}: shape {list(shape)}, expected [out, in]")
        blocks = tuple(-(-size // by) for size, by in zip(shape, self._block, strict=True))
        self._check_scales(scales, ("F32", "BF16"), blocks)

    def _shown(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        return stored

    def _decode(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        rows, columns = (np.arange(s.start, s.stop, s.step) for s in index)
        scales, row_blocks = self._scales_of(name, rows, columns)
        stored = self.read_bytes(name, index)
        out = np.empty(stored.shape, np.float32)
        for at in range(0, len(rows), _TILE):
            tile = slice(at, at + _TILE)
            values = _e4m3().take(stored[tile], mode="clip")
            np.multiply(values, scales[row_blocks[tile]], out=out[tile])
        return out

    def _scales_of(
        self, name: str, rows: np.ndarray, columns: np.ndarray
    ) -> tuple[Float32[np.ndarray, "blocks columns"], np.ndarray]:
        """Of blocks of rows, at these columns, and in which block each row is."""
        row_blocks, column_blocks = rows // self._block[0], columns // self._block[1]
        blocks = tuple(slice(int(of[0]), int(of[-1]) + 1) for of in (row_blocks, column_blocks))
        scales = self.read(name + self._SCALES, blocks).astype(np.float32)
        return scales[:, column_blocks - column_blocks[0]], row_blocks - row_blocks[0]

    def read_codes(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        codes = self.read_bytes(name, index)
        if ((codes & 0x7F) == 0x7F).any():
            raise ModelError(f"{self._at(name)}: has a weight that is no number")
        return codes

    def read_scales(self, name: str, index: tuple[slice, ...], group: int) -> np.ndarray:
        rows, columns = index
        firsts = np.arange(columns.start, columns.stop, group)
        scales, row_blocks = self._scales_of(name, np.arange(rows.start, rows.stop), firsts)
        return scales[row_blocks]


class _Int4(Quantised):
    """i32[out, in / 8] and a scale for some values of a row; shown as float32 [out, in].

    A word holds eight values, the lowest four bits first, each from -8 to 7 with 8 added. The shape
    of the whole is there as well.
    Source: vllm-project/compressed-tensors: src/compressed_tensors/compressors/pack_quantized.
    """

    _DATA = "_packed"
    _SCALES = "_scale"
    _STORED = "I32"
    _SHOWN = "F32"
    _BESIDE = ("_shape",)
    # What would be beside them were weights not what is computed here.
    _FOREIGN: ClassVar[Mapping[str, str]] = {
        "_zero_point": "symmetric weights, which have none",
        "_g_idx": "groups of columns in their order, which need none",
    }

    def __init__(self, folder: Path, block: tuple[int, int]) -> None:
        rows, self._group = block
        if rows != 1 or self._group % _WORD:
            accepted = f"a multiple of {_WORD} columns of one row"
            raise ModelError(
                f"{folder}: quantised in blocks of {list(block)}, accepted: {accepted}"
            )
        super().__init__(folder)

    def _is_data(self, name: str) -> bool:
        return name.endswith(self._DATA)

    def _check_fit(self, data: str, scales: str) -> None:
        name, shape = data.removesuffix(self._DATA), self.shape(data)
        for end, accepted in self._FOREIGN.items():
            if name + end in self._where:
                raise ModelError(f"{self._at(name + end)}: is there; accepted: {accepted}")
        if len(shape) != 2 or shape[1] * _WORD % self._group:
            raise ModelError(
                f"{self._at(data)}: shape {list(shape)}, expected [out, in / {_WORD}] with whole "
                f"groups of {self._group} values"
            )
        self._check_scales(
            scales, ("BF16", "F16", "F32"), (shape[0], shape[1] * _WORD // self._group)
        )
        said = name + self._BESIDE[0]
        if said not in self._where:
            raise ModelError(f"{self._at(data)}: no tensor {said} in {self.folder}")
        if self.shape(said) != (2,) or self.dtype(said) not in ("I32", "I64"):
            got = f"{self.dtype(said)} {list(self.shape(said))}"
            raise ModelError(f"{self._at(said)}: {got}; accepted: I32 or I64 [2]")

    def _shown(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        return stored[0], stored[1] * _WORD

    def _decode(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        (rows, columns), group = index, self._group
        first, pairs = self._pairs(name, index)
        groups = slice(first // group, -(-columns.stop // group))
        scales = self.read(name + self._SCALES, (slice(rows.start, rows.stop), groups))
        scales = scales[:: rows.step].astype(np.float32)
        within = slice(columns.start - first, columns.stop - first, columns.step)
        num_columns = len(range(columns.start, columns.stop, columns.step))
        out = np.empty((len(pairs), num_columns), np.float32)
        for at in range(0, len(pairs), _TILE):
            tile = slice(at, at + _TILE)
            values = _int4_pairs().take(pairs[tile], mode="clip").view(np.float32)
            values = values.reshape(*scales[tile].shape, group)
            values *= scales[tile, :, None]
            out[tile] = values.reshape(len(values), -1)[:, within]
        return out

    def read_codes(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        first, pairs = self._pairs(name, index)
        codes = _int4_codes().take(pairs, mode="clip").view(np.uint8).reshape(len(pairs), -1)
        return codes[:, index[1].start - first : index[1].stop - first]

    def read_scales(self, name: str, index: tuple[slice, ...], group: int) -> np.ndarray:
        groups = np.arange(index[1].start, index[1].stop, group) // self._group
        part = index[0], slice(int(groups[0]), int(groups[-1]) + 1)
        scales = self.read(name + self._SCALES, part).astype(np.float32)
        return scales[:, groups - groups[0]]

    def _pairs(
        self, name: str, index: tuple[slice, ...]
    ) -> tuple[int, UInt8[np.ndarray, "rows pairs"]]:
        """Bytes of two values each, of whole groups, and the first of their columns.

        What is too much of the first group and the last is little, and the caller's to cut off.
        """
        self._check_said(name)
        group, (rows, columns) = self._group, index
        first, last = columns.start // group * group, -(-columns.stop // group) * group
        words = slice(first // _WORD, last // _WORD)
        stored = self.read(name + self._DATA, (slice(rows.start, rows.stop), words))[:: rows.step]
        return first, np.ascontiguousarray(stored, "<i4").view(np.uint8)

    def _check_said(self, name: str) -> None:
        """Raises ModelError unless the shape that is there is the tensor's.

        Not before the tensor is read: of every expert that would touch a page of the files.
        """
        said = name + self._BESIDE[0]
        shape, expected = self.read(said, (slice(0, 2),)).tolist(), list(self.shape(name))
        if shape != expected:
            raise ModelError(f"{super()._at(said)}: says {shape}, expected {expected}")


def _unpacked(
    blocks: UInt8[np.ndarray, "rows groups 16"], scales: UInt8[np.ndarray, "rows groups"]
) -> UInt16[np.ndarray, "rows cols"]:
    """The values of packed rows, as bits of bfloat16. Scales are at most _SCALE_MAX."""
    which = blocks | (scales.astype(np.uint16) << 8)[:, :, None]
    # clip: every index is within the table, and the other modes are twice as slow
    return _pairs().take(which, mode="clip").view(np.uint16).reshape(len(blocks), -1)


@cache
def _pairs() -> UInt32[np.ndarray, " pairs"]:
    """Of every scale and every byte under it, the bits of both bfloat16 values as one u32."""
    exponents = np.arange(_SCALE_MAX + 1)[:, None] - 127
    scaled = np.ldexp(_FOUR_BITS, exponents).astype(ml_dtypes.bfloat16)
    byte = np.arange(256)
    pairs = np.stack([scaled[:, byte & 15], scaled[:, byte >> 4]], axis=-1)
    return pairs.view(np.uint32).reshape(-1)


@cache
def _int4_pairs() -> UInt64[np.ndarray, "256"]:
    """Of every byte, both float32 values as one u64."""
    byte = np.arange(256)
    pairs = np.stack([byte & 15, byte >> 4], axis=-1) - 8
    return pairs.astype(np.float32).view(np.uint64).reshape(-1)


@cache
def _mxfp4_codes() -> UInt16[np.ndarray, "256"]:
    return _codes_of(_FOUR_BITS)


@cache
def _int4_codes() -> UInt16[np.ndarray, "256"]:
    return _codes_of(np.arange(-8, 8, dtype=np.float32))


def _codes_of(four_bits: Float32[np.ndarray, "16"]) -> UInt16[np.ndarray, "256"]:
    """Of every byte, both values as e4m3 codes, which can say each of them."""
    codes = four_bits.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    byte = np.arange(256)
    return np.stack([codes[byte & 15], codes[byte >> 4]], axis=-1).view(np.uint16).reshape(-1)


@cache
def _e4m3() -> Float32[np.ndarray, "256"]:
    """The value of every byte; a table is faster than a cast."""
    return np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
