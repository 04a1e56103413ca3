"""The limits on a grammar's cost: the same where it is checked and where it is followed."""

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
