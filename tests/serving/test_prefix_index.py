"""The guess at other processes' caches, compared with a naive one on random events."""

import os
import subprocess
import sys
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from serving.prefix_index import MOST_UNTOLD_BYTES, PrefixIndex, Untold, Use, prefix_chain
from transfer import wire

PAGE = 2
MOST = 6
WORKERS = ["a", "b"]
TOKENS = st.lists(st.integers(0, 1), max_size=9)


def chain(tokens: list[int], salt: str = "") -> list[int]:
    return prefix_chain(wire.pack_i32(tokens), PAGE, salt)


def seen(index: PrefixIndex[str], tokens: list[int], worker: str = "a") -> Use:
    """Note a prompt that the worker has computed."""
    pages = chain(tokens)
    use = index.use(worker, pages, len(pages))
    index.settle(worker, use, use.num_found)
    return use


def found(index: PrefixIndex[str], tokens: list[int], worker: str = "a") -> int:
    return index.match(worker, chain(tokens))


def test_only_full_pages_behind_the_same_beginning_and_salt_are_found():
    index = PrefixIndex[str]()
    seen(index, [1, 2, 3, 4, 5])
    assert found(index, [1, 2, 3, 4, 5, 6]) == 2
    assert found(index, [1, 2, 9, 9]) == 1
    assert found(index, [3, 4]) == 0
    assert found(index, [1, 2, 3, 4], "b") == 0
    assert index.match("a", chain([1, 2, 3, 4], "tenant")) == 0


def test_what_was_used_last_stays_and_tails_go_first():
    index = PrefixIndex[str](max_pages=3)
    seen(index, [1, 1, 2, 2])
    seen(index, [3, 3])
    seen(index, [1, 1])
    seen(index, [4, 4])
    assert [found(index, ids) for ids in ([1, 1, 2, 2], [3, 3], [4, 4])] == [1, 1, 1]


def test_a_worker_is_not_thought_to_have_more_than_its_pool():
    index = PrefixIndex[str]()
    index.use("a", chain([1, 1, 2, 2, 3, 3]), 3, pages_total=2)
    assert (index.num_pages("a"), found(index, [1, 1, 2, 2, 3, 3])) == (2, 2)


def test_a_page_that_was_gone_takes_along_what_was_used_no_later():
    index = PrefixIndex[str]()
    for ids in ([1, 1], [2, 2], [3, 3]):
        seen(index, ids)
    pages = chain([2, 2])
    use = index.use("a", pages, 1)
    index.settle("a", use, 0)
    assert [found(index, ids) for ids in ([1, 1], [2, 2], [3, 3])] == [0, 1, 1]


def test_a_page_that_its_first_prompt_has_not_computed_yet_tells_nothing_of_the_others():
    index = PrefixIndex[str]()
    seen(index, [1, 1])
    pages = chain([2, 2])
    first, second = (index.use("a", pages, 1) for _ in range(2))
    index.settle("a", second, 0)
    index.settle("a", first, 0)
    assert found(index, [1, 1]) == 1


def test_a_page_that_would_be_computed_again_is_not_missed():
    index = PrefixIndex[str]()
    seen(index, [1, 1])
    pages = chain([2, 2])
    seen(index, [2, 2])
    use = index.use("a", pages, num_reusable=0)
    index.settle("a", use, 0)
    assert found(index, [1, 1]) == 1


def test_a_worker_that_is_forgotten_knows_nothing():
    index = PrefixIndex[str]()
    use = index.use("a", chain([1, 1]), 1)
    seen(index, [1, 1], "b")
    index.forget(lambda worker: worker == "a")
    index.settle("a", use, 0)
    assert (found(index, [1, 1]), found(index, [1, 1], "b")) == (0, 1)


@dataclass
class Naive:
    """Every page as the tokens up to its end, with the number of its last use."""

    pages: dict[tuple[int, ...], int] = field(default_factory=dict)

    def match(self, tokens: list[int], most: int) -> int:
        num_found = 0
        while (
            num_found < most
            and len(tokens) >= (num_found + 1) * PAGE
            and tuple(tokens[: (num_found + 1) * PAGE]) in self.pages
        ):
            num_found += 1
        return num_found

    def use(self, tokens: list[int], number: int) -> None:
        for pages in range(1, min(len(tokens) // PAGE, MOST) + 1):
            self.pages[tuple(tokens[: pages * PAGE])] = number
        while len(self.pages) > MOST:
            # The oldest use; within one, the longest.
            del self.pages[min(self.pages, key=lambda page: (self.pages[page], -len(page)))]

    def drop(self, last_use: int) -> None:
        self.pages = {page: use for page, use in self.pages.items() if use > last_use}


@dataclass
class Expected:
    """A use that is not settled yet, and what must come of it."""

    worker: str
    use: Use
    num_found: int
    last_found: int


class Beside(RuleBasedStateMachine):
    """Random prompts at two workers, settled in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex[str](MOST)
        self.naive = {worker: Naive() for worker in WORKERS}
        self.open: list[Expected] = []
        self.uses = 0

    @rule(worker=st.sampled_from(WORKERS), tokens=TOKENS, spared=st.integers(0, 1))
    def use(self, worker: str, tokens: list[int], spared: int) -> None:
        naive = self.naive[worker]
        num_reusable = max(len(tokens) // PAGE - spared, 0)
        num_found = naive.match(tokens, num_reusable)
        last_found = naive.pages[tuple(tokens[: num_found * PAGE])] if num_found else -1
        self.uses += 1
        naive.use(tokens, self.uses)
        use = self.index.use(worker, chain(tokens), num_reusable)
        assert use.num_found == num_found
        self.open.append(Expected(worker, use, num_found, last_found))

    @precondition(lambda self: self.open)
    @rule(data=st.data(), told=st.booleans())
    def settle(self, data: st.DataObject, told: bool) -> None:
        one = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        num_cached = data.draw(st.integers(0, one.num_found)) if told else None
        in_progress = {other.use.number for other in self.open}
        missed = num_cached is not None and num_cached < one.num_found
        if missed and one.last_found not in in_progress:
            self.naive[one.worker].drop(one.last_found)
        self.index.settle(one.worker, one.use, num_cached)

    @rule(worker=st.sampled_from(WORKERS))
    def forget(self, worker: str) -> None:
        self.naive[worker] = Naive()
        self.index.forget(lambda other: other == worker)

    @invariant()
    def both_know_the_same(self) -> None:
        for worker, naive in self.naive.items():
            assert self.index.num_pages(worker) == len(naive.pages) <= MOST
            for page in naive.pages:
                assert self.index.match(worker, chain(list(page))) == len(page) // PAGE


TestBesideNaive = Beside.TestCase
TestBesideNaive.settings = settings(max_examples=60, stateful_step_count=30)


def test_every_process_makes_the_same_keys():
    code = (
        "from serving.prefix_index import prefix_chain\n"
        "print(*prefix_chain(bytes(range(32)), 2, 'salt'))\n"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(said) == 1
    assert len(said.pop().split()) == 4


def test_uses_are_told_as_they_were_and_no_more_than_fit_into_a_message():
    untold = Untold()
    untold.add("a", 5, -1, [1, (1 << 64) - 1], 7)
    untold.add("b", 6, 2, [], 7)  # a prompt without a full page
    long = range(MOST_UNTOLD_BYTES // 8)
    untold.add("c", 7, 0, long, 0)
    untold.add("d", 8, 0, long[:-2], 0)
    first, last = untold.take()
    assert (first.worker_id, first.epoch, first.rank, first.most_pages) == ("a", 5, -1, 7)
    assert first.chain == [1, (1 << 64) - 1]
    assert last.worker_id == "d"
    assert untold.take() == ()
    untold.add("c", 7, 0, long, 0)
    assert len(untold.take()) == 1
