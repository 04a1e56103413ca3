"""Statuses that every process exits with. Imports nothing: a command needs them before all else."""

EXIT_CONFIG = 2  # what the operator can mend; nobody tries again
EXIT_INTERRUPTED = 130  # by Ctrl-C, as shells have it
