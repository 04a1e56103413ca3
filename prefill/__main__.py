"""`python -m prefill`: the same as `kvferry prefill`."""

import sys
from collections.abc import Sequence

from prefill.config import PrefillConfig
from transfer import flags
from transfer.collector import rest_while_starting
from transfer.worker_config import WORKER_HELP


def main(argv: Sequence[str], prog: str = "python -m prefill") -> None:
    """Run a prefill worker until it is told to stop."""
    parser = flags.Parser(
        prog=prog,
        description="start a prefill worker, which computes prompts and sends their pages",
    )
    flags.add_flags(parser, PrefillConfig, WORKER_HELP)
    flags.add_security_flags(parser)
    args = parser.parse_args(argv)
    config = flags.config_from(PrefillConfig, args)
    security = flags.security_from(args).reached_by(config.reached_by)
    # Only now: jax takes seconds to import, and a bad flag should be told at once.
    rest_while_starting()
    from prefill.node import PrefillNode
    from prefill.worker import PrefillWorker
    from transfer.process import run

    run(config, security, PrefillWorker, PrefillNode)


if __name__ == "__main__":
    flags.run_main("prefill", lambda: main(sys.argv[1:]))
