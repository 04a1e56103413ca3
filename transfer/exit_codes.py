"""Statuses that every process exits with. Imports nothing: a command needs them before all else."""

EXIT_CONFIG = 2  # the operator has to fix it; nothing restarts the process
EXIT_INTERRUPTED = 130  # by Ctrl-C, as shells have it
