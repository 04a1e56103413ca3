"""Lives of processes: workers and the registry, with their own servers, leases and endings."""

import asyncio
from collections.abc import Callable
from contextlib import suppress

from tests.sim.calls import ControlPlane, SimServer
from tests.sim.plan import WorkerPlan
from tests.sim.transport import LONGEST_DELAY
from tests.sim.workers import SimDecode, SimPrefill
from transfer import wire
from transfer.bootstrap import RegistryClient, RegistryServer
from transfer.clock import Clock
from transfer.errors import RpcError
from transfer.worker import FAREWELL_S, HEARTBEAT_S

REGISTRY = "registry:1"
MODEL = "digest"


def address_of(worker_id: str) -> str:
    """Of its control server, in each of its lives."""
    return f"{worker_id}:1"


class WorkerLife:
    """What `Worker.run` is to a worker, without its threads: the simulation makes its turns.

    on_over: called once the worker takes no more turns, but still says its last words.
    """

    def __init__(
        self,
        plane: ControlPlane,
        name: str,
        plan: WorkerPlan,
        worker: SimPrefill | SimDecode,
        on_over: Callable[["WorkerLife"], None],
    ) -> None:
        self.process = plane.processes[name]
        self.plan = plan
        self.worker = worker
        self._plane = plane
        self._on_over = on_over
        worker._loop = asyncio.get_running_loop()
        server = worker._make_server()
        assert isinstance(server, SimServer)
        server.listen(address_of(plan.worker_id))
        self._server = server
        self._registry = RegistryClient(REGISTRY, self.process.security, worker.clock)
        worker._registry = self._registry
        lease = self._registry.run_worker(
            self._info(),
            worker.epoch,
            lambda: (worker.load(), worker.leaving.draining),
            HEARTBEAT_S,
            worker.rank_loads,
        )
        self._lease = plane.run(lease)
        self._end = plane.run(self._until_over())

    def kill(self) -> None:
        """Nothing of it goes on."""
        self._lease.cancel()
        self._end.cancel()
        self._plane.end(self.process)
        self._close_data_plane()

    async def _until_over(self) -> None:
        """Leave once told, as `Worker._run` does at its end."""
        worker = self.worker
        await worker.leaving.over.wait()
        worker._ready = False
        self._lease.cancel()
        worker._end_streams()
        self._on_over(self)
        self._server.close()
        with suppress(RpcError):
            await self._registry.deregister()
        await asyncio.sleep(FAREWELL_S if worker.leaving.drained else 0.2)
        self._plane.end(self.process)
        self._plane.net.after(LONGEST_DELAY, self._close_data_plane)

    def _close_data_plane(self) -> None:
        worker = self.worker
        if isinstance(worker, SimPrefill):
            worker.sender.close()
        else:
            worker.receiver.close()

    def _info(self) -> wire.WorkerInfo:
        worker, plan = self.worker, self.plan
        facts, is_decode = worker._facts, isinstance(worker, SimDecode)
        return wire.WorkerInfo(
            worker_id=plan.worker_id,
            role=worker.role,
            address=address_of(plan.worker_id),
            data_address=f"sim://{plan.worker_id}" if is_decode else "",
            model_name="sim",
            model_digest=MODEL,
            kv_spec=wire.KVSpecMessage(
                1, plan.logical_heads, 1, plan.page_size, "float32", groups=facts.groups
            ),
            tp_size=plan.tp_size,
            dp_size=plan.dp_size,
            context_length=plan.context,
            max_request_tokens=facts.request_limit(plan.num_pages),
            stored_kv_heads=plan.stored_heads,
            local_prefill_tokens=plan.local_tokens if is_decode else 0,
            adapters=facts.adapters,
            host_pages=plan.host_pages,
            shares_pages=isinstance(worker, SimDecode) and worker._shares_sent,
        )


class RegistryLife:
    """The registry."""

    def __init__(self, plane: ControlPlane, name: str, clock: Clock) -> None:
        self.process = plane.begin(name)
        self._plane = plane
        self._registry = RegistryServer(self.process.security, clock)
        server = self._registry._server
        assert isinstance(server, SimServer)
        server.listen(REGISTRY)
        self._sweeper = plane.run(self._registry._sweep())

    def kill(self) -> None:
        self._sweeper.cancel()
        self._plane.end(self.process)
