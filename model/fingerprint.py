"""Fingerprints of what programs are made from: the same text in every process."""

import dataclasses
import enum
import functools
import hashlib
import types
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

# Packages whose sources or versions model/executables.py adds to its keys.
_KNOWN = "model", "prefill", "decode", "jax", "numpy", "ml_dtypes", "functools", "builtins", "math"


class NoFingerprint(TypeError):
    """Something has no fingerprint."""


def fingerprint(value: Any) -> str:
    """A text that is the same for values that make the same program, and for no others.

    Raises NoFingerprint for what has no such text.
    """
    try:
        return _tell(value)
    except RecursionError:
        raise NoFingerprint("a value contains itself") from None


def _tell(value: Any) -> str:
    match value:
        case enum.Enum():
            return f"{_name(type(value))}.{value.name}"
        case None | bool() | int() | float() | str() | bytes() | np.generic():
            return f"{type(value).__name__} {value!r}"
        case np.dtype():
            return f"dtype {value.name} {value.str}"
        case np.ndarray() if type(value) is np.ndarray and not _has_parts(value.dtype):
            digest = hashlib.sha256(value.tobytes()).hexdigest()
            return f"array {_tell(value.dtype)} {value.shape} {digest}"
        case type():
            return f"type {_name(value)}"
        case tuple() | list():
            return f"{_name(type(value))}[{', '.join(map(_tell, value))}]"
        case set() | frozenset():
            return f"set[{', '.join(sorted(map(_tell, value)))}]"
        case Mapping():
            told = (f"{_tell(key)}: {_tell(item)}" for key, item in value.items())
            return f"{_name(type(value))}{{{', '.join(told)}}}"
    return _tell_jax(value) or _tell_function(value) or _tell_fields(value)


def _tell_jax(value: Any) -> str:
    match value:
        case jax.ShapeDtypeStruct():
            if value.format is not None and value.format.layout is not None:
                raise NoFingerprint("a shape with a layout")
            parts = value.shape, value.dtype, value.weak_type, value.sharding
            return f"shape {_tell(parts)}"
        case NamedSharding():
            return f"sharding {_tell((value.mesh, value.spec, value.memory_kind))}"
        case SingleDeviceSharding():
            return f"sharding {_tell((sorted(value.device_set, key=_id), value.memory_kind))}"
        case PartitionSpec():
            return repr(value)
        case Mesh():
            axes = value.axis_names, value.axis_types, value.devices.shape
            return f"mesh {_tell((*axes, list(value.devices.flat)))}"
        case jax.Device():
            return f"device {value.id} {value.platform} {value.device_kind}"
    return ""


def _tell_function(value: Any) -> str:
    match value:
        case functools.partial():
            return f"partial {_tell((value.func, value.args, value.keywords))}"
        case types.BuiltinFunctionType() if isinstance(value.__self__, types.ModuleType | None):
            return f"builtin {_name(value)}"
        case types.FunctionType():
            # Its own code and module, whatever it wraps and is named after.
            code, module = value.__code__, value.__globals__["__name__"]
            if code.co_name == "<lambda>":
                raise NoFingerprint(f"a lambda of {module}, which may share its line with another")
            name = _known(f"{module}.{code.co_qualname}:{code.co_firstlineno}")
            try:
                cells = [cell.cell_contents for cell in value.__closure__ or ()]
            except ValueError:  # of a variable that is not bound yet
                raise NoFingerprint(f"{name} holds an empty cell") from None
            held = cells, value.__defaults__, value.__kwdefaults__
            return f"function {name} {_tell(held)}"
    return ""


def _tell_fields(value: Any) -> str:
    if not dataclasses.is_dataclass(value):
        name = f"{type(value).__module__}.{type(value).__qualname__}"
        raise NoFingerprint(f"{name} has no value that can be written as text")
    fields = (f"{f.name}={_tell(getattr(value, f.name))}" for f in dataclasses.fields(value))
    return f"{_name(type(value))}({', '.join(fields)})"


def _has_parts(dtype: np.dtype) -> bool:
    return dtype.hasobject or dtype.names is not None


def _name(of: Any) -> str:
    return _known(f"{of.__module__}.{of.__qualname__}")


def _known(name: str) -> str:
    """The name, if it is of a known package; raises NoFingerprint otherwise."""
    if name.partition(".")[0] not in _KNOWN:
        raise NoFingerprint(f"{name} is from a package whose source is not in fingerprints")
    return name


def _id(device: jax.Device) -> int:
    return device.id
