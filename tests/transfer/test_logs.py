"""What a process may write on stderr, and how much of it."""

import logging
import warnings

import pytest

from transfer import logs
from transfer.errors import ConfigError


def test_what_a_message_quotes_cannot_write_lines_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logging.root, "handlers", [])
    monkeypatch.setattr(logging.root, "level", logging.root.level)
    with warnings.catch_warnings():
        logs.set_up("serve")
        warnings.simplefilter("always")
        warnings.warn("no space\nleft", stacklevel=1)
    (warned,) = capsys.readouterr().err.removesuffix("\n").split("\n")
    assert warned.endswith(r"[serve] W UserWarning: no space\nleft")
    log = logging.getLogger("serving.quotes")
    log.warning("%s moves: été", "a\r\n12:00:00 [serve] E forged\x08\x1b[2K\x9b\u2028\u2029")
    try:
        raise ValueError("a\x1b[2K")
    except ValueError:
        log.exception("it failed")
    first, second, *traceback = capsys.readouterr().err.removesuffix("\n").split("\n")
    quoted = r"a\r\n12:00:00 [serve] E forged\x08\x1b[2K\x9b\u2028\u2029 moves: été"
    assert first.endswith(f"[serve] W {quoted}")
    assert second.endswith("[serve] E it failed")
    assert traceback[0].startswith("Traceback")
    assert traceback[-1] == r"ValueError: a\x1b[2K"


@pytest.mark.parametrize(("asked", "shown"), [("error", []), ("INFO", ["jax warns", "said"])])
def test_the_level_is_for_what_libraries_say_too(
    asked: str,
    shown: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(logs.LEVEL_ENV, asked)
    monkeypatch.setattr(logging.root, "handlers", [])
    for name in ("", "jax"):
        monkeypatch.setattr(logging.getLogger(name), "level", logging.NOTSET)
    logs.set_up("")
    logging.getLogger("jax").info("jax says")
    logging.getLogger("jax").warning("jax warns")
    logging.getLogger("serving").info("said")
    for name in ("jax", "serving"):  # loggers cache which levels are on, and the test resets levels
        logging.getLogger(name)._cache.clear()  # type: ignore[attr-defined]
    told = capsys.readouterr().err
    assert [line.split(" ", 2)[2] for line in told.splitlines()] == shown


def test_a_level_of_the_log_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(logs.LEVEL_ENV, "loud")
    with pytest.raises(ConfigError, match=r"KVFERRY_LOG_LEVEL is 'loud', expected .*, WARNING"):
        logs.set_up("serve")
