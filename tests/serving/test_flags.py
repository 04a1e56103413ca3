"""Flags: every field has one, it says what it does, takes its values and refuses others."""

import argparse
import dataclasses
import os
import ssl
import subprocess
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest

from decode.config import DecodeConfig
from model.errors import MemoryShortage, ModelError, NodeLost
from prefill.config import PrefillConfig
from serving import api, convert, launch, registry, up
from serving.config import ServeConfig
from serving.registry import RegistryConfig
from transfer import flags, logs
from transfer.checks import NamedPath
from transfer.errors import ConfigError, Incompatible, Unauthenticated, Unavailable
from transfer.flag_names import flag_name
from transfer.rpc import Security
from transfer.worker_config import WORKER_HELP

HELP: dict[type[Any], dict[str, str]] = {
    **dict.fromkeys((PrefillConfig, DecodeConfig), WORKER_HELP),
    ServeConfig: api.HELP,
    RegistryConfig: registry.HELP,
}
FIELDS = [(config, field.name) for config in HELP for field in dataclasses.fields(config)]
ROLES: up.Roles = {"prefill": PrefillConfig, "decode": DecodeConfig}
NEEDED = {"model_path": Path("a/model"), "registry_address": "127.0.0.1:1"}
GIVEN = [f"{flag_name(name)}={value}" for name, value in NEEDED.items()]
# Values for fields where one more than the default would be refused, or means nothing.
PARTED = {"tp_size": 2, "ep_size": 2}
NODES = {"tp_size": 6, "nnodes": 3, "node_rank": 2, "dist_init_addr": "10.1.2.3:45"}
OTHERS: dict[str, dict[str, Any]] = {
    "ep_size": {"tp_size": 4, "ep_size": 2},
    "ep_num_redundant_experts": PARTED | {"ep_num_redundant_experts": 2},
    "init_expert_location": PARTED | {"init_expert_location": "a.json"},
    "enable_eplb": PARTED | {"enable_eplb": True},
    "expert_distribution_file": PARTED | {"enable_eplb": True, "expert_distribution_file": "a"},
    "eplb_min_rebalancing_utilization_threshold": {
        "eplb_min_rebalancing_utilization_threshold": 0.5
    },
    "page_size": {"page_size": 32},
    "lora_paths": {"lora_paths": (NamedPath("a", Path("b c")), NamedPath("d e", Path("f=g")))},
    "mem_fraction_static": {"mem_fraction_static": 0.25},
    "profile_dir": {"profile_dir": "."},
    "stream_interval": {"stream_interval": 7},
    "allowed_origins": {"allowed_origins": ("https://a.example", "http://[::1]:3000")},
    "default_chat_template_kwargs": {"default_chat_template_kwargs": '{"a": "b c"}'},
    "nnodes": NODES,
    "node_rank": NODES,
    "dist_init_addr": NODES,
}


def parse(config: type[Any], argv: list[str]) -> Any:
    parser = flags.Parser(prog="kvferry x")
    flags.add_flags(parser, config, HELP[config])
    return flags.config_from(config, parser.parse_args(argv))


def needed(config: type[Any]) -> dict[str, Any]:
    names = {field.name for field in dataclasses.fields(config)}
    return {name: value for name, value in NEEDED.items() if name in names}


def another(config: type[Any], name: str) -> dict[str, Any]:
    """This field, with a value that is not its default."""
    hint = get_type_hints(config)[name]
    fields: dict[str, Any] = {field.name: field for field in dataclasses.fields(config)}
    default = fields[name].default
    if name in OTHERS:
        return OTHERS[name]
    if get_origin(hint) is Literal:
        return {name: get_args(hint)[-1]}
    if hint is Path or name in NEEDED:
        return {name: hint("10.1.2.3:45")}
    if hint is bool:
        return {name: not default}
    return {name: "--a name=with -signs" if hint is str else default + 1}


# --- every field -----------------------------------------------------------------------------


@pytest.mark.parametrize(("config", "name"), FIELDS)
def test_every_field_is_a_flag_with_a_help_text(config: type[Any], name: str) -> None:
    parser = flags.Parser(prog="kvferry x")
    flags.add_flags(parser, config, HELP[config])
    text = " ".join(parser.format_help().split())
    assert f"{flag_name(name)} " in text or f"{flag_name(name)}," in text
    assert len(HELP[config][name]) >= 10
    assert text.isascii()


@pytest.mark.parametrize(("config", "name"), FIELDS)
def test_up_hands_every_field_on_as_it_was_given(
    config: type[Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = config(**(needed(config) | another(config, name)))
    for variable, secret in flags.secrets_of(value):
        monkeypatch.setenv(variable, secret)
    assert parse(config, flags.argv_of(value)) == value


@pytest.mark.parametrize("config", HELP)
def test_defaults_are_not_handed_on(config: type[Any]) -> None:
    argv = flags.argv_of(config(**needed(config)))
    assert argv == [f"{flag_name(name)}={value}" for name, value in needed(config).items()]


@pytest.mark.parametrize("config", HELP)
def test_no_help_text_belongs_to_no_field(config: type[Any]) -> None:
    known = {name for other, name in FIELDS if HELP[other] is HELP[config]}
    assert set(HELP[config]) == known


# --- `up` gives each role its own ------------------------------------------------------------


def up_args(*argv: str) -> argparse.Namespace:
    args = up._parser("kvferry up", ROLES).parse_args(["--model-path", "a/model", *argv])
    args.model_path = Path(args.model_path)
    return args


def both(*argv: str) -> tuple[PrefillConfig, DecodeConfig]:
    args = up_args(*argv)
    prefill, decode = (
        up._worker_config(config, args, role, "127.0.0.1:1") for role, config in ROLES.items()
    )
    return prefill, decode


def test_a_flag_with_a_role_in_front_is_that_roles_alone() -> None:
    prefill, decode = both("--prefill-tp-size", "2", "--decode-max-running-requests", "3")
    assert (prefill.tp_size, decode.tp_size) == (2, 1)
    assert decode.max_running_requests == 3


def test_a_plain_flag_is_both_roles_and_gives_way_to_one_with_a_role() -> None:
    prefill, decode = both("--tp-size", "2", "--decode-tp-size=4", "--context-length", "64")
    assert (prefill.tp_size, decode.tp_size) == (2, 4)
    assert prefill.context_length == decode.context_length == 64


def test_a_flag_that_one_role_has_needs_no_role_in_front() -> None:
    prefill, decode = both("--chunked-prefill-size=64", "--max-running-requests=5")
    assert prefill.chunked_prefill_size == 64
    assert decode.max_running_requests == 5


def test_switches_are_turned_on_and_off() -> None:
    assert both("--disable-radix-cache")[0].disable_radix_cache
    assert both("--prefill-disable-radix-cache")[0].disable_radix_cache
    off = both("--disable-radix-cache", "--no-prefill-disable-radix-cache")
    assert not off[0].disable_radix_cache
    assert not parse_front("--no-enable-metrics").enable_metrics
    assert parse_front("--enable-metrics").enable_metrics
    assert not parse_front().enable_tokenizer_info_endpoint
    assert parse_front("--enable-tokenizer-info-endpoint").enable_tokenizer_info_endpoint


def test_the_address_and_queue_of_the_api_are_not_the_workers() -> None:
    argv = ("--host", "0.0.0.0", "--port", "8123", "--max-queued-requests", "0")
    prefill, decode = both(*argv)
    assert (prefill.host, prefill.port) == (decode.host, decode.port) == ("127.0.0.1", 0)
    assert prefill.max_queued_requests == decode.max_queued_requests > 0
    front = parse_front(*argv)
    assert (front.host, front.port, front.max_queued_requests) == ("0.0.0.0", 8123, 0)


def test_a_worker_can_have_a_queue_of_its_own() -> None:
    prefill, decode = both("--prefill-max-queued-requests", "7")
    assert prefill.max_queued_requests == 7
    assert decode.max_queued_requests == 1024


def parse_front(*argv: str) -> ServeConfig:
    return flags.config_from(ServeConfig, up_args(*argv), registry_address="127.0.0.1:1")


# --- refusals --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--pagesize", "16"], "unknown flag --pagesize; did you mean --page-size? ("),
        (["--model-pth=x"], "unknown flag --model-pth; did you mean --model-path? ("),
        (["--zzz"], "unknown flag --zzz ("),
        (["--decode-page-size=16"], "unknown flag --decode-page-size; did you mean --page-size? ("),
        (["--page", "16"], "unknown flag --page; did you mean --page-size? ("),
        (["--tp-size", "two"], "argument --tp-size: invalid int value: 'two' ("),
        (["--max-total-tokens=9223372036854775808"], "invalid int value: '9223372036854775808' ("),
        (["--mem-fraction-static", "half"], "argument --mem-fraction-static: invalid float value"),
        (["--stall-timeout", "nan"], "argument --stall-timeout: invalid float value: 'nan' ("),
        (["--stall-timeout=inf"], "argument --stall-timeout: invalid float value: 'inf' ("),
        (["--tp-size"], "argument --tp-size: expected one argument ("),
        (["--model-path", ""], "argument --model-path: expected a path, got '' ("),
        (["--kv-cache-dtype", "fp8"], "invalid choice: 'fp8' (choose from 'auto', 'float32'"),
        (["--disable-radix-cache=1"], "argument --disable-radix-cache/--no-disable-radix-cache: "),
        (["spare"], "unrecognized arguments: spare ("),
        (["--worker-id=\udcff"], "expected UTF-8, got '--worker-id=\\udcff' ("),
        ([], "the following arguments are required: --model-path, --registry-address ("),
    ],
)
def test_what_the_parser_refuses_is_one_line(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(PrefillConfig, [*GIVEN, *argv] if argv else [])
    said = capsys.readouterr().err
    assert caught.value.code == 2
    assert said.startswith("kvferry x: ")
    assert message in said
    assert said.endswith("(see kvferry x --help)\n")
    assert said.count("\n") == 1


@pytest.mark.parametrize("flag", ["--model-path", "--output"])
def test_convert_takes_no_empty_path_for_the_folder_it_is_in(
    flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        convert.main(["--model-path=a", "--output=b", f"{flag}="])
    assert caught.value.code == 2
    assert f"argument {flag}: expected a path, got ''" in capsys.readouterr().err


def test_a_number_that_has_a_word_for_itself_is_either(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse(ServeConfig, GIVEN).stream_interval == "auto"
    assert parse(ServeConfig, [*GIVEN, "--stream-interval", "8"]).stream_interval == 8
    with pytest.raises(SystemExit):
        parse(ServeConfig, [*GIVEN, "--stream-interval", "often"])
    assert "expected auto or a number, got 'often'" in capsys.readouterr().err


def test_a_misspelt_flag_is_told_before_the_one_it_leaves_missing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        parse(PrefillConfig, ["--model", "x"])
    assert "unknown flag --model; did you mean --model-path?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("config", "values", "message"),
    [
        (
            ServeConfig,
            {"stream_interval": 0},
            "--stream-interval must be auto or at least 1, got 0",
        ),
        (PrefillConfig, {"page_size": 24}, "--page-size must be a power of two, got 24"),
        (PrefillConfig, {"page_size": -16}, "--page-size must be at least 0, got -16"),
        (PrefillConfig, {"context_length": -1}, "--context-length must be at least 0, got -1"),
        (PrefillConfig, {"tp_size": 0}, "--tp-size must be at least 1, got 0"),
        (PrefillConfig, {"tp_size": 2, "ep_size": 4}, "--ep-size 4 must divide --tp-size 2"),
        (PrefillConfig, {"tp_size": 3, "ep_size": 2}, "--ep-size 2 must divide --tp-size 3"),
        (
            DecodeConfig,
            {"tp_size": 2, "ep_size": 3, "dp_size": 2},
            "must be --dp-size 2 times a divisor of the tp size",
        ),
        (DecodeConfig, {"tp_size": 2, "ep_size": 8, "dp_size": 2}, "--ep-size 8 is above"),
        (
            DecodeConfig,
            {"enable_eplb": True},
            "--enable-eplb needs --ep-size above 1, got 1",
        ),
        (
            PrefillConfig,
            {"ep_num_redundant_experts": 8},
            "--ep-num-redundant-experts needs --ep-size above 1",
        ),
        (PrefillConfig, {"init_expert_location": "a.json"}, "--init-expert-location needs --ep-"),
        (DecodeConfig, {"ep_num_redundant_experts": -1}, "--ep-num-redundant-experts must be at l"),
        (
            DecodeConfig,
            {"tp_size": 2, "ep_size": 2, "expert_distribution_file": "a.json"},
            "--expert-distribution-file needs --enable-eplb to count rows",
        ),
        (
            DecodeConfig,
            {
                "tp_size": 2,
                "ep_size": 2,
                "enable_eplb": True,
                "expert_distribution_file": "/nowhere/at/all/a.json",
            },
            "--expert-distribution-file: /nowhere/at/all is not a folder",
        ),
        (
            DecodeConfig,
            {"eplb_rebalance_num_iterations": 0},
            "--eplb-rebalance-num-iterations must be at least 1, got 0",
        ),
        (
            DecodeConfig,
            {"eplb_min_rebalancing_utilization_threshold": 1.5},
            "-threshold must be above 0 and at most 1, got 1.5",
        ),
        (PrefillConfig, {"max_total_tokens": -1}, "--max-total-tokens must be at least 0, got -1"),
        (PrefillConfig, {"mem_fraction_static": 1.5}, "--mem-fraction-static must be in [0, 1]"),
        (PrefillConfig, {"max_seqs_per_chunk": 0}, "--max-seqs-per-chunk must be at least 1"),
        (PrefillConfig, {"max_seqs_per_chunk": 2000}, "--max-seqs-per-chunk must be at most 1024"),
        (PrefillConfig, {"tp_size": 4096}, "--tp-size 4096: at most 1024 devices, got 4096"),
        (DecodeConfig, {"dp_size": 64, "tp_size": 32}, "--dp-size 64 x --tp-size 32: at most 1024"),
        (PrefillConfig, {"dp_size": 0}, "--dp-size must be at least 1, got 0"),
        (
            DecodeConfig,
            {"dp_size": 2, "max_running_requests": 5},
            "--dp-size 2 must divide --max-running-requests 5",
        ),
        (DecodeConfig, {"max_running_requests": 10**6}, "must be at most 8192, got 1000000"),
        (PrefillConfig, {"port": 65536}, "--port must be 0 to 65535, got 65536"),
        (DecodeConfig, {"data_port": -1}, "--data-port must be 0 to 65535, got -1"),
        (DecodeConfig, {"max_running_requests": -2}, "--max-running-requests must be at least 0"),
        (DecodeConfig, {"stall_timeout_s": 0.0}, "--stall-timeout must be above 0, got 0.0"),
        (
            PrefillConfig,
            {"max_frame_bytes": 1 << 32},
            "--max-frame-bytes must be at most 2147483648",
        ),
        (ServeConfig, {"host": ""}, "--host must not be empty; 0.0.0.0 stands for every address"),
        (RegistryConfig, {"host": ""}, "--host must not be empty; 0.0.0.0 stands for every"),
        (DecodeConfig, {"host": ""}, "--host must not be empty: peers reach this worker by it"),
        (ServeConfig, {"port": 70000}, "--port must be 0 to 65535, got 70000"),
        (ServeConfig, {"queue_timeout_s": 0.0}, "--queue-timeout must be above 0, got 0.0"),
        (ServeConfig, {"max_inflight_requests": 0}, "--max-inflight-requests must be at least 1"),
        (ServeConfig, {"api_workers": 0}, "--api-workers must be 1 to --max-inflight-requests"),
        (
            ServeConfig,
            {"api_workers": 3, "max_inflight_requests": 2},
            "--max-inflight-requests, which they share (2), got 3",
        ),
        (
            RegistryConfig,
            {"lease_ttl_s": 0.3},
            "--lease-ttl must be at least 1, since workers send",
        ),
        (RegistryConfig, {"route_ttl_s": 0.0}, "--route-ttl must be above 0, got 0.0"),
        (RegistryConfig, {"max_routes": 0}, "--max-routes must be at least 1, got 0"),
        (
            RegistryConfig,
            {"disaggregation_bootstrap_port": 65536},
            "--disaggregation-bootstrap-port must be 0 to 65535, got 65536",
        ),
    ],
)
def test_a_value_out_of_range_is_refused_with_what_would_do(
    config: type[Any], values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        config(**(needed(config) | values))
    assert message in str(caught.value)


# --- token and certificates ------------------------------------------------------------------


def security(*argv: str) -> Security:
    parser = flags.Parser(prog="kvferry x")
    flags.add_security_flags(parser)
    return flags.security_from(parser.parse_args(argv))


def test_certificates_are_handed_on_to_children() -> None:
    argv = flags.tls_argv_of(Security("t", Path("a b"), Path("c"), Path("d")))
    assert argv == ["--tls-ca-file=a b", "--tls-cert-file=c", "--tls-key-file=d"]
    assert flags.tls_argv_of(Security("t")) == []


@pytest.mark.parametrize(
    ("token", "message"),
    [
        (None, "at least 16 characters is needed, got 0: give --cluster-token-file or $KVFERRY_"),
        ("short", "at least 16 characters is needed, got 5"),
        ("geheimer-schlüssel", "got some not printable in ASCII"),
    ],
)
def test_a_token_that_guards_nothing_is_refused(
    token: str | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(flags.TOKEN_ENV, raising=False)
    if token is not None:
        monkeypatch.setenv(flags.TOKEN_ENV, token)
    with pytest.raises(ConfigError) as caught:
        security()
    assert message in str(caught.value)


def test_the_token_is_read_from_a_file_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text("0123456789abcdef\n")
    monkeypatch.setenv(flags.TOKEN_ENV, "fedcba9876543210")
    assert security().token == "fedcba9876543210"
    assert security("--cluster-token-file", str(tmp_path / "token")).token == "0123456789abcdef"
    with pytest.raises(ConfigError, match=r"--cluster-token-file .*nowhere.*No such file"):
        security("--cluster-token-file", str(tmp_path / "nowhere"))


def test_certificates_are_read_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(flags.TOKEN_ENV, "0123456789abcdef")
    names = ("ca", "cert", "key")
    argv = [word for name in names for word in (f"--tls-{name}-file", str(tmp_path / name))]
    with pytest.raises(ConfigError, match="--tls-key-file go together"):
        security(*argv[:2])
    with pytest.raises(ConfigError, match=r"TLS: .*/ca is not a file"):
        security(*argv)
    for name in names:
        (tmp_path / name).write_text("no PEM")
    with pytest.raises(ConfigError, match=r"--tls-ca-file .*/ca: no CA certificates"):
        security(*argv)
    _make_certificate(tmp_path)
    assert security(*argv).cert_file == tmp_path / "cert"
    (tmp_path / "key").write_text("no PEM")
    with pytest.raises(ConfigError, match=r"--tls-key-file .*/key: not a certificate and"):
        security(*argv)


def _make_certificate(folder: Path) -> None:
    command = "openssl req -x509 -newkey rsa:2048 -nodes -subj /CN=localhost -keyout key -out cert"
    try:
        subprocess.run(command.split(), cwd=folder, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip(f"no openssl here to make a certificate ({ssl.OPENSSL_VERSION})")
    (folder / "ca").write_bytes((folder / "cert").read_bytes())


# --- how a process ends ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ConfigError("--x must\nbe 1"), 2, "kvferry x: --x must be 1\n"),
        (ModelError("a/config.json: no"), 2, "kvferry x: a/config.json: no\n"),
        (Incompatible("page size differs: 8 and 16"), 2, "kvferry x: page size differs: 8 and 16"),
        (Unauthenticated("wrong token"), 2, "kvferry x: wrong token\n"),
        (MemoryShortage("too little"), 1, "kvferry x: too little\n"),
        (NodeLost("another node\nis gone"), 1, "kvferry x: another node is gone\n"),
        (Unavailable("nobody there"), 1, "kvferry x: nobody there\n"),
        (MemoryError("of 1 TiB"), 1, "kvferry x: out of memory"),
        (RuntimeError("can't start new thread"), 1, "kvferry x: can't start new thread: "),
        (ValueError("Unavailable (os error 11)"), 1, "kvferry x: can't start new thread: "),
        (
            ValueError("odd value for environment 'JAX_X'"),
            2,
            "kvferry x: an environment variable",
        ),
        (ValueError("no\nluck"), 1, "kvferry x: ValueError: no luck\n"),
        (KeyboardInterrupt(), 130, ""),
        (SystemExit(2), 2, ""),
        (None, 0, ""),
    ],
)
def test_the_exit_code_tells_what_the_operator_can_mend(
    error: BaseException | None,
    code: int,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Ended(Exception): ...

    def end(code: int) -> None:
        raise Ended(code)

    def main() -> None:
        if error is not None:
            raise error

    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(logs, "set_up", lambda name: None)
    with pytest.raises(Ended) as caught:
        flags.run_main("x", main)
    assert caught.value.args == (code,)
    assert capsys.readouterr().err.startswith(line)


@pytest.mark.parametrize("name", launch.COMMANDS)
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        launch._command(name)(["--help"], f"kvferry {name}")
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: kvferry {name} ")
