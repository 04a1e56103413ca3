"""A node of a prefill worker that does not lead: an engine, and its own end of transfers."""

from prefill.config import PrefillConfig
from prefill.opening import build_engine
from prefill.sending import Sending
from transfer.backend import SenderEvent
from transfer.choice import default_connections, open_sender
from transfer.gathered import GatheredPages
from transfer.group import NodeState
from transfer.host_sizes import take_memories
from transfer.keeping import KeptPages
from transfer.member import Tell
from transfer.opened import PoolFacts
from transfer.rpc import Security


class PrefillNode:
    """The engine and data plane of one node."""

    data_address = ""

    def __init__(self, config: PrefillConfig, security: Security, tell: Tell) -> None:
        """Load, compile and take memory, as the leader does."""
        engine, opened, _ = build_engine(config)
        self._tell, self._most_queued = tell, config.transfer_queue_bytes
        connections = config.transfer_connections or default_connections()
        frame_bytes = config.max_frame_bytes
        self._sender = open_sender(
            config, security, connections, frame_bytes, sender_id="", on_event=self._told
        )
        gathered = GatheredPages(engine)
        facts = PoolFacts.of(opened)
        self._sending = Sending(self._sender, engine, gathered, facts, config.nodes, frame_bytes)
        if config.enable_hierarchical_cache:
            KeptPages(take_memories(config, opened, engine), engine, gathered)
        self.calls = engine.calls

    def joined(self, worker_id: str, node: int) -> None:
        """All nodes are ready. worker_id: of the worker that they are."""
        self._sender.sender_id, self._sender.node = worker_id, node

    def behind(self) -> frozenset[str]:
        """Data addresses for which too many pages are queued here."""
        return self._sender.behind(self._most_queued)

    def state(self) -> NodeState:
        sender = self._sender
        counters = {name: float(count) for name, count in dict(sender.counters).items()}
        return NodeState(counters, sender.transfers, sender.in_flight_bytes)

    def close(self) -> None:
        self._sender.close()

    def _told(self, event: SenderEvent) -> None:
        self._sending.ended(event.room)
        self._tell(event)
