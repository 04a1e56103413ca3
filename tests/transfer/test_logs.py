"""What a process may write on stderr, and how much."""

import logging

import pytest

from transfer import logs
from transfer.errors import ConfigError


def test_what_a_message_quotes_cannot_write_lines_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logging.root, "handlers", [])
    monkeypatch.setattr(logging.root, "level", logging.root.level)
    logs.set_up("serve")
    log = logging.getLogger("serving.quotes")
    log.warning("%s moves: été", "a\r\n12:00:00 [serve] E forged\x1b[2K\x9b\u2028")
    try:
        raise ValueError("a\x1b[2K")
    except ValueError:
        log.exception("it failed")
    first, second, *traceback = capsys.readouterr().err.removesuffix("\n").split("\n")
    quoted = r"a\r\n12:00:00 [serve] E forged\x1b[2K\x9b\u2028 moves: été"
    assert first.endswith(f"[serve] W {quoted}")
    assert second.endswith("[serve] E it failed")
    assert traceback[0].startswith("Traceback")
    assert traceback[-1] == r"ValueError: a\x1b[2K"


def test_a_level_of_the_log_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(logs.LEVEL_ENV, "loud")
    with pytest.raises(ConfigError, match=r"KVFERRY_LOG_LEVEL is 'loud', expected .*, WARNING"):
        logs.set_up("serve")
