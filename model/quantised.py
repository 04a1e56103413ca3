"""Checkpoints of quantised tensors, read as if they were not quantised, or as codes and scales."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import ClassVar, Final

import ml_dtypes
import numpy as np
from jaxtyping import Float32, UInt8, UInt16, UInt32

from model.checkpoint import Checkpoint
from model.config_quantised import AWQ, FP8_BLOCKS, FP8_ROWS, GPTQ, GPTQ_V2, INT8, INT8_PACKED
from model.config_quantised import MXFP4_GROUP as _GROUP
from model.errors import ModelError
from model.quantised_columns import Awq, Gptq, GptqV2
from model.quantised_integers import Int4, Int8, Int8Packed
from model.quantised_pairs import Quantised, nibble_pairs

_GROUP_BYTES: Final = 16
# 6 · 2^(252 - 127) is the largest finite product in bfloat16, and 255 means NaN.
_SCALE_MAX: Final = 252
_MAGNITUDES: Final = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_FOUR_BITS: Final = np.concatenate([_MAGNITUDES, -_MAGNITUDES])  # the values of e2m1, by code
_LARGEST_E4M3: Final = 448
_TILE: Final = 64


def open_checkpoint(
    folder: Path, quantization: str, block: tuple[int, int] = (128, 128)
) -> Checkpoint:
    """The tensors of a folder, quantised ones under the name and shape that they stand for.

    quantization: "" for none, "mxfp4" as GPT-OSS is published, "fp8" as DeepSeek-V3 is, "int4" as
    Kimi-K2-Thinking is, "int8-packed", "int8", "fp8-blocks" and "fp8-rows" as compressed-tensors
    has weights of eight bits, "awq", "gptq" and "gptq_v2". block: rows and columns of a weight that
    share a scale; mxfp4 and fp8-rows have their own. For integers it is columns of one row: for
    four bits a multiple of 8; 0 means all columns, except for int4.
    Raises ModelError as Checkpoint does, and for a tensor without its scales or scales without
    their tensor, a dtype or a shape that does not fit.
    """
    of_rows = INT8, INT8_PACKED, FP8_ROWS, AWQ, GPTQ, GPTQ_V2
    by_rows = quantization in of_rows and block[1] == 0
    if min(block) < 1 and not by_rows:
        raise ModelError(f"{folder}: quantised in blocks of {list(block)}, accepted: 1 and more")
    if quantization == "":
        return Checkpoint(folder)
    if quantization == "mxfp4":
        return _Mxfp4(folder)
    kinds: dict[str, Callable[[Path, tuple[int, int]], Checkpoint]]
    kinds = {"fp8": _Fp8, "int4": Int4, INT8: Int8, INT8_PACKED: Int8Packed}
    kinds |= {FP8_BLOCKS: _Fp8Blocks, FP8_ROWS: _Fp8Rows}
    kinds |= {AWQ: Awq, GPTQ: Gptq, GPTQ_V2: GptqV2}
    if quantization not in kinds:
        accepted = ", ".join(map(repr, ("", "mxfp4", *kinds)))
        raise ModelError(f"{folder}: quantization {quantization!r}, accepted: {accepted}")
    return kinds[quantization](folder, block)


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
        part, within = _whole_groups(index)
        blocks = self.read_bytes(name + self._DATA, part)
        scales = self.read_bytes(name + self._SCALES, part)
        self._check_exponents(name, scales)
        return _turned(blocks, scales, _scaled_pairs(), within).view(ml_dtypes.bfloat16)

    def read_codes(self, name: str, index: tuple[slice, ...], dtype: np.dtype) -> np.ndarray:
        assert dtype == np.uint8, dtype
        part, within = _whole_groups(index)
        blocks = self.read_bytes(name + self._DATA, part)
        return _turned(blocks, None, _code_pairs(), within)

    def read_scales(self, name: str, index: tuple[slice, ...], group: int) -> np.ndarray:
        experts, columns, rows = index
        groups = np.arange(columns.start, columns.stop, group) // _GROUP
        part = experts, rows, slice(int(groups[0]), int(groups[-1]) + 1)
        scales = self.read_bytes(name + self._SCALES, part)
        self._check_exponents(name, scales)
        exponents = scales[:, :, groups - groups[0]].transpose(0, 2, 1).astype(np.int32) - 127
        return np.ldexp(np.float32(1), exponents)

    def _check_exponents(self, name: str, scales: UInt8[np.ndarray, "..."]) -> None:
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
    _SCALE_DTYPES: ClassVar[tuple[str, ...]] = ("F32", "BF16")

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
        self._check_scales(scales, self._SCALE_DTYPES, blocks)

    def _shown(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        return stored

    def _decode(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        rows, columns = (np.arange(s.start, s.stop, s.step) for s in index)
        scales, row_blocks = self._scales_of(name, rows, columns)
        stored = self.read_codes(name, index, np.dtype(np.uint8))
        out = np.empty(stored.shape, np.float32)
        for at in range(0, len(rows), _TILE):
            tile = slice(at, at + _TILE)
            values = _e4m3().take(stored[tile], mode="clip")
            np.multiply(values, scales[row_blocks[tile]], out=out[tile])
        return out

    def _scales_of(
        self, name: str, rows: np.ndarray, columns: np.ndarray
    ) -> tuple[Float32[np.ndarray, "blocks columns"], np.ndarray]:
        """The scales of blocks of rows, at these columns, and in which block each row is."""
        row_blocks, column_blocks = rows // self._block[0], columns // self._block[1]
        blocks = tuple(slice(int(of[0]), int(of[-1]) + 1) for of in (row_blocks, column_blocks))
        scales = self.read(name + self._SCALES, blocks).astype(np.float32)
        self._check_largest(name + self._SCALES, scales, _LARGEST_E4M3)
        return scales[:, column_blocks - column_blocks[0]], row_blocks - row_blocks[0]

    def read_codes(self, name: str, index: tuple[slice, ...], dtype: np.dtype) -> np.ndarray:
        assert dtype == np.uint8, dtype
        codes = self.read_bytes(name, index)
        if ((codes & 0x7F) == 0x7F).any():
            raise ModelError(f"{self._at(name)}: has a weight that is no number")
        return codes

    def read_scales(self, name: str, index: tuple[slice, ...], group: int) -> np.ndarray:
        rows, columns = index
        firsts = np.arange(columns.start, columns.stop, group)
        scales, row_blocks = self._scales_of(name, np.arange(rows.start, rows.stop), firsts)
        return scales[row_blocks]


class _Fp8Blocks(_Fp8):
    """The same under another name for the scales.

    Source: vllm-project/compressed-tensors: src/compressed_tensors/compressors/naive_quantized.
    """

    _SCALES = "_scale"
    _SCALE_DTYPES = ("F32", "BF16", "F16")
    _UNUSED = ".input_scale"  # of rows that would be rounded, which they are not here

    def _is_scales(self, name: str) -> bool:
        return super()._is_scales(name) and not name.endswith(self._UNUSED)

    @property
    def names(self) -> list[str]:
        """As Quantised has them, without scales that nothing here is multiplied by."""
        unused = {name.removesuffix(".weight") + self._UNUSED for name in self._quantised}
        return [name for name in super().names if name not in unused]


class _Fp8Rows(_Fp8Blocks):
    """F8_E4M3 [out, in] times the scale of its row, [out, 1], or the one of all, [1]."""

    def _check_fit(self, data: str, scales: str) -> None:
        shape, own = self.shape(data), self.shape(scales)
        if len(shape) != 2:
            raise ModelError(f"{self._at(data)}: shape {list(shape)}, expected [out, in]")
        one_for_all = own in ((), (1,), (1, 1))
        self._check_scales(scales, self._SCALE_DTYPES, own if one_for_all else (shape[0], 1))

    def _scales_of(
        self, name: str, rows: np.ndarray, columns: np.ndarray
    ) -> tuple[Float32[np.ndarray, "rows columns"], np.ndarray]:
        shape = self.shape(name + self._SCALES)
        part = slice(int(rows[0]), int(rows[-1]) + 1)
        index = (slice(0, 1),) * len(shape) if shape[:1] in ((), (1,)) else (part, slice(0, 1))
        scales = self.read(name + self._SCALES, index).astype(np.float32).reshape(-1, 1)
        self._check_largest(name + self._SCALES, scales, _LARGEST_E4M3)
        num_rows = part.stop - part.start
        return np.broadcast_to(scales, (num_rows, len(columns))), rows - rows[0]


def _whole_groups(index: tuple[slice, ...]) -> tuple[tuple[slice, ...], slice]:
    """What a slice of a tensor is stored in: [experts, rows, groups], and its columns in there."""
    experts, columns, rows = index
    first = columns.start // _GROUP
    within = slice(columns.start - first * _GROUP, columns.stop - first * _GROUP, columns.step)
    return (experts, rows, slice(first, -(-columns.stop // _GROUP))), within


def _turned(
    blocks: UInt8[np.ndarray, "experts rows groups 16"],
    scales: UInt8[np.ndarray, "experts rows groups"] | None,
    pairs: np.ndarray,
    within: slice,
) -> np.ndarray:
    """The bits of some columns' values: [experts, columns, rows].

    pairs: the table of both values of a byte, for each scale where there are scales.
    """
    num_experts, num_rows, num_groups, _ = blocks.shape
    num_stored, kind = num_groups * _GROUP, f"u{pairs.dtype.itemsize // 2}"
    num_columns = len(range(*within.indices(num_stored)))
    out = np.empty((num_experts, num_columns, num_rows), kind)
    for expert in range(num_experts):
        # Some rows at a time stay in the cache while they are transposed.
        for at in range(0, num_rows, _TILE):
            rows = slice(at, at + _TILE)
            which = blocks[expert, rows]
            if scales is not None:
                which = which | (scales[expert, rows].astype(np.uint16) << 8)[:, :, None]
            # clip: every index is within the table, and the other modes are twice as slow
            values = pairs.take(which, mode="clip").view(kind).reshape(-1, num_stored)
            out[expert, :, rows] = values[:, within].T
    return out


@cache
def _scaled_pairs() -> UInt32[np.ndarray, " pairs"]:
    """For every scale and every byte under it, the bits of both bfloat16 values as one u32."""
    exponents = np.arange(_SCALE_MAX + 1)[:, None] - 127
    return nibble_pairs(np.ldexp(_FOUR_BITS, exponents).astype(ml_dtypes.bfloat16))


@cache
def _code_pairs() -> UInt16[np.ndarray, "256"]:
    """For every byte, both values as e4m3 codes, which represent them exactly."""
    return nibble_pairs(_FOUR_BITS.astype(ml_dtypes.float8_e4m3fn))


@cache
def _e4m3() -> Float32[np.ndarray, "256"]:
    """The value of every byte; a table is faster than a cast."""
    return np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
