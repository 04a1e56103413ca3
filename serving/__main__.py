"""`python -m serving`: the same as `kvferry serve`."""

import sys

from serving import api
from transfer import flags

if __name__ == "__main__":
    flags.run_main("serve", lambda: api.main(sys.argv[1:], "python -m serving"))
