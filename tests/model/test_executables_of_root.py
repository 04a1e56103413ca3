"""Executables in an image: root has made the folder, and whoever runs the image reads it."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from model.executables import ExecutableCache


@pytest.fixture(autouse=True)
def usual_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def test_others_may_read_what_was_kept_and_not_write_it(tmp_path: Path) -> None:
    folder = tmp_path / "executables"
    assert ExecutableCache(folder)._write(folder / "program", b"code")
    modes = [path.stat().st_mode & 0o777 for path in (folder, *folder.iterdir())]
    assert modes == [0o755, 0o644]


def test_a_folder_that_may_not_be_read_is_refused_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = ExecutableCache(tmp_path)
    cache.check_owner()
    monkeypatch.setattr(os, "access", lambda *_: False)  # as for another user than root
    with pytest.raises(PermissionError, match=f"{tmp_path} may not be read"):
        cache.check_owner()
