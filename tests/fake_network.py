"""A network without weights, whose tokens and logprobs can be computed by hand."""

from collections.abc import Callable, Sequence

import numpy as np

from transfer import wire
from transfer.stops import finish_of


def next_token(token_ids: Sequence[int], vocab_size: int = 200) -> int:
    """The fake network: changing any earlier token changes the next one."""
    state = 17
    for token_id in token_ids:
        state = (state * 31 + token_id + 1) % 1_000_003
    return 3 + state % (vocab_size - 3)


def logprob_of(token_id: int) -> float:
    """The fake network's logprob of a token it chose, exact in f32."""
    return -0.125 * (1 + token_id % 8)


def top_of(token_id: int) -> list[tuple[int, float]]:
    """All twenty candidates listed with the token, best first."""
    own = logprob_of(token_id)
    return [(token_id + rank, own - 0.125 * rank) for rank in range(wire.NUM_TOP_LOGPROBS)]


def expected_tokens(
    prompt_ids: Sequence[int],
    params: wire.SamplingParams,
    network: Callable[[Sequence[int]], int] = next_token,
) -> list[int]:
    """The tokens that a request must get, up to its stop id or its length."""
    tokens: list[int] = []
    while not tokens or not finish_of(tokens[-1], len(tokens) - 1, params):
        tokens.append(network([*prompt_ids, *tokens]))
    return tokens


def top_arrays(ids: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """i32[n, 20], f32[n, 20]: the candidates listed with each id."""
    shape = len(ids), wire.NUM_TOP_LOGPROBS, 2
    top = np.array([top_of(token_id) for token_id in ids]).reshape(shape)
    return top[..., 0].astype(np.int32), top[..., 1].astype(np.float32)


def prompt_logprobs(prompt_ids: Sequence[int], start: int) -> wire.PromptLogprobs:
    """What prefill reports about the prompt from position `start` on."""
    ids = prompt_ids[start:]
    top_ids, top_logprobs = top_arrays(ids)
    return wire.PromptLogprobs(
        start,
        wire.pack_i32(ids),
        wire.pack_f32([logprob_of(token_id) for token_id in ids]),
        wire.pack_i32(top_ids),
        wire.pack_f32(top_logprobs),
    )
