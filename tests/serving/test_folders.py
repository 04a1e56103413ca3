"""The private folders of servers: none outlives its server for long, nothing else is removed."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from serving import folders
from serving.folders import lock_of, private_folder
from tests.serving.test_listening import leave_stale

LEFT = "kvferry-api-abcd_123"


@pytest.fixture(autouse=True)
def parent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def left_in(parent: Path) -> Path:
    """What a server leaves when it is killed with all its processes."""
    folder = parent / LEFT
    folder.mkdir(0o700)
    leave_stale(folder / "0")
    return folder


def test_a_folder_is_private_and_goes_in_the_end(parent: Path) -> None:
    with private_folder() as name:
        assert Path(name).stat().st_mode & 0o777 == 0o700
        leave_stale(Path(name) / "0")
    assert not [*parent.iterdir()]


def test_what_a_killed_server_left_goes_when_the_next_one_starts(parent: Path) -> None:
    left = left_in(parent)
    with private_folder() as name:
        assert [*parent.iterdir()] == [Path(name)]
        assert not left.exists()


def test_what_another_server_has_is_left_to_it(parent: Path) -> None:
    with private_folder() as first:
        leave_stale(Path(first) / "0")
        with private_folder() as second:
            assert sorted(parent.iterdir()) == sorted([Path(first), Path(second)])
            assert (Path(first) / "0").is_socket()


@pytest.mark.parametrize(
    "make",
    [
        lambda folder: (folder / "notes").write_text("mine"),
        lambda folder: folder.chmod(0o755),
        lambda folder: folder.rename(folder.with_name("kvferry-memory-0-4026531836")),
        lambda folder: folder.rename(folder.with_name(f"{LEFT}4")),
        lambda folder: folder.rename(folder.with_name("mine")).with_name(LEFT).symlink_to("mine"),
        lambda folder: folder.rename(folder.with_name("mine")).with_name(LEFT).write_text("mine"),
    ],
)
def test_nothing_else_is_removed(make: Callable[[Path], object], parent: Path) -> None:
    make(left_in(parent))
    before = sorted(parent.rglob("*"))
    with private_folder():
        pass
    assert sorted(parent.rglob("*")) == before


def test_a_folder_that_is_another_users_is_not_removed(
    parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, own = left_in(parent), os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    with private_folder():
        assert left.exists()


def test_a_folder_that_another_server_removed_before_it_was_locked_is_made_anew(
    parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = tempfile.TemporaryDirectory
    made: list[str] = []

    def seen_by_another(**values: Any) -> "tempfile.TemporaryDirectory[str]":
        folder = make(**values)
        made.append(folder.name)
        if len(made) < 3:
            folders._remove_left(parent)
        return folder

    monkeypatch.setattr(tempfile, "TemporaryDirectory", seen_by_another)
    with private_folder() as name:
        assert made[2:] == [name]
        with lock_of(Path(name)) as is_held:
            assert not is_held
        assert Path(name).is_dir()
    assert not [*parent.iterdir()]


def test_where_folders_cannot_be_locked_there_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(held: int, how: int) -> None:
        raise OSError("no locks available")

    monkeypatch.setattr(folders.fcntl, "flock", refuse)
    with pytest.raises(OSError, match="cannot be locked"), private_folder():
        pass
