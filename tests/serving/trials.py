"""Grammars to try, and the processes that try them: which there are, and how one is held."""

import contextlib
import json
import signal
from collections.abc import Iterator
from typing import Any

import psutil

from serving import trial_process


def schema(value: Any) -> str:
    return json.dumps({"grammars": [{"json_schema": value}]})


def lark(text: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": text}]})


def endless(number: int) -> dict[str, Any]:
    """A schema that takes more time than any may."""
    return {"type": "integer", "multipleOf": 99_999_989 + number}


def slow() -> dict[str, Any]:
    """A good schema that takes longer than the first lane gives."""
    leaf = {"type": "string", "format": "uri"}
    names = [f"p{number}" for number in range(1000)]
    properties = dict.fromkeys(names, leaf)
    return {"type": "object", "properties": properties, "additionalProperties": False}


def processes() -> list[psutil.Process]:
    """The live trial processes of this process, the oldest first."""
    living = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if trial_process.__name__ in child.cmdline():
                living.append(child)
    return sorted(living, key=psutil.Process.create_time)


@contextlib.contextmanager
def held(process: psutil.Process) -> Iterator[None]:
    """Keep the process stopped meanwhile."""
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGCONT)
