"""Safetensors files of one folder: find every tensor, read slices, refuse what is broken."""

import json
import math
from pathlib import Path
from typing import Any, Final

import ml_dtypes  # noqa: F401  teaches numpy the name bfloat16
import numpy as np
from safetensors import SafetensorError, safe_open

from model.errors import ModelError

_INDEX: Final = "model.safetensors.index.json"
_SINGLE: Final = "model.safetensors"
_DTYPES: Final = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
# All that numpy has: those of scales and packed values too, and of tensors only a digest reads.
_NUMPY: Final = {"F64": "float64", "BOOL": "bool", **_DTYPES} | {
    f"{kind[0].upper()}{bits}": f"{kind}{bits}"
    for kind in ("int", "uint")
    for bits in (8, 16, 32, 64)
}
# All bits of the exponent, which only infinities and NaNs have set.
_EXPONENTS: Final[dict[str, tuple[Any, int]]] = {
    "float32": (np.uint32, 0x7F800000),
    "bfloat16": (np.uint16, 0x7F80),
    "float16": (np.uint16, 0x7C00),
}
_TILE: Final = 1 << 17  # numbers that fit in the cache


class Checkpoint:
    """The tensors of a folder by name; nothing is read before it is asked for."""

    def __init__(self, folder: Path, files: tuple[str, ...] = ()) -> None:
        """Open the files, those that an index names unless they are given.

        Raises ModelError naming a file that is missing, truncated or foreign.
        """
        self.folder = folder
        self._files: dict[str, Any] = {}
        self._where: dict[str, str] = {}
        self._offsets: dict[str, dict[str, int]] = {}
        self._maps: dict[str, np.ndarray] = {}
        listed = files or tuple(self._listed())
        for file in listed:
            self._files[file] = self._open(file)
            for name in self._files[file].keys():  # noqa: SIM118  a handle, not a dict
                if name in self._where:
                    raise ModelError(
                        f"{folder / file}: tensor {name} is in {self._where[name]} too"
                    )
                self._where[name] = file
        if not files and _SINGLE not in listed and (folder / _SINGLE).exists():
            # One of them is left from another model: transformers reads this one, vLLM the others.
            raise ModelError(
                f"{folder}: {_SINGLE} is there, and {_INDEX}, which names other files; expected one"
            )

    def _listed(self) -> list[str]:
        index = self.folder / _INDEX
        if not index.exists():
            if not (self.folder / _SINGLE).exists():
                raise ModelError(f"{self.folder}: no {_SINGLE} and no {_INDEX}; expected one")
            return [_SINGLE]
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            files = sorted(set(weight_map.values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ModelError(f"{index}: not an index with a weight_map: {error!r}") from error
        names = [f for f in files if isinstance(f, str) and Path(f).name == f and f.isprintable()]
        if not names or names != files:
            raise ModelError(f"{index}: weight_map must name files of its own folder, got {files}")
        return files

    def _open(self, file: str) -> Any:
        path = self.folder / file
        named = f", but {_INDEX} names it" if (self.folder / _INDEX).exists() else ""
        try:
            path.open("rb").close()  # safetensors calls any file missing that it cannot open
            return safe_open(path, framework="np")
        except FileNotFoundError as error:
            raise ModelError(f"{path}: no such file{named}") from error
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path}: not a whole safetensors file: {error}") from error

    @property
    def names(self) -> list[str]:
        """Every tensor of every file, sorted."""
        return sorted(self._where)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor. Raises ModelError if it is in no file."""
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """Name of a tensor's dtype as the file has it (BF16)."""
        return str(self._slice(name).get_dtype())

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Raises ModelError unless the tensor is there with this shape and a dtype we read."""
        if self.shape(name) != shape:
            got = list(self.shape(name))
            raise ModelError(f"{self._at(name)}: shape {got}, expected {list(shape)}")
        if self.dtype(name) not in _DTYPES:
            raise self._foreign(name)

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """A non-empty slice of a tensor, in the file's dtype; a view, as of read_bytes.

        Raises ModelError when the file cannot be read, numpy has no such dtype, or a number in it
        is not finite: nothing would show that later, since pages hold finite keys and values only.
        """
        dtype = _NUMPY.get(self.dtype(name))
        if dtype is None:
            raise self._foreign(name)
        values = self._mapped(name, np.dtype(dtype))[index]
        if not is_finite(values):
            raise ModelError(f"{self._at(name)}: has a number that is not finite")
        return values

    def read_bytes(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """A slice of a tensor of one-byte items as u8, also of dtypes that numpy lacks.

        A view of the mapped file: what is not touched is not read. Raises ModelError when the file
        cannot be read.
        """
        return self._mapped(name, np.dtype(np.uint8))[index]

    def _mapped(self, name: str, dtype: np.dtype) -> np.ndarray:
        shape, file = self.shape(name), self._where[name]
        try:
            if file not in self._maps:
                self._maps[file] = np.asarray(np.memmap(self.folder / file, np.uint8, "r"))
            first = self._offset(name)
            held = self._maps[file][first : first + math.prod(shape) * dtype.itemsize]
            return held.view(dtype).reshape(shape)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ModelError(f"{self._at(name)}: not readable: {error}") from error

    def _offset(self, name: str) -> int:
        """Where in its file a tensor begins; safetensors has checked it, but does not expose it."""
        file = self._where[name]
        if file not in self._offsets:
            with (self.folder / file).open("rb") as opened:
                size = int.from_bytes(opened.read(8), "little")
                header = json.loads(opened.read(size))
            header.pop("__metadata__", None)
            self._offsets[file] = {
                tensor: 8 + size + entry["data_offsets"][0] for tensor, entry in header.items()
            }
        return self._offsets[file][name]

    def _foreign(self, name: str) -> ModelError:
        accepted = ", ".join(_DTYPES)
        return ModelError(f"{self._at(name)}: dtype {self.dtype(name)}; accepted: {accepted}")

    def _slice(self, name: str) -> Any:
        if name not in self._where:
            files = ", ".join(sorted(self._files))
            raise ModelError(f"{self.folder}: tensor {name} is missing from {files}")
        return self._files[self._where[name]].get_slice(name)

    def _at(self, name: str) -> str:
        return f"{self.folder / self._where[name]}: tensor {name}"


def is_finite(values: np.ndarray) -> bool:
    """Tests exponent bits, some numbers at a time: several times faster than numpy's isfinite."""
    if values.dtype.name not in _EXPONENTS:
        return True
    kind, exponent = _EXPONENTS[values.dtype.name]
    bits = np.ascontiguousarray(values).reshape(-1).view(kind)
    parts = (bits[at : at + _TILE] for at in range(0, len(bits), _TILE))
    return not any(bool(((part & exponent) == exponent).any()) for part in parts)
