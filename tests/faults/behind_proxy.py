"""`python -m tests.faults.behind_proxy ADDRESS decode ...`: decode behind another data address.

All else is `kvferry decode`. A proxy listens at ADDRESS, as it might in a real network.
"""

import sys

from serving import launch
from transfer.tcp import TcpReceiver


def main() -> None:
    """Announce ADDRESS instead of the receiver's own, then start what is asked."""
    address = sys.argv.pop(1)
    start = TcpReceiver.start

    def start_behind(self: TcpReceiver) -> str:
        start(self)
        return address

    TcpReceiver.start = start_behind  # type: ignore[method-assign]
    launch.main()


if __name__ == "__main__":
    main()
