"""Which texts a grammar takes, and texts drawn from one, with the tokens of the tests' model."""

import llguidance
import numpy as np
from tokenizers import AddedToken

from model.tokenizer_files import read_tokenizer
from serving.grammar_trial import GrammarTrial
from serving.tokenizer import Tokenizer
from tests.serving.live import EOS, MODEL_PATH
from transfer.grammar_limits import LIMITS


class Texts:
    """A tokenizer, and what a grammar makes of texts with it."""

    def __init__(self, markers: tuple[str, ...] = (), special: bool = True) -> None:
        files = read_tokenizer(MODEL_PATH)
        tokens = [AddedToken(each, special=special, normalized=False) for each in markers]
        files.backend.add_tokens(tokens)
        self.tokenizer = Tokenizer(files.backend, {}, {}, is_byte_level=True)
        self.vocab_size = self.tokenizer.vocab_size
        self._ll = llguidance.LLTokenizer(files.backend.to_str(), self.vocab_size, [EOS])

    def matcher(self, grammar: str) -> llguidance.LLMatcher:
        matcher = llguidance.LLMatcher(self._ll, grammar, log_level=0, limits=LIMITS)
        assert not matcher.is_error(), matcher.get_error()
        return matcher

    def takes(self, grammar: str, text: str) -> bool:
        """Whether the text, to its end, is one of the grammar's."""
        matcher, ids = self.matcher(grammar), self.tokenizer.encode(text, False)
        return all(matcher.consume_token(token_id) for token_id in [*ids, EOS])

    def drawn(self, grammar: str, seed: int, most: int = 600) -> str:
        """A text of random tokens that the grammar allows."""
        *ids, last = self.drawn_ids(grammar, seed, most)
        assert last == EOS, f"no end in sight: {self.tokenizer.decode(ids, False)}"
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def drawn_ids(self, grammar: str, seed: int, most: int) -> list[int]:
        """The same as token ids, with the one that ends it; cut after `most` of them."""
        matcher, rng = self.matcher(grammar), np.random.default_rng(seed)
        ids: list[int] = []
        while len(ids) < most and EOS not in ids[-1:]:
            bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little")[: self.vocab_size])
            # Favour the ways to the end, lest a thought go on for ever.
            ends = [token_id for token_id in allowed.tolist() if token_id >= 1017]
            ids.append(ends[0] if ends and rng.random() < 0.3 else int(rng.choice(allowed)))
            assert matcher.consume_token(ids[-1])
        return ids


class Untried(GrammarTrial):
    """Tries nothing: for grammars that name tokens of another model."""

    async def fault(self, grammar: str) -> str:
        return ""
