"""Locates the small checkpoint that comes with the package (scripts/make_demo_model.py)."""

from pathlib import Path


def demo_model_path() -> Path:
    """Folder of a Qwen3-MoE checkpoint in Hugging Face layout, about 7 MiB."""
    return Path(__file__).resolve().parent / "demo_model"
