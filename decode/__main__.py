"""`python -m decode`: the same as `kvferry decode`."""

import sys
from collections.abc import Sequence

from decode.config import DecodeConfig
from transfer import flags
from transfer.collector import rest_while_starting
from transfer.worker_config import WORKER_HELP


def main(argv: Sequence[str], prog: str = "python -m decode") -> None:
    """Run a decode worker until it is told to stop."""
    parser = flags.Parser(
        prog=prog, description="start a decode worker, which receives pages and draws tokens"
    )
    flags.add_flags(parser, DecodeConfig, WORKER_HELP)
    flags.add_security_flags(parser)
    args = parser.parse_args(argv)
    config = flags.config_from(DecodeConfig, args)
    security = flags.security_from(args).reached_by(config.reached_by)
    # Only now: jax takes seconds to import, and a bad flag should be told at once.
    rest_while_starting()
    from decode.node import DecodeNode
    from decode.worker import DecodeWorker
    from transfer.process import run

    run(config, security, DecodeWorker, DecodeNode)


if __name__ == "__main__":
    flags.run_main("decode", lambda: main(sys.argv[1:]))
