"""`python -m serving`: the same as `kvferry serve`."""

import shutil
import sys
from functools import partial

from serving import api
from serving.seat import Seat
from transfer import flags

if __name__ == "__main__":
    if (seat := Seat.from_environment()) is not None:
        # The parent removes the folder. If it was killed, the first child to notice removes it.
        flags.when_orphaned(partial(shutil.rmtree, seat.folder, ignore_errors=True))
    flags.run_main("serve", lambda: api.main(sys.argv[1:], "python -m serving"))
