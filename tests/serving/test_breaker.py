"""Breakers: when they open, for how long, which attempt tries, and what does not count."""

from hypothesis import given, settings
from hypothesis import strategies as st

from serving.breaker import FIRST_S, FORGIVEN_S, LONGEST_S, Breakers, State


def opened(failures: int = 2) -> Breakers[str]:
    """Breakers of which worker w's opened at second 1."""
    breakers = Breakers[str](failures)
    for n in range(failures):
        breakers.failed("w", picked_s=(n + 0.5) / failures, now_s=(n + 1) / failures)
    assert breakers.state("w", 1.0) is State.OPEN
    return breakers


def test_only_failures_in_a_row_open_it():
    breakers = Breakers[str](2)
    for second in range(0, 20, 2):
        breakers.failed("w", second, second + 0.5)
        breakers.succeeded("w", second)
    assert breakers.state("w", 20.0) is State.CLOSED
    assert not breakers.is_out("w", 20.0)
    assert opened().is_out("w", 1.0)
    assert not opened().is_out("another", 1.0)


def test_what_one_accident_ends_is_one_failure():
    breakers = Breakers[str](2)
    for room in range(100):
        breakers.failed("w", picked_s=room / 100, now_s=1.0 + room / 1000)
    assert breakers.state("w", 1.2) is State.CLOSED
    breakers.failed("w", picked_s=1.1, now_s=1.2)
    assert breakers.state("w", 1.2) is State.OPEN


def test_half_open_one_attempt_tries_and_closes_it():
    breakers = opened()
    now_s = 1.0 + FIRST_S
    assert breakers.state("w", now_s) is State.HALF_OPEN
    assert not breakers.is_out("w", now_s)
    trial, other = object(), object()
    breakers.picked("w", trial, now_s)
    assert breakers.is_out("w", now_s)
    breakers.picked("w", other, now_s)  # there was no other worker
    breakers.left("w", other)
    assert breakers.is_out("w", now_s)
    breakers.succeeded("w", picked_s=0.5)  # picked before it opened: no news
    assert breakers.is_out("w", now_s)
    breakers.succeeded("w", now_s)
    assert breakers.state("w", now_s) is State.CLOSED


def test_answers_without_pages_do_not_close_it_for_those_that_need_them():
    breakers = Breakers[str](2)
    for second in range(1, 3):
        breakers.failed("w", second, second + 0.5, of_pages=True)
        breakers.succeeded("w", second + 0.6, of_pages=False)
    assert breakers.state("w", 2.6) is State.OPEN
    later_s = 2.5 + FIRST_S
    breakers.succeeded("w", later_s, of_pages=False)
    assert breakers.state("w", later_s) is State.HALF_OPEN
    breakers.succeeded("w", 2.5 + FORGIVEN_S, of_pages=False)
    assert breakers.state("w", 2.5 + FORGIVEN_S) is State.CLOSED
    breakers.failed("w", 200.0, 201.0, of_pages=True)
    breakers.succeeded("w", 202.0)
    breakers.failed("w", 203.0, 204.0)
    assert breakers.state("w", 204.0) is State.CLOSED


def test_a_trial_that_its_client_gives_up_leaves_the_place_to_another():
    breakers = opened()
    now_s = 1.0 + FIRST_S
    trial = object()
    breakers.picked("w", trial, now_s)
    breakers.left("w", trial)
    assert not breakers.is_out("w", now_s)


def test_back_off_doubles_with_each_failed_trial_up_to_a_bound():
    breakers = opened()
    now_s, pauses = 1.0, []
    for _ in range(10):
        pause_s = 0.5
        while breakers.state("w", now_s + pause_s) is State.OPEN:
            pause_s += 0.5
        pauses.append(pause_s)
        now_s += pause_s
        breakers.failed("w", picked_s=now_s, now_s=now_s + 0.5)
        now_s += 0.5
    assert pauses == [min(FIRST_S * 2**n, LONGEST_S) for n in range(10)]


def test_who_is_taken_though_open_and_succeeds_closes_it():
    breakers = opened()
    breakers.succeeded("w", picked_s=1.5)
    assert not breakers.is_out("w", 1.5)


def test_an_incarnation_that_is_gone_is_forgotten():
    breakers = opened()
    breakers.keep({"w", "v"})
    assert breakers.is_out("w", 1.0)
    breakers.keep({"v"})
    assert not breakers.is_out("w", 1.0)


EVENTS = st.lists(
    st.tuples(st.sampled_from(["pick", "succeed", "fail", "leave"]), st.floats(0.0625, 40.0)),
    max_size=80,
)


@settings(max_examples=150)
@given(EVENTS)
def test_whatever_happens_it_is_tried_by_one_at_a_time_and_never_out_for_good(events):
    breakers = Breakers[str](2)
    now_s = 0.0
    attempts: list[tuple[object, float]] = []
    for event, pause_s in events:
        now_s += pause_s
        if event == "pick" and not breakers.is_out("w", now_s):
            attempt = object()
            half_open = breakers.state("w", now_s) is State.HALF_OPEN
            breakers.picked("w", attempt, now_s)
            attempts.append((attempt, now_s))
            assert breakers.is_out("w", now_s) == half_open
        elif attempts:
            attempt, picked_s = attempts.pop(0)
            if event == "succeed":
                breakers.succeeded("w", picked_s)
            elif event == "fail":
                breakers.failed("w", picked_s, now_s)
            breakers.left("w", attempt)
    for attempt, _ in attempts:
        breakers.left("w", attempt)
    assert not breakers.is_out("w", now_s + LONGEST_S)


def test_failures_while_it_is_open_do_not_keep_it_open():
    breakers = opened()
    breakers.failed("w", picked_s=1.2, now_s=1.3)
    assert breakers.state("w", 1.0 + FIRST_S) is State.HALF_OPEN
