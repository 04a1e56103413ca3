"""`kvferry up`: its help, what it refuses, its token and ports, and a last worker that leaves."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from serving import up
from serving.children import ChildSpec, Supervisor
from tests.serving.commands import MODEL
from tests.serving.test_flags import ROLES
from transfer import flags
from transfer.errors import ConfigError


@pytest.mark.parametrize(
    "said",
    [
        "defaults are read from it; default: the demo model --host STR",
        "data-parallel rank (virtual ones on CPU) (default: 1) --ep-size INT",
        "prompts packed into one chunk (default: 8) --transfer-connections INT",
        "prefill only: --prefill-X sets X for prefill alone, whatever --X says to both roles",
        "decode only: --decode-X sets X for decode alone, whatever --X says to both roles",
    ],
)
def test_help_of_up_says_defaults_and_what_a_role_in_front_means(said: str) -> None:
    assert said in " ".join(up._parser("kvferry up", ROLES).format_help().split())


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_what_one_role_refuses_is_told_with_its_name(role: str, tmp_path: Path) -> None:
    given = [f"--model-path={tmp_path}", f"--{role}-dp-size=0"]
    with pytest.raises(ConfigError, match=f"^{role}: --dp-size must be at least 1, got 0$"):
        up.main(given, "kvferry up", ROLES)


def _supervisor(monkeypatch: pytest.MonkeyPatch, *given: str) -> Supervisor:
    """That of `up` with these flags, which starts nothing."""
    found: list[Supervisor] = []
    monkeypatch.setattr(up, "supervise", lambda name, own, start: found.append(own))
    up.main([f"--model-path={MODEL}", "--port=0", *given], "kvferry up", ROLES)
    return found[0]


def test_a_token_of_the_environment_is_that_of_all_that_up_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(flags.TOKEN_ENV, raising=False)
    made = {_supervisor(monkeypatch)._token for _ in range(2)}
    assert len(made) == 2
    monkeypatch.setenv(flags.TOKEN_ENV, "a token of sixteen characters\n")
    assert _supervisor(monkeypatch)._token == "a token of sixteen characters"
    monkeypatch.setenv(flags.TOKEN_ENV, "short")
    with pytest.raises(ConfigError, match="at least 16 characters is needed, got 5"):
        _supervisor(monkeypatch)


@pytest.mark.parametrize(("asked", "refused"), [("-1", True), ("65536", True), ("8998", False)])
def test_the_registry_listens_where_it_is_told_to(
    asked: str, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    flag, found = f"--disaggregation-bootstrap-port={asked}", []
    if refused:
        with pytest.raises(ConfigError, match=f"port must be 0 to 65535, got {asked}"):
            _supervisor(monkeypatch, flag)
        return

    async def start(spec: Any) -> None:
        found.append(spec.argv[-1])
        raise ConfigError("it starts nothing")

    monkeypatch.setattr(up, "supervise", lambda name, own, start: found.append(start))
    up.main([f"--model-path={MODEL}", "--port=0", flag], "kvferry up", ROLES)
    own = Supervisor("")
    monkeypatch.setattr(own, "start", start)
    with pytest.raises(ConfigError, match="it starts nothing"):
        asyncio.run(found.pop()(own))
    assert found == [asked]


@pytest.mark.parametrize(
    ("others", "is_last"),
    [([], True), (["prefill-0"], True), (["decode-0.1"], True), (["decode-1"], False)],
)
def test_the_last_worker_of_a_role_that_leaves_is_a_warning(
    others: list[str], is_last: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def ended() -> int:
        return 0

    def child(name: str) -> Any:
        number = name.partition(".")[0]
        spec = ChildSpec(name, (name.partition("-")[0],), is_worker=True, group=number)
        told = SimpleNamespace(terminate=lambda: None)
        return SimpleNamespace(spec=spec, ended=ended, served_s=1.0, process=told)

    own, leaves = Supervisor(""), child("decode-0")
    own._children = [leaves, *map(child, others)]
    with caplog.at_level("INFO"):
        asyncio.run(own.watch(leaves))
    (record,) = caplog.records
    assert record.getMessage().startswith("decode-0 has left, as it was told")
    assert record.getMessage().endswith("up has no other decode worker") == is_last
    assert record.levelname == ("WARNING" if is_last else "INFO")
