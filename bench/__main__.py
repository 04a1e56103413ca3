"""`python -m bench`, which is what `kvferry bench` becomes."""

import sys

from bench.cli import main

if __name__ == "__main__":
    sys.exit(main())
