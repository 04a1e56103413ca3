"""The interval widens with the lag, and narrows when the load says that the lag stays away."""

import pytest

from serving.interval import MOST_TOKENS, AutoInterval, Lag

WORKER = ("d", 1)


def test_lag_is_what_a_step_took_beyond_the_quickest_one():
    lag = Lag()
    ahead_s = -5000.0  # the worker's clock is another host's
    assert lag.measure(WORKER, 10.0 - ahead_s, 10.002) == 0.0
    assert lag.measure(WORKER, 11.0 - ahead_s, 11.032) == pytest.approx(0.030, abs=2e-3)
    assert lag.measure(WORKER, 12.0 - ahead_s, 12.001) == pytest.approx(0.0, abs=1e-9)
    assert lag.measure(("p", 1), 0.0, 12.5) == 0.0, "each worker has its own clock"


def test_a_path_that_got_longer_is_no_lag_for_ever():
    lag = Lag()
    lag.measure(WORKER, 0.0, 0.001)
    assert lag.measure(WORKER, 1.0, 1.101) == pytest.approx(0.1, rel=0.1)
    assert lag.measure(WORKER, 300.0, 300.101) == 0.0


class Loop:
    """An event loop that handles steps with a lag and a load."""

    def __init__(self) -> None:
        self.interval = AutoInterval()
        self.now_s = 100.0
        self.cpu_s = 0.0

    def run(self, seconds: float, lag_s: float, load: float) -> list[int]:
        """Run with this lag and load; the intervals it had, without repeats in a row."""
        seen = [self.interval.tokens]
        for _ in range(round(seconds / 0.05)):
            self.now_s += 0.05
            self.cpu_s += 0.05 * load
            self.interval.observe(lag_s, self.now_s, self.cpu_s)
            if self.interval.tokens != seen[-1]:
                seen.append(self.interval.tokens)
        return seen


def test_a_loop_that_keeps_up_stays_at_one_token_a_chunk():
    loop = Loop()
    assert loop.run(10.0, lag_s=0.02, load=0.9) == [1]


def test_lag_widens_it_step_by_step_up_to_a_bound():
    loop = Loop()
    assert loop.run(0.4, lag_s=0.2, load=1.0) == [1, 2], "what a change did must show first"
    assert loop.run(30.0, lag_s=0.2, load=1.0)[-1] == MOST_TOKENS


def test_lag_that_is_not_of_the_loops_making_widens_nothing():
    loop = Loop()
    assert loop.run(30.0, lag_s=0.2, load=0.15) == [1]
    loop.run(2.0, lag_s=0.2, load=1.0)
    assert loop.interval.tokens > 2
    assert loop.run(10.0, lag_s=0.2, load=0.05)[-1] == 1


def test_it_narrows_at_once_when_the_loop_could_do_twice_the_work():
    loop = Loop()
    loop.run(0.6, lag_s=0.2, load=1.0)
    wide = loop.interval.tokens
    assert wide > 1
    assert loop.run(10.0, lag_s=0.03, load=0.2) == [wide], "some lag is left"
    seen = loop.run(10.0, lag_s=0.0, load=0.2)
    assert (seen[0], seen[1], seen[-1]) == (wide, wide // 2, 1)


def test_at_a_higher_load_it_tries_half_and_waits_longer_each_time_that_fails():
    loop = Loop()
    loop.run(0.4, lag_s=0.2, load=1.0)
    assert loop.interval.tokens == 2
    waited_s = []
    for _ in range(3):
        start_s = loop.now_s
        while loop.interval.tokens == 2:
            loop.run(0.05, lag_s=0.0, load=0.7)
        waited_s.append(loop.now_s - start_s)
        loop.run(0.3, lag_s=0.2, load=1.0)
        assert loop.interval.tokens == 2
    assert waited_s == pytest.approx([5.0, 10.0, 20.0], rel=0.25)


def test_a_hiccup_at_a_high_load_widens_it_for_seconds_only():
    loop = Loop()
    loop.run(5.0, lag_s=0.0, load=0.8)
    loop.run(0.1, lag_s=0.2, load=1.0)
    assert loop.interval.tokens == 2
    assert loop.run(8.0, lag_s=0.0, load=0.5)[-1] == 1
