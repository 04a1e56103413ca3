"""How many threads XLA is told to have, and that it obeys."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from model import processors

LARGE, SMALL = 4096, 256


@pytest.fixture(autouse=True)
def _nobody_has_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in processors.VARIABLES:
        monkeypatch.delenv(name, raising=False)


def told(asked: int, hidden_size: int) -> str | None:
    processors.take_threads(asked, hidden_size)
    return os.environ.get(processors.VARIABLES[0])


def test_a_small_network_has_one_thread_and_a_large_one_all() -> None:
    assert told(0, LARGE) is None
    assert told(0, SMALL + 1) is None
    assert told(0, SMALL) == "1"


def test_what_is_asked_for_is_had_by_any_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(processors.VARIABLES[0], "7")
    assert told(3, LARGE) == "3"
    assert told(2, SMALL) == "2"


@pytest.mark.parametrize("name", processors.VARIABLES)
def test_whoever_has_set_a_variable_of_xla_is_left_it(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "5")
    told(0, SMALL)
    assert {key: os.environ.get(key) for key in processors.VARIABLES} == {
        key: "5" if key == name else None for key in processors.VARIABLES
    }


def test_beside_a_plugin_only_what_is_asked_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"jax_plugins": [SimpleNamespace(name="cuda")]}
    monkeypatch.setattr(
        processors.importlib.metadata, "entry_points", lambda *, group: found.get(group, [])
    )
    assert told(0, SMALL) is None
    assert told(4, SMALL) == "4"


def test_xla_has_as_many_threads_as_it_was_told() -> None:
    script = (
        "import os, sys, jax; from model.processors import take_threads;"
        "take_threads(int(sys.argv[1]), 4096); jax.devices(); "
        "print(len(os.listdir('/proc/self/task')))"
    )

    def running(asked: int) -> int:
        command = [sys.executable, "-c", script, str(asked)]
        return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

    few, many = running(1), running(21)
    assert many - few >= 20
