"""The `kvferry` command: picks what to start. The only module that knows both roles."""

import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version

import decode.__main__ as decode_main
import prefill.__main__ as prefill_main
from serving import api, convert, registry, up
from transfer import flags

COMMANDS: dict[str, tuple[Callable[[Sequence[str], str], None], str]] = {
    "up": (up.main, "start prefill, decode and the API on this machine"),
    "prefill": (prefill_main.main, "start a prefill worker"),
    "decode": (decode_main.main, "start a decode worker"),
    "serve": (api.main, "start the HTTP API"),
    "registry": (registry.main, "start the registry of workers"),
    "convert": (convert.main, "write a checkpoint as a sharded Orbax checkpoint"),
}


def main() -> None:
    """Entry point of the console script and of `python -m serving.launch`."""
    argv = sys.argv[1:]
    name = argv[0] if argv else ""
    if name in ("-h", "--help", "help", ""):
        sys.stdout.write(_usage())
        raise SystemExit(0 if name else flags.EXIT_CONFIG)
    if name == "--version":
        sys.stdout.write(f"kvferry {version('kvferry')}\n")
        return
    if name == "bench":  # benchmarks stand above serving in the import order
        os.execv(sys.executable, [sys.executable, "-m", "bench", *argv[1:]])
    if name not in COMMANDS:
        takes = ", ".join([*COMMANDS, "bench", "test"])
        sys.stderr.write(f"kvferry: unknown command {name!r}; it takes {takes}\n")
        raise SystemExit(flags.EXIT_CONFIG)
    function, _ = COMMANDS[name]
    flags.run_main(name, lambda: function(argv[1:], f"kvferry {name}"))


def _usage() -> str:
    rows = [(name, what) for name, (_, what) in COMMANDS.items()]
    rows.append(("bench", "run benchmarks: kernels, transfer, serve, compare"))
    rows.append(("test", "run the tests (./kvferry in a clone)"))
    lines = "\n".join(f"  {name:<10}{what}" for name, what in rows)
    return f"usage: kvferry COMMAND [flags]\n\n{lines}\n\nkvferry COMMAND --help lists flags.\n"


if __name__ == "__main__":
    main()
