"""Who gives way to whom at a port: strangers to newcomers, known guests to nobody."""

import random

from transfer.places import Places


class Port:
    """Places of names, with those that were told to go, in order."""

    def __init__(self, most: int, most_of_host: int) -> None:
        self.gone: list[str] = []
        self.places = Places[str](most, most_of_host, lambda name, _: self.gone.append(name))

    def enter(self, *names: str, host: str = "a") -> list[bool]:
        return [self.places.enter(name, host) for name in names]


def test_the_oldest_stranger_of_a_host_gives_way_to_the_next_one_of_that_host() -> None:
    port = Port(most=9, most_of_host=2)
    assert all(port.enter("1", host="b") + port.enter("2", "3", "4"))
    assert port.gone == ["2"]
    port.places.leave("3")
    assert all(port.enter("5"))
    assert port.gone == ["2"]


def test_where_no_place_is_left_the_oldest_stranger_of_any_host_gives_way() -> None:
    port = Port(most=3, most_of_host=2)
    assert all(port.enter("1", "2", host="b") + port.enter("3", "4"))
    assert port.gone == ["1"]


def test_who_has_shown_the_token_gives_way_to_nobody() -> None:
    port = Port(most=2, most_of_host=2)
    assert all(port.enter("1", "2"))
    assert port.places.know("1")
    assert all(port.enter("3"))
    assert port.places.know("3")
    assert port.enter("4") == [False]
    assert port.gone == ["2"]
    port.places.leave("1")
    assert port.enter("4") == [True]


def test_who_was_told_to_go_cannot_stay_for_having_shown_the_token_meanwhile() -> None:
    port = Port(most=1, most_of_host=1)
    port.enter("1", "2")
    assert not port.places.know("1")
    assert port.places.know("2")


def test_strangers_that_come_faster_than_others_leave_find_no_place() -> None:
    port = Port(most=9, most_of_host=2)
    assert port.enter("1", "2", "3", "4", "5") == [True] * 4 + [False]
    port.places.leave("1")
    assert port.enter("5") == [True]


def test_whatever_happens_the_bounds_hold_and_known_guests_stay() -> None:
    chance = random.Random(5)
    port = Port(most=8, most_of_host=3)
    known: set[str] = set()
    inside: list[str] = []
    for number in range(3000):
        if not inside or chance.random() < 0.6:
            name = str(number)
            if port.places.enter(name, chance.choice("abc")):
                inside.append(name)
        elif chance.random() < 0.3:
            name = chance.choice(inside)
            if name not in known and port.places.know(name):
                known.add(name)
        else:
            name = chance.choice(inside)
            inside.remove(name)
            known.discard(name)
            port.places.leave(name)
        assert not known & set(port.gone)
        assert sorted(port.places) == sorted(inside)
        assert len(port.places) - len(set(port.gone) & set(inside)) <= 8
        assert len(set(port.gone) & set(inside)) <= 2
