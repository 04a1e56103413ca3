"""What a submit must hold, whoever sends it."""

import math

from transfer import wire


def malformed(submit: wire.Submit) -> str:
    """What would crash the engine, or hold a room for ever; "" = nothing is wrong.

    No API process of ours sends such a submit.
    """
    if submit.room < 1:
        return f"room {submit.room}, at least 1"
    num_tokens, rest = divmod(len(submit.token_ids), 4)
    if rest or not 0 < submit.num_prompt_tokens <= num_tokens:
        return f"{len(submit.token_ids)} bytes of token ids, {submit.num_prompt_tokens} of prompt"
    if not (math.isfinite(submit.left_s) and math.isfinite(submit.age_s)):
        return f"left_s {submit.left_s}, age_s {submit.age_s}: both must be finite"
    sampling = submit.sampling
    for name, got, most in (
        ("stop_token_ids", len(sampling.stop_token_ids), wire.MAX_STOP_IDS),
        ("logit_bias", len(sampling.logit_bias), wire.MAX_LOGIT_BIAS),
        ("num_top_logprobs", sampling.num_top_logprobs, wire.NUM_TOP_LOGPROBS),
        ("bad_words", len(sampling.bad_words), wire.MAX_BAD_WORDS),
        ("bad_words", max(map(len, sampling.bad_words), default=0), wire.MAX_BAD_WORD_TOKENS),
        ("grammar", len(sampling.grammar.encode()), wire.MAX_GRAMMAR_BYTES),
    ):
        if got > most:
            return f"{name}: {got}, at most {most}"
    if sampling.max_new_tokens <= submit.num_generated:
        return f"max_new_tokens: {sampling.max_new_tokens}, {submit.num_generated} generated"
    return ""
