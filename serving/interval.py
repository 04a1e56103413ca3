"""Sets how many tokens a streamed chunk has: as asked, or by how far the loop lags behind steps."""

from collections.abc import Collection
from dataclasses import dataclass

from serving.router import Key

WIDEN_LAG_S = 0.05  # above this the loop does not keep up
NARROW_LAG_S = 0.01
# Half the interval costs at most twice the time, so below this load the loop keeps up with it too.
NARROW_LOAD = 0.4
# Below this load the lag is not the loop's own work, as on a host whose other processes take its
# processor: wider intervals would only make clients wait.
WIDEN_LOAD = 0.25
# Even twice this load is too little to widen for, whatever the lag.
_HARDLY_ANY_LOAD = 0.1
MOST_TOKENS = 64
_SETTLE_S = 0.25  # from one change to the next: the effect of the first must show
_WINDOW_S = 1.0
_PATIENCE_S = 5.0  # without lag, before half the interval is tried though the load is not low
_LONGEST_PATIENCE_S = 80.0
# Two hosts' clocks drift apart by less than this; it makes a longer path the norm within minutes.
_DRIFT = 1e-3


@dataclass(slots=True, eq=False)
class Interval:
    """Tokens per chunk after a stream's first; streams that ask for no interval share one."""

    tokens: int


class Lag:
    """How far behind the steps this loop is, by worker.

    A step's time is on its worker's clock, so what counts is how much longer a step took to get
    here than the quickest one did: time that it waited for gRPC's flow control and for the loop.
    """

    def __init__(self) -> None:
        self._quickest_s: dict[Key, tuple[float, float]] = {}  # and when it was last looked at

    def measure(self, worker: Key, emitted_s: float, now_s: float) -> float:
        """How many seconds the step that is handled now has waited."""
        took_s = now_s - emitted_s
        quickest_s, then_s = self._quickest_s.get(worker, (took_s, now_s))
        quickest_s = min(took_s, quickest_s + _DRIFT * (now_s - then_s))
        self._quickest_s[worker] = quickest_s, now_s
        return took_s - quickest_s

    def keep(self, workers: Collection[Key]) -> None:
        """Forget all others."""
        for worker in self._quickest_s.keys() - workers:
            del self._quickest_s[worker]


@dataclass(slots=True, eq=False)
class AutoInterval(Interval):
    """1 while the loop keeps up; doubles as the lag grows; halves when the lag would stay away.

    It grows only with a lag of the loop's own making, that is, when the loop has work to do.
    The end of the lag says little, because the wide interval ended it. A low load says that half
    the interval would do as well. At a higher load half is tried after a while without lag; each
    time that brings the lag back, the next try waits twice as long.
    """

    tokens: int = 1
    _changed_s: float = 0.0
    _calm_s: float = 0.0  # since when there is no lag
    _window_s: float = 0.0  # since when load is measured, and the loop's processor time then
    _cpu_s: float = 0.0
    _load: float = 0.0  # share of the time that the loop computes, as last measured
    _narrowed: bool = False  # by the latest change
    _patience_s: float = _PATIENCE_S

    def observe(self, lag_s: float, now_s: float, loop_cpu_s: float) -> None:
        """A step is handled. Seconds: monotonic, and of processor time of the loop's thread."""
        if lag_s > NARROW_LAG_S:
            self._calm_s = now_s
        is_window_over = self._measure(now_s, loop_cpu_s)
        if lag_s > WIDEN_LAG_S and self.tokens < MOST_TOKENS and self._load >= WIDEN_LOAD:
            if now_s - self._changed_s >= _SETTLE_S:
                self._widen(now_s)
        elif is_window_over and self.tokens > 1:
            self._consider(now_s)

    def _measure(self, now_s: float, loop_cpu_s: float) -> bool:
        """Measure the load; whether the window is over, and another begins."""
        elapsed_s = now_s - self._window_s
        if elapsed_s >= _SETTLE_S:
            self._load = (loop_cpu_s - self._cpu_s) / elapsed_s
        if elapsed_s < _WINDOW_S:
            return False
        self._window_s = now_s
        self._cpu_s = loop_cpu_s
        return True

    def _widen(self, now_s: float) -> None:
        came_back = self._narrowed and now_s - self._changed_s < self._patience_s
        if came_back:
            self._patience_s = min(2 * self._patience_s, _LONGEST_PATIENCE_S)
        self._change(2 * self.tokens, now_s, narrowed=False)

    def _consider(self, now_s: float) -> None:
        """Halve the interval if half would do."""
        is_low = self._load < NARROW_LOAD
        calm_s = now_s - max(self._calm_s, self._changed_s)
        calm_enough = calm_s >= (_WINDOW_S if is_low else self._patience_s)
        if calm_enough or self._load < _HARDLY_ANY_LOAD:
            if self.tokens == 2 and is_low:
                self._patience_s = _PATIENCE_S  # the overload is over
            self._change(self.tokens // 2, now_s, narrowed=True)

    def _change(self, tokens: int, now_s: float, narrowed: bool) -> None:
        self.tokens = tokens
        self._changed_s = now_s
        self._narrowed = narrowed
