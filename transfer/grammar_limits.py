"""The limits on a grammar's cost, and how its faults are told, where it is checked or followed."""

from typing import Final

import llguidance

# Steps per millisecond: 14,000 of the lexer and 20,000 of the parser for a token, 50,000 to begin.
LIMITS: Final = llguidance.LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=100_000,
    step_max_items=50_000,
    max_lexer_states=25_000,  # of 1 to 2 kB of host memory each
    max_grammar_size=250_000,
    verbose_errors=False,
)

_TERSE: Final = "<non-verbose/>"  # llguidance appends it to errors unless they are to be verbose
_NOTHING_NEXT: Final = "NoExtensionBias"  # all that it says where no token can come next


def fault_of(matcher: llguidance.LLMatcher, nothing_next: str) -> str:
    """Why a matcher cannot go on, in one line; "" if it has no error.

    nothing_next: what to say where no token of the model can come next.
    """
    why = " ".join(matcher.get_error().replace(_TERSE, "").split())
    return nothing_next if why == _NOTHING_NEXT else why
