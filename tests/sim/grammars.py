"""Grammars that can be computed by hand; compiling one takes as long as a message.

Which tokens are allowed next follows from the sum of all tokens so far, so a token that was
consumed twice, or not at all, shows at the next one.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tests.sim.network import may_follow
from tests.sim.transport import Net
from transfer import wire
from transfer.errors import Code, RequestError
from transfer.grammars import Constraint, Grammars, Outcome

WRONG = "wrong"  # a grammar that does not compile


class SumMatcher:
    """Replaces llguidance's matcher."""

    def __init__(self, grammar: str, token_ids: Sequence[int]) -> None:
        self._grammar = grammar
        self._token_ids = list(token_ids)

    @property
    def mask(self) -> np.ndarray:
        return may_follow(self._grammar, self._token_ids)

    def consume_token(self, token_id: int) -> bool:
        is_right = bool(self.mask[token_id // 32] >> np.uint32(token_id % 32) & 1)
        self._token_ids.append(token_id)
        return is_right


class SimGrammars(Grammars):
    """Outcomes arrive as events of the simulated network."""

    def __init__(self, net: Net) -> None:
        self._net = net

    def begin(
        self, submit: wire.Submit, is_wanted: Callable[[], bool], tell: Callable[[Outcome], None]
    ) -> None:
        def compiled() -> None:
            if is_wanted():
                tell(self._outcome(submit))
            else:
                self._net.stats["grammars_not_wanted"] += 1

        self._net.after(self._net.delay(), compiled)

    def masks(self, constraints: Sequence[Constraint]) -> np.ndarray:
        matchers: list[Any] = [each.matcher for each in constraints]
        return np.stack([matcher.mask for matcher in matchers])

    def close(self) -> None:
        pass

    def _outcome(self, submit: wire.Submit) -> Outcome:
        grammar = submit.sampling.grammar
        if grammar == WRONG:
            return RequestError(Code.BAD_REQUEST, "no such grammar")
        generated = wire.unpack_i32(submit.token_ids)[submit.num_prompt_tokens :].tolist()
        self._net.stats["grammars_resumed"] += bool(generated)
        matcher: Any = SumMatcher(grammar, generated)
        return Constraint(matcher, matcher.mask)
