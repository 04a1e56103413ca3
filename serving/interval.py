"""How many tokens a streamed chunk has: as asked, or by how far the loop is behind the steps."""

from serving.router import Key

WIDEN_LAG_S = 0.05  # behind by so much, the loop does not keep up
NARROW_LAG_S = 0.01
# Half the interval costs at most twice the time, so below this the loop keeps up with it too.
NARROW_LOAD = 0.4
MOST_TOKENS = 64
_SETTLE_S = 0.25  # from one change to the next: what it did must show first
_WINDOW_S = 1.0
# Clocks of two hosts part by less than this; a path that got longer is the new normal in minutes.
_DRIFT = 1e-3


class Interval:
    """Tokens of a chunk after a stream's first; all streams that did not ask share one."""

    __slots__ = ("tokens",)

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens


class Lag:
    """How far behind the steps this loop is, by worker.

    A step's time is on its worker's clock, so what counts is how much longer a step took to get
    here than the quickest one did: time that it waited for gRPC's flow control and for the loop.
    """

    def __init__(self) -> None:
        self._quickest_s: dict[Key, float] = {}
        self._heard_s: dict[Key, float] = {}

    def measure(self, worker: Key, emitted_s: float, now_s: float) -> float:
        """Seconds that a step which is handled now has waited."""
        took_s = now_s - emitted_s
        since_s = now_s - self._heard_s.get(worker, now_s)
        quickest_s = min(took_s, self._quickest_s.get(worker, took_s) + _DRIFT * since_s)
        self._quickest_s[worker] = quickest_s
        self._heard_s[worker] = now_s
        return took_s - quickest_s

    def forget(self, worker: Key) -> None:
        self._quickest_s.pop(worker, None)
        self._heard_s.pop(worker, None)


class AutoInterval(Interval):
    """1 while the loop keeps up; doubles as the lag grows; back once half of it would do.

    It does not narrow because the lag is gone, which the wide interval did, but because the
    loop's load says that it would stay away.
    """

    __slots__ = ("_changed_s", "_load_s", "_window_s", "_worst_lag_s")

    def __init__(self) -> None:
        super().__init__(1)
        self._changed_s = 0.0
        self._window_s = 0.0  # when it began, and the loop's processor time then
        self._load_s = 0.0
        self._worst_lag_s = 0.0

    def observe(self, lag_s: float, now_s: float, loop_cpu_s: float) -> None:
        """A step was handled. Seconds: monotonic, and of processor time of the loop's thread."""
        self._worst_lag_s = max(self._worst_lag_s, lag_s)
        settled = now_s - self._changed_s >= _SETTLE_S
        if lag_s > WIDEN_LAG_S and settled and self.tokens < MOST_TOKENS:
            self._change(2 * self.tokens, now_s)
        if now_s - self._window_s < _WINDOW_S:
            return
        load = (loop_cpu_s - self._load_s) / (now_s - self._window_s)
        if self.tokens > 1 and self._worst_lag_s < NARROW_LAG_S and load < NARROW_LOAD:
            self._change(self.tokens // 2, now_s)
        self._window_s = now_s
        self._load_s = loop_cpu_s
        self._worst_lag_s = 0.0

    def _change(self, tokens: int, now_s: float) -> None:
        self.tokens = tokens
        self._changed_s = now_s
