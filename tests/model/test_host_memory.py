"""How much host memory a container leaves, by files as the kernel writes them."""

import ctypes
from pathlib import Path

import psutil
import pytest

from model import host_memory
from model.host_memory import available_bytes, give_back_freed, total_bytes

HOST = 1 << 34
MIB = 1 << 20


@pytest.fixture(autouse=True)
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    free = psutil.virtual_memory()._replace(available=HOST, total=HOST)
    monkeypatch.setattr(host_memory.psutil, "virtual_memory", lambda: free)


def _group(
    folder: Path, limit: str, used: int, idle: int = 0, high: str = "max", active: int = 0
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.high").write_text(f"{high}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    stat = f"anon 1\ninactive_file {idle}\nactive_file {active}\nunevictable 5\n"
    (folder / "memory.stat").write_text(stat)


def _group_v1(folder: Path, limit: int, used: int, idle: int = 0, active: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{used}\n")
    own = f"inactive_file 3\nactive_file 3\nhierarchical_memory_limit {limit}\n"
    whole = f"total_inactive_file {idle}\ntotal_active_file {active}\n"
    (folder / "memory.stat").write_text(own + whole)


def _proc(root: Path, cgroup: str, mountinfo: str) -> None:
    folder = root / "proc" / "self"
    folder.mkdir(parents=True)
    (folder / "cgroup").write_text(cgroup)
    (folder / "mountinfo").write_text(mountinfo)


V2 = "30 24 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = "33 25 0:29 {of} /sys/fs/cgroup/memory rw,nosuid shared:15 - cgroup cgroup rw,memory\n"
OTHER = (
    "31 25 0:27 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n22 1 8:1 / / rw - ext4 /dev/a rw\n"
)


def test_without_groups_it_is_the_hosts(tmp_path: Path) -> None:
    assert available_bytes(tmp_path) == HOST
    _proc(tmp_path, "0::/\n", V2)
    assert available_bytes(tmp_path) == HOST


def test_the_tightest_of_a_group_and_those_around_it_counts(tmp_path: Path) -> None:
    _proc(tmp_path, "0::/a/b\n", V2 + OTHER)
    top = tmp_path / "sys/fs/cgroup"
    _group(top / "a/b", "max", 5 * MIB)
    assert available_bytes(tmp_path) == HOST
    _group(top / "a", str(100 * MIB), 30 * MIB, idle=10 * MIB)
    assert available_bytes(tmp_path) == 80 * MIB
    _group(top / "a/b", str(20 * MIB), 5 * MIB)
    assert available_bytes(tmp_path) == 15 * MIB
    _group(top / "a/b", str(20 * MIB), 5 * MIB, high=str(12 * MIB))
    assert available_bytes(tmp_path) == 7 * MIB
    _group(top / "a/b", str(20 * MIB), 25 * MIB)
    assert available_bytes(tmp_path) == 0


@pytest.mark.parametrize(
    ("own", "of", "folder"),
    [
        ("/docker/x", "/", "docker/x"),
        ("/docker/x", "/docker/x", ""),  # a container that sees its own group as the root
        ("/../other", "/docker/x", ""),
    ],
)
def test_the_first_version_is_read_where_it_is_mounted(
    own: str, of: str, folder: str, tmp_path: Path
) -> None:
    _proc(tmp_path, f"4:cpu,memory:{own}\n1:cpu:/z\n0::/\n", OTHER + V1.format(of=of))
    top = tmp_path / "sys/fs/cgroup/memory"
    _group_v1(top, (1 << 63) - 4096, 1 << 33)
    _group_v1(top / folder, 64 * MIB, 30 * MIB, idle=8 * MIB)
    assert available_bytes(tmp_path) == 42 * MIB


def test_what_was_freed_goes_back_to_the_host() -> None:
    process, size = psutil.Process(), 64 << 10
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    taken = [libc.malloc(size) for _ in range(3_000)]
    for memory in taken:
        ctypes.memset(memory, 1, size)
    for memory in taken[:-1]:  # the last one keeps the others from being the end of the heap
        libc.free(memory)
    kept = process.memory_info().rss
    give_back_freed()
    assert kept - process.memory_info().rss > 150 * MIB
    libc.free(taken[-1])


def test_the_whole_is_the_least_limit_whatever_is_in_use(tmp_path: Path) -> None:
    assert total_bytes(tmp_path) == HOST
    _proc(tmp_path, "0::/a/b\n", V2)
    _group(tmp_path / "sys/fs/cgroup/a", str(100 * MIB), 90 * MIB)
    assert total_bytes(tmp_path) == 100 * MIB
    _group(tmp_path / "sys/fs/cgroup/a/b", str(80 * MIB), 5 * MIB, high=str(60 * MIB))
    assert total_bytes(tmp_path) == 60 * MIB


def test_a_checkpoint_that_was_read_twice_leaves_as_much_as_one_that_was_not(
    tmp_path: Path,
) -> None:
    _proc(tmp_path, "4:memory:/docker/x\n0::/a\n", V2 + V1.format(of="/"))
    first, second = tmp_path / "sys/fs/cgroup/memory/docker/x", tmp_path / "sys/fs/cgroup/a"
    for idle, active in ((40 * MIB, 0), (0, 40 * MIB), (10 * MIB, 30 * MIB)):
        _group_v1(first, 100 * MIB, 90 * MIB, idle, active)
        assert available_bytes(tmp_path) == 50 * MIB
    (first / "memory.limit_in_bytes").write_text(f"{HOST}\n")
    for idle, active in ((40 * MIB, 0), (0, 40 * MIB), (10 * MIB, 30 * MIB)):
        _group(second, str(100 * MIB), 80 * MIB, idle, active=active)
        assert available_bytes(tmp_path) == 60 * MIB
