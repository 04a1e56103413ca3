"""Which workers are alive, and until when: a lease lasts ttl_s after each heartbeat. Pure.

Registering again replaces the lease and never adds one; an older incarnation (lower epoch) is
refused while the newer one lives. Workers that could not work together are refused at registration,
with both values named.
"""

from dataclasses import dataclass, replace
from typing import NoReturn

from transfer import wire
from transfer.errors import Incompatible, Superseded, Unavailable
from transfer.layout import check_fit


@dataclass(frozen=True)
class _Lease:
    info: wire.WorkerInfo
    epoch: int
    load: wire.Load
    draining: bool
    until_s: float
    ranks: tuple[wire.Load, ...] = ()
    rival: int = 0  # the latest lower epoch that tried to register
    outlived: int = 0  # the rival after whose attempt this incarnation sent a heartbeat


class Leases:
    """Every live worker. Times are monotonic seconds, given by the caller."""

    def __init__(self, ttl_s: float) -> None:
        assert ttl_s > 0
        self.ttl_s = ttl_s
        self.revision = 0  # grows when a worker comes or goes
        self._leases: dict[str, _Lease] = {}

    def register(self, info: wire.WorkerInfo, epoch: int, now_s: float) -> None:
        """Register a worker.

        Raises Superseded when a higher epoch of it is alive, Unavailable while that is not certain
        (its host's clock may have gone back, and the higher epoch be dead), Incompatible when it
        does not fit the registered workers; Unavailable if all that it does not fit are draining.
        """
        known = self._leases.get(info.worker_id)
        if known is not None and known.epoch > epoch:
            self._refuse(known, epoch)
        others = [lease for name, lease in self._leases.items() if name != info.worker_id]
        for other in sorted(others, key=lambda lease: lease.draining):
            try:
                check_fit(info, other.info)
            except Incompatible as error:
                if not other.draining:
                    raise
                raise Unavailable(f"{error}; {other.info.worker_id} drains") from error
        self._leases[info.worker_id] = _Lease(info, epoch, wire.Load(), False, now_s + self.ttl_s)
        if known is None or (known.info, known.epoch) != (info, epoch):
            self.revision += 1

    def heartbeat(self, beat: wire.Heartbeat, now_s: float) -> bool:
        """Renew a lease; False when there is none of that epoch."""
        lease = self._leases.get(beat.worker_id)
        if lease is None or lease.epoch != beat.epoch:
            return False
        if lease.draining != beat.draining:
            self.revision += 1
        self._leases[beat.worker_id] = replace(
            lease,
            load=beat.load,
            ranks=beat.ranks,
            draining=beat.draining,
            until_s=now_s + self.ttl_s,
            outlived=lease.rival,
        )
        return True

    def prolong(self, for_s: float, now_s: float) -> None:
        """Extend all leases by for_s, during which the registry did not listen."""
        for worker_id, lease in self._leases.items():
            until_s = min(lease.until_s + for_s, now_s + self.ttl_s)
            self._leases[worker_id] = replace(lease, until_s=until_s)

    def deregister(self, worker_id: str, epoch: int) -> bool:
        """End a worker's lease; False when it had none. Another incarnation's lease stays."""
        lease = self._leases.get(worker_id)
        if lease is None or lease.epoch != epoch:
            return False
        del self._leases[worker_id]
        self.revision += 1
        return True

    def has(self, worker_id: str, epoch: int) -> bool:
        """Whether this incarnation has a lease."""
        lease = self._leases.get(worker_id)
        return lease is not None and lease.epoch == epoch

    def expire(self, now_s: float) -> tuple[str, ...]:
        """Drop workers whose lease has ended; returns their names."""
        gone = tuple(name for name, lease in self._leases.items() if lease.until_s < now_s)
        for name in gone:
            del self._leases[name]
            self.revision += 1
        return gone

    def _refuse(self, known: _Lease, epoch: int) -> NoReturn:
        worker_id = known.info.worker_id
        what = f"{worker_id} registers with epoch {epoch}, a newer one has {known.epoch}"
        if known.outlived == epoch:
            raise Superseded(f"{what}; two that shall both run need a --worker-id each")
        self._leases[worker_id] = replace(known, rival=epoch)
        raise Unavailable(f"{what}, and keeps the name unless its lease ends")

    def view(self) -> wire.ClusterView:
        """All live workers, by name."""
        members = tuple(
            wire.Member(lease.info, lease.epoch, lease.load, lease.draining, lease.ranks)
            for _, lease in sorted(self._leases.items())
        )
        return wire.ClusterView(self.revision, members)
