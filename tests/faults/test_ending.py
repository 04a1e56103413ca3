"""However a campaign ends, so do the processes that it started."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.cluster import has_ended, wait_until
from tests.faults.system import SIZES

NUM_PROCESSES = 1 + 2 * len(SIZES) + 2


@pytest.mark.timeout(60)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_campaign_that_is_told_to_end_leaves_no_process(
    number: signal.Signals, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "tests.faults"]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE) as campaign:
        known = psutil.Process(campaign.pid)
        wait_until(lambda: len(known.children()) == NUM_PROCESSES)
        children = known.children()
        campaign.send_signal(number)
        _, said = campaign.communicate(timeout=30)
    wait_until(lambda: all(map(has_ended, children)))
    if number != signal.SIGKILL:  # which leaves it no time to clear up or to say anything
        assert (campaign.returncode, said) == (130, b"tests.faults: interrupted\n")
        assert not list(tmp_path.glob("tmp*"))
