"""The house rules hold everywhere, and each rule catches what it is for."""

import re
import subprocess
import tomllib
from functools import cache
from pathlib import Path

import pytest

from tests import house
from tests.house import MODULE_RULES, Module

ROOT = Path(__file__).resolve().parents[1]
# Fixtures from other projects, and these two files, which must spell out what is forbidden.
NOT_READ = ("tests/goldens/", "tests/house.py", "tests/test_house.py", "LICENSE")
TEXT_SUFFIXES = {".py", ".md", ".toml", ".lock", ".sh", ".txt", ".yml", ".yaml", ".cfg", ""}


def tracked_files() -> list[str]:
    """Paths that git tracks or would track; without git, every file of the known folders."""
    try:
        listed = subprocess.run(
            ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        folders = [ROOT / name for name in (*house.LAYER, "scripts", "docs")]
        listed = [
            str(path.relative_to(ROOT))
            for folder in folders
            for path in folder.rglob("*")
            if path.is_file() and "__pycache__" not in path.parts
        ]
    return sorted({path for path in listed if (ROOT / path).is_file()})


@cache
def modules() -> list[Module]:
    """Every Python file of the tree, read and parsed once for all rules."""
    return [
        Module(path, (ROOT / path).read_text(encoding="utf-8"))
        for path in tracked_files()
        if path.endswith(".py") and not path.startswith("tests/goldens/")
    ]


def test_there_are_files_to_check():
    assert {"model", "transfer", "tests"} <= {module.package for module in modules()}


@pytest.mark.parametrize("rule", MODULE_RULES, ids=lambda rule: rule.__name__)
def test_every_module_keeps_the_rule(rule):
    findings = [finding for module in modules() for finding in rule(module)]
    assert not findings, "\n".join(findings)


def test_no_pure_module_reaches_jax():
    findings = list(house.pure_modules_reach_no_jax(modules()))
    assert not findings, "\n".join(findings)


def test_tracked_text_names_no_machine_and_no_ticket():
    findings: list[str] = []
    for path in tracked_files():
        if path.startswith(NOT_READ) or Path(path).suffix not in TEXT_SUFFIXES:
            continue
        text = (ROOT / path).read_text(encoding="utf-8")
        findings += house.text_names_no_machine_and_no_ticket(path, text)
    assert not findings, "\n".join(findings)


def test_readme_names_only_what_exists():
    readme = ROOT / "README.md"
    if not readme.exists():
        pytest.skip("no README.md")
    findings = list(house.readme_names_only_what_exists(ROOT, readme.read_text(encoding="utf-8")))
    assert not findings, "\n".join(findings)


def test_a_wheel_has_every_file_that_its_packages_need():
    """Python files come along by themselves, and measured rows stay in the clone."""
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    packaged = {
        path
        for package, patterns in setuptools["package-data"].items()
        for pattern in patterns
        for path in (ROOT / package.replace(".", "/")).glob(pattern)
    }
    packages = {name for name in setuptools["packages"]["find"]["include"] if "." not in name}
    needed = {
        ROOT / path
        for path in tracked_files()
        if path.split("/")[0] in packages
        and not path.endswith(".py")
        and not path.startswith("bench/results/")
    }
    assert needed
    assert needed == packaged


def test_every_decision_is_listed_once():
    folder = ROOT / "docs" / "adr"
    listed = re.findall(r"\((\d{4}-[\w-]+\.md)\)", (folder / "README.md").read_text())
    assert sorted(listed) == sorted(path.name for path in folder.glob("[0-9]*.md"))


def test_every_decision_that_is_named_is_there():
    there = {path.name[:4] for path in (ROOT / "docs" / "adr").glob("[0-9]*.md")}
    files = [ROOT / path for path in tracked_files() if Path(path).suffix in (".py", ".md")]
    named = re.compile(r"docs/adr/(\d{4})|\bADR (\d+)")
    found = [(path, "".join(found)) for path in files for found in named.findall(path.read_text())]
    assert len(found) > 50
    assert [(path, number) for path, number in found if number.zfill(4) not in there] == []


def anchors(page: str) -> set[str]:
    """What links to headings of a page end in, as GitHub makes it of their texts."""
    shown = re.sub(r"^```.*?^```", "", page, flags=re.DOTALL | re.MULTILINE)
    headings = [text.strip().lower() for text in re.findall(r"^#+ (.*)$", shown, re.MULTILINE)]
    return {re.sub(r"[^\w\- ]", "", text).replace(" ", "-") for text in headings}


def test_every_link_between_pages_leads_somewhere():
    pages = {ROOT / path for path in tracked_files() if path.endswith(".md")}
    texts = {path: path.read_text(encoding="utf-8") for path in pages}
    links = [
        (path, target)
        for path, text in texts.items()
        for target in re.findall(r"\]\(([^)\s]+)\)", text)
        if "://" not in target
    ]
    assert len(links) > 300
    broken = []
    for path, target in links:
        file, _, anchor = target.partition("#")
        there = (path.parent / file).resolve() if file else path
        if not there.exists() or (anchor and anchor not in anchors(texts[there])):
            broken.append(f"{path.relative_to(ROOT)}: {target}")
    assert broken == []


DOC = '"""A file."""\n'
BAD = [
    (house.imports_point_one_way, "model/a.py", "from transfer import wire"),
    (house.imports_point_one_way, "transfer/a.py", "import serving.app"),
    (house.imports_point_one_way, "prefill/a.py", "def f():\n    from decode import engine"),
    (house.imports_point_one_way, "decode/a.py", "import prefill"),
    (house.imports_point_one_way, "serving/launch.py", "import bench.cli"),
    (
        house.imports_point_one_way,
        "serving/a.py",
        "import importlib\nimportlib.import_module('bench')",
    ),
    (house.imports_point_one_way, "bench/a.py", "from tests.fakes import FakeModel"),
    (house.imports_point_one_way, "model/kernels/a.py", "from ...transfer import wire"),
    (house.only_launch_imports_both_roles, "serving/config.py", "import prefill\nimport decode"),
    (house.only_launch_imports_both_roles, "bench/a.py", "import prefill.config, decode.config"),
    (house.pure_modules_do_no_io, "decode/scheduler.py", "import jax.numpy as jnp"),
    (house.pure_modules_do_no_io, "transfer/pages.py", "def f():\n    import asyncio"),
    (house.pure_modules_do_no_io, "serving/router.py", "from transfer.clock import Clock"),
    (house.only_the_clock_reads_time, "serving/a.py", "import time"),
    (house.only_the_clock_reads_time, "serving/a.py", "from time import monotonic"),
    (house.only_the_clock_reads_time, "decode/a.py", "asyncio.get_running_loop().time()"),
    (house.only_the_clock_reads_time, "decode/a.py", "datetime.datetime.now()"),
    (house.the_wall_clock_is_only_shown, "decode/a.py", "until_s = self.clock.now_s() + 1"),
    (house.the_wall_clock_is_only_shown, "serving/a.py", "read = SYSTEM_CLOCK.now_s"),
    (house.mesh_axes_are_named_once, "model/moe.py", "jax.lax.psum(x, 'expert')"),
    (house.mesh_axes_are_named_once, "model/kv.py", "P(None, ('expert', 'tensor'))"),
    (house.mesh_axes_are_named_once, "prefill/a.py", "lax.all_gather(x, axis_name='tensor')"),
    (house.no_type_checking_blocks, "model/a.py", "if TYPE_CHECKING:\n    import x"),
    (house.no_type_checking_blocks, "model/a.py", "if typing.TYPE_CHECKING:\n    import x"),
    (house.files_and_functions_fit_a_sitting, "model/a.py", "x = 1\n" * 501),
    (house.files_and_functions_fit_a_sitting, "model/a.py", "def f():\n" + "    x = 1\n" * 70),
    (house.no_error_is_swallowed, "model/a.py", "try:\n    f()\nexcept:\n    raise"),
    (house.no_error_is_swallowed, "model/a.py", "try:\n    f()\nexcept Exception:\n    pass"),
    (house.only_public_jax, "model/a.py", "from jax._src import core"),
    (house.only_public_jax, "model/a.py", "from jax.interpreters import mlir"),
    (house.only_public_jax, "model/a.py", "jax.lax._convert(x)"),
    (house.only_public_jax, "model/a.py", "from jaxlib import xla_client"),
    (house.only_metrics_knows_the_metrics_library, "decode/a.py", "import prometheus_client"),
    (house.nothing_is_pickled_and_no_path_is_edited, "transfer/a.py", "import pickle"),
    (house.nothing_is_pickled_and_no_path_is_edited, "tests/a.py", "sys.path.insert(0, '.')"),
]


@pytest.mark.parametrize(("rule", "path", "snippet"), BAD)
def test_the_rule_catches_a_bad_snippet(rule, path, snippet):
    assert list(rule(Module(path, DOC + snippet + "\n")))


def test_a_file_without_docstring_is_caught():
    assert list(house.files_state_their_responsibility(Module("model/a.py", "x = 1\n")))


GOOD = [
    ("transfer/a.py", "from model.config import KVSpec"),
    ("serving/launch.py", "import decode.worker\nimport prefill.worker"),
    ("tests/sim/a.py", "import time\nimport decode\nimport prefill\nimport bench"),
    ("transfer/clock.py", "import time\ntime.monotonic()"),
    ("serving/arrival.py", "clock.now_s()"),
    ("serving/a.py", "clock.monotonic_s()\ntimelines.now_s()"),
    ("model/sharding.py", "P('expert', 'tensor')"),
    ("model/kernels/a.py", "from . import reference"),
    ("model/a.py", "lax.psum(x, sharding.EXPERT)"),
    ("decode/worker.py", "import asyncio\ntry:\n    f()\nexcept ValueError:\n    pass"),
    ("bench/a.py", "import time\nimport serving.protocol"),
    ("model/a.py", "jax.experimental.pallas.__name__"),
]


@pytest.mark.parametrize(("path", "snippet"), GOOD)
def test_no_rule_minds_a_good_snippet(path, snippet):
    module = Module(path, DOC + snippet + "\n")
    assert not [finding for rule in MODULE_RULES for finding in rule(module)]


def test_a_pure_module_that_reaches_jax_through_another_is_caught():
    pure = Module("decode/scheduler.py", "from model.middle import size\n")
    middle = Module("model/middle.py", "def size():\n    import jax\n")
    assert list(house.pure_modules_reach_no_jax([pure, middle]))
    assert not list(house.pure_modules_reach_no_jax([pure, Module("model/middle.py", "")]))


@pytest.mark.parametrize(
    "line",
    [
        # Split in two, so that no tool that reads this file takes the samples for the real thing.
        "open('/wor" + "k/main/x')",
        "see .." + "/shared/notes",
        "cd /ho" + "me/someone",
        "--index" + "-url https://mirror/simple",
        "https://py" + "pi.org/simple",
        "fixes iss" + "ue 123",
        "as in #" + "4321",
        "vllm#" + "35943",
        "P" + "R 77",
        "left for the next ses" + "sion",
        "written by an AI assis" + "tant",
        "# TO" + "DO: later",
    ],
)
def test_forbidden_text_is_caught(line):
    assert list(house.text_names_no_machine_and_no_ticket("a.md", line))


@pytest.mark.parametrize(
    "line",
    ["the model/root folder", "role: assistant", "a TCP session", "&#8217;", "color '#123456'"],
)
def test_plain_text_is_let_through(line):
    assert not list(house.text_names_no_machine_and_no_ticket("a.md", line))


def test_a_readme_that_names_what_is_not_there_is_caught(tmp_path):
    for name in ("model", "transfer", "decode"):
        (tmp_path / name).mkdir()
    (tmp_path / "model" / "kv.py").touch()
    tree = "```\nmodel/  net\n  kv.py  pool\ntransfer/ wire\ndecode/ steps\n{}\n```\n`model/kv.py`"
    assert not list(house.readme_names_only_what_exists(tmp_path, tree.format("")))
    for line in ("prefill/  chunks", "├── gone/", "transfer/\n  wire.py  messages"):
        assert list(house.readme_names_only_what_exists(tmp_path, tree.format(line)))
    assert list(house.readme_names_only_what_exists(tmp_path, "see `model/gone.py`"))
