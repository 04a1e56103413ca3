"""`kvferry up` without prefill: one process for both roles, and what contradicts that."""

from pathlib import Path

import pytest

from decode.config import DecodeConfig
from serving import up
from tests.serving.test_flags import ROLES, parse, up_args
from transfer import flags
from transfer.errors import ConfigError
from transfer.worker_config import ANY_PROMPT

LOCAL = ("--local-prefill-tokens", "-1")


@pytest.mark.parametrize(
    "argv",
    [
        ("--colocated",),
        ("--colocated", "--prefill=0", *LOCAL),
        ("--prefill=0", *LOCAL),
        ("--prefill=0", "--local-prefill-tokens=40", "--decode-local-prefill-tokens=-1"),
    ],
)
def test_decode_computes_every_prompt_where_no_prefill_is_started(argv: tuple[str, ...]) -> None:
    args = up_args(*argv, "--decode=2", "--tp-size=2", "--chunked-prefill-size=64")
    up._settle_prefill(args, ROLES)
    assert list(up._started(args, ROLES)) == ["decode"]
    said = up._starting(args, ROLES)
    assert said == "kvferry: starting 2 decode and the API on a/model"
    config = up._worker_config(DecodeConfig, args, "decode", "127.0.0.1:1")
    assert config.local_prefill_tokens == ANY_PROMPT
    assert (config.tp_size, config.chunked_prefill_size) == (2, 64)
    assert parse(DecodeConfig, flags.argv_of(config)) == config


@pytest.mark.parametrize(("argv", "count"), [((), 1), (("--prefill=3",), 3), (LOCAL, 1)])
def test_prefill_is_started_otherwise(argv: tuple[str, ...], count: int) -> None:
    args = up_args(*argv)
    up._settle_prefill(args, ROLES)
    assert args.prefill == count
    said = up._starting(args, ROLES)
    assert said == f"kvferry: starting {count} prefill, 1 decode and the API on a/model"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--colocated --prefill 2", "--colocated starts no prefill group, got --prefill 2"),
        (
            "--colocated --local-prefill-tokens 40",
            "--colocated lets decode compute every prompt, got --local-prefill-tokens 40",
        ),
        (
            "--colocated --local-prefill-tokens -1 --decode-local-prefill-tokens 0",
            "--colocated lets decode compute every prompt, got --decode-local-prefill-tokens 0",
        ),
        ("--prefill 0", "give --local-prefill-tokens -1 too, or --colocated instead"),
        ("--prefill 0 --local-prefill-tokens 40", "or --colocated instead; got 40"),
        ("--prefill -1 --local-prefill-tokens -1", "--prefill must be 1 to 256, got -1"),
        ("--colocated --decode 0", "--decode must be 1 to 256, got 0"),
        (
            "--colocated --prefill-tp-size 2",
            "--prefill-tp-size is for prefill, and --colocated starts no prefill group",
        ),
        (
            "--colocated --max-frame-bytes 65536",
            "--max-frame-bytes is for prefill, and --colocated starts no prefill group",
        ),
        (
            "--colocated --max-seqs-per-chunk 2",
            "--max-seqs-per-chunk is for prefill, and --colocated starts no prefill group",
        ),
        (
            "--colocated --prefill-policy cache_aware",
            "--prefill-policy is for prefill, and --colocated starts no prefill group",
        ),
        (
            "--prefill 0 --local-prefill-tokens -1 --load-balance-method total_tokens",
            "--load-balance-method is for prefill, and --prefill 0 starts no prefill group",
        ),
    ],
)
def test_what_contradicts_it_is_refused_with_both_named(
    argv: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        up.main([f"--model-path={tmp_path}", *argv.split()], "kvferry up", ROLES)
    assert message in str(caught.value)
