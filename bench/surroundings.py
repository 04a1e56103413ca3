"""Finds out what a row must say beside its number: commit, device, versions."""

import importlib.metadata
import platform
import subprocess
from dataclasses import dataclass
from pathlib import Path

from model.processors import threads

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("jax", "jaxlib", "numpy", "jax-cuda13-plugin", "nvidia-cudnn-cu13", "nixl-cu12")


@dataclass(frozen=True)
class Surroundings:
    """Commit (with `-dirty` if files differ), device in words, versions of relevant packages."""

    commit: str
    device: str
    versions: dict[str, str]


def describe(with_jax: bool) -> Surroundings:
    """Surroundings of this process.

    with_jax: the device is jax's first; otherwise the host's processor, and jax stays unimported.
    """
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue  # a CPU machine has no CUDA packages
    device = processor()
    if with_jax:
        import jax
        import psutil

        found = jax.devices()
        if found[0].platform != "cpu":
            device = f"{len(found)} x {found[0].device_kind}"
        elif (own := threads(len(found))) != psutil.cpu_count():
            device = f"{own} of {device}"
    return Surroundings(commit(), device, versions)


def processor() -> str:
    """Cores and model of the host's processor."""
    import psutil

    name = platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                name = line.split(":", 1)[1].strip()
                break
    except OSError:
        name = platform.processor() or name
    return f"{psutil.cpu_count()} x {name}"


def commit() -> str:
    """Short commit of this tree, `unknown` outside a clone."""
    try:
        short = _git("rev-parse", "--short=12", "HEAD")
        # Results grow while rows are measured, but change nothing of what is measured.
        changed = _git("status", "--porcelain", "-uno", "--", ".", ":!bench/results")
        return short + ("-dirty" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*args: str) -> str:
    done = subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()
