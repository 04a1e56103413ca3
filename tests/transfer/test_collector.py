"""How often a worker's garbage collector runs while it starts, and afterwards."""

import subprocess
import sys

CODE = """
import gc
from transfer.collector import keep_what_started, rest_while_starting

usual = gc.get_threshold()
rest_while_starting()
assert gc.get_threshold()[0] > usual[0]
keep_what_started()
assert gc.get_threshold() == usual
assert gc.get_freeze_count() > 0
"""


def test_collections_are_rare_during_a_start_and_then_as_often_as_before() -> None:
    # In a process of its own: that of the tests has settings of its own.
    subprocess.run([sys.executable, "-c", CODE], check=True, timeout=60)
