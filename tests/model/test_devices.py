"""Which JAX settings a worker makes in any environment, and which devices it refuses."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from model import devices, opening
from model.errors import ModelError


def prepared(monkeypatch: pytest.MonkeyPatch, meeting_host: str = "") -> dict[str, Any]:
    """What gets set in this environment; this process's own JAX is left alone."""
    told: dict[str, Any] = {}
    with monkeypatch.context() as inside:
        inside.setattr(jax.config, "update", told.__setitem__)
        devices.prepare_devices(3, meeting_host)
    assert told["jax_num_cpu_devices"] == 3
    assert told["jax_enable_x64"] is False
    return told


def test_programs_are_kept_where_the_user_keeps_such_things(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("JAX_COMPILATION_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = prepared(monkeypatch)["jax_compilation_cache_dir"]
    assert folder == f"{tmp_path}/.cache/kvferry/jax"
    monkeypatch.setenv("XDG_CACHE_HOME", "/else")
    assert prepared(monkeypatch)["jax_compilation_cache_dir"] == "/else/kvferry/jax"
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "/own")
    assert "jax_compilation_cache_dir" not in prepared(monkeypatch)


@pytest.mark.parametrize(("spared", "then"), [("", "10.0.0.3"), ("a.b", "a.b,10.0.0.3")])
def test_proxies_are_not_for_the_host_where_a_mesh_meets(
    monkeypatch: pytest.MonkeyPatch, spared: str, then: str
) -> None:
    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    monkeypatch.setenv(devices._SPARED, spared)
    devices.prepare_devices(3)
    assert os.environ[devices._SPARED] == spared
    devices.prepare_devices(3, "10.0.0.3")
    assert os.environ[devices._SPARED] == then


def test_a_user_without_a_home_keeps_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("JAX_COMPILATION_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", nobody)
    assert "jax_compilation_cache_dir" not in prepared(monkeypatch)


@pytest.mark.parametrize("capability", ["8.9", "9.0", "10.0", "gfx942", None])
def test_a_device_that_converts_codes_or_is_not_nvidias_is_taken(capability: str | None) -> None:
    opening.check_reads_codes([SimpleNamespace(device_kind="x", compute_capability=capability)])
    opening.check_reads_codes(jax.devices())


def test_a_gpu_that_cannot_convert_codes_is_refused() -> None:
    old = SimpleNamespace(device_kind="NVIDIA A100", compute_capability="8.0")
    with pytest.raises(
        ModelError, match=r"A100 has compute capability 8\.0; .* need 8\.9 or later"
    ):
        opening.check_reads_codes([old])


def test_a_mesh_over_processes_has_no_cache_of_jax_and_none_at_all_where_the_user_wants_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "/own")
    monkeypatch.setenv(devices._SPARED, "")
    told = prepared(monkeypatch, "10.0.0.3")
    assert told["jax_enable_compilation_cache"] is False
    assert "jax_compilation_cache_dir" not in told
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        assert prepared(monkeypatch, "10.0.0.3")["jax_compilation_cache_dir"] is None
    finally:
        jax.config.update("jax_enable_compilation_cache", True)
