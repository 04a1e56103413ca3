"""A soak: `python -m tests.faults --faults 1000 --seed 1`; the same arguments replay a failure."""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.endings import exit_with
from tests.faults.campaign import Broken
from tests.faults.notices import Strike
from tests.faults.play import Played, play
from tests.faults.system import SIZES


def main() -> int:
    """Play one campaign and print what was seen. Returns 1 if a promise was broken."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--faults", type=int, default=100, help="how many")
    parser.add_argument("--seed", type=int, default=1, help="of what is hurt, and when")
    parser.add_argument(
        "--backend", choices=("tcp", "shm", "nixl", "auto"), default="tcp", help="carries pages"
    )
    parser.add_argument(
        "--network",
        choices=("loopback", "namespaces"),
        default="loopback",
        help="namespaces: each process has its own network, which can be cut",
    )
    parser.add_argument("--clients", type=int, default=6, help="requests in flight")
    parser.add_argument("--settle-every", type=int, default=25, help="count pages after so many")
    parser.add_argument("--model", type=Path, help="checkpoint folder; default: the demo model")
    for role in SIZES:
        parser.add_argument(
            f"--{role}-flag",
            dest=role,
            action="append",
            default=[],
            metavar="FLAG",
            help=f"of every {role} worker, as --{role}-flag=--tp-size=2; may be repeated",
        )
        parser.add_argument(
            f"--{role}-nnodes", type=int, default=1, help=f"processes of each {role} worker"
        )
    parser.add_argument("--json", type=Path, help="write what was seen of each fault here")
    args = parser.parse_args()
    if args.network == "namespaces" and max(args.prefill_nnodes, args.decode_nnodes) > 1:
        parser.error("--network namespaces takes workers of one process")  # a cut ends its group
    begun_s = time.monotonic()

    def tell(strike: Strike) -> None:
        at_s = time.monotonic() - begun_s
        print(f"{at_s:7.1f} s  {strike.fault} -> {strike.target}, hit {strike.hit}", flush=True)

    words: dict[str, Any] = {k: v for k, v in vars(args).items() if k not in ("json", *SIZES)}
    words["nodes"] = {role: words.pop(f"{role}_nnodes") for role in SIZES}
    words["sizes"] = {role: (*SIZES[role], *getattr(args, role)) for role in SIZES}
    with tempfile.TemporaryDirectory() as folder:
        try:
            played = asyncio.run(play(Path(folder), tell=tell, **words))
        except Broken as error:
            print(error, file=sys.stderr)
            return 1
    _say(played)
    if args.json is not None:
        args.json.write_text(
            json.dumps({**words, **played.as_dict()}, indent=1, default=str) + "\n"
        )
    return 0


def _say(played: Played) -> None:
    for name, value in played.summary().items():
        print(f"{name:36} {value}")


if __name__ == "__main__":
    exit_with("tests.faults", main)
