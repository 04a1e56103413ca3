"""docs/api.md and docs/operating.md name all fields, errors and metrics that there are."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_type_hints

import msgspec
import pytest

from serving import openai_fields, responses_fields, sglang_api
from serving.errors import from_request_error
from serving.forms import StructuredOutputs
from serving.messages_fields import MessagesFields
from transfer.errors import Code, RequestError

ROOT = Path(__file__).resolve().parents[2]
API = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
PAGES = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md"))]
BODIES = (
    openai_fields.ChatFields,
    openai_fields.CompletionFields,
    openai_fields.StreamOptions,
    openai_fields.ChatReasoning,
    responses_fields.ResponsesFields,
    responses_fields.ReasoningOptions,
    MessagesFields,
    sglang_api.GenerateFields,
    sglang_api.GenerateSampling,
)
# Only between workers and API processes; see serving/errors.py.
NEVER_TOLD = {Code.DRAINING, Code.STALE, Code.GONE}


def words(text: str) -> set[str]:
    """Every name within backticks."""
    return set(re.findall(r"[A-Za-z_]\w*", " ".join(re.findall(r"`([^`]+)`", text))))


def section(heading: str) -> str:
    """The text under a heading, up to the next one of the same level."""
    level = heading.partition(" ")[0]
    return API.partition(f"\n{heading}\n")[2].partition(f"\n{level} ")[0]


def calls(folder: str) -> Iterator[tuple[str, list[ast.expr], dict[str | None, ast.expr]]]:
    """The calls in a package's files: the function's last name, and the arguments."""
    for path in sorted((ROOT / folder).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                name = getattr(node.func, "id", "") or getattr(node.func, "attr", "")
                yield str(name), node.args, {one.arg: one.value for one in node.keywords}


def text_of(node: ast.expr | None) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_every_field_of_a_body_is_on_the_page(body: type[msgspec.Struct]) -> None:
    assert set(body.__struct_fields__) - words(API) == set()


def test_every_field_that_is_refused_is_listed_as_refused() -> None:
    refused = words(section("### Refused parameters") + section("## Responses"))
    refused |= words(section("## Messages"))
    hints = get_type_hints(openai_fields.CompletionFields, include_extras=True)
    (mark,) = hints["suffix"].__metadata__
    names = {
        name
        for body in BODIES
        for name, hint in get_type_hints(body, include_extras=True).items()
        if mark in getattr(hint, "__metadata__", ())
    }
    assert len(names) > 50
    assert names - refused == set()


def test_every_name_that_is_listed_as_refused_is_one_that_is_read() -> None:
    table = [line.split("|") for line in section("### Refused parameters").splitlines()]
    listed = {
        name
        for cells in table
        if len(cells) == 5 and "`sampling_params`" not in cells[1]
        for name in re.findall(r"`(\w+)`", cells[2])
    }
    read = {name for body in (*BODIES, StructuredOutputs) for name in body.__struct_fields__}
    assert len(listed) > 40
    assert listed - read == set()


def test_every_code_of_an_error_is_in_the_table() -> None:
    told = words(section("## Errors")) | words(section("## Messages"))
    raised = {str(code) for code in Code if code not in NEVER_TOLD}
    for name, args, named in calls("serving"):
        places = {"ApiError": 3, "unavailable": 1, "bad_field": 2}
        if name in places:
            place = places[name]
            given = named.get("code") or (args[place] if len(args) > place else None)
            raised |= {code for code in [text_of(given)] if code}
    assert len(raised) > 25
    assert raised - told == set()


@pytest.mark.parametrize("code", [code for code in Code if code not in NEVER_TOLD])
def test_the_table_has_the_status_of_the_code(code: Code) -> None:
    told: dict[str, int] = {}
    status = 0
    for line in section("## Errors").splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) == 4:
            status = int(cells[0]) if cells[0].isdigit() else status
            told |= dict.fromkeys(re.findall(r"`(\w+)`", cells[2]), status)
    assert told[str(code)] == from_request_error(RequestError(code, "")).status


def test_the_pages_name_every_metric_and_no_other() -> None:
    exported: set[str] = set()
    for name, args, _ in calls("serving"):
        if name in ("GaugeMetricFamily", "BulkHistogram") and (metric := text_of(args[0])):
            exported.add(metric)
        elif name == "CounterMetricFamily" and (metric := text_of(args[0])):
            exported.add(f"{metric}_total")
        elif name == "_counter" and (metric := text_of(args[1])):
            exported.add(f"kvferry_{metric}_total")
        elif name == "gauge" and (metric := text_of(args[0])):
            exported.add(f"kvferry_{metric}")
    exported |= {f"kvferry_pages_{kind}" for kind in ("capacity", "free", "held", "cached")}
    named = {name for page in PAGES for name in re.findall(r"kvferry_\w*[a-z]\b(?!_|\.\.)", page)}
    assert len(exported) > 30
    assert named == exported


def test_the_page_has_every_path_and_no_other() -> None:
    routes = {
        re.sub(r"\{\w+:path\}", "ID", path)
        for name, args, _ in calls("serving")
        if name == "Route" and (path := text_of(args[0]))
    }
    cells = [line.split("|")[1] for line in section("## Endpoints").splitlines() if "|" in line]
    told = {path for cell in cells for path in re.findall(r"[ `](/[\w/]+)", cell)}
    assert len(routes) > 30
    assert {path.replace("NAME", "ID") for path in told} == routes
