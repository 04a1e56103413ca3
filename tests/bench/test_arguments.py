"""The benchmarks' command lines: numbers in range, and a server's flags as a shell splits them."""

import argparse

import pytest

from bench.arguments import API_KEY_ENV, server_args
from bench.cli import add_subcommands, main
from bench.transfer import BACKENDS
from transfer.flags import Parser


def parsed(*argv: str) -> argparse.Namespace:
    parser = Parser(prog="kvferry bench")
    add_subcommands(parser)
    return parser.parse_args(argv)


@pytest.mark.parametrize("value", ["nan", "inf", "0", "-1", "1e9999", "1e-308"])
@pytest.mark.parametrize(
    "argv",
    [
        "serve --rate",
        "serve --slo-ttft-ms",
        "serve --slo-tpot-ms",
        "serve --timeout-s",
        "frontend --step-ms",
        "frontend --overload-step-ms",
        "routing --seconds",
        "kernels --budget-s",
        "transfer --budget-s",
    ],
)
def test_times_and_rates_are_finite_and_above_zero(
    argv: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command, flag = argv.split()
    with pytest.raises(SystemExit) as ended:
        parsed(command, f"{flag}={value}")
    assert ended.value.code == 2
    assert f"argument {flag}: must be " in capsys.readouterr().err


@pytest.mark.parametrize("argv", ["serve --rate", "serve --timeout-s", "frontend --step-ms"])
def test_times_and_rates_without_end_are_refused(
    argv: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parsed(*argv.split(), "1e308")
    assert "must be from 1e-06 to 1e+06, got 1e+308" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "most"),
    [
        ("kernels --seed", (1 << 63) - 1),
        ("serve --seed", (1 << 63) - 1),
        ("routing --seed", (1 << 63) - 1),
        ("serve --warm-up", (1 << 31) - 1),
    ],
)
def test_numbers_that_are_too_large_are_refused_by_their_own_name(
    argv: str, most: int, capsys: pytest.CaptureFixture[str]
) -> None:
    command, flag = argv.split()
    assert str(most) in str(vars(parsed(command, flag, str(most))).values())
    for bad in (-1, most + 1):
        with pytest.raises(SystemExit):
            parsed(command, f"{flag}={bad}")
        said = capsys.readouterr().err
        assert f"argument {flag}: must be from 0 to {most}, got {bad}" in said


def test_the_help_of_transfer_names_the_backends_that_it_takes_by_default(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        parsed("transfer", "--help")
    told = " ".join(capsys.readouterr().out.split())
    assert f"default: {' and '.join(BACKENDS)} " in told


def test_times_and_rates_in_range_are_taken() -> None:
    args = parsed("serve", "--rate", "0.5", "--timeout-s", "1e-3")
    assert (args.rate, args.timeout_s, args.slo_ttft_ms) == (0.5, 1e-3, None)
    assert parsed("routing", "--seconds", "1").seconds == 1.0


def test_the_key_of_a_server_may_come_from_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KVFERRY_API_KEY", "from-there")
    assert parsed("serve").api_key == "from-there"
    assert parsed("serve", "--api-key", "told").api_key == "told"


def test_a_key_that_no_server_has_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a line end, as of a file, the rest of the request's head was its body."""
    monkeypatch.setenv("KVFERRY_API_KEY", "from-a-file\n")
    with pytest.raises(SystemExit):
        parsed("serve")
    said = capsys.readouterr().err
    assert "argument --api-key: it, or $KVFERRY_API_KEY, must not have control characters" in said


@pytest.mark.parametrize("command", ["serve", "frontend"])
def test_a_model_without_a_name_is_not_the_demo_model(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parsed(command, "--model-path=")
    assert "argument --model-path: expected a path, got ''" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["serve", "frontend"])
def test_flags_of_a_server_are_cut_as_a_shell_cuts_them(command: str) -> None:
    assert parsed(command).server_args == []
    args = parsed(command, "--server-args", "--model-path 'my models/a' --colocated")
    assert args.server_args == ["--model-path", "my models/a", "--colocated"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("--model-path 'a", "No closing quotation"),
        ("--port 8000", "the benchmark chooses --port itself"),
        ("--colocated --host=0.0.0.0", "the benchmark chooses --host itself"),
        ("--uds /tmp/socket", "the benchmark chooses --uds itself"),
        ("--api-key=x", r"--api-key would stand in rows, .* `serve` has \$KVFERRY_API_KEY"),
    ],
)
def test_flags_of_a_server_that_cannot_be_are_refused(text: str, message: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=message):
        server_args(text)


def test_flags_that_the_server_refuses_end_the_benchmark_as_they_end_the_server(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["serve", "--server-args=--prefill 0"]) == 2
    assert "did not become ready:\nkvferry up: " in capsys.readouterr().err


@pytest.mark.parametrize("command", ["kernels", "transfer", "serve", "frontend", "routing"])
def test_a_misspelt_flag_is_told_with_the_one_meant(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parsed(command, "--jason=rows.jsonl")
    assert ended.value.code == 2
    line = f"kvferry bench {command}: unknown flag --jason; did you mean --json? "
    assert capsys.readouterr().err == f"{line}(see kvferry bench {command} --help)\n"


def test_help_says_the_defaults_and_no_key(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(API_KEY_ENV, "a-key-that-nobody-sees")
    with pytest.raises(SystemExit) as ended:
        parsed("serve", "--help")
    assert ended.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "one for each --concurrency (default: 64)" in text
    assert "tokens of a prompt (default: 512)" in text
    assert "key to send as a bearer token; default: $KVFERRY_API_KEY --server-args" in text
    assert "a-key-that-nobody-sees" not in text
    assert "SUPPRESS" not in text
    assert "default: None" not in text
