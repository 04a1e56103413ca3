"""What clients must know and nobody else on the host may read."""

from pathlib import Path

import httpx
import pytest

from serving.api import HELP
from serving.config import ServeConfig
from tests.cluster import wait_until
from tests.ports import free_port
from tests.serving.commands import MODEL, refused, start
from transfer import flags

KEY = "a-key-that-nobody-sees"


@pytest.mark.parametrize(
    ("argv", "key"), [([], KEY), (["--api-key=another"], "another"), (["--api-key="], "")]
)
def test_a_key_comes_from_the_environment_unless_a_flag_says_otherwise(
    argv: list[str], key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVFERRY_API_KEY", KEY)
    parser = flags.Parser(prog="kvferry serve")
    flags.add_flags(parser, ServeConfig, HELP)
    needed = ["--model-path=a", "--registry-address=b:1"]
    config = flags.config_from(ServeConfig, parser.parse_args([*needed, *argv]))
    assert config.api_key == key
    assert dict(flags.secrets_of(config)) == {"KVFERRY_API_KEY": key}
    assert KEY not in parser.format_help()


@pytest.mark.parametrize("command", ["up", "serve --registry-address=127.0.0.1:1"])
@pytest.mark.parametrize("key", [f"{KEY}\n", f" {KEY}", "in\tside"])
def test_a_key_that_no_client_can_send_is_refused_without_being_shown(
    command: str, key: str, tmp_path: Path
) -> None:
    """A Secret made from a file ends in a line end, which HTTP has no way to send."""
    words = (*command.split(), "--port=0", f"--model-path={MODEL}")
    line = refused(start(tmp_path, *words, KVFERRY_API_KEY=key))
    assert "--api-key, or $KVFERRY_API_KEY, must not have control characters, nor blanks" in line
    assert key.strip() not in line


def test_no_process_has_the_key_on_its_command_line(tmp_path: Path) -> None:
    port = free_port()
    words = (f"--port={port}", f"--model-path={MODEL}", "--registry-address=127.0.0.1:1")
    command = start(tmp_path, "serve", *words, "--api-workers=2", KVFERRY_API_KEY=KEY)
    try:
        command.says("HTTP processes listen on")
        family = command.family()
        assert len(family) == 3
        assert not any(KEY in word for process in family for word in process.cmdline())
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as http:
            assert http.get("/v1/models").status_code == 401
            bearer = {"Authorization": f"Bearer {KEY}"}
            wait_until(lambda: http.get("/v1/models", headers=bearer).status_code == 200)
    finally:
        command.kill()
    assert KEY not in command.text
