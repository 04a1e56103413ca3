"""`python -m tests.faults.behind_proxy ADDRESS decode ...`: decode that tells another data address.

Everything else is `kvferry decode`: a proxy stands at the address, as one in a network would.
"""

import sys

from serving import launch
from transfer.tcp import TcpReceiver


def main() -> None:
    """Put the address in front of the receiver's own, then start what is asked."""
    address = sys.argv.pop(1)
    start = TcpReceiver.start

    def start_behind(self: TcpReceiver) -> str:
        start(self)
        return address

    TcpReceiver.start = start_behind  # type: ignore[method-assign]
    launch.main()


if __name__ == "__main__":
    main()
