"""When a token ends its request: prefill decides for the first token, decode for the rest."""

import numpy as np

from transfer.wire import LENGTH, RUNNING, STOP, SamplingParams


def finish_of(token_id: int, token_idx: int, params: SamplingParams) -> int:
    """RUNNING, STOP or LENGTH after this token.

    token_idx: 0 = the first generated token. A stop id cannot be drawn before min_tokens
    (model/sampling masks it), so this does not check for it.
    """
    if token_id in params.stop_token_ids:
        return STOP
    return LENGTH if token_idx + 1 >= params.max_new_tokens else RUNNING


def finish_of_rows(
    token_ids: np.ndarray, token_idx: np.ndarray, stop_ids: np.ndarray, max_new: np.ndarray
) -> np.ndarray:
    """The same for a batch: u8[n, W].

    token_ids, token_idx: i32[n, W]; stop_ids: i32[n, k], -1 where unused; max_new: i32[n].
    """
    stopped = (stop_ids[:, None, :] == token_ids[:, :, None]).any(axis=2)
    length = token_idx + 1 >= max_new[:, None]
    return np.where(stopped, STOP, np.where(length, LENGTH, RUNNING)).astype(np.uint8)
