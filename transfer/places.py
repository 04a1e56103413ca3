"""The places of one port: peers that have not shown the token yet give way to newcomers."""

from collections.abc import Callable, Iterator


class Places[G]:
    """Who is connected to a port. Used by one thread, or under its owner's lock.

    Whoever connects is a stranger until it shows the token, which takes an honest peer some
    milliseconds. Silent strangers would otherwise keep their places until their time is up, and
    enough of them would keep out everybody, so the oldest goes when there is no place for another.

    A guest is a known one, a stranger, or a stranger that was told to go and has not left yet. Of
    known ones and strangers there are never more than `most` together, of strangers of one host
    never more than `most_of_host`, and of those that go never more than that or a quarter of most.
    """

    def __init__(self, most: int, most_of_host: int, send_away: Callable[[G, str], None]) -> None:
        """send_away(guest, host): end its connection; it may leave later."""
        self._most = most
        self._most_of_host = most_of_host
        self._most_going = min(most_of_host, max(1, most // 4))
        self._send_away = send_away
        self._known: set[G] = set()
        self._strangers: dict[G, str] = {}  # the oldest first, with its host
        self._going: set[G] = set()

    def __len__(self) -> int:
        return len(self._known) + len(self._strangers) + len(self._going)

    def __iter__(self) -> Iterator[G]:
        return iter([*self._known, *self._strangers, *self._going])

    def enter(self, guest: G, host: str) -> bool:
        """Give a newcomer of this host a place, if need be another stranger's.

        False: there is none. All guests are known, or strangers come faster than others go.
        """
        of_host = [each for each, of in self._strangers.items() if of == host]
        if len(of_host) >= self._most_of_host:
            goes = of_host[0]
        elif len(self._known) + len(self._strangers) < self._most:
            self._strangers[guest] = host
            return True
        elif self._strangers:
            goes = next(iter(self._strangers))
        else:
            return False
        if len(self._going) >= self._most_going:
            return False
        host_of_goes = self._strangers.pop(goes)
        self._going.add(goes)
        self._strangers[guest] = host
        self._send_away(goes, host_of_goes)
        return True

    def know(self, guest: G) -> bool:
        """The guest has shown the token, and keeps its place. False: it was told to go before."""
        if guest not in self._strangers:
            return False
        del self._strangers[guest]
        self._known.add(guest)
        return True

    def leave(self, guest: G) -> None:
        """The guest is no longer connected, if it ever was."""
        self._known.discard(guest)
        self._strangers.pop(guest, None)
        self._going.discard(guest)
