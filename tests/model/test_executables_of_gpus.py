"""Executables for GPUs are filed by the libraries that they were compiled with, too."""

from pathlib import Path

import pytest

from model import executables


def test_versions_of_libraries_are_told_beside_an_installation_without_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As pip leaves it behind where a file could not be removed."""
    (tmp_path / "broken-1.0.dist-info").mkdir()
    library = tmp_path / "nvidia_cudnn-9.1.dist-info" / "METADATA"
    library.parent.mkdir()
    library.write_text("Metadata-Version: 2.1\nName: nvidia-cudnn\nVersion: 9.1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    told = executables._libraries()
    assert "nvidia-cudnn==9.1" in told
    assert any(name.startswith("jaxlib==") for name in told)
    assert not any("None" in name for name in told)
