"""The manual names no flag that no command has."""

import argparse
import re
from pathlib import Path

import pytest

from bench import plan
from bench.cli import add_subcommands
from serving import launch

ROOT = Path(__file__).resolve().parents[2]
PAGES = ["README.md", *(f"docs/{page}.md" for page in ("api", "operating", "protocol"))]
PAGES += ["docs/streaming.md", "docs/transfer.md", "docs/benchmarks.md"]
FLAG = re.compile(r"(?<![\w-])--[a-z]\w*(?:-\w+)*(?![\w-])")
# Of uv, pip, curl and XLA.
OF_OTHERS = {"--no-deps", "--python", "--require-hashes", "--unix-socket", "--version"}
OF_OTHERS |= {"--xla_gpu_enable_command_buffer"}


def flags_of_commands(capsys: pytest.CaptureFixture[str]) -> set[str]:
    mains = [launch._command(name) for name in launch.COMMANDS]
    for main in (*mains, plan.main):
        with pytest.raises(SystemExit):
            main(["--help"], "kvferry")
    return set(FLAG.findall(capsys.readouterr().out))


def flags_of_benchmarks() -> set[str]:
    parser = argparse.ArgumentParser()
    add_subcommands(parser)
    (commands,) = (one for one in parser._actions if isinstance(one.choices, dict))
    assert isinstance(commands.choices, dict)
    return {flag for one in commands.choices.values() for flag in one._option_string_actions}


def flags_of_programs() -> set[str]:
    """Those of files that are run by themselves."""
    files = ("tests/faults/__main__.py", "bench/gpu_check.py", "bench/tune.py")
    texts = [(ROOT / file).read_text() for file in (*files, "bench/gpu_compile.py")]
    named = set(re.findall(r'"(--[a-z{}-]+)"', "\n".join(texts)))
    return {flag.replace("{role}", role) for flag in named for role in ("prefill", "decode")}


def test_every_flag_that_a_page_names_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    known = flags_of_commands(capsys) | flags_of_benchmarks() | flags_of_programs() | OF_OTHERS
    named = {(page, flag) for page in PAGES for flag in FLAG.findall((ROOT / page).read_text())}
    assert len(named) > 150
    assert [(page, flag) for page, flag in sorted(named) if flag not in known] == []
