"""What a process writes on stderr: a line for each message, with its time and level."""

import logging
import os
import re
import warnings
from typing import Any, TextIO

from transfer import terminal
from transfer.errors import ConfigError

LEVEL_ENV = "KVFERRY_LOG_LEVEL"
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")

# Control characters of a terminal, and anything else that may end a line.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\N{LINE SEPARATOR}\N{PARAGRAPH SEPARATOR}]")
# How lines begin, perhaps after names of children, that tell of nothing wrong: at levels D and I of
# ours and of Google's libraries, and those of one that has no levels.
_CALM = re.compile(r"(\[[\w.-]+\] )*(\d\d:\d\d:\d\d (\[\w+\] )?[DI] |I\d{4} \d\d:|\[Gloo\] )|$")


def set_up(name: str) -> None:
    """Set up logging; `name` is in each line, if not "". Raises ConfigError for a bad level."""
    asked = os.environ.get(LEVEL_ENV) or "INFO"
    level = asked.upper()
    if level not in LEVELS:
        raise ConfigError(f"{LEVEL_ENV} is {asked!r}, expected one of {', '.join(LEVELS)}")
    handler = _Lines()
    form = f"%(asctime)s {f'[{name}] ' if name else ''}%(levelname).1s %(message)s"
    handler.setFormatter(_Formatter(form, datefmt="%H:%M:%S"))
    logging.basicConfig(level=level, handlers=[handler])
    of_others = max(logging.WARNING, logging.getLevelNamesMapping()[level])
    for noisy in ("jax", "absl", "httpx", "asyncio"):
        logging.getLogger(noisy).setLevel(of_others)
    warnings.showwarning = _warned


def is_calm(line: str) -> bool:
    """Whether a line that a process wrote on stderr tells of nothing wrong."""
    return _CALM.match(line) is not None


def _warned(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Log a library's Python warning, mostly about a cache that cannot be written."""
    logging.getLogger("py.warnings").warning("%s: %s", category.__name__, message)


class _Lines(logging.Handler):
    """Writes to stderr without waiting."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            terminal.complain(self.format(record))
        except Exception:  # the arguments do not fit the message
            self.handleError(record)


class _Formatter(logging.Formatter):
    """Keeps a message on one line, whatever it quotes: clients choose the ids of requests."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return _escaped(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:
        return "\n".join(map(_escaped, super().formatException(ei).split("\n")))


def _escaped(line: str) -> str:
    return _CONTROL.sub(lambda found: found.group().encode("unicode_escape").decode(), line)
