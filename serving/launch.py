"""The `kvferry` command: picks what to start. The only module that knows both roles."""

import os
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version

from transfer.exit_codes import EXIT_CONFIG, EXIT_INTERRUPTED

COMMANDS = {
    "up": "start prefill, decode and the API on this machine",
    "prefill": "start a prefill worker",
    "decode": "start a decode worker",
    "serve": "start the HTTP API",
    "registry": "start the registry of workers",
    "convert": "write a checkpoint in Orbax form, which loads shard by shard",
}
# They stand above serving in the import order.
ABOVE = {"plan": "bench.plan", "bench": "bench"}


def main() -> None:
    """Entry point of the console script and of `python -m serving.launch`."""
    # A process that is told to end while modules load has nothing to say or to wait for. Later
    # `run_main` handles SIGINT, and the command itself the other two. Not SIG_DFL, with which the
    # first process of a container would not receive them. A server ends well then; a conversion,
    # which something may wait for, has not done what it was started for.
    failed = sys.argv[1:2] == ["convert"]
    codes = {n: 128 + n if failed else 0 for n in (signal.SIGTERM, signal.SIGHUP)}
    for number, code in {signal.SIGINT: EXIT_INTERRUPTED, **codes}.items():
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda *_, code=code: os._exit(code))
    from transfer import flags, terminal

    terminal.open_missing()
    argv = sys.argv[1:]
    name = argv[0] if argv else ""
    if name in ("-h", "--help", "help", ""):
        terminal.say(_usage())
        raise SystemExit(0 if name else EXIT_CONFIG)
    if name == "--version":
        terminal.say(f"kvferry {version('kvferry')}")
        return
    if name in ABOVE:
        os.execv(sys.executable, [sys.executable, "-P", "-m", ABOVE[name], *argv[1:]])
    if name == "test":
        terminal.complain("kvferry: the tests are in a clone, where ./kvferry test runs them")
        raise SystemExit(EXIT_CONFIG)
    if name not in COMMANDS:
        takes = ", ".join([*COMMANDS, *ABOVE, "test"])
        terminal.complain(f"kvferry: unknown command {name!r}; it takes {takes}")
        raise SystemExit(EXIT_CONFIG)
    flags.run_main(name, lambda: _command(name)(argv[1:], f"kvferry {name}"))


def _command(name: str) -> Callable[[Sequence[str], str], None]:
    """The function that runs a command. Imports only its own: none waits for another's jax."""
    if name == "up":
        from decode.config import DecodeConfig
        from prefill.config import PrefillConfig
        from serving import up

        return partial(up.main, roles={"prefill": PrefillConfig, "decode": DecodeConfig})
    if name == "prefill":
        import prefill.__main__ as prefill_main

        return prefill_main.main
    if name == "decode":
        import decode.__main__ as decode_main

        return decode_main.main
    if name == "serve":
        from serving import api

        return api.main
    if name == "registry":
        from serving import registry

        return registry.main
    from serving import convert

    return convert.main


def _usage() -> str:
    rows = [*COMMANDS.items()]
    rows.append(("plan", "tell what fits on given devices, and how fast it is at best"))
    rows.append(("bench", "run and compare benchmarks (kvferry bench --help)"))
    rows.append(("test", "run the tests (./kvferry in a clone)"))
    lines = "\n".join(f"  {name:<10}{what}" for name, what in rows)
    return f"usage: kvferry COMMAND [flags]\n\n{lines}\n\nkvferry COMMAND --help lists flags."


if __name__ == "__main__":
    main()
