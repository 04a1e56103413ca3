"""Finds the runs in the rows of several steps: consecutive tokens of one room."""

import numpy as np

from transfer import wire


def gathered(
    rooms: np.ndarray, token_idx: np.ndarray, finish: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sort rows by room, keeping the order within a room, and find the runs.

    A run is a room's consecutive tokens, of which only the last may finish it. Arrays have one
    entry per row. Returns the order of the rows, i64[n], and where in it each run starts and ends,
    i64[runs].
    """
    order = np.argsort(rooms, kind="stable")
    rooms, token_idx, finish = rooms[order], token_idx[order], finish[order]
    follows = rooms[1:] == rooms[:-1]
    follows &= (token_idx[1:] == token_idx[:-1] + 1) & (finish[:-1] == wire.RUNNING)
    starts = np.concatenate(([0], np.flatnonzero(~follows) + 1))
    return order, starts, np.append(starts[1:], len(rooms))
