"""Front end designs side by side: what a run asks for, and small real runs of each design."""

import argparse
import asyncio
import io
import json
import math
import shutil
import socket
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.applications import Starlette

from bench import cli
from bench.frontend_cases import PACES, Case, all_of, cases_of
from bench.frontend_designs import DESIGNS, http_config, main
from bench.frontend_engine import Workers
from bench.frontend_plan import Cell
from bench.frontend_rows import Measured, report_case
from bench.frontend_steps import pace
from bench.frontend_typed import TypedEvents
from bench.report import Report
from bench.surroundings import Surroundings
from serving.choice import Choice, Piece
from serving.config import ServeConfig
from serving.demo import demo_model_path
from serving.openai_answers import chat_answer
from serving.prompt import Prompt
from serving.protocol import ChoiceAsk, Request, Shown
from serving.tokenizer import Tokenizer
from transfer import wire
from transfer.errors import ConfigError
from transfer.rpc import Security

NUM_STREAMS = 6
NUM_TOKENS = 12


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    cli.add_subcommands(parser)
    return parser.parse_args(["frontend", *words])


def report_to(path) -> Report:
    return Report("frontend", Surroundings("c", "d", {}), json_path=path, out=io.StringIO())


def names(case: Case) -> list[str]:
    return [design.name for design in case.designs]


# --- what is asked for ----------------------------------------------------------------------------


def test_every_pace_compares_with_naive_first_and_with_the_floor_last():
    cases = cases_of(arguments())
    assert {case.cell.num_streams for case in cases} == {64, 256, 1024, 2048}
    for case in cases:
        assert (names(case)[0], names(case)[-1]) == ("naive", "floor")
        assert "all" in names(case)
        assert "all, interval 8" in names(case)
        assert ("auto" in names(case)) == (case.cell.drive != "saturated")
    assert set(names(cases[0])) >= set(DESIGNS)


def test_overload_is_of_the_most_streams_unless_it_is_asked_for():
    cells = [case.cell.name for case in cases_of(arguments("--streams", "8", "--streams", "4"))]
    assert [name for name in cells if name.endswith("paced 12 ms")] == ["x8 paced 12 ms"]
    asked = cases_of(arguments("--streams", "8", "--streams", "4", "--pace", "overload"))
    assert [case.cell.name for case in asked] == ["x4 paced 12 ms", "x8 paced 12 ms"]


def test_cells_of_one_number_of_streams_follow_each_other():
    cases = cases_of(arguments("--streams", "8", "--streams", "4", "--streams", "8"))
    assert [case.cell.num_streams for case in cases] == [4] * 3 + [8] * 4


def test_filters_leave_what_they_name():
    words = ("--design", "floor", "--design", "spliced", "--pace", "backlog", "--streams", "5")
    (case,) = cases_of(arguments(*words, "--rounds", "2"))
    assert names(case) == ["spliced", "floor"]
    assert (case.cell, case.rounds) == (Cell(5, 128, 1, "backlog"), 2)
    assert [case.rounds for case in cases_of(arguments("--streams", "5"))] == [3, 1, 1, 1]


def test_intervals_are_of_the_product_alone():
    words = ("--interval", "4", "--interval", "1", "--design", "all", "--design", "naive")
    case = cases_of(arguments(*words))[0]
    assert [(d.name, d.interval) for d in case.designs] == [
        ("naive", 1),
        ("all", 1),
        ("all, interval 4", 4),
    ]
    assert case.cell_of(case.designs[2]).interval == 4


def test_auto_leaves_the_interval_to_the_server_and_is_never_steered_by_events():
    cases = cases_of(arguments("--design", "auto", "--streams", "8"))
    assert [case.cell.drive for case in cases] == ["paced", "paced", "backlog"]
    (auto,) = cases[0].designs
    assert auto.server_args == ("--stream-interval", "auto")
    assert "stream_interval" not in auto.payload(cases[0].cell)
    assert all_of(8).payload(cases[0].cell)["stream_interval"] == 8
    with pytest.raises(ValueError, match="without an interval"):
        Cell(8, 128, interval=0)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--design", "clever"], "--design 'clever' is unknown; known: naive, grouped"),
        (["--pace", "slow"], "--pace 'slow' is unknown; known: saturated, paced"),
        (["--design", "auto", "--pace", "saturated"], "auto is not steered by events"),
        (["--output-tokens", "1"], "--output-tokens must be at least 2, got 1"),
        (["--rounds", "0"], "--rounds must be at least 1, got 0"),
        (["--streams", "0"], "--streams must be at least 1, got 0"),
        (["--streams", "5000"], "--streams must be at most 4096, got 5000"),
        (["--interval", "0"], "--interval must be at least 1, got 0"),
        (
            ["--design", "sglang"],
            "--design sglang needs --sglang-python PATH, a Python with sglang",
        ),
        (["--design", "vllm"], "--design vllm needs --vllm-python PATH, a Python with vllm"),
        (
            ["--design", "vllm", "--vllm-python", "/nowhere/python"],
            "--vllm-python /nowhere/python does not run: ",
        ),
        (
            ["--design", "sglang", "--sglang-python", sys.executable],
            f"--sglang-python {sys.executable} has no sglang: ",
        ),
    ],
)
def test_what_makes_no_sense_is_refused_in_a_line(words, told, capsys):
    # A Python that is named correctly but does not work is no usage error.
    assert cli.run(arguments(*words)) == (1 if "-python /" in told else 2)
    assert f"kvferry bench frontend: {told}" in capsys.readouterr().err


def test_typed_designs_say_what_they_lack(monkeypatch):
    monkeypatch.setenv("KVFERRY_CLUSTER_TOKEN", "token of this small test")
    monkeypatch.delitem(sys.modules, "bench.frontend_typed")
    monkeypatch.setitem(sys.modules, "pydantic", None)
    words = ["--design", "naive", "--port", "0", "--registry-address", "127.0.0.1:1"]
    with pytest.raises(ConfigError, match="typed events needs pydantic"):
        main([*words, "--model-path", str(demo_model_path())])


def test_a_connection_made_ahead_is_not_closed_for_being_idle():
    config = http_config(
        Starlette(), ServeConfig(model_path=Path("m"), registry_address="127.0.0.1:1")
    )
    assert config.timeout_keep_alive == ServeConfig.timeout_keep_alive_s


# --- what is spelt --------------------------------------------------------------------------------


def test_typed_events_are_the_products_bytes():
    ask = ChoiceAsk(0, 0, "r", Prompt([5], ""), wire.SamplingParams(max_new_tokens=4), Shown())
    tokenizer = Tokenizer.from_dir(demo_model_path())
    choice = Choice(ask, tokenizer)
    ours = chat_answer(Request("r", [ask], stream=True), tokenizer, "m", 7)
    typed = TypedEvents("r", "m", 7)
    assert typed.opening(choice) == ours.opening(choice)
    assert typed.frame(choice) is None
    for text in ("tide", 'a "quote"\n', "é"):
        assert typed.piece(choice, Piece(text)) == ours.piece(choice, Piece(text))
    choice.finish("length")
    for rest in ("", "tail"):
        assert typed.finish(choice, Piece(rest)) == ours.finish(choice, Piece(rest))
    assert typed.closing([choice]) == ours.closing([choice])


# --- rows -----------------------------------------------------------------------------------------


def measured(taken_s: float, tokens: int = 100) -> Measured:
    one = Measured(tokens=tokens, pieces=tokens, taken_s=taken_s, server_cpu_s=1.0, load_cpu_s=1.0)
    one.ttft_s = [0.01]
    one.lag_s = [np.array([0.02])]
    return one


def test_rows_are_medians_and_the_product_stands_beside_other_designs():
    words = ("--pace", "backlog", "--streams", "5", "--interval", "1")
    designs = ("naive", "grouped+json", "all", "floor")
    (case,) = cases_of(arguments(*words, *(w for name in designs for w in ("--design", name))))
    slowness = dict(zip(designs, (8.0, 4.0, 2.0, 1.0), strict=True))
    rounds = {
        design: [measured(slowness[design.name] * factor) for factor in (1.0, 5.0, 0.1)]
        for design in case.designs
    }
    report = report_to(None)
    report_case(report, case, rounds, ["--max-retries", "0"])
    values = {(row.case, row.metric): row for row in report.rows}
    assert values["x5 backlog naive", "output"].value == 100 / 8
    assert values["x5 backlog all", "output"].ratio == 4
    assert values["x5 backlog floor", "output"].shapes["baseline"] == "naive"
    assert values["x5 backlog all", "output of grouped+json"].ratio == 2
    assert values["x5 backlog all", "output of floor"].ratio == 0.5
    assert values["x5 backlog all", "output"].shapes["server_args"] == "--max-retries 0"
    assert values["x5 backlog naive", "output"].shapes["server_args"] == "--design naive"
    assert {row.shapes["tokens"] for row in report.rows} == {1 << 16}
    assert len(report.rows) == 4 * 9 + 2


def test_other_intervals_stand_beside_an_event_a_token_unless_that_is_the_baseline():
    words = ("--pace", "paced", "--streams", "5", "--design", "all", "--design", "floor")
    metrics = ("output", "ttft p50", "lag p99")
    one, eight = "x5 paced 50 ms all", "x5 paced 50 ms all, interval 8"
    for more, expected in (
        (("--design", "naive"), {(one, "floor"), (eight, "all")}),
        ((), {(one, "floor")}),
    ):
        (case,) = cases_of(arguments(*words, *more))
        report = report_to(None)
        report_case(report, case, {design: [measured(1.0)] for design in case.designs}, [])
        beside = {(row.case, row.metric) for row in report.rows if " of " in row.metric}
        assert beside == {(name, f"{m} of {other}") for name, other in expected for m in metrics}


# --- the engine in backlog ------------------------------------------------------------------------


async def test_in_backlog_all_steps_leave_and_nothing_is_waited_for():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        left: list[int] = []

        class Listed(Workers):
            def emit(self, token_idx: int) -> None:
                left.append(token_idx)

        way = Listed(Security("a token of this test"), [1, 2])
        current = way.begin(Cell(2, 5, 1, "backlog"))
        current.begin([0, 1], 0.0)
        current.ready(2)
        await asyncio.wait_for(pace(way, current, ours), 5.0)
        assert left == [1, 2, 3, 4]
        theirs.setblocking(False)
        with pytest.raises(BlockingIOError):  # the client's socket was not read
            theirs.recv(1)


def test_the_native_floor_without_a_compiler_says_what_it_takes(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    words = ("--design", "native floor", "--pace", "backlog", "--streams", "5")
    assert cli.run(arguments(*words)) == 1
    assert "needs rustc on the PATH, got none" in capsys.readouterr().err


# --- small real runs ------------------------------------------------------------------------------


@pytest.mark.timeout(600)
def test_a_small_run_of_every_design_at_every_pace_accounts_for_every_token(tmp_path):
    floors = ("floor", "native floor") if shutil.which("rustc") else ("floor",)
    designs = (*DESIGNS, "all", "auto", "responses", "messages", *floors)
    words = [word for name in designs for word in ("--design", name)]
    words += ["--streams", str(NUM_STREAMS), "--osl", str(NUM_TOKENS), "--rounds", "2"]
    words += ["--interval", "1", "--interval", "5", "--tokens", str(2 * NUM_STREAMS * NUM_TOKENS)]
    words += ["--step-ms", "2", "--overload-step-ms", "0.1", "--server-args=--stream-interval 4"]
    words += ["--json", str(tmp_path / "rows.jsonl")]
    assert cli.run(arguments(*words)) == 0
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    cases: dict[str, dict[str, Any]] = defaultdict(dict)
    for row in rows:
        assert math.isfinite(row["value"])
        # 0: the server fell behind and sent everything in too few events to tell the size.
        assert row["shapes"]["piece_bytes"] == 0 or row["shapes"]["piece_bytes"] > 100
        cases[row["case"]][row["metric"]] = row
    paces = ("saturated", "paced 2 ms", "paced 0.1 ms", "backlog")
    named = (*designs, "all, interval 5")
    expected = {f"x{NUM_STREAMS} {pace} {name}" for pace in paces for name in named}
    assert set(cases) == expected - {f"x{NUM_STREAMS} saturated auto"}
    assert len(paces) == len(PACES)
    steps = NUM_TOKENS - 1
    for name in named:
        values = cases[f"x{NUM_STREAMS} paced 2 ms {name}"]
        assert values["output"]["value"] < NUM_STREAMS * steps / (0.002 * (steps - 2))
        per_token = values["chunks"]["value"] / values["output"]["value"]
        if name in (*DESIGNS, *floors):
            assert per_token == 1.0
        else:  # the product may merge pieces when it is behind
            assert per_token <= (3 / 11 if name == "all, interval 5" else 1.0) + 1e-9
        assert len(values["output"]["shapes"]["rounds_s"]) == 2
    sizes = {
        cases[f"x{NUM_STREAMS} {pace} {name}"]["output"]["shapes"]["piece_bytes"]
        for name in (*DESIGNS, *floors)
        for pace in paces
    }
    assert len(sizes) == 1  # every design sends the same bytes


@pytest.mark.timeout(60)
def test_a_server_that_does_not_start_is_told_with_its_last_words(capsys):
    words = ("--streams", "1", "--design", "all", "--server-args=--no-such-flag")
    assert cli.run(arguments(*words)) == 2
    assert "unknown flag --no-such-flag" in capsys.readouterr().err
