"""How `bench serve` reads its arguments: which server, which cases, which prompts."""

import argparse
import contextlib
import io
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench import serve
from bench.cli import add_subcommands
from bench.client import Server, Trace
from bench.report import Report
from bench.surroundings import Surroundings
from bench.workload import WorkloadConfig, plan_requests


def parsed(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_subcommands(parser)
    return parser.parse_args(["serve", *argv])


class Recorded:
    """Runs the benchmark without a server and records the requests it would have sent."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ok: bool = True) -> None:
        self.started: list[list[str]] = []
        self.files: set[str] = set()
        self.loads: list[tuple[str, WorkloadConfig, str]] = []
        self.servers: list[Server] = []
        self.report = Report("serve", Surroundings("c", "d", {}), out=io.StringIO())
        self._ok = ok
        monkeypatch.setattr(serve, "started_server", self._start)
        monkeypatch.setattr(serve, "load", self._load)
        monkeypatch.setattr(serve, "devices_of", lambda server: "1 x NVIDIA H200")

    def run(self, *argv: str) -> int:
        return serve.run(parsed(*argv), self.report)

    @contextlib.contextmanager
    def _start(self, arguments: list[str], api_key: str) -> Iterator[Server]:
        self.started.append(arguments)
        if "--model-path" in arguments:
            folder = Path(arguments[arguments.index("--model-path") + 1])
            self.files = {file.name for file in folder.glob("*")}
        yield Server("127.0.0.1", 1, api_key)

    def _load(
        self, report: Report, server: Server, case: str, config: WorkloadConfig, *more: object
    ) -> list[Trace]:
        self.loads.append((case, config, str(more[-1])))
        self.servers.append(server)
        return [Trace(event_s=[1.0], error="" if self._ok else "gone")]


def test_several_concurrencies_are_cases_of_one_server_with_prompts_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorded = Recorded(monkeypatch)
    argv = ["--concurrency", "1,16", "--num-requests", "4,32", "--isl", "64", "--osl", "8"]
    assert recorded.run(*argv, "--server-args=--colocated") == 0
    assert recorded.started == [["--colocated"]]
    assert [case for case, _, _ in recorded.loads] == [
        "64/8 x1, --colocated",
        "64/8 x16, --colocated",
    ]
    one, many = (config for _, config, _ in recorded.loads)
    assert [(c.concurrency, c.num_requests) for c in (one, many)] == [(1, 4), (16, 32)]
    prompts = [{request.prompt_ids for request in plan_requests(c)} for c in (one, many)]
    assert not prompts[0] & prompts[1]
    assert one.seed == 0


def test_a_server_that_was_started_has_a_row_of_when_it_was_ready(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorded = Recorded(monkeypatch)
    recorded.run("--model-path", "some/model")
    (row,) = recorded.report.rows
    assert (row.case, row.metric, row.unit) == ("start to ready", "ready", "s")
    assert (row.device, row.shapes) == ("1 x NVIDIA H200", {"server": "up --model-path some/model"})
    recorded.run("--url", "http://127.0.0.1:1")
    assert len(recorded.report.rows) == 1
    assert len(recorded.started) == 1


def test_a_shape_is_served_from_a_folder_of_its_own_that_is_gone_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorded = Recorded(monkeypatch)
    recorded.run("--shape", "demo-moe-fp8", "--num-requests", "1", "--server-args=--colocated")
    ((first, flag, path, *more),) = recorded.started
    assert (first, flag) == ("--colocated", "--model-path")
    assert more == ["--load-format", "dummy", "--quantization", "fp8"]
    assert recorded.files == {"config.json", "tokenizer.json", "tokenizer_config.json"}
    assert not Path(path).exists()
    ((case, config, said),) = recorded.loads
    assert case == "512/128 x8, demo-moe-fp8, --colocated"
    assert said == f"up --colocated --model-path demo-moe-fp8 {' '.join(more)}"
    assert config.vocab_size == 4096


def test_flags_of_a_server_are_passed_on_as_a_shell_would(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorded = Recorded(monkeypatch)
    recorded.run("--server-args=--model-path 'my models/a'", "--api-key", "k")
    assert recorded.started == [["--model-path", "my models/a"]]
    ((case, _, said),) = recorded.loads
    assert case == "512/128 x8, --model-path 'my models/a'"
    assert said == "up --model-path 'my models/a'"
    assert recorded.servers == [Server("127.0.0.1", 1, "k")]


def test_flags_of_a_server_are_refused_for_one_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = Recorded(monkeypatch)
    with pytest.raises(ValueError, match="--server-args is for a server that is started"):
        recorded.run("--url", "http://127.0.0.1:1", "--server-args=--colocated")
    assert not recorded.loads


def test_rows_of_a_server_that_runs_say_nothing_of_this_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorded = Recorded(monkeypatch)
    for devices, expected in (({"2 x cpu"}, "2 x cpu"), (set(), "unknown")):
        monkeypatch.setattr(serve, "_told_devices", lambda _, found=devices: found)
        recorded.run("--url", "http://127.0.0.1:1")
        told = recorded.report.surroundings
        assert told == Surroundings("unknown", expected, {"server": "unknown"})


def test_an_empty_address_is_refused_and_no_other_server_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorded = Recorded(monkeypatch)
    with pytest.raises(ValueError, match="--url must be http://host:port, got ''"):
        recorded.run("--url", "")
    assert not recorded.started


def test_prompts_are_of_the_vocabulary_asked_for() -> None:
    for argv, size in (
        ("", 1000),
        ("--shape qwen3-8b", 151936),
        ("--shape demo --vocab-size 9", 9),
    ):
        (config,) = serve.configs_of(parsed(*argv.split()))
        assert config.vocab_size == size


def test_one_failure_of_any_case_fails_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Recorded(monkeypatch, ok=False).run("--concurrency", "1,2") == 1


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--concurrency 1,2 --num-requests 1,2,3", "one number, or 2 as --concurrency has, got 3"),
        ("--concurrency 1,2 --rate 4", "--rate takes one --concurrency"),
        ("--concurrency 1,0", "--concurrency must be at least 1, got 0"),
    ],
)
def test_cases_that_make_no_sense_are_refused(argv: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        serve.configs_of(parsed(*argv.split()))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--shape demo --url http://127.0.0.1:1", "not allowed with argument"),
        ("--shape demo --model-path some/model", "not allowed with argument"),
        ("--shape gpt-oss-20b", "invalid choice: 'gpt-oss-20b' (choose from 'demo'"),
        ("--concurrency 1,x", "expected a number, or several with commas between, got '1,x'"),
    ],
)
def test_arguments_that_cannot_go_together_are_refused_by_name(
    argv: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parsed(*argv.split())
    assert message in capsys.readouterr().err
