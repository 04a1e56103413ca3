"""What is told to an operator who knows another server, or misspells a flag."""

import pytest

from serving import launch
from tests.serving.test_flags import FIELDS
from transfer.flag_names import _ELSEWHERE, _SAID, flag_name


@pytest.mark.parametrize(
    ("command", "argv", "told"),
    [
        ("prefill", ["--tp", "2"], "unknown flag --tp; did you mean --tp-size?"),
        ("prefill", ["-tp", "2"], "unknown flag -tp; did you mean --tp-size?"),
        ("prefill", ["--max-model-len=9"], "--max-model-len; did you mean --context-length?"),
        ("prefill", ["--max-num-seqs", "9"], "unknown flag --max-num-seqs"),  # decode's alone
        ("prefill", ["--disaggregation-mode=prefill"], "; each role is a command: kvferry prefil"),
        ("decode", ["--enable-prefix-caching"], "; prefixes are kept unless --disable-radix-cache"),
        ("decode", ["--disaggregation-bootstrap-port=1"], "; kvferry registry listens there; all"),
        ("decode", ["--grammar-backend=xgrammar"], "; there is one, llguidance"),
        ("registry", ["--port=1"], "--port; did you mean --disaggregation-bootstrap-port?"),
        ("serve", ["a/model"], "unexpected 'a/model'; --model-path takes the model's folder"),
        ("registry", ["a/model"], "unexpected 'a/model'"),
        ("up", ["a/model", "--tp=2"], "unexpected 'a/model'; --model-path takes the model's fold"),
        ("up", ["--decode-tp=2"], "unknown flag --decode-tp; did you mean --decode-tp-size?"),
        ("up", ["--prefill-max-model-len=2"], "; did you mean --context-length?"),
        ("up", ["--prefill-pp-size=2"], "; layers are not divided into a pipeline; --tp-size di"),
    ],
)
def test_a_name_of_another_server_is_answered_by_what_there_is_here(
    command: str, argv: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        launch._command(command)(argv, f"kvferry {command}")
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert told in said
    assert said.endswith(f" (see kvferry {command} --help)\n")
    assert "did you mean" not in said or "did you mean" in told


def test_what_others_call_a_flag_is_told_by_a_flag_that_there_is() -> None:
    known = {flag_name(field) for _, field in FIELDS}
    assert set(_ELSEWHERE.values()) <= known
    of_some_commands = {"--port", "--disaggregation-bootstrap-port"}
    assert (set(_ELSEWHERE) | set(_SAID)) & known == of_some_commands
