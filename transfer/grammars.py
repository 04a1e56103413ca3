"""Grammars that limit which tokens a request may draw: compiled off the engine, a mask per token.

llguidance does the work. An API process has checked each grammar (serving/grammar.py), but its cost
is bounded here as well: a grammar that takes too much ends its own request.
"""

import contextlib
import itertools
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path

import llguidance
import numpy as np
from llguidance.numpy import fill_next_token_bitmask_par

from model.buckets import mask_words
from model.config import ModelConfig
from model.tokenizer_files import eos_ids, read_tokenizer
from transfer import wire
from transfer.errors import Code, RequestError
from transfer.grammar_limits import LIMITS, fault_of
from transfer.grammar_threads import grammar_threads

log = logging.getLogger(__name__)

MAX_COMPILED = 32  # compiled grammars kept for later requests
_THREADS = 2  # that compile
_NOTHING_NEXT = "no token of this model can come next"


class Constraint:
    """One request's place in its grammar. Used by one thread at a time."""

    def __init__(self, matcher: llguidance.LLMatcher, first_mask: np.ndarray) -> None:
        """first_mask: u32[words], the tokens that may come next."""
        self.matcher = matcher
        self.first_mask = first_mask

    def take(self, token_id: int) -> bool:
        """Take a drawn token that does not end the text. False when the grammar cannot go on.

        A limit may be the reason (transfer/grammar_limits.py), which only the drawn token exceeds.
        """
        return self.matcher.consume_token(token_id)

    @property
    def failure(self) -> RequestError:
        """Why the grammar cannot go on."""
        why = fault_of(self.matcher, _NOTHING_NEXT) or _NOTHING_NEXT
        return RequestError(Code.BAD_REQUEST, f"the grammar cannot be followed: {why}")


Outcome = Constraint | RequestError


class Grammars:
    """All grammars of one worker. The engine thread calls `begin` and `masks`."""

    def __init__(self, model_path: Path, config: ModelConfig) -> None:
        self._model_path = model_path
        self._config = config
        self._num_words = mask_words(config.vocab_size)
        self._compiled: OrderedDict[str, llguidance.LLMatcher] = OrderedDict()
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._begun_by: dict[int, int] = {}  # by thread: the number of what it has begun
        self._threads = grammar_threads(_THREADS, "grammar")
        self._masking = llguidance.LLExecutor()
        self._opening = self._threads.submit(self._open)

    def begin(
        self, submit: wire.Submit, is_wanted: Callable[[], bool], tell: Callable[[Outcome], None]
    ) -> None:
        """Compile a request's grammar and advance it over the tokens generated so far.

        is_wanted, tell: called by another thread; nothing is told of a room not wanted any more.
        """
        with contextlib.suppress(RuntimeError):  # closed: nobody is left to be told
            self._threads.submit(self._begin, submit, is_wanted, tell)

    def masks(self, constraints: Sequence[Constraint]) -> np.ndarray:
        """Masks of the tokens that may come next, u32[n, words]; 0 if a grammar cannot go on."""
        masks = np.zeros((len(constraints), self._num_words), np.int32)
        pairs = [(each.matcher, row) for row, each in enumerate(constraints)]
        fill_next_token_bitmask_par(self._masking, pairs, masks)
        for row, each in enumerate(constraints):
            if each.matcher.is_error():
                masks[row] = 0
        return masks.view(np.uint32)

    def progress(self) -> int:
        """A number that stays the same only while a thread stays at one grammar (any thread)."""
        with self._lock:
            return min(self._begun_by.values(), default=next(self._numbers))

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    # --- threads of its own -----------------------------------------------------------------------

    def _open(self) -> llguidance.LLTokenizer:
        files = read_tokenizer(self._model_path)
        ends = [*eos_ids(self._config, files.eos_id)]
        return llguidance.LLTokenizer(files.backend.to_str(), self._config.vocab_size, ends)

    @cached_property
    def _tokenizer(self) -> llguidance.LLTokenizer:
        """Raises RequestError."""
        try:
            return self._opening.result()
        except Exception as error:
            log.warning("grammars cannot be followed: %s", error)
            message = f"this model's tokenizer cannot follow a grammar: {error}"
            raise RequestError(Code.BAD_REQUEST, message) from error

    def _begin(
        self, submit: wire.Submit, is_wanted: Callable[[], bool], tell: Callable[[Outcome], None]
    ) -> None:
        if not is_wanted():
            return
        thread = threading.get_ident()
        with self._lock:
            self._begun_by[thread] = next(self._numbers)
        try:
            tell(self._constraint(submit))
        except RequestError as error:
            tell(error)
        except BaseException as error:
            log.exception("a grammar could not be compiled")
            tell(RequestError(Code.INTERNAL, f"the grammar could not be compiled: {error}"))
        finally:
            with self._lock:
                del self._begun_by[thread]

    def _constraint(self, submit: wire.Submit) -> Constraint:
        matcher = self._matcher(submit.sampling.grammar)
        generated = wire.unpack_i32(submit.token_ids)[submit.num_prompt_tokens :].tolist()
        if not matcher.consume_tokens(generated):
            raise RequestError(Code.INTERNAL, "the tokens so far do not follow their grammar")
        return self._begun(matcher)

    def _matcher(self, grammar: str) -> llguidance.LLMatcher:
        """A matcher at the beginning of a grammar. Raises RequestError."""
        with self._lock:
            known = self._compiled.get(grammar)
            if known is not None:
                self._compiled.move_to_end(grammar)
                return known.deep_copy()
        matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0, limits=LIMITS)
        self._begun(matcher)  # so that the cached matcher includes the work for its first mask
        with self._lock:
            self._compiled[grammar] = matcher
            while len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
            return matcher.deep_copy()

    def _begun(self, matcher: llguidance.LLMatcher) -> Constraint:
        mask = np.zeros(self._num_words, np.uint32)
        constraint = Constraint(matcher, mask)
        if not matcher.is_error():
            matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if matcher.is_error() or not mask.any():
            raise constraint.failure
        return constraint
