"""The fields of a checkpoint's JSON files, taken by name and type or refused in one line."""

import json
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from model.errors import ModelError

REQUIRED: Final = object()
MOST_INTEGER: Final = (1 << 31) - 1  # the largest integer: programs count in int32


class Fields:
    """One JSON object. A field that cannot be accepted raises ModelError naming file and field."""

    def __init__(self, file: str, values: dict[str, Any]) -> None:
        self.file = file
        self.values = values

    @staticmethod
    def read(file: Path, what: str = "a checkpoint's config") -> "Fields":
        """what: that the file is, for the error where there is none."""
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            # Folders of Hugging Face's cache have links to files outside, which may be left behind.
            found = f"a link to nothing, {file.readlink()}" if file.is_symlink() else "no such file"
            raise ModelError(f"{file}: {found}; expected {what}") from error
        except (OSError, ValueError, RecursionError) as error:
            raise ModelError(f"{file}: not readable as JSON: {error}") from error
        if not isinstance(values, dict):
            raise ModelError(f"{file}: expected a JSON object, got {type(values).__name__}")
        return Fields(str(file), values)

    def fail(self, name: str, got: object, accepted: str) -> ModelError:
        return ModelError(f"{self.file}: {name} is {got!r}; accepted: {accepted}")

    def sub(self, name: str) -> "Fields | None":
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.fail(name, value, "an object or null")
        return Fields(f"{self.file}: {name}", value)

    def raw(self, name: str, default: Any) -> Any:
        value = self.values.get(name)
        if value is None:
            if default is REQUIRED:
                raise ModelError(f"{self.file}: {name} is missing")
            return default
        return value

    def integer(
        self, name: str, default: Any = REQUIRED, low: int = 1, high: int = MOST_INTEGER
    ) -> Any:
        value = self.raw(name, default)
        if value is default:
            return value
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise self.fail(name, value, f"an integer of at least {low}")
        if value > MOST_INTEGER:  # it may have thousands of digits
            raise ModelError(f"{self.file}: {name} is larger than {MOST_INTEGER}")
        if value > high:
            raise self.fail(name, value, f"at most {high}")
        return value

    def number(self, name: str, default: Any = REQUIRED, low: float = 0.0) -> Any:
        value = self.raw(name, default)
        if value is default:
            return value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.fail(name, value, "a number")
        if not low <= value <= sys.float_info.max:  # math.isfinite raises for integers above it
            raise self.fail(name, value, f"a finite number of at least {low}")
        return float(value)

    def theta(self) -> float | None:
        """rope_theta, or None. It is a base of powers, so zero is refused."""
        value: float | None = self.number("rope_theta", None)
        if value == 0.0:
            raise self.fail("rope_theta", value, "a finite number above 0")
        return value

    def flag(self, name: str, default: Any = REQUIRED) -> Any:
        value = self.raw(name, default)
        if not isinstance(value, bool):
            raise self.fail(name, value, "true or false")
        return value

    def said_once(self, name: str, other: str) -> Any:
        """The value of a field with two names, or None. Raises ModelError where they differ."""
        value, same = self.raw(name, None), self.raw(other, None)
        if value is not None and same is not None and value != same:
            raise self.fail(name, value, f"{same!r}, as in {other}, or only one of the two")
        return same if value is None else value

    def only(self, values: Mapping[str, Any]) -> None:
        """Raises ModelError unless each of these fields has its value, or is null or missing."""
        for name, only in values.items():
            value = self.raw(name, only)
            if value != only:
                raise self.fail(name, value, json.dumps(only))

    def ids(self, name: str) -> tuple[int, ...]:
        value = self.raw(name, [])
        listed = value if isinstance(value, list) else [value]
        for x in listed:
            if not isinstance(x, int) or isinstance(x, bool) or not 0 <= x <= MOST_INTEGER:
                accepted = f"a token id, or a list of them; ids are from 0 to {MOST_INTEGER}"
                raise self.fail(name, value, accepted)
        return tuple(listed)

    def one_of(self, name: str, value: object, accepted: tuple[str, ...]) -> str:
        if not isinstance(value, str) or value not in accepted:
            raise self.fail(name, value, ", ".join(accepted))
        return value


def is_endless(file: Path) -> bool:
    """Whether it is a pipe, socket or device: its reader might wait, or read, without end."""
    try:
        mode = file.stat().st_mode
    except OSError:
        return False  # whoever reads it says why it cannot be read
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))
