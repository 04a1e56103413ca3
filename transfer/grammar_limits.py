"""What a grammar may take: the same where it is checked and where it is followed."""

from typing import Final

import llguidance

# For one token the lexer may do 14,000 steps a millisecond, the parser 20,000; to begin, 50,000.
LIMITS: Final = llguidance.LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=100_000,
    step_max_items=50_000,
    max_lexer_states=25_000,  # of 1 to 2 kB of the host's memory
    max_grammar_size=250_000,
    verbose_errors=False,
)
