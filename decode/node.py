"""A node of a decode worker that does not lead: an engine, and its own end of transfers."""

from decode.config import DecodeConfig
from decode.opening import build_engine, check_data_port, keeps_prefixes, open_data
from decode.receiving import Receiving
from transfer.backend import Arrived, PagesArrived, ReceiverEvent
from transfer.gathered import GatheredPages
from transfer.group import NodeState
from transfer.host_sizes import take_memories
from transfer.keeping import KeptPages
from transfer.member import Tell
from transfer.rpc import Security

# The leader's word that a room is expected goes another way than prefill's first frame for it.
_ROOM_WAIT_S = 1.0


class DecodeNode:
    """The engine and data plane of one node."""

    def __init__(self, config: DecodeConfig, security: Security, tell: Tell) -> None:
        """Load, compile and take memory, as the leader does. Raises what the leader raises."""
        check_data_port(config)
        engine, opened, *_ = build_engine(config)
        self._tell = tell
        self._receiver = open_data(config, security, opened, self._told)
        self._receiver.room_wait_s = _ROOM_WAIT_S
        self._receiving = Receiving(self._receiver, engine, config.nodes, config.node_rank)
        if keeps_prefixes(config):
            memories = take_memories(config, opened, engine)
            KeptPages(memories, engine, GatheredPages(engine))
        self.calls = engine.calls
        self.data_address = self._receiver.start()

    def joined(self, worker_id: str, node: int) -> None:
        """All nodes are ready."""

    def behind(self) -> frozenset[str]:
        """Nothing is queued here."""
        return frozenset()

    def state(self) -> NodeState:
        counters = dict(self._receiver.counters)
        return NodeState({name: float(count) for name, count in counters.items()})

    def close(self) -> None:
        self._receiver.close()

    def _told(self, event: ReceiverEvent) -> None:
        if isinstance(event, PagesArrived):
            if self._receiving.keep(event):
                self._tell(Arrived(event.room, event.page_start, event.num_pages))
        else:
            self._tell(event)
