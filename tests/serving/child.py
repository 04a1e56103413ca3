"""A stand-in for a child of `kvferry up`: `python -m tests.serving.child CODE` runs the code."""

import sys

exec(sys.argv[1])
