"""Folders with a tokenizer's files that a test may change."""

import json
from pathlib import Path

from serving.tokenizer import Tokenizer
from transfer.clock import ManualClock

GOLDENS = Path(__file__).parents[1] / "goldens" / "tokenizer"
BOS, EOS = 1017, 1019


def set_config(folder, **changes):
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    return folder


def render(folder, template, messages=(), **kwargs):
    clock = ManualClock(unix_s=1_500_000_000.0)
    tokenizer = Tokenizer.from_dir(set_config(folder, chat_template=template), clock=clock)
    return tokenizer.apply_chat_template(list(messages), **kwargs)
