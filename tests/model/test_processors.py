"""How many processors this process may use, how many threads XLA is given, and that it obeys."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from model import processors

LARGE, SMALL = 4096, 256
looks_for_plugins = processors._has_plugins
available = processors.available

# As the kernel writes it: for a container that sees its own group as the root, and for a host.
V2 = "30 24 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = "33 25 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,nosuid - cgroup cgroup rw,cpu,cpuacct\n"
MEMORY = "34 25 0:30 / /sys/fs/cgroup/memory rw,nosuid - cgroup cgroup rw,memory\n"


@pytest.fixture(autouse=True)
def _nobody_has_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in processors.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(processors, "_has_plugins", lambda: False)
    monkeypatch.setattr(processors, "available", lambda: len(os.sched_getaffinity(0)))


def told(asked: int, hidden_size: int) -> str | None:
    processors.take_threads(asked, hidden_size)
    return os.environ.get(processors.VARIABLES[0])


def test_a_small_network_has_one_thread_and_a_large_one_all() -> None:
    assert told(0, LARGE) is None
    assert told(0, SMALL + 1) is None
    assert told(0, SMALL) == "1"


def test_a_large_network_has_no_more_threads_than_its_container_has_processors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.setattr(processors, "available", lambda: 4)
    assert told(0, LARGE) == "4"


def _host(root: Path, monkeypatch: pytest.MonkeyPatch, cgroup: str, mountinfo: str) -> Path:
    """A host of 16 processors with such groups; returns where they are mounted."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(cgroup)
    (root / "proc/self/mountinfo").write_text(mountinfo)
    return root / "sys/fs/cgroup"


def test_the_least_quota_of_a_group_and_those_around_it_counts_rounded_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    top = _host(tmp_path, monkeypatch, "0::/a/b\n", V2)
    assert available(tmp_path) == 16
    (top / "a/b").mkdir(parents=True)
    (top / "a/b/cpu.max").write_text("max 100000\n")
    assert available(tmp_path) == 16
    (top / "a/cpu.max").write_text("400000 100000\n")
    assert available(tmp_path) == 4
    (top / "a/b/cpu.max").write_text("125000 50000\n")
    assert available(tmp_path) == 3
    (top / "a/cpu.max").write_text("1000 100000\n")
    assert available(tmp_path) == 1
    (top / "a/cpu.max").write_text("3200000 100000\n")
    assert available(tmp_path) == 3
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {5, 9})
    assert available(tmp_path) == 2


def test_quotas_of_the_first_version_are_read_where_the_controller_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    top = _host(tmp_path, monkeypatch, "7:memory:/m\n2:cpu,cpuacct:/x\n0::/\n", MEMORY + V1)
    for at, quota in (("cpu,cpuacct", -1), ("cpu,cpuacct/x", 250_000), ("memory/m", 100_000)):
        (top / at).mkdir(parents=True)
        (top / at / "cpu.cfs_quota_us").write_text(f"{quota}\n")
        (top / at / "cpu.cfs_period_us").write_text("100000\n")
    assert available(tmp_path) == 3
    (top / "cpu,cpuacct/x/cpu.cfs_quota_us").write_text("-1\n")
    assert available(tmp_path) == 16


def test_without_groups_it_is_the_processors_that_this_process_may_run_on(tmp_path: Path) -> None:
    assert available(tmp_path) == len(os.sched_getaffinity(0))


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


def test_beside_a_plugin_only_what_is_asked_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plugin = tmp_path / "accelerator-1.dist-info"
    plugin.mkdir()
    (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: accelerator\nVersion: 1\n")
    (plugin / "entry_points.txt").write_text("[jax_plugins]\naccelerator = accelerator\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(processors, "_has_plugins", looks_for_plugins)
    assert told(0, SMALL) is None
    assert told(4, SMALL) == "4"


def test_what_xla_has_is_what_it_was_told_or_a_processor_each_and_one_a_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 5})
    assert processors.threads(1) == 3
    monkeypatch.setenv(processors.VARIABLES[1], "6")
    assert processors.threads(1) == 6
    monkeypatch.setenv(processors.VARIABLES[0], "2")
    assert processors.threads(1) == 2
    assert processors.threads(4) == 4


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
